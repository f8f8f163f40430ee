"""The Engine protocol: ids in, ids and their logprobs out.

Every implementation passes `tests/contract/test_engine.py`. Nothing here knows text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from unbroken.transfer.announcement import Announcement, Transport
from unbroken.transfer.layout import TensorSpec
from unbroken.types import ImageSpan, InFlight, SampleChunk, SampleRequest, SampleResult, ScoredSequence, TokenIds

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
    def vocab_size(self) -> int:
        """Prompt ids and stop ids lie in [0, vocab_size)."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images: not with a text model."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        ...

    @property
    def world_size(self) -> int:
        """How many workers hold the weights or a part of them: those that take part in an update of the weights."""
        ...

    async def check_health(self) -> None:
        """Answer at once, whatever runs.

        Raises:
            EngineError: the engine is closed or has failed: no request will be answered.
        """
        ...

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions.

        A cancelled call aborts its request. A completion that reaches the end of the context ends with LENGTH.

        Raises:
            ContextOverflowError: the prompt fills the context.
            SamplingError: an id outside the vocabulary, a request id in use, or something the engine does not support:
                images for a text model, or more than it takes.
            ImageError: an image is broken, or the model's processor refuses it.
            EchoError: the engine expands an image to other ids than `prompt_ids` has there (I3).
            EngineError: the engine is closed or has failed, or its weights give no finite distribution.
        """
        ...

    def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Like `sample`, in pieces as they are sampled; the chunks of the n completions come mixed.

        Leaving the iteration aborts the request. Raises as `sample` does, and `EchoError` where the engine's own
        account of the prompt differs (I3), which a caller of `sample` checks by himself.
        """
        ...

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """The logprob of each of T ids after the first, given the ids before it. Raises as `sample` does.

        `images` are those whose ids stand in `token_ids`, as in `SampleRequest`.
        """
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
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        policy_version: int,
        reuse_kv: bool = False,
        in_flight: InFlight = InFlight.PAUSE,
    ) -> None:
        """Take new weights between two steps; ids sampled from then on carry `policy_version` (I6).

        KV computed under older weights is recomputed for running requests and dropped from the prefix cache, unless
        `reuse_kv` asks for the opposite. Values are not looked at: weights with NaN fail the requests they sample for,
        and the next good ones are the cure.

        Raises:
            SamplingError: `policy_version` does not rise, a name or shape is not the model's, or requests shall finish
                while the engine is paused; nothing was loaded.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests."""
        ...

    async def close(self) -> None:
        """Abort what runs and free the model. Idempotent."""
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine in the trainer's process that lends it the accelerator's memory while it trains.

        awake at version 3 ── sleep() ──► asleep ── load_weights(..., policy_version=4) ──► awake at version 4

    There is no other way to wake: an engine that slept has only the weights that it is given (I6).
    """

    async def sleep(self) -> None:
        """Finish the requests in flight, then give back the memory of weights, keys and values.

        From the call on, `EngineError` answers requests, scores, `pause`, `resume` and `reset_prefix_cache`: whoever
        waited for an engine that a trainer holds asleep could wait for ever. `check_health` finds a sleeping engine
        healthy. `load_weights` that is refused leaves it asleep. Idempotent; a call that is cancelled while requests
        run leaves the engine awake.

        Raises:
            EngineError: the engine is paused, closed or has failed, or cannot sleep.
        """
        ...


@runtime_checkable
class WeightHolder(Protocol):
    """An engine that says what its weights are, so that they come as it needs them."""

    @property
    def weight_dtype(self) -> str:
        """Of floating-point weights, under torch's name."""
        ...

    @property
    def weight_device(self) -> str:
        """The kind of device they are on: `cpu`, `cuda`."""
        ...

    async def gpu_uuids(self) -> Sequence[str]:
        """The GPUs that the workers have, which a sender over NCCL cannot share."""
        ...


@runtime_checkable
class WeightReceiver(WeightHolder, Protocol):
    """An engine whose workers, in processes of their own, receive weights from a trainer themselves."""

    async def receive_weights(
        self, announcement: Announcement, *, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> ReceivedWeights:
        """Take the weights that a trainer announces; otherwise as `Engine.load_weights`.

        Raises:
            SamplingError: the version does not rise, a name or shape is not the model's, or the trainer counts other
                workers; nobody received anything.
            WeightsError: the transfer failed, in part or as a whole; the old weights are in use.
            EngineError: the engine is closed, or has failed while it loaded.
        """
        ...


@runtime_checkable
class WeightFileReader(Protocol):
    """An engine whose workers read weights from files themselves."""

    async def load_weight_files(
        self, folder: Path, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> None:
        """Take the weights in the safetensors files of a folder; otherwise as `Engine.load_weights`.

        The files are the caller's, and stay as they are until this returns, also if it is cancelled meanwhile.
        """
        ...


@runtime_checkable
class ParameterReceiver(WeightHolder, Protocol):
    """An engine that takes weights parameter by parameter, as TRL's client sends them."""

    async def open_communicator(
        self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str = ""
    ) -> None:
        """Begin to meet a sender, who is the last rank; returns before he is met.

        Raises:
            SamplingError: he counts other workers, or uses the GPU of one.
        """
        ...

    async def announce_parameter(self, spec: TensorSpec) -> None:
        """Begin to receive a parameter, which is kept but not loaded; returns before it has come.

        Raises:
            SamplingError: there is no communicator, or the model has no such weight.
            WeightsError: meeting the sender, or an earlier parameter, failed.
        """
        ...

    async def load_parameters(self, *, in_flight: InFlight = InFlight.PAUSE) -> bool:
        """Load all that has come as one update, whose policy version is the next; whether there was anything.

        Raises:
            SamplingError: weights are missing; nothing was loaded.
            WeightsError: a parameter did not come; nothing was loaded.
            EngineError: the engine has failed while it loaded them.
        """
        ...

    async def close_communicator(self) -> None:
        """Leave the sender, and drop what is not loaded. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """What came of a broadcast."""

    digest: str
    """As `Layout.digest` has it."""
    seconds: Mapping[str, float]
    """How long the parts took: `receive`, the requests' end with it; `load`; `resume`, with the caches' reset."""
