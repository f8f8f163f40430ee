"""Weights on vLLM's own wire, from a trainer to the workers of all servers (vLLM 0.22 to 0.33; TRL since 1.11).

The trainer is rank 0 of a group, the workers have the ranks after it. They meet in a key-value store of the trainer's,
and connect by NCCL, or without it by gloo. The weights come in the order of their announcement, in chunks that
both sides derive from the sizes: a chunk ends with the first weight that makes it larger than `buffer_bytes`, without
padding. With `buffer_bytes` 8 and weights of 4, 6, 20 and 2 bytes:

    chunk 0: 4 + 6 bytes      chunk 1: 20 bytes      chunk 2: 2 bytes

Not packed, each weight is a chunk of its own. A member that loses another or waits too long gets a `WeightsError`, and
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.weights.memory import HostFile, map_file
from unbroken.weights.sources import (
    ITEM_BYTES,
    ReceivedWeights,
    Receiver,
    StagedSource,
    TensorSpec,
    TiedNames,
    WeightStream,
    check_tied,
    sum_bytes,
)

if TYPE_CHECKING:
    import torch

BUFFER_BYTES = 2**30
"""vLLM's default, which neither it nor TRL sends."""
RESERVED_BYTES = 4 * 2**30
"""What received weights leave free on a GPU, for the steps that go on until they are loaded."""
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
    """Longest wait for the others to join. The engine samples nothing meanwhile."""
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
        with weights_errors(
            f"the group of {size} did not meet at {rendezvous.host}:{rendezvous.port} within "
            f"{rendezvous.join_timeout_s:g} s"
        ):
            # vLLM's `StatelessProcessGroup` is such a store.
            self._store: Any = TCPStore(
                rendezvous.host, rendezvous.port, size, rank == 0, timeout=timeout, use_libuv=False, **listening
            )
            check()
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
        with weights_errors("a broadcast of weights failed"):
            return self._backend.begin(chunk)

    def wait(self, work: Any, *, check: Check) -> None:
        """Wait until a chunk is there; `WeightsError` if another member is gone, or after the time-out."""
        if self._backend is None:
            raise WeightsError("the group was left")
        until = time.monotonic() + self._timeout_s
        next_check = time.monotonic() + _CHECK_S
        with weights_errors(self._loss):
            while not self._backend.is_done(work):
                now = time.monotonic()
                if now > until:
                    raise WeightsError(f"{self._loss}: the weights were still under way after {self._timeout_s:g} s")
                if now > next_check:
                    next_check = now + _CHECK_S
                    check()
                time.sleep(_POLL_S)

    def check_trainer(self) -> None:
        """Raise `WeightsError` if the trainer, whose store this is, is gone."""
        with weights_errors("the trainer is gone"):
            self._store.check(["alive"])

    def close(self) -> None:
        """Leave the group, even during a broadcast. gloo's connections close with the last reference to them."""
        backend, self._backend = self._backend, None
        if isinstance(backend, _Nccl):
            backend.abort()
        self._store = None


def listen(host: str) -> socket.socket:
    """Listen for workers on a free port of `host`; `WeightsError` if this machine has no such address."""
    with weights_errors(
        f"the trainer cannot listen on {host!r}: name an address of this machine that the servers reach"
    ):
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def stop_waiting(rendezvous: Rendezvous) -> None:
    """End the wait of a trainer that joins its own group: its store counts these connections as the workers'."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with suppress(RuntimeError, ValueError, OSError):
        for _ in range(rendezvous.world_size - 1):
            TCPStore(
                rendezvous.host, rendezvous.port, rendezvous.world_size, False, timeout=timedelta(seconds=1),
                use_libuv=False,
            )  # fmt: skip


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
                "ncclAllReduce", pointer, pointer, count, ctypes.c_int(self._FLOAT32), ctypes.c_int(self._SUM),
                self._comm, ctypes.c_void_p(self._stream.cuda_stream),
            )  # fmt: skip
            self._stream.synchronize()

    def begin(self, chunk: torch.Tensor) -> Any:
        import torch

        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            pointer, count = ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(chunk.numel())
            self._call(
                "ncclBroadcast", pointer, pointer, count, ctypes.c_int(self._UINT8), ctypes.c_int(0), self._comm,
                ctypes.c_void_p(self._stream.cuda_stream),
            )  # fmt: skip
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
    import torch

    casts = zip(stream.specs, stream, strict=True)
    return _read_sums([sum_bytes(tensor.detach().to(getattr(torch, spec.dtype))) for spec, (_, tensor) in casts])


def _read_sums(sums: Sequence[torch.Tensor]) -> list[int]:
    import torch

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


class PackedSource(StagedSource):
    """Weights that the workers have received in chunks."""

    __slots__ = ()


class PackedReceiver(Receiver[StagedSource]):
    """A worker's side: keeps what comes until all is loaded.

    Of several workers of one machine, one keeps the bytes, in memory that the others open to load from.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0) -> None:
        super().__init__(device, rank=rank)
        self._group: PackedGroup | None = None
        self._weights: dict[str, torch.Tensor] = {}
        """What came and is not loaded yet, by name."""
        self._files: list[HostFile] = []

    def open(self, fields: Mapping[str, Any]) -> str:
        """Join a trainer's group, and leave an older one; returns the name of this machine."""
        self.close()
        rendezvous = Rendezvous(**{**fields, "transport": Transport(fields["transport"])})
        self._group = PackedGroup(rendezvous, rank=rendezvous.first_rank + self._rank, device=self._device)
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"

    def take(
        self, tensors: Sequence[Mapping[str, Any]], packing: Mapping[str, Any], keepers: Mapping[int, bool]
    ) -> dict[str, Any] | None:
        """Receive weights, and keep them if this rank is among the `keepers`: whether each shares them with others.

        Returns the sum of each weight that is kept, and the files that others open. After a failure the group is left,
        and nothing is kept.
        """
        if self._group is None:
            raise WeightsError("this worker is in no group")
        shares = keepers.get(self._rank)
        sums: list[torch.Tensor] = []
        files = []
        try:
            for specs in BufferPacking(**packing).split([TensorSpec.from_object(fields) for fields in tensors]):
                chunk = self._receive(sum(spec.num_bytes for spec in specs), in_file=bool(shares))
                if shares is None:
                    continue
                sums += [sum_bytes(values) for _, values in unpack(chunk, specs)]
                kept = self._stage(chunk, in_file=shares)
                if shares and len(chunk):
                    files.append([self._files[-1].path, len(chunk), [spec.to_object() for spec in specs]])
                self._weights.update(unpack(kept, specs))
        except BaseException as error:
            clear_frames(error)
            self.close()
            raise
        return None if shares is None else {"sums": _read_sums(sums), "files": files}

    def receive(self, source: StagedSource, *, tied: TiedNames | None = None) -> ReceivedWeights:
        """See `Receiver`: the weights are here already, or another process of this machine has them."""
        kept, self._weights = self._weights, {}
        files, self._files = self._files, []
        for path, num_bytes, tensors in (source.shared or {}).get(self._rank, ()):
            with weights_errors("a worker cannot open the weights that another one received"):
                chunk = map_file(path, num_bytes)
            kept.update(unpack(chunk, [TensorSpec.from_object(fields) for fields in tensors]))
        weights = {spec.name: kept[spec.name] for spec in source.specs}
        check_tied(weights, tied)

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for file in files:  # all workers have opened them: they load after all have received
                file.close()
            yield from weights.items()

        return ReceivedWeights(tensors=read(), digest=source.digest)

    def drop(self) -> None:
        """Forget what came."""
        self._weights = {}
        files, self._files = self._files, []
        for file in files:
            file.close()

    def close(self) -> None:
        """Leave the group, and forget what came."""
        self.drop()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _receive(self, num_bytes: int, *, in_file: bool) -> torch.Tensor:
        """Receive a chunk; on a CPU right where it is kept."""
        import torch

        assert self._group is not None
        wire = self._group.wire
        try:
            if in_file and num_bytes and wire.type == "cpu":
                self._files.append(HostFile(num_bytes))
                chunk = self._files[-1].row
            else:
                chunk = torch.empty(num_bytes, dtype=torch.uint8, device=wire)
        except (RuntimeError, OSError) as error:
            raise WeightsError(f"a chunk of {num_bytes / 2**30:.2f} GiB has no room on {wire}") from error
        if num_bytes:
            self._group.wait(self._group.begin(chunk), check=self._group.check_trainer)
        return chunk

    def _stage(self, chunk: torch.Tensor, *, in_file: bool) -> torch.Tensor:
        """Return the chunk where it can stay: in a file, on the GPU while that has room, or in the host's memory."""
        import torch

        if chunk.device.type != "cuda":
            return chunk
        if in_file and len(chunk):
            self._files.append(HostFile(len(chunk)))
            return self._files[-1].row.copy_(chunk)
        free, _ = torch.cuda.mem_get_info(chunk.device)
        return chunk if free > RESERVED_BYTES + chunk.numel() else chunk.cpu()


def answer(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what `work` returns, or its error, as an answer.

    An exception of one worker would reach the engine before the answers of the others, which the engine would then take
    for the answers to its next call.
    """
    try:
        return {"answer": work()}
    except Exception as error:
        return {"error": str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"}


def open_fields(rendezvous: Rendezvous) -> dict[str, Any]:
    """Return a rendezvous as `PackedReceiver.open` takes it in another process."""
    return {**asdict(rendezvous), "transport": rendezvous.transport.value}


def clear_frames(error: BaseException) -> None:
    """Drop the references that the frames of an error hold: gloo's connections close with the last one."""
    traceback.clear_frames(error.__traceback__)
    if error.__cause__ is not None:
        clear_frames(error.__cause__)


@contextmanager
def weights_errors(problem: str) -> Iterator[None]:
    """Raise errors of sockets and of torch as `WeightsError`."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise WeightsError(f"{problem} ({type(error).__name__}: {first_line[:300]})") from error
