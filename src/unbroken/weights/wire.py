"""Weights on vLLM's own wire, from a trainer to the workers of all servers (vLLM 0.22 to 0.33; TRL since 1.11).

The trainer is rank 0 of a group, the workers have the ranks after it. They meet in a key-value store of the trainer's,
and connect by NCCL, or without it by gloo. The weights come in the order of their announcement, in chunks that
both sides derive from the sizes: a chunk ends with the first weight that makes it larger than `buffer_bytes`, without
padding. With `buffer_bytes` 8 and weights of 4, 6, 20 and 2 bytes:

    chunk 0: 4 + 6 bytes      chunk 1: 20 bytes      chunk 2: 2 bytes

Not packed, each weight is its own chunk. A member that loses another or waits too long gets a `WeightsError`, and
the group cannot be used again. vLLM itself is not needed: any trainer can send, any engine can receive.
"""

from __future__ import annotations

import ctypes
import os
import pickletools
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.weights.sources import (
    ITEM_BYTES,
    NamedTensors,
    TensorSpec,
    WeightStream,
    check_finite,
    sum_bytes,
)

if TYPE_CHECKING:
    import torch

BUFFER_BYTES = 2**30
"""vLLM's default, which neither it nor TRL sends."""
_POLL_S = 0.0005
_CHECK_S = 0.05

Check: TypeAlias = Callable[[], None]
"""Called while a member waits; raises `WeightsError` to give up."""


class Transport(StrEnum):
    """The library that carries the bytes."""

    GLOO = "gloo"
    """TCP, from memory to memory; everywhere."""
    NCCL = "nccl"
    """From GPU to GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where a trainer and the workers form a group."""

    host: str
    port: int
    """The trainer's store listens there."""
    first_rank: int
    """Rank of this server's first worker."""
    world_size: int
    """The trainer, and all workers of all servers."""
    transport: Transport
    join_timeout_s: float = 60.0
    """Longest wait for the others to join, in which the engine samples nothing."""
    timeout_s: float = 300.0
    """Longest wait for a chunk."""

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPacking:
    """How weights are put into chunks; the trainer and all workers must use the same."""

    packed: bool = False
    buffer_bytes: int = BUFFER_BYTES

    def split(self, specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
        """Yield the weights of each chunk."""
        chunk: list[TensorSpec] = []
        size = 0
        for spec in specs:
            chunk.append(spec)
            size += spec.num_bytes
            if not self.packed or size > self.buffer_bytes:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def unpack(chunk: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of each weight of a chunk of bytes: views of it, or copies where it lies between items."""
    import torch

    start = 0
    for spec in specs:
        values = chunk[start : start + spec.num_bytes]
        if start % ITEM_BYTES[spec.dtype]:
            values = values.clone()
        yield spec.name, values.view(getattr(torch, spec.dtype)).view(spec.shape)
        start += spec.num_bytes


class PackedGroup:
    """One member of a group, the trainer or a worker."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rank: int,
        device: torch.device,
        listener: socket.socket | None = None,
        check: Check = lambda: None,
    ) -> None:
        """Join; the trainer (rank 0) with the socket that it listens at, which is the store's from then on.

        Raises `WeightsError` if another member does not join in time, or `check` raises it when all are there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.device = device
        self._timeout_s = rendezvous.timeout_s
        self._loss = "a worker is gone, or too slow" if rank == 0 else "the trainer is gone, or sent nothing in time"
        self._backend: _Gloo | _Nccl | None = None
        if rendezvous.transport is Transport.NCCL and device.type != "cuda":
            raise WeightsError(f"nccl needs a GPU, and this worker is on {device}: use gloo")
        size, timeout = rendezvous.world_size, timedelta(seconds=max(1, round(rendezvous.join_timeout_s)))
        listening: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
        with _weights_errors(
            f"the group of {size} did not meet at {rendezvous.host}:{rendezvous.port} within "
            f"{rendezvous.join_timeout_s:g} s"
        ):
            # vLLM's `StatelessProcessGroup` is such a store.
            make_store = partial(
                TCPStore,
                rendezvous.host,
                rendezvous.port,
                size,
                rank == 0,
                timeout=timeout,
                use_libuv=False,
                **listening,
            )
            self._store: Any = make_store() if rank > 0 else _make_with_check(make_store, rendezvous, check)
            if rendezvous.transport is Transport.NCCL:
                self._backend = _Nccl(self._store, rank, size, device)
            else:
                self._backend = _Gloo(self._store, rank, size, timeout_s=rendezvous.timeout_s)

    @property
    def wire(self) -> torch.device:
        """Where chunks must be."""
        import torch

        return torch.device("cpu") if isinstance(self._backend, _Gloo) else self.device

    def begin(self, chunk: torch.Tensor) -> Any:
        """Begin to send (rank 0) or receive a chunk of bytes; returns what `wait` waits for."""
        if self._backend is None:
            raise WeightsError("the group was left")
        with _weights_errors("a broadcast of weights failed"):
            return self._backend.begin(chunk)

    def wait(self, work: Any, *, check: Check) -> None:
        """Wait until a chunk is there; `WeightsError` if another member is gone, or after the time-out."""
        until = time.monotonic() + self._timeout_s
        next_check = time.monotonic() + _CHECK_S
        with _weights_errors(self._loss):
            while (backend := self._backend) is not None and not backend.is_done(work):
                now = time.monotonic()
                if now > until:
                    raise WeightsError(f"{self._loss}: the weights were still under way after {self._timeout_s:g} s")
                if now > next_check:
                    next_check = now + _CHECK_S
                    check()
                time.sleep(_POLL_S)
        if backend is None:
            raise WeightsError("the group was left")

    def begin_receive(self, num_bytes: int) -> tuple[torch.Tensor, Any]:
        """Begin to receive the next chunk; returns it, and what `end_receive` waits for.

        `WeightsError` if there is no room.
        """
        import torch

        try:
            chunk = torch.empty(num_bytes, dtype=torch.uint8, device=self.wire)
        except (RuntimeError, OSError) as error:
            raise WeightsError(f"a chunk of {num_bytes / 2**30:.2f} GiB has no room on {self.wire}") from error
        return chunk, (self.begin(chunk) if num_bytes else None)

    def end_receive(self, work: Any) -> None:
        """Wait until a chunk is there; `WeightsError` if the trainer is gone, or too slow."""
        if work is not None:
            self.wait(work, check=self.check_trainer)

    def check_trainer(self) -> None:
        """Raise `WeightsError` if the trainer, whose store this is, is gone."""
        with _weights_errors("the trainer is gone"):
            self._store.check(["alive"])

    def close(self) -> None:
        """Leave the group, even during a broadcast. gloo's connections close with the last reference to them."""
        backend, self._backend = self._backend, None
        if isinstance(backend, _Nccl):
            backend.abort()
        self._store = None


def listen(host: str) -> socket.socket:
    """Listen for workers on a free port of `host`; `WeightsError` if this machine has no such address."""
    with _weights_errors(
        f"the trainer cannot listen on {host!r}: name an address of this machine that the servers reach"
    ):
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _make_with_check(make_store: Callable[[], Any], rendezvous: Rendezvous, check: Check) -> Any:
    """Make the trainer's store, which waits for all workers; raises as `check`.

    Nothing but workers ends the wait, so who gives up connects in their place: the store counts the connections.
    """
    with ThreadPoolExecutor(1, "unbroken-meeting") as thread:
        making = thread.submit(make_store)
        while not making.done():
            try:
                check()
            except BaseException:
                with suppress(RuntimeError, ValueError, OSError):
                    for _ in range(rendezvous.world_size - 1):
                        _connect_to_store(rendezvous)
                raise
            futures.wait([making], timeout=_CHECK_S)
        return making.result()


def _connect_to_store(rendezvous: Rendezvous) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port, size = rendezvous.host, rendezvous.port, rendezvous.world_size
    TCPStore(host, port, size, False, timeout=timedelta(seconds=1), use_libuv=False)


class _Gloo:
    """Sends between memories of hosts. vLLM has no such transfer: its engines on CPUs are ours."""

    def __init__(self, store: Any, rank: int, size: int, *, timeout_s: float, source: int = 0) -> None:
        from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        self._gloo: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout_s))
        self._options = BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = source, 0

    def begin(self, chunk: torch.Tensor) -> Any:
        return self._gloo.broadcast([chunk], self._options)

    def is_done(self, work: Any) -> bool:
        if not work.is_completed():
            return False
        work.wait()  # raises if it failed
        return True


def make_gloo_broadcast(group: Any, *, source: int, timeout_s: float) -> Callable[[torch.Tensor], None]:
    """Return a function that broadcasts a tensor from the rank `source` of vLLM's `StatelessProcessGroup`."""
    gloo = _Gloo(group.store, group.rank, group.world_size, timeout_s=timeout_s, source=source)
    return lambda tensor: gloo.begin(tensor).wait()


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Nccl:
    """A communicator of the NCCL that torch brings, made as vLLM's `PyNcclCommunicator` makes it."""

    _UINT8, _FLOAT32, _SUM = 1, 7, 0
    _KEY = "broadcast_from/0/0"

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        import torch

        self._device = device
        self._lib = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        own = _UniqueId()
        with torch.cuda.device(device):
            if rank == 0:
                self._call("ncclGetUniqueId", ctypes.byref(own))
                store.set(self._KEY, pickle_unique_id(bytes(own)))
            else:
                own = _UniqueId.from_buffer_copy(read_unique_id(store.get(self._KEY)))
            self._comm = ctypes.c_void_p()
            self._call("ncclCommInitRank", ctypes.byref(self._comm), ctypes.c_int(size), own, ctypes.c_int(rank))
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            first = torch.zeros(1, device=device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            pointer, count = ctypes.c_void_p(first.data_ptr()), ctypes.c_size_t(1)
            self._call(
                "ncclAllReduce",
                pointer,
                pointer,
                count,
                ctypes.c_int(self._FLOAT32),
                ctypes.c_int(self._SUM),
                self._comm,
                ctypes.c_void_p(self._stream.cuda_stream),
            )
            self._stream.synchronize()

    def begin(self, chunk: torch.Tensor) -> Any:
        import torch

        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            pointer, count = ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(chunk.numel())
            self._call(
                "ncclBroadcast",
                pointer,
                pointer,
                count,
                ctypes.c_int(self._UINT8),
                ctypes.c_int(0),
                self._comm,
                ctypes.c_void_p(self._stream.cuda_stream),
            )
            return self._stream.record_event()

    def is_done(self, work: Any) -> bool:
        done: bool = work.query()
        return done

    def abort(self) -> None:
        """Free the GPU of a broadcast whose peer is gone, which would stay there forever."""
        thread = threading.Thread(target=self._call, args=("ncclCommAbort", self._comm), daemon=True)
        thread.start()
        thread.join(timeout=5.0)  # it may wait for CUDA graphs that are freed later

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != 0:
            raise WeightsError(f"{name} failed: {self._lib.ncclGetErrorString(code).decode()}")


def pickle_unique_id(value: bytes) -> bytes:
    """Pickle NCCL's 128 bytes as the `ncclUniqueId` of vLLM, which its workers unpickle."""
    kind = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    return b"\x80\x03c_ctypes\n_unpickle\n" + kind + b"}C" + bytes([len(value)]) + value + b"\x86\x86R."


def read_unique_id(pickled: bytes) -> bytes:
    """Return the 128 bytes of a pickled `ncclUniqueId`, without running what else the pickle may have."""
    for _, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str):
            argument = argument.encode("latin-1")
        if isinstance(argument, bytes) and len(argument) == 128:
            return argument
    raise WeightsError("the trainer's store has no id of NCCL")


def send(group: PackedGroup, stream: WeightStream, packing: BufferPacking, *, check: Check) -> list[int]:
    """Send the weights to all workers, cast to the stream's dtypes; returns the sum of each (`sum_bytes`).

    One chunk is filled while another is sent. `WeightsError` if a worker is gone or too slow.
    """
    import torch

    pending: deque[tuple[Any, torch.Tensor]] = deque()
    sums: list[torch.Tensor] = []
    tensors = iter(stream)

    def finish_first() -> None:
        group.wait(pending[0][0], check=check)
        pending.popleft()

    with torch.cuda.device(group.wire) if group.wire.type == "cuda" else nullcontext():
        for specs in packing.split(stream.specs):
            check()
            size = sum(spec.num_bytes for spec in specs)
            while pending and (len(pending) > 1 or len(pending[0][1]) + size > 2 * packing.buffer_bytes):
                finish_first()
            chunk = _fill(tensors, specs, size, group.wire)
            sums += [sum_bytes(values) for _, values in unpack(chunk, specs)]
            if size:
                pending.append((group.begin(chunk), chunk))
        while pending:
            finish_first()
    return _read_sums(sums)


def sum_stream(stream: WeightStream) -> list[int]:
    """Return what `send` would return, without sending."""
    return _read_sums([sum_bytes(values) for _, values in stream.read_cast()])


def _read_sums(sums: Sequence[torch.Tensor]) -> list[int]:
    import torch

    if not sums:
        return []
    totals: list[int] = torch.stack(list(sums)).tolist()
    return totals


def _fill(
    tensors: Iterator[tuple[str, torch.Tensor]], specs: Sequence[TensorSpec], size: int, device: torch.device
) -> torch.Tensor:
    """Return the next chunk; a weight that is there as it must be sent is the chunk itself."""
    import torch

    chunk: torch.Tensor | None = None
    start = 0
    for spec in specs:
        name, tensor = next(tensors, ("", None))
        if tensor is None or name != spec.name or tuple(tensor.shape) != spec.shape:
            found = "nothing" if tensor is None else f"{name!r} of shape {tuple(tensor.shape)}"
            raise WeightsError(f"weight {spec.name!r} of shape {spec.shape} was announced, and {found} came")
        dtype, values = getattr(torch, spec.dtype), tensor.detach()
        if len(specs) == 1 and values.dtype is dtype and values.device == device and values.is_contiguous():
            return values.view(-1).view(torch.uint8)
        if chunk is None:
            chunk = torch.empty(size, dtype=torch.uint8, device=device)
        target = chunk[start : start + spec.num_bytes]
        if start % ITEM_BYTES[spec.dtype]:
            target.copy_(values.to(device, dtype).contiguous().view(-1).view(torch.uint8))
        else:
            target.view(dtype).view(spec.shape).copy_(values)
        start += spec.num_bytes
    assert chunk is not None
    return chunk


class WireReceiver:
    """The side of a process that holds the model or a part: it gives what comes to the model, chunk by chunk.

    Nothing is kept: a chunk is free once the model has copied it. So an update needs the memory of a chunk or two, and
    one that ends half-way leaves a model that is neither old nor new. The engine knows, and samples no more with it.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0) -> None:
        """Receive for the model on `device`; `rank` is the number of this process among those of its engine."""
        import torch

        self._device = torch.device(device)
        self._rank = rank
        self._group: PackedGroup | None = None

    def open(self, fields: Mapping[str, Any]) -> None:
        """Join a sender's group, and leave an older one."""
        self.close()
        self._group = self.join(fields)

    def join(self, fields: Mapping[str, Any]) -> PackedGroup:
        """Join a sender's group; `WeightsError` if another member does not come in time."""
        rendezvous = Rendezvous(**{**fields, "transport": Transport(fields["transport"])})
        return PackedGroup(rendezvous, rank=rendezvous.first_rank + self._rank, device=self._device)

    def take(
        self,
        tensors: Sequence[Mapping[str, Any]],
        packing: Mapping[str, Any],
        load: Callable[[NamedTensors], object] | None,
    ) -> list[int]:
        """Receive weights and have them loaded as they come; returns the sum of each (`sum_bytes`).

        Without `load` they are dropped.

        After a failure the group is left. `WeightsError` if the sender is gone or too slow, or a weight is not finite.
        """
        sums: list[torch.Tensor] = []
        problem: BaseException | None = None
        try:
            chunks = self._receive(tensors, packing)
            try:
                if load is not None:
                    load(_examine(chunks, sums))
            except BaseException as error:
                problem = error
            for _ in chunks:  # the sender sends all of it, and would wait: NCCL has no time-out
                pass
            if problem is not None:
                raise problem
        except BaseException as error:
            clear_frames(error)
            self.close()
            raise
        return _read_sums(sums)

    def check_sender(self) -> None:
        """Raise `WeightsError` if the sender is gone."""
        if self._group is None:
            raise WeightsError("this worker is in no group")
        self._group.check_trainer()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _receive(
        self, tensors: Sequence[Mapping[str, Any]], packing: Mapping[str, Any]
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the weights of each chunk; while they are loaded, the next chunk comes."""
        group = self._group
        if group is None:
            raise WeightsError("this worker is in no group")
        begun: deque[tuple[list[TensorSpec], torch.Tensor, Any]] = deque()
        for specs in BufferPacking(**packing).split([TensorSpec.from_object(fields) for fields in tensors]):
            begun.append((specs, *group.begin_receive(sum(spec.num_bytes for spec in specs))))
            if len(begun) > 1:
                yield _end_receive(group, *begun.popleft())
        while begun:
            yield _end_receive(group, *begun.popleft())


def _end_receive(
    group: PackedGroup, specs: Sequence[TensorSpec], chunk: torch.Tensor, work: Any
) -> list[tuple[str, torch.Tensor]]:
    group.end_receive(work)
    return list(unpack(chunk, specs))


def _examine(
    chunks: Iterable[Sequence[tuple[str, torch.Tensor]]], sums: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of chunks, and add the sum of each to `sums`; `WeightsError` if one is not finite."""
    for weights in chunks:
        for name, values in weights:
            check_finite(name, values)
            sums.append(sum_bytes(values))
        yield from weights


def answer(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what `work` returns, or its error, as an answer.

    An exception of one worker would reach the engine before the answers of the others, which the engine would then take
    for the answers to its next call.
    """
    try:
        return {"answer": work()}
    except Exception as error:
        return {"error": str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"}


def read_answers(answers: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What each worker's `answer` returned; `WeightsError` with the first error, if there is one."""
    if errors := [found["error"] for found in answers if "error" in found]:
        raise WeightsError(errors[0])
    return [found["answer"] for found in answers]


def open_fields(rendezvous: Rendezvous) -> dict[str, Any]:
    """Return a rendezvous as `WireReceiver.open` takes it in another process."""
    return {**asdict(rendezvous), "transport": rendezvous.transport.value}


def clear_frames(error: BaseException) -> None:
    """Drop the references that the frames of an error hold: gloo's connections close with the last one."""
    traceback.clear_frames(error.__traceback__)
    if error.__cause__ is not None:
        clear_frames(error.__cause__)


@contextmanager
def _weights_errors(problem: str) -> Iterator[None]:
    """Raise errors of sockets and of torch as `WeightsError`."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise WeightsError(f"{problem} ({type(error).__name__}: {first_line[:300]})") from error
