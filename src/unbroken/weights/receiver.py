"""How new weights reach an engine: the kinds of source, what reads them, and transfers of several calls.

    open(rendezvous)      returns when trainer and workers have met
    start()               begins an update; what an older one left is dropped
    receive(specs)        returns when these weights are here; an update may have several such calls
    collect()             the source of one update, for `engine.update_weights`

Nothing is loaded before that, so whatever fails leaves the old weights in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any, TypeVar

from unbroken.errors import EngineError, SamplingError, UnbrokenError, WeightsError
from unbroken.weights.files import FileReceiver, FileSource
from unbroken.weights.memory import MemoryReceiver, MemorySource
from unbroken.weights.sources import (
    ReceivedWeights,
    Receiver,
    StagedSource,
    TensorReceiver,
    TensorSource,
    TensorSpec,
    WeightSource,
    make_digest,
)
from unbroken.weights.wire import (
    BufferPacking,
    PackedReceiver,
    PackedSource,
    Rendezvous,
    Transport,
    answer,
    open_fields,
)

RECEIVERS: Mapping[type[WeightSource], type[Receiver[Any]]] = {
    TensorSource: TensorReceiver,
    FileSource: FileReceiver,
    MemorySource: MemoryReceiver,
    PackedSource: PackedReceiver,
}
"""The kinds of source that need nothing of a particular engine, and the receiver of each."""
_T = TypeVar("_T")


class LocalReceivers:
    """The receivers of an engine whose model is in this process, made when they are first needed."""

    sources = RECEIVERS.keys()

    def __init__(self) -> None:
        self._receivers: dict[type[WeightSource], Receiver[Any]] = {}

    async def receive(self, source: WeightSource, *, device: str) -> ReceivedWeights:
        """Return the source's weights; `tensors` is a list. The caller receives one source at a time."""
        return await asyncio.to_thread(self._receive, source, device)

    def make_transfer(
        self,
        device: Callable[[], str],
        *,
        check_awake: Callable[[], None],
        check_weights: Callable[[Mapping[str, tuple[int, ...]]], None] = lambda shapes: None,
    ) -> EngineTransfer:
        """Make the engine's transfer; `check_weights` raises `SamplingError` for weights that the model lacks."""

        async def call(method: str, *args: Any) -> list[dict[str, Any]]:
            receiver = self._find(PackedSource, device())
            return [await asyncio.to_thread(answer, lambda: getattr(receiver, method)(*args))]

        async def check(shapes: Mapping[str, tuple[int, ...]], is_whole: bool) -> None:
            if is_whole:
                check_weights(shapes)

        return EngineTransfer(call, check_awake=check_awake, check_weights=check, num_workers=1)

    def _receive(self, source: WeightSource, device: str) -> ReceivedWeights:
        received = self._find(type(source), device).receive(source)
        return ReceivedWeights(tensors=list(received.tensors), digest=received.digest)

    def _find(self, kind: type[WeightSource], device: str) -> Receiver[Any]:
        if kind not in self._receivers:
            self._receivers[kind] = RECEIVERS[kind](device)
        return self._receivers[kind]


class _State(StrEnum):
    CLOSED = "closed"
    """There is no group."""
    READY = "ready"
    UPDATING = "updating"


class EngineTransfer:
    """An engine's side of transfers: one call at a time, each finished even if its caller leaves."""

    def __init__(
        self,
        call: Callable[..., Awaitable[list[dict[str, Any]]]],
        *,
        check_awake: Callable[[], None],
        check_weights: Callable[[Mapping[str, tuple[int, ...]], bool], Awaitable[None]],
        num_workers: int,
    ) -> None:
        """`call` calls a method of `PackedReceiver` in each worker, by rank, and returns what each answered.

        `check_awake` raises `EngineError` unless the engine is awake. `check_weights` raises `SamplingError` for names
        or shapes that the model lacks, and if they shall be all of an update, also for missing ones.
        """
        self._call_receivers = call
        self._check_awake = check_awake
        self._check_weights = check_weights
        self._num_workers = num_workers
        self._state = _State.CLOSED
        self._error: str | None = None
        """Why the weights will not come."""
        self._packing = BufferPacking()
        self._keepers: dict[int, int] = {}
        """For each rank the one of its machine that keeps the weights."""
        self._last_specs: tuple[TensorSpec, ...] = ()
        """What the last call of `receive` from this trainer was about."""
        self._clear()
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()

    async def open(self, rendezvous: Rendezvous, packing: BufferPacking) -> None:
        """Connect to a trainer, which has rank 0 and sends weights in this `packing`; closes an older connection first.

        Raises:
            SamplingError: the world does not count the engine's workers.
            WeightsError: the trainer or a worker did not come in time.
        """
        self._check_awake()
        last = rendezvous.first_rank + self._num_workers
        if rendezvous.first_rank < 1 or last > rendezvous.world_size:
            raise SamplingError(
                f"world_size must count the trainer and all workers, got {rendezvous.world_size} with rank_offset "
                f"{rendezvous.first_rank} for a server of {self._num_workers}"
            )
        await self._run_to_end(self._open(rendezvous, packing))

    async def start(self) -> None:
        """Begin an update, and drop what an unfinished one has received. `SamplingError` without a trainer."""
        self._check_awake()
        await self._run_to_end(self._start())

    async def receive(
        self, specs: Sequence[TensorSpec], packing: BufferPacking | None = None, *, last: bool = False
    ) -> str | None:
        """Receive the next weights of the update, in this `packing` or that of `open`; returns when they are here.

        Empty `specs` repeat those of the last call: trainers of vLLM 0.33 send them for an equal update. With `last`
        the update is checked as a whole, and its digest returned.

        Raises:
            SamplingError: no update has begun, there was no last call, or the model has no such weight, which ends the
                update.
            WeightsError: the trainer is gone or too slow, there is no room, or the update has failed before.

        Refused weights are received too, and dropped: the trainer sends them in any case, and would wait forever.
        """
        self._check_awake()
        return await self._run_to_end(self._receive(specs, packing, last))

    async def collect(self, digest: str | None = None) -> PackedSource:
        """Return what was received, for `update_weights`. Raises as `receive` does before it receives.

        `WeightsError` if it does not have this `digest`.
        """
        self._check_awake()
        async with self._lock:
            self._check_updating()
            own = self._digest()
            if digest is not None and digest != own:
                raise WeightsError("the weights that came are not those that the trainer sent: their digests differ")
            shared = {rank: self._files[keeper] for rank, keeper in self._keepers.items() if rank != keeper}
            return PackedSource(specs=tuple(self._specs.values()), digest=own, shared=shared, forget=self._forget)

    async def cancel(self, reason: str) -> None:
        """End an update that cannot be loaded; `reason` is in the errors of its further calls."""
        if self._state is _State.UPDATING:
            await self._run_to_end(self._fail(reason))

    async def close(self) -> None:
        """Leave the trainer, and drop what is not loaded. Idempotent."""
        await self._run_to_end(self._close())

    async def _open(self, rendezvous: Rendezvous, packing: BufferPacking) -> None:
        self._clear()
        self._state, self._error, self._last_specs = _State.CLOSED, None, ()
        machines = await self._call("open", open_fields(rendezvous))
        self._keepers = {rank: machines.index(machine) for rank, machine in enumerate(machines)}
        self._state, self._packing = _State.READY, packing

    async def _start(self) -> None:
        if self._state is _State.CLOSED:
            raise self._no_group()
        await self._call("drop")
        self._clear()
        self._state, self._error = _State.UPDATING, None

    async def _receive(self, specs: Sequence[TensorSpec], packing: BufferPacking | None, last: bool) -> str | None:
        if self._state is _State.CLOSED:
            raise self._no_group()
        specs = self._last_specs = tuple(specs) or self._last_specs
        if not specs:
            raise SamplingError("update_info.names must not be empty in a trainer's first update")
        refusal = await self._find_refusal(specs, last)
        shares = {keeper: list(self._keepers.values()).count(keeper) > 1 for keeper in self._keepers.values()}
        # The trainer sends whatever we answer, and would wait forever for workers that do not take part.
        answers = await self._call(
            "take", [spec.to_object() for spec in specs], asdict(packing or self._packing),
            {} if refusal is not None else shares,
        )  # fmt: skip
        if refusal is not None:
            if self._error is None and self._state is _State.UPDATING:
                await self._fail(str(refusal))
            raise refusal
        kept = {rank: found for rank, found in enumerate(answers) if found is not None}
        first = next(iter(kept.values()))["sums"]
        if any(found["sums"] != first for found in kept.values()):
            await self._fail("the workers received different weights")
            self._check_updating()
        for rank, found in kept.items():
            self._files.setdefault(rank, []).extend(found["files"])
        self._specs |= {spec.name: spec for spec in specs}
        self._sums += first
        return self._digest() if last else None

    async def _find_refusal(self, specs: Sequence[TensorSpec], last: bool) -> UnbrokenError | None:
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        try:
            self._check_updating()
            for spec in specs:
                if spec.name in shapes:
                    raise SamplingError(f"weight {spec.name!r} came twice")
                shapes[spec.name] = spec.shape
            await self._check_weights({spec.name: spec.shape for spec in specs}, False)
            if last:
                await self._check_weights(shapes, True)
        except (SamplingError, WeightsError) as error:
            return error
        return None

    async def _fail(self, reason: str) -> None:
        self._error = reason
        self._clear()
        await self._call("drop")

    async def _close(self) -> None:
        self._clear()
        self._state, self._error = _State.CLOSED, None
        await self._call("close")

    def _clear(self) -> None:
        self._specs: dict[str, TensorSpec] = {}
        """What the workers keep, by name."""
        self._sums: list[int] = []
        self._files: dict[int, list[Any]] = {}

    def _digest(self) -> str:
        return make_digest(list(self._specs.values()), self._sums)

    def _forget(self) -> None:
        """Called when an update is over."""
        self._clear()
        if self._state is _State.UPDATING:
            self._state = _State.READY

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """Call all receivers; `WeightsError` if one fails, after which there is no group."""
        answers = await self._call_receivers(method, *args)
        errors = [found["error"] for found in answers if "error" in found]
        if errors:
            self._clear()
            self._state, self._error = _State.CLOSED, errors[0]
            await self._call_receivers("close")
            raise WeightsError(f"{errors[0]}. The old weights are in use: POST /init_weight_transfer_engine again")
        return [found["answer"] for found in answers]

    def _check_updating(self) -> None:
        if self._state is _State.CLOSED:
            raise self._no_group()
        if self._error is not None:
            raise WeightsError(
                f"this update has failed: {self._error}. The old weights are in use: POST /start_weight_update again"
            )
        if self._state is _State.READY:
            raise SamplingError("there is no update: POST /start_weight_update first")

    def _no_group(self) -> UnbrokenError:
        if self._error is not None:
            return WeightsError(
                f"the transfer has failed: {self._error}. The old weights are in use: POST "
                "/init_weight_transfer_engine again"
            )
        return SamplingError("there is no trainer: POST /init_weight_transfer_engine first")

    async def _run_to_end(self, call: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(self._run_alone(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _run_alone(self, call: Coroutine[Any, Any, _T]) -> _T:
        async with self._lock:
            return await call


class ParameterSource(StagedSource):
    """Parameters that the workers have received one by one."""

    __slots__ = ()


class ParameterCommunicator:
    """An engine's side of TRL's communicator (TRL 1.0 to 1.10), which sends parameter by parameter.

    open()           answers before the workers are connected to the sender, which joins when it has the answer
    announce(spec)   answers before the parameter is broadcast, for the same reason
    collect()        waits for all parameters: the source of one update

    It calls the workers one call at a time, in order; nothing is loaded before all have come.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[list[dict[str, Any]]]],
        *,
        gpu_uuids: Callable[[], Awaitable[list[str]]],
        check_awake: Callable[[], None],
        check_weights: Callable[[Mapping[str, tuple[int, ...]], bool], Awaitable[None]],
        num_workers: int,
    ) -> None:
        """See `EngineTransfer`; `call` calls the receiver of `ParameterSource` in each worker."""
        self._call = call
        self._gpu_uuids = gpu_uuids
        self._check_weights = check_weights
        self._check_awake = check_awake
        self._num_workers = num_workers
        self._specs: dict[str, TensorSpec] = {}
        """What the workers keep, by name."""
        self._error: str | None = None
        """Why the weights will not come."""
        self._last: asyncio.Task[None] | None = None
        """The newest call to the workers; each waits for the one before it."""
        self._is_open = False

    @property
    def has_parameters(self) -> bool:
        """Whether announced parameters wait to be loaded."""
        return bool(self._specs)

    async def open(self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str = "") -> None:
        """Begin to connect to a sender, which has the last rank; an older connection is closed.

        `SamplingError` if `world_size` does not count workers and sender, or a worker has the GPU `sender_uuid`.
        """
        self._check_awake()
        if world_size != self._num_workers + 1:
            raise SamplingError(
                f"world_size must be {self._num_workers + 1}, the engine's workers and the sender, got {world_size}"
            )
        if sender_uuid and sender_uuid in await self._gpu_uuids():
            raise SamplingError(f"client_device_uuid must be a GPU that no worker has, got {sender_uuid}")
        await self.close()
        self._is_open = True
        self._call_next("open", {"host": host, "port": port, "world_size": world_size, "transport": transport.value})

    async def announce(self, spec: TensorSpec) -> None:
        """Begin to receive a parameter, which is kept but not loaded.

        Raises:
            SamplingError: there is no sender, or the model has no such weight.
            WeightsError: connecting to the sender, or an earlier parameter, failed.
        """
        self._check_awake()
        if not self._is_open:
            raise SamplingError("there is no communicator: POST /init_communicator/ first")
        self._check_error()
        await self._check_weights({spec.name: spec.shape}, False)
        if spec.name in self._specs:
            raise SamplingError(
                f"weight {spec.name!r} came twice: reset the prefix cache when an update is whole, which loads it"
            )
        self._specs[spec.name] = spec
        self._call_next("take_one", spec.to_object())

    async def collect(self) -> ParameterSource:
        """Wait for all announced parameters, which are kept until an update with them is over.

        `WeightsError` if one failed.
        """
        self._check_awake()
        await self._wait_for_calls()
        self._check_error()
        return ParameterSource(specs=tuple(self._specs.values()), forget=self._forget)

    async def close(self) -> None:
        """Disconnect from the sender, and drop parameters that are not loaded. Idempotent."""
        await self._wait_for_calls()
        self._error = None
        self._forget()
        if self._is_open:
            self._is_open = False
            await self._call("close")

    def _forget(self) -> None:
        self._specs = {}

    def _call_next(self, method: str, *args: Any) -> None:
        self._last = asyncio.create_task(self._call_after(self._last, method, args))

    async def _call_after(self, before: asyncio.Task[None] | None, method: str, args: tuple[Any, ...]) -> None:
        if before is not None:
            await before
        if self._error is not None:
            return
        try:
            for found in await self._call(method, *args):
                self._error = self._error or found.get("error")
        except EngineError as error:
            self._error = str(error)

    async def _wait_for_calls(self) -> None:
        if self._last is not None:
            await asyncio.shield(self._last)

    def _check_error(self) -> None:
        if self._error is not None:
            raise WeightsError(
                f"the communicator has failed: {self._error}. The old weights are in use: init the communicator again"
            )
