"""The embedded engine: any decoder-only transformers model, in this process. Callers need only the two names here.

From the outside in: `engine` checks requests and posts commands; `worker` is the thread that the model runs in, and
`answers` lead from it back to the callers; `batch` is the loop over all requests, which are `jobs` of rows, each in one
of the `slots`; `forward` runs the model over the slots, on a `kv_cache` and an `attention` of its own; `sampling` goes
from logits to ids and their exact logprobs; `loading` takes new weights.
"""

from unbroken.engines.transformers.engine import TransformersEngine, TransformersEngineConfig

__all__ = ["TransformersEngine", "TransformersEngineConfig"]
