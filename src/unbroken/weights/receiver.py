"""The engine's side of weights that a sender brings by calls: vLLM's weight transfer, and TRL's older communicator.

    open(rendezvous)      returns when sender and workers have met
    start()               begins an update: `engine.update_weights` with a source that has no weights yet
    receive(specs)        a part of it: returns when these weights are in the model; an update may have several
    finish()              the engine samples with the new version, if it is whole and what was sent

What can be refused is refused before anything is loaded: names, shapes, dtypes, the version. After that the engine has
no version in use until the update is finished. If it ends half-way, the engine is not healthy and samples nothing until
a whole version comes: over this wire again, from another sender, or from a store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from unbroken.errors import SamplingError, UnbrokenError, WeightsError
from unbroken.types import InFlight, WeightReceipt
from unbroken.weights.sources import TensorSpec, WeightSource, check_version_rises, find_repeated, make_digest
from unbroken.weights.wire import BufferPacking, Rendezvous, WireReceiver, answer, open_fields, read_answers

_T = TypeVar("_T")
_POLL_S = 1.0
"""How often the workers are asked whether the sender is there while it announces nothing."""
_log = logging.getLogger(__name__)

Call = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Calls a method of `WireReceiver` in each worker, by rank; returns what each answered."""


class CheckWeights(Protocol):
    """Raises `SamplingError` for weights that a model lacks, or cannot have."""

    async def __call__(
        self, specs: Mapping[str, TensorSpec], *, is_whole: bool, sums: Mapping[str, int] | None = None
    ) -> None:
        """With `is_whole` they shall be all of an update: missing ones are refused too, and tied ones whose `sums`
        differ.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnnouncedWeights:
    """Weights that come next."""

    specs: tuple[TensorSpec, ...]
    packing: BufferPacking
    loaded: asyncio.Future[None]
    """Done when they are in the model."""


class WireSource(WeightSource):
    """The weights of one update over the wire: parts that the engine takes as they are announced."""

    __slots__ = ("_call", "_failure", "_idle_s", "_parts", "_version", "_wake", "specs", "sums")

    def __init__(self, call: Call, *, idle_s: float) -> None:
        """The sender has failed if it announces nothing for `idle_s` once a part was loaded."""
        self._version: int | None = None
        """Once there are no more parts."""
        self.specs: dict[str, TensorSpec] = {}
        """All that was loaded so far, by name."""
        self.sums: dict[str, int] = {}
        self._call = call
        self._idle_s = idle_s
        self._parts: list[_AnnouncedWeights] = []
        self._failure: str | None = None
        self._wake = asyncio.Event()

    @property
    def policy_version(self) -> int | None:
        """See `WeightSource`; None until `end`."""
        return self._version

    def put(self, part: _AnnouncedWeights) -> None:
        """Announce a part."""
        self._parts.append(part)
        self._wake.set()

    def end(self, policy_version: int) -> None:
        """There are no more parts, and what came is what was sent."""
        self._version = policy_version
        self._wake.set()

    def fail(self, reason: str) -> None:
        """The weights will not be whole."""
        self._failure = self._failure or reason
        self._wake.set()

    @property
    def digest(self) -> str:
        """The checksum of what came."""
        return make_digest(list(self.specs.values()), list(self.sums.values()))

    async def wait_for_first(self) -> Mapping[str, tuple[int, ...]]:
        """Wait until a part is announced, as long as it takes; returns its shapes. `WeightsError` if none will come."""
        while not self._parts:
            self._check_going()
            if self._version is not None:
                raise WeightsError("the update has no weights")
            await self._wait()
        return {spec.name: spec.shape for spec in self._parts[0].specs}

    async def parts(self) -> AsyncIterator[_AnnouncedWeights]:
        """Yield the parts; each must be given to `take`. Ends when the sender has finished the update.

        Raises:
            WeightsError: the sender is gone or silent, or what came is not what it sent.
        """
        while (part := await self._next_part()) is not None:
            yield part

    async def _next_part(self) -> _AnnouncedWeights | None:
        """The next of `parts`."""
        until = time.monotonic() + self._idle_s
        while True:
            self._check_going()
            if self._parts:
                return self._parts.pop(0)
            if self._version is not None:
                return None
            if time.monotonic() > until:
                raise WeightsError(f"the sender has neither sent more nor finished for {self._idle_s:g} s")
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._wait()
            except TimeoutError:
                read_answers(await self._call("check_sender"))

    async def take(self, part: _AnnouncedWeights, *args: Any) -> None:
        """Have all workers receive and load a part; `args` are the engine's own.

        Raises:
            WeightsError: a worker could not, or the workers received different weights.
        """
        try:
            fields = [spec.to_object() for spec in part.specs]
            sums = read_answers(await self._call("take", fields, asdict(part.packing), *args))
            if any(own != sums[0] for own in sums):
                raise WeightsError("the workers received different weights")
            self._check_going()
        except BaseException as error:
            if not part.loaded.done():
                part.loaded.set_exception(WeightsError(str(error)))
                part.loaded.exception()  # its caller may have left
            raise
        for spec, total in zip(part.specs, sums[0], strict=True):
            self.specs[spec.name], self.sums[spec.name] = spec, total
        if not part.loaded.done():
            part.loaded.set_result(None)

    def _check_going(self) -> None:
        if self._failure is not None:
            raise WeightsError(self._failure)

    async def _wait(self) -> None:
        self._wake.clear()
        await self._wake.wait()


@dataclass(slots=True, kw_only=True)
class _Update:
    source: WireSource
    task: asyncio.Task[WeightReceipt]
    """`engine.update_weights`."""
    policy_version: int
    names: set[str] = field(default_factory=set)
    """Of all weights that were announced."""

    @property
    def error(self) -> BaseException | None:
        """Why it has failed."""
        if not self.task.done():
            return None
        return asyncio.CancelledError() if self.task.cancelled() else self.task.exception()


class WeightReceiver:
    """An engine's receiver: one call at a time, each finished even if its caller leaves."""

    def __init__(
        self,
        update: Callable[..., Coroutine[Any, Any, WeightReceipt]],
        call: Call,
        *,
        policy_version: Callable[[], int],
        version_to_exceed: Callable[[], int] | None = None,
        check_takes: Callable[[], None],
        check_weights: CheckWeights,
        num_workers: int,
        call_in_update: Call | None = None,
        takes_parameters: bool = False,
    ) -> None:
        """`update` is the engine's `update_weights`, `policy_version` its version. A new one must exceed that, or
        `version_to_exceed` if it is given.

        `check_takes` raises `EngineError` or `SamplingError` unless the engine takes weights. `call_in_update` is
        `call` while the engine is in an update, if that is another. Of `takes_parameters` see `open_later`.
        """
        self._update_engine = update
        self._call = call
        self._call_in_update = call_in_update or call
        self._policy_version = policy_version
        self._version_to_exceed = version_to_exceed or policy_version
        self._check_takes = check_takes
        self._check_weights = check_weights
        self.num_workers = num_workers
        self.takes_parameters = takes_parameters
        self._is_open = False
        self._announced: set[str] = set()
        """The parameters of `receive_later` since the last update was finished."""
        self._error: str | None = None
        """Why there is no group, or no update."""
        self._packing = BufferPacking()
        self._idle_s = 300.0
        self._update: _Update | None = None
        self._last_specs: tuple[TensorSpec, ...] = ()
        """What the last call of `receive` from this sender was about."""
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def takes_reset(self) -> bool:
        """Whether an update of TRL's communicator has begun, which a reset of the prefix cache finishes."""
        return bool(self._announced)

    async def open(self, rendezvous: Rendezvous, packing: BufferPacking) -> None:
        """Connect to a sender, which has rank 0 and sends weights in this `packing`; closes an older connection first.

        Raises:
            SamplingError: the world does not count the engine's workers.
            WeightsError: the sender or a worker did not come in time.
        """
        self._check_takes()
        last = rendezvous.first_rank + self.num_workers
        if rendezvous.first_rank < 1 or last > rendezvous.world_size:
            raise SamplingError(
                f"world_size must count the trainer and all workers, got {rendezvous.world_size} with rank_offset "
                f"{rendezvous.first_rank} for a server of {self.num_workers}"
            )
        await self._run_to_end(self._open(open_fields(rendezvous), packing, rendezvous.timeout_s))

    async def start(
        self,
        specs: Sequence[TensorSpec] | None = None,
        *,
        policy_version: int | None = None,
        in_flight: InFlight = InFlight.PAUSE,
        reuse_kv: bool = False,
    ) -> None:
        """Begin an update, and end one that was not finished. `specs` are all of its weights, if they are known.

        Raises:
            SamplingError: there is no sender, or the engine would refuse the weights or the version.
        """
        self._check_takes()
        options = {"in_flight": in_flight, "reuse_kv": reuse_kv}
        await self._run_to_end(self._start(specs, policy_version, options))

    async def receive(self, specs: Sequence[TensorSpec], packing: BufferPacking | None = None) -> None:
        """Receive and load the next weights of the update, in this `packing` or that of `open`.

        Empty `specs` repeat those of the last call: trainers of vLLM 0.33 send them for an equal update.

        Raises:
            SamplingError: no update has begun, there was no last call, or the model has no such weight, which ends the
                update.
            WeightsError: the sender is gone or too slow, a weight is not finite, or the update has failed before.

        Refused weights are received too, and dropped: the sender sends them in any case, and would wait forever.
        """
        await self._run_to_end(self._receive(tuple(specs), packing))

    async def finish(self, *, policy_version: int | None = None, digest: str | None = None) -> WeightReceipt:
        """Have the engine sample with what came, by default as its next version.

        Raises:
            SamplingError: no update has begun.
            WeightsError: a weight is missing, or what came does not have this `digest`. The engine samples nothing
                until a whole version comes, unless nothing was loaded.
        """
        return await self._run_to_end(self._finish(policy_version, digest))

    async def close(self) -> None:
        """Leave the sender; an update that was not finished has failed. Idempotent."""
        self.fail("the sender left")  # at once: a call may wait for it
        await self._run_to_end(self._close())

    def fail(self, reason: str) -> None:
        """End an update that waits for its sender."""
        if self._update is not None:
            self._update.source.fail(reason)

    # TRL's communicator (1.0 to 1.10): its client joins, or broadcasts, only once it has the answer. So the work is
    # done afterwards, in order, and its error is in the answer to the next call.

    async def open_later(self, *, host: str, port: int, world_size: int, transport: str) -> None:
        """Begin to connect to a sender that has the last rank; `SamplingError` unless it counts workers and sender."""
        self._check_takes()
        if world_size != self.num_workers + 1:
            raise SamplingError(
                f"world_size must be {self.num_workers + 1}, the engine's workers and the sender, got {world_size}"
            )
        fields = {"host": host, "port": port, "world_size": world_size, "transport": transport, "is_sender_last": True}
        self._error, self._is_open = None, True
        self._announced.clear()
        self._run_later(self._open(fields, BufferPacking(), self._idle_s))

    async def receive_later(self, spec: TensorSpec) -> None:
        """Begin to receive and load a parameter; the first one begins an update.

        Raises:
            SamplingError: there is no sender, or the model has no such weight.
            WeightsError: connecting to the sender, or an earlier parameter, failed.
        """
        self._check_takes()
        if self._error is not None or not self._is_open:
            raise self._no_group("/init_communicator/")
        await self._check_weights({spec.name: spec}, is_whole=False)
        if spec.name in self._announced:
            raise SamplingError(
                f"weight {spec.name!r} came twice: reset the prefix cache when an update is whole, which finishes it"
            )
        self._announced.add(spec.name)
        self._run_later(self._receive((spec,), None, starts=True))

    async def _open(self, fields: Mapping[str, Any], packing: BufferPacking, idle_s: float) -> None:
        await self._end_update("another sender came")
        self._error, self._last_specs = None, ()
        try:
            read_answers(await self._call("open", dict(fields)))
        except WeightsError as error:
            await self._leave(str(error))
            raise
        self._is_open, self._packing, self._idle_s = True, packing, idle_s

    async def _start(
        self, specs: Sequence[TensorSpec] | None, policy_version: int | None, options: Mapping[str, Any]
    ) -> None:
        if not self._is_open:
            raise self._no_group()
        await self._end_update("another update has begun")
        self._error = None
        version = self._policy_version() + 1 if policy_version is None else policy_version
        check_version_rises(version, current=self._version_to_exceed())
        if specs is not None:
            await self._check_weights(_by_name(specs), is_whole=True)
        source = WireSource(self._call_in_update, idle_s=self._idle_s)
        task = asyncio.create_task(self._update_engine(source, policy_version=version, **options))
        task.add_done_callback(_note_failure)
        self._update = _Update(source=source, task=task, policy_version=version)

    async def _receive(
        self, specs: tuple[TensorSpec, ...], packing: BufferPacking | None, *, starts: bool = False
    ) -> None:
        if not self._is_open:
            raise self._no_group()
        if starts and self._update is None and self._error is None:
            await self._start(None, None, {})
        specs = self._last_specs = specs or self._last_specs
        if not specs:
            raise SamplingError("update_info.names must not be empty in a trainer's first update")
        packing = packing or self._packing
        if (refusal := await self._find_refusal(specs)) is not None:
            await self._end_update(str(refusal))
            await self._drop(specs, packing)
            raise refusal
        update = self._update
        assert update is not None
        update.names.update(spec.name for spec in specs)
        part = _AnnouncedWeights(specs=specs, packing=packing, loaded=asyncio.get_running_loop().create_future())
        update.source.put(part)
        either: set[asyncio.Future[Any]] = {part.loaded, update.task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if part.loaded.done() and part.loaded.exception() is None:
            return
        was_taken = part.loaded.done()
        reason = await self._end_update("its weights could not be loaded")
        if not was_taken:
            await self._drop(specs, packing)
        else:
            await self._leave(reason)
        raise self._failed()

    async def _finish(self, policy_version: int | None, digest: str | None) -> WeightReceipt:
        self._announced.clear()
        self._check_updating()
        update = self._update
        assert update is not None
        version = update.policy_version if policy_version is None else policy_version
        try:
            check_version_rises(version, current=self._version_to_exceed())
            if not update.source.specs:
                raise SamplingError("no weights came")
            if digest is not None and digest != update.source.digest:
                raise WeightsError("the weights that came are not those that the trainer sent: their digests differ")
            await self._check_weights(update.source.specs, is_whole=True, sums=update.source.sums)
        except (SamplingError, WeightsError) as error:
            await self._end_update(str(error))
            raise self._failed() from error
        update.source.end(version)
        await asyncio.wait({update.task})
        if update.error is not None:
            await self._end_update("")
            raise self._failed() from update.error
        self._update = None
        return update.task.result()

    async def _close(self) -> None:
        self._announced.clear()
        await self._end_update("the sender left")
        await self._leave(None)

    async def _leave(self, reason: str | None) -> None:
        self._is_open, self._error = False, reason
        await self._call("close")

    async def _end_update(self, reason: str) -> str:
        """End the update, if there is one; returns why it has failed."""
        update, self._update = self._update, None
        if update is None:
            return self._error or reason
        update.source.fail(reason)
        await asyncio.wait({update.task})
        self._error = str(update.error) if update.error is not None else reason
        return self._error

    async def _find_refusal(self, specs: Sequence[TensorSpec]) -> UnbrokenError | None:
        try:
            self._check_updating()
            assert self._update is not None
            if repeated := self._update.names & {spec.name for spec in specs}:
                raise SamplingError(f"weight {min(repeated)!r} came twice")
            await self._check_weights(_by_name(specs), is_whole=False)
        except (SamplingError, WeightsError) as error:
            return error
        return None

    async def _drop(self, specs: Sequence[TensorSpec], packing: BufferPacking) -> None:
        """Receive weights that are not wanted: a sender sends them whatever it is answered."""
        fields = [spec.to_object() for spec in specs]
        try:
            read_answers(await self._call("take", fields, asdict(packing), None))
        except WeightsError as error:
            await self._leave(str(error))

    def _check_updating(self) -> None:
        if not self._is_open:
            raise self._no_group()
        if self._update is not None and self._update.error is None:
            return
        if self._update is not None:
            self._error, self._update = str(self._update.error), None
        if self._error is not None:
            raise self._failed()
        raise SamplingError("there is no update: POST /start_weight_update first")

    def _failed(self) -> WeightsError:
        return WeightsError(f"this update has failed: {self._error}. Send a whole version: POST /start_weight_update")

    def _no_group(self, route: str = "/init_weight_transfer_engine") -> UnbrokenError:
        if self._error is not None:
            return WeightsError(f"the transfer has failed: {self._error}. POST {route} again")
        return SamplingError(f"there is no trainer: POST {route} first")

    def _run_later(self, call: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await self._run_alone(call)
            except UnbrokenError as error:
                self._error = self._error or str(error)

        task = asyncio.create_task(run())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run_to_end(self, call: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(self._run_alone(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _run_alone(self, call: Coroutine[Any, Any, _T]) -> _T:
        async with self._lock:
            return await call


def _note_failure(task: asyncio.Task[WeightReceipt]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("an update of the weights has failed: %s", error)


def _by_name(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    if (repeated := find_repeated([spec.name for spec in specs])) is not None:
        raise SamplingError(f"weight {repeated!r} came twice")
    return {spec.name: spec for spec in specs}


def make_local_call(device: Callable[[], str]) -> Call:
    """Make the `Call` of an engine whose model is in this process: its receiver works in a thread.

    What `WireSource.take` gets besides the part is the function that loads its weights.
    """
    receivers: list[WireReceiver] = []

    async def call(method: str, *args: Any) -> list[dict[str, Any]]:
        if not receivers:
            receivers.append(WireReceiver(device()))
        return [await asyncio.to_thread(answer, lambda: getattr(receivers[0], method)(*args))]

    return call
