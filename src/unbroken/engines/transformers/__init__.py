"""The embedded engine: any decoder-only transformers model, in this process. Public are the two names here.

From the outside in: `engine` checks requests and posts commands; `worker` is the thread that runs the model; `batch` is
the loop over all requests, which are `jobs` of rows, each in one of the `slots`; `forward` runs the model over the
slots; `sampling` turns logits into ids and their exact logprobs; `weights` loads new weights into the model.
"""

from typing import TYPE_CHECKING

from unbroken.engines.transformers.config import TransformersEngineConfig

if TYPE_CHECKING:
    from unbroken.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine", "TransformersEngineConfig"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the engine, and torch, at its first use."""
        if name != "TransformersEngine":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from unbroken.engines.transformers.engine import TransformersEngine

        return TransformersEngine
