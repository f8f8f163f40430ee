"""The embedded engine: any decoder-only transformers model, in this process. Public are the two names here.

From the outside in: `engine` checks requests and posts commands; `worker` is the thread that runs the model, and
`answers` lead from it back to the callers; `batch` is the loop over all requests, which are `jobs` of rows, each in one
of the `slots`; `forward` runs the model over the slots with its `kv_cache` and `attention`; `sampling` turns logits
into ids and their exact logprobs; `loading` copies new weights into the model.
"""

from unbroken.engines.transformers.engine import TransformersEngine, TransformersEngineConfig

__all__ = ["TransformersEngine", "TransformersEngineConfig"]
