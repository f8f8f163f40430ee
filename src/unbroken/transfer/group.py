"""The group of a trainer and its workers: a store to agree through, and broadcasts. It touches no other group.

    trainer (rank 0)                       worker (ranks 1, 2, ...)
    host()                                 join()                  a TCP store, which the trainer has
    num_arrived(READY) == all?       <--   arrive(READY)           there is room for what comes
    say_go(READY)                    -->   wait_for_word(READY)
    connect(), broadcast() ...             connect(), broadcast() ...
    say_sums()                       -->   sums()                  compared with what came
    num_arrived(TAKEN) == all?       <--   arrive(TAKEN)
    say_go(TAKEN)                    -->   wait_for_word(TAKEN)    from here on every worker loads

Whoever loses the other, or waits longer than `timeout_s`, gets a `WeightsError`, and the group is of no more use.
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
    """Where the workers wait for one another."""

    READY = "ready"
    TAKEN = "taken"


_GO = b"go"
_NO = b"no: "
_POLL_S = 0.0005


class WeightGroup:
    """One member's part in a group; made by `host` or `join`."""

    def __init__(self, store: Any, meeting: Meeting, *, rank: int, timeout_s: float) -> None:
        self.meeting = meeting
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._backend: Any = None

    @classmethod
    def host(cls, host: str, *, group_id: str, transport: Transport, world_size: int, timeout_s: float) -> WeightGroup:
        """The trainer's part: listen on `host`, at a free port, for the workers.

        Raises:
            WeightsError: it cannot be listened on.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with _told(f"the trainer cannot listen on {host!r}: name an address of this machine that the servers reach"):
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
        """A worker's part.

        Raises:
            WeightsError: nobody listens there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with _told(f"the trainer's store at {meeting.host}:{meeting.port} cannot be reached"):
            # torch would try for all of the time-out to reach a trainer that is gone; it listens before it announces.
            socket.create_connection((meeting.host, meeting.port), timeout=timeout_s).close()
            store = TCPStore(
                meeting.host, meeting.port, is_master=False, wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        return cls(store, meeting, rank=rank, timeout_s=timeout_s)

    def check_open(self) -> None:
        """Raise `WeightsError` if the group has met before, so that a worker that joins now is too late."""
        with _told("the trainer is gone"):
            if self._store.check(["met"]):
                raise WeightsError("the trainer's group met without this worker, which was started later")

    def arrive(self, update_id: str, step: Step) -> None:
        """A worker has come so far, and waits for the trainer's word (`wait_for_word`)."""
        with _told("the trainer is gone"):
            self._store.add(f"{update_id}/{step}", 1)

    def num_arrived(self, update_id: str, step: Step) -> int:
        """How many workers wait for the trainer's word.

        Raises:
            WeightsError: one of them has failed; the message has its reason.
        """
        with _told("the store failed"):
            if self._store.check([f"{update_id}/failed"]):
                raise WeightsError(self._store.get(f"{update_id}/failed").decode())
            number: int = self._store.add(f"{update_id}/{step}", 0)
            return number

    def say_failed(self, update_id: str, reason: str) -> None:
        """A worker cannot go on."""
        with _told("the trainer is gone"):
            self._store.set(f"{update_id}/failed", reason)

    def say_go(self, update_id: str, step: Step) -> None:
        """The trainer's word: all have come so far."""
        with _told("the store failed"):
            self._store.set(f"{update_id}/{step}/word", _GO.decode())

    def say_no(self, update_id: str, reason: str) -> None:
        """The trainer's word: this update does not happen."""
        with _told("the store failed"):
            for step in Step:
                self._store.compare_set(f"{update_id}/{step}/word", "", _NO.decode() + reason)

    def wait_for_word(self, update_id: str, step: Step) -> None:
        """Wait until all workers have come so far.

        Raises:
            WeightsError: one does not, or the trainer is gone; the message has the reason.
        """
        word = self._get(f"{update_id}/{step}/word", "the trainer did not say whether it goes on")
        if word != _GO:
            raise WeightsError(f"the trainer ended the update: {word.removeprefix(_NO).decode()}")

    def say_sums(self, update_id: str, sums: Sequence[int]) -> None:
        """What the trainer's buckets add up to."""
        with _told("the store failed"):
            self._store.set(f"{update_id}/sums", json.dumps(list(sums)))

    def sums(self, update_id: str) -> list[int]:
        """What the trainer's buckets add up to; it is told once all are sent."""
        found: list[int] = json.loads(self._get(f"{update_id}/sums", "the trainer did not finish"))
        return found

    def connect(self, device: torch.device) -> None:
        """Connect all members, unless they are; everybody must call it.

        Raises:
            WeightsError: somebody is missing.
        """
        if self._backend is not None:
            return
        import torch
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        meeting = self.meeting
        timeout = timedelta(seconds=self._timeout_s)
        store = PrefixStore(meeting.group_id, self._store)
        with _told(f"the group of {meeting.world_size} did not come together within {self._timeout_s:g} s"):
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
        """Send (rank 0) or receive bytes; returns the work under way, to be given to `finish`."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with _told("a broadcast of weights failed"):
            return self._backend.broadcast([tensor], options)

    def follow(self, work: Any) -> None:
        """What is done with the tensor from here on comes after the work. On a CPU it is waited for."""
        with _told("the other side of a broadcast is gone, or too slow"):
            work.wait()

    def finish(self, work: Any, device: torch.device, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the work is done, and all that was put on the device's current stream before.

        Args:
            work: of the last broadcast.
            device: of its tensor.
            check: called again and again while it waits; raises to give up.

        Raises:
            WeightsError: another member is gone, or it took longer than the time-out.
        """
        self.follow(work)
        if device.type != "cuda":
            return
        import torch

        # A GPU whose peer is gone waits for ever. We don't: the store tells who is gone, and `close` frees the GPU.
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        until = time.monotonic() + self._timeout_s
        next_check = 0.0
        while not event.query():
            now = time.monotonic()
            if now > until:
                raise WeightsError(f"the weights were still under way after {self._timeout_s:g} s")
            if now > next_check:
                next_check = now + 0.05
                check()
                with _told("the trainer is gone"):
                    self._store.check(["alive"])
            time.sleep(_POLL_S)

    def disconnect(self) -> None:
        """End what is under way, so that nobody waits for it; there are no more broadcasts in this group.

        With gloo the connections close with the last reference to them: a work, or the traceback of an error in one,
        holds them open. `released` lets go of those.
        """
        backend, self._backend = self._backend, None
        if backend is not None and self.meeting.transport is Transport.NCCL:
            backend.abort()

    def close(self) -> None:
        """Leave the group, whatever is under way."""
        self.disconnect()
        self._store = None

    def _get(self, key: str, otherwise: str) -> bytes:
        with _told(otherwise):
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            found: bytes = self._store.get(key)
            return found


def _nccl(store: Any, rank: int, world_size: int) -> Any:
    """A group whose failures end the group alone: `finish` has a time-out of its own, and `disconnect` aborts.

    torch's would end the process, the engine's worker. It is told not to when the group is made, by its environment
    alone (see `torch.distributed.distributed_c10d._abort_process_group`).
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    told = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        return ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def released(error: BaseException) -> None:
    """Let go of what the frames of an error hold."""
    traceback.clear_frames(error.__traceback__)
    if error.__cause__ is not None:
        released(error.__cause__)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Errors of sockets and of torch as one of ours."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise WeightsError(f"{what} ({type(error).__name__}: {first_line[:300]})") from error
