"""The Engine protocol: ids in, ids and their logprobs out.

Every implementation passes `tests/contract/test_engine.py`. Nothing here knows text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from unbroken.types import Logprobs, SampleRequest, SampleResult, TokenIds

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Engine(Protocol):
    """Samples from one policy. All methods may be called concurrently from one event loop."""

    @property
    def context_length(self) -> int:
        """Most ids a sequence may hold, prompt and completion together."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        ...

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions.

        A cancelled call aborts its request. A completion that reaches the end of the context ends with LENGTH.

        Raises:
            ContextOverflowError: the prompt fills the context.
            SamplingError: an id outside the vocabulary, a request id in use, or something the engine does not support.
            EngineError: the engine is closed or has failed, or its weights give no finite distribution.
        """
        ...

    async def score(self, token_ids: TokenIds, *, temperature: float = 1.0) -> Logprobs:
        """[T - 1] the logprob of each id after the first, given the ids before it. Raises as `sample` does."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far with ABORT. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Stop sampling after the current step; requests wait and keep what they have. Idempotent."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    async def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, policy_version: int, reuse_kv: bool = False
    ) -> None:
        """Take new weights between two steps; ids sampled from then on carry `policy_version` (I6).

        KV computed under older weights is recomputed for running requests and dropped from the prefix cache, unless
        `reuse_kv` asks for the opposite. Values are not looked at: weights with NaN fail the requests they sample for,
        and the next good ones are the cure.

        Raises:
            SamplingError: `policy_version` does not rise, or a name or shape is not the model's; nothing was loaded.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests."""
        ...

    async def close(self) -> None:
        """Abort what runs and free the model. Idempotent."""
        ...
