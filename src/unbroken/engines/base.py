"""The Engine protocol: ids in, ids and their logprobs out. Nothing here knows text.

`Engine` is what every engine does. What only some do are separate protocols, found by `isinstance`:

    StreamingEngine  ScoringEngine  AdapterEngine       streams, scores, loads adapters
    PausableEngine ── UpdatableEngine ── SleepingEngine  pauses, takes new weights, gives its memory back
                                     └── TransferEngine       weights come over a wire

Every implementation passes `tests/contract/test_engine_*.py`, which skip what an engine is not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from unbroken.types import (
    ImageSpan,
    SampleChunk,
    SampleRequest,
    SampleResult,
    ScoredSequence,
    TokenIds,
)
from unbroken.weights.base import TakesWeights
from unbroken.weights.receiver import WeightReceiver


@runtime_checkable
class Engine(Protocol):
    """Samples from one policy: what every engine does. All methods may be called concurrently from one event loop."""

    @property
    def context_length(self) -> int:
        """Maximum number of ids in a sequence, prompt and completion together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Prompt ids and stop ids lie in [0, vocab_size)."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images."""
        ...

    @property
    def takes_structured_output(self) -> bool:
        """Whether requests may have `SamplingParams.structured_output`."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        ...

    async def check_health(self) -> None:
        """Return at once; raises `EngineError` if the engine is closed or has failed."""
        ...

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions.

        A cancelled call aborts its request. A completion that reaches the end of the context ends with LENGTH.

        Raises:
            ContextOverflowError: the prompt fills the context.
            SamplingError: an id outside the vocabulary, a request id in use, or a feature that the engine lacks.
            ImageError: an image is broken, or the model's processor refuses it.
            EchoError: the engine expands an image to other ids than `prompt_ids` has there (I3).
            EngineError: the engine is closed or has failed, or its weights give no finite distribution.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far, with ABORT. Unknown ids are ignored."""
        ...

    async def close(self) -> None:
        """Abort all requests and free the model. Idempotent."""
        ...


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that gives ids as they are sampled. Use `stream_request`, which takes any engine."""

    def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Yield the completions in chunks as they are sampled; the chunks of the n completions are interleaved.

        Leaving the iteration aborts the request. Raises as `sample` does, and `EchoError` if the engine reports another
        prompt (I3), which callers of `sample` check themselves.
        """
        ...


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """An engine that computes the logprobs of given ids."""

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """Return the logprob of each of T ids after the first, given the ids before it. Raises as `sample` does.

        `images` are those whose ids are in `token_ids`, as in `SampleRequest`.
        """
        ...


@runtime_checkable
class PausableEngine(Engine, Protocol):
    """An engine whose requests can wait, and whose cache can be dropped."""

    async def pause(self) -> None:
        """Stop sampling after the current step; requests wait and keep what they have. Idempotent."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests."""
        ...


@runtime_checkable
class UpdatableEngine(PausableEngine, TakesWeights, Protocol):
    """An engine whose weights are replaced while it runs, as training needs it."""


@runtime_checkable
class SleepingEngine(UpdatableEngine, Protocol):
    """An engine that gives the accelerator's memory to a trainer while the trainer makes a step.

        awake at version 3 ── sleep() ──► asleep ── update_weights(..., policy_version=4) ──► awake at version 4

    Only new weights wake it, because sleep may drop the old ones (I6).
    """

    @property
    def is_asleep(self) -> bool:
        """Whether the memory was given back."""
        ...

    async def sleep(self) -> None:
        """Finish the requests in flight, then give back the memory of weights, keys and values.

        From the call on, requests, scores, `pause`, `resume` and `reset_prefix_cache` raise `EngineError`: a caller
        that waited for the engine to wake could wait forever. `check_health` finds a sleeping engine healthy. An
        update that is refused leaves it asleep. Idempotent; a call that is cancelled while requests run leaves the
        engine awake.

        Raises:
            EngineError: the engine is paused, closed or has failed, or cannot sleep.
        """
        ...


@runtime_checkable
class RequiresVersion(Protocol):
    """An engine of several servers, of which some may have missed an update."""

    def require_version(self, policy_version: int) -> None:
        """From now on, refuse samples of older weights, and send the request to another server."""
        ...


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that loads LoRA adapters while it runs."""

    @property
    def adapters(self) -> Collection[str]:
        """Names of the adapters that requests may have."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter; `InvalidInputError` if the name is in use, or the adapter cannot be loaded."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter, and drop its KV; `InvalidInputError` for an unknown one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """How many LoRA adapters an engine takes in an update: that of the policy, or those of several policies.

    It is the engine's `adapter_room`. One that has none, or None, takes any.
    """

    max_adapters: int
    """Of one version, which sample at once, beside those of the version before. 0: it takes no adapter."""
    max_rank: int
    how: str
    """How the engine was started, and what it takes to have more; of the server with the fewest of several."""
    how_rank: str
    """How it was started as to `max_rank`; of the server with the lowest of several."""

    @staticmethod
    def of(engine: Engine) -> AdapterRoom | None:
        """That of an engine; None for any adapters."""
        room: AdapterRoom | None = getattr(engine, "adapter_room", None)
        return room


@runtime_checkable
class TransferEngine(UpdatableEngine, Protocol):
    """An engine that receives weights from a sender, over vLLM's wire."""

    @property
    def transfer(self) -> WeightReceiver:
        """Its connection to a sender."""
        ...


async def stream_request(engine: Engine, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
    """Stream the completions of any engine: of one that does not stream, each as one chunk. As `StreamingEngine`."""
    if isinstance(engine, StreamingEngine):
        async with aclosing(engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    result = await engine.sample(request)
    result.check_answers(request)
    for index, sequence in enumerate(result.sequences):
        yield SampleChunk.from_sequence(index, sequence)
