"""The group of a trainer and its workers: a shared store for messages, and broadcasts.

    trainer (rank 0)                       worker (ranks 1, 2, ...)
    host()                                 join()                  a TCP store, which the trainer has
    num_arrived(READY) == all?       <--   arrive(READY)           there is room for the weights
    say_go(READY)                    -->   wait_for_go(READY)
    connect(), broadcast() ...             connect(), broadcast() ...
    say_sums()                       -->   sums()                  compared with what came
    num_arrived(TAKEN) == all?       <--   arrive(TAKEN)
    say_go(TAKEN)                    -->   wait_for_go(TAKEN)      from here on every worker loads

A member that loses another or waits longer than `timeout_s` gets a `WeightsError`, and the group cannot be used again.
The group is separate from torch's default group and from any other.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from unbroken.errors import WeightsError
from unbroken.transfer.announcement import Meeting, Transport

if TYPE_CHECKING:
    import torch


class Step(StrEnum):
    """A point of the update at which all workers wait for one another."""

    READY = "ready"
    TAKEN = "taken"


_GO = b"go"
_NO = b"no: "
_POLL_S = 0.0005


class WeightGroup:
    """One member of a group; made by `host` or `join`."""

    def __init__(self, store: Any, meeting: Meeting, *, rank: int, timeout_s: float) -> None:
        self.meeting = meeting
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._backend: Any = None

    @classmethod
    def host(cls, host: str, *, group_id: str, transport: Transport, world_size: int, timeout_s: float) -> WeightGroup:
        """Open a group as the trainer, on a free port of `host`; `WeightsError` if this machine has no such address."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with weights_errors(
            f"the trainer cannot listen on {host!r}: name an address of this machine that the servers reach"
        ):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port: int = listener.getsockname()[1]
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        meeting = Meeting(
            host=host, port=port, group_id=group_id, transport=transport, world_size=world_size, first_rank=1
        )
        return cls(store, meeting, rank=0, timeout_s=timeout_s)

    @classmethod
    def join(cls, meeting: Meeting, *, rank: int, timeout_s: float) -> WeightGroup:
        """Join a group as a worker; `WeightsError` if no trainer listens at the address."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with weights_errors(f"the trainer's store at {meeting.host}:{meeting.port} cannot be reached"):
            # torch would try to reach a trainer that is gone until the time-out. A trainer listens before it announces.
            socket.create_connection((meeting.host, meeting.port), timeout=timeout_s).close()
            store = TCPStore(
                meeting.host, meeting.port, is_master=False, wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        return cls(store, meeting, rank=rank, timeout_s=timeout_s)

    def check_open(self) -> None:
        """Raise `WeightsError` if the group has connected already: a worker that joins now is too late."""
        with weights_errors("the trainer is gone"):
            if self._store.check(["met"]):
                raise WeightsError("the trainer's group met without this worker, which was started later")

    def arrive(self, update_id: str, step: Step) -> None:
        """Report as a worker that it has reached a step; `wait_for_go` is next."""
        with weights_errors("the trainer is gone"):
            self._store.add(f"{update_id}/{step}", 1)

    def num_arrived(self, update_id: str, step: Step) -> int:
        """Return how many workers have reached a step; `WeightsError`, with the reason, if one has failed."""
        with weights_errors("the store failed"):
            if self._store.check([f"{update_id}/failed"]):
                raise WeightsError(self._store.get(f"{update_id}/failed").decode())
            number: int = self._store.add(f"{update_id}/{step}", 0)
            return number

    def say_failed(self, update_id: str, reason: str) -> None:
        """Report as a worker that it cannot continue."""
        with weights_errors("the trainer is gone"):
            self._store.set(f"{update_id}/failed", reason)

    def say_go(self, update_id: str, step: Step) -> None:
        """Tell all workers, as the trainer, that all have reached a step."""
        with weights_errors("the store failed"):
            self._store.set(f"{update_id}/{step}/word", _GO.decode())

    def say_no(self, update_id: str, reason: str) -> None:
        """End this update for all workers, as the trainer."""
        with weights_errors("the store failed"):
            for step in Step:
                self._store.compare_set(f"{update_id}/{step}/word", "", _NO.decode() + reason)

    def wait_for_go(self, update_id: str, step: Step) -> None:
        """Wait until the trainer has seen all workers at a step; `WeightsError` if it ended the update or is gone."""
        answer = self._get(f"{update_id}/{step}/word", "the trainer did not say whether to continue")
        if answer != _GO:
            raise WeightsError(f"the trainer ended the update: {answer.removeprefix(_NO).decode()}")

    def say_sums(self, update_id: str, sums: Sequence[int]) -> None:
        """Publish the sum of each bucket, as the trainer."""
        with weights_errors("the store failed"):
            self._store.set(f"{update_id}/sums", json.dumps(list(sums)))

    def sums(self, update_id: str) -> list[int]:
        """Return the sums of the trainer's buckets; waits until all are sent."""
        found: list[int] = json.loads(self._get(f"{update_id}/sums", "the trainer did not finish"))
        return found

    def connect(self, device: torch.device) -> None:
        """Connect all members, unless they are; each must call it. `WeightsError` if one is missing."""
        if self._backend is not None:
            return
        import torch
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        meeting = self.meeting
        timeout = timedelta(seconds=self._timeout_s)
        store = PrefixStore(meeting.group_id, self._store)
        with weights_errors(f"the group of {meeting.world_size} did not come together within {self._timeout_s:g} s"):
            if meeting.transport is Transport.GLOO:
                from torch.distributed.distributed_c10d import ProcessGroupGloo

                self._backend = ProcessGroupGloo(store, self._rank, meeting.world_size, timeout)
            else:
                self._backend = _nccl(store, self._rank, meeting.world_size)
            if self._rank == 0:
                self._store.set("met", "")
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            self.finish(self.broadcast(first), device)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send (rank 0) or receive bytes; returns the running work, for `follow` and `finish`."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with weights_errors("a broadcast of weights failed"):
            return self._backend.broadcast([tensor], options)

    def follow(self, work: Any) -> None:
        """Order later use of the tensor after the work; on a CPU, wait for it."""
        with weights_errors("the other side of a broadcast is gone, or too slow"):
            work.wait()

    def finish(self, work: Any, device: torch.device, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the work, and everything before it on the device's current stream, is done.

        `check` is called meanwhile, and raises to give up. Raises `WeightsError` if another member is gone, or after
        the time-out.
        """
        self.follow(work)
        if device.type != "cuda":
            return
        import torch

        def check_all() -> None:
            check()
            with weights_errors("the trainer is gone"):
                self._store.check(["alive"])

        wait_for_stream(torch.cuda.current_stream(device), timeout_s=self._timeout_s, check=check_all)

    def disconnect(self) -> None:
        """End running broadcasts, so that no member waits for them; this group can broadcast no more.

        gloo's connections close with the last reference to them, which may be a work or the traceback of an error: see
        `clear_frames`.
        """
        backend, self._backend = self._backend, None
        if backend is not None and self.meeting.transport is Transport.NCCL:
            backend.abort()

    def close(self) -> None:
        """Leave the group, even during a broadcast."""
        self.disconnect()
        self._store = None

    def _get(self, key: str, otherwise: str) -> bytes:
        with weights_errors(otherwise):
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            found: bytes = self._store.get(key)
            return found


def _nccl(store: Any, rank: int, world_size: int) -> Any:
    """Make an NCCL group whose failures do not end the process, which is the engine's worker.

    torch's watchdog would. It can be switched off only by environment variables that are read when the group is made
    (`torch.distributed.distributed_c10d._abort_process_group`). `finish` has a time-out, and `disconnect` aborts.
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        return ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def wait_for_stream(stream: Any, *, timeout_s: float, check: Callable[[], None]) -> None:
    """Wait until a GPU's stream has done what it was given so far; `WeightsError` after the time-out.

    A GPU whose peer is gone waits forever. `check` is called meanwhile, and raises if the peer is gone; what closes
    the group then frees the GPU.
    """
    event = stream.record_event()
    until = time.monotonic() + timeout_s
    next_check = 0.0
    while not event.query():
        now = time.monotonic()
        if now > until:
            raise WeightsError(f"the weights were still under way after {timeout_s:g} s")
        if now > next_check:
            next_check = now + 0.05
            check()
        time.sleep(_POLL_S)


def clear_frames(error: BaseException) -> None:
    """Drop the references that the frames of an error hold."""
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
