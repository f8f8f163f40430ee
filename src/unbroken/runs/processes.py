"""The processes of one run: `torchrun` or `accelerate launch`, with `-m unbroken train ...`, starts several."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError, TrainingError, UnbrokenError
from unbroken.rollout.failures import format_error, must_propagate
from unbroken.server.config import is_loopback
from unbroken.threads import exit_in

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch.distributed.distributed_c10d import Store

SAMPLER_KEY = "UNBROKEN_SAMPLER_KEY"
"""The environment variable with the key of a sampler that gets no file."""
_logger = logging.getLogger(__name__)
_SET_BY_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "MASTER_",
    "TORCHELASTIC_",
)  # fmt: skip
"""Prefixes of environment variables that say which process of a group this is."""
_LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
"""Variables of which launchers, and MPI, set one for each of their processes."""
_MEETING = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables of processes whose first one makes the store that they meet in; torchrun's agents have another one."""
_CONNECTED, _NOT_CONNECTED = "connected", "not connected"
"""What a process leaves in the store for the first one."""
_ENDED = "ended"
"""What a process says that has done its work."""
_MEET_S = 30.0
"""How long the run's processes may take to connect, after one of them has begun to."""
_CONNECT_S = 10.0
_HANDSHAKE_S = 5.0
_NUM_TURNS = 20
"""Turns of the loop in which a process at the door is let in, however long it computes in each."""
_OWN_ERROR_S = 3.0
"""How long a process may take to end by its own error once another is lost, and how long that waits for the reason."""
_THREADS_S = 15.0
"""How long threads may hold up the end: some wait for the process that was lost, without an end on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which of the run's processes this one is."""

    index: int = 0
    num_processes: int = 1

    def select(self, numbers: Sequence[int]) -> Sequence[int]:
        """Select this process's part of the numbers that all processes share: every `num_processes`-th."""
        return numbers[self.index :: self.num_processes]


def uses_cpu() -> bool:
    """Whether accelerate needs `cpu=True`: without it, accelerate does not join the other processes on a CPU."""
    import torch
    from accelerate.utils import parse_flag_from_env

    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def join_processes() -> PartialState:
    """Join the run's other processes; no `Accelerator` is needed yet.

    Raises:
        InvalidInputError: a launcher was asked for several processes, and they would be a run each; or the first
            process cannot listen at MASTER_ADDR.
    """
    from accelerate import PartialState
    from torch.distributed import is_initialized

    from unbroken.training.checks import check_num_processes

    is_known = is_initialized() or not os.environ.keys() >= _MEETING or "TORCHELASTIC_USE_AGENT_STORE" in os.environ
    state = PartialState(cpu=uses_cpu(), **({} if is_known else _make_store()))
    check_num_processes(state.num_processes)
    if state.num_processes == 1 and _is_one_of_several():
        raise InvalidInputError(
            "accelerate launch starts one process on a CPU, whatever --num_processes is: start several with `torchrun "
            "--nproc_per_node N -m unbroken train ...` or with `accelerate launch --multi_gpu --num_processes N`, "
            "which needs no GPU; for one process, leave --num_processes and MASTER_ADDR out"
        )
    return state


@contextmanager
def main_process_first() -> Iterator[bool]:
    """Run the block in the first process, then in the others, which see its files; yields whether this is the first.

    If the block fails in one process, all raise. Raises as `join_processes` does. A process without a launcher is the
    only one, and loads no torch for it.
    """
    if not os.environ.keys() & set(_LAUNCHED):
        yield True
        return
    from unbroken.training.model.sharding import fail_together

    is_first = bool(join_processes().is_main_process)
    for is_turn in (is_first, not is_first):
        with fail_together():
            if is_turn:
                yield is_first


@asynccontextmanager
async def ended_together() -> AsyncIterator[None]:
    """Run the block in each process of the run. If one is killed or fails, all end within seconds, and say which one.

    A process without others runs it as it is.

    Each is connected to the first one. A kernel closes connections however a process ends, so nothing is sent before:

        rank 2 is killed ──► rank 0 reads the end of its connection ──► tells ranks 1 and 3 ──► each ends

    Launchers end the processes of the same machine. Those of others would not know before they next communicate, and
    their error would name an address.

    Raises:
        TrainingError: another process was lost or has failed, while this one had no error that explains itself.
    """
    if not os.environ.keys() & set(_LAUNCHED) or (state := join_processes()).num_processes == 1:
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine enters it"
    loss: asyncio.Future[str] = loop.create_future()
    others = await _Others.connect(state, loss)
    is_over, is_cancelled = False, False

    def cancel() -> None:
        nonlocal is_cancelled
        # One that SIGTERM or Ctrl-C ends, as a launcher does all at once, closes what it has open as the lost one did.
        if not is_over and task.cancelling() == 0:
            is_cancelled = task.cancel()

    loss.add_done_callback(lambda _: loop.call_later(_OWN_ERROR_S, cancel))
    said = _ENDED
    try:
        yield
        others.call_off_exit()
    except BaseException as error:
        is_over = True
        if is_cancelled:
            task.uncancel()  # what is left are the cancellations of others, which must propagate
        said = others.describe_failure(error, is_lost=loss.done())
        if not isinstance(error, asyncio.CancelledError | UnbrokenError):
            await asyncio.wait([loss], timeout=_OWN_ERROR_S)  # of another process: the error may be there before
            others.log_absent()
        if isinstance(error, UnbrokenError) or not loss.done() or must_propagate(error):
            raise
        raise TrainingError(
            f"{loss.result()}: its log may say more; the same commands continue from the last checkpoint"
        ) from error
    finally:
        is_over = True
        others.close(said)


class _Others:
    """Connections between the first process and each other one, over which each says how it ended.

    The first one leaves its address in the store in which torch's processes have met. One that fails before it connects
    is known by its absence: the others are not waited for together, as that would have no end.
    """

    def __init__(self, index: int, num_processes: int, loss: asyncio.Future[str]) -> None:
        self.own_name = f"rank {index} of {num_processes} (process {os.getpid()} on {socket.gethostname()})"
        self.call_off_exit: Callable[[], None] = lambda: None
        self._index = index
        self._names = {rank: f"rank {rank} of {num_processes}" for rank in range(num_processes)}
        self._loss = loss
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: set[socket.socket] = set()
        self._absent: set[int] = set()
        """Processes that the first one does not know yet."""
        loss.add_done_callback(self._pass_on)
        os.register_at_fork(after_in_child=self._close_sockets)  # or they would stay open as long as a fork lives

    @classmethod
    async def connect(cls, state: PartialState, loss: asyncio.Future[str]) -> _Others:
        """Connect this process; all call it together. The first one that does not end well becomes the `loss`.

        Raises:
            TrainingError: the first process has failed before.
        """
        from torch.distributed import group

        others = cls(state.process_index, state.num_processes, loss)
        store: Store = group.WORLD.get_group_store()  # type: ignore[union-attr]
        key = f"unbroken/others/{store.add(f'unbroken/others/of-rank-{others._index}', 1)}"  # one for each call
        if others._index == 0:
            others._be_first(store, key)
        else:
            await others._reach_first(store, key)
        return others

    def close(self, said: str) -> None:
        """Tell the others how this process ended, unless they know of a loss."""
        for task in self._tasks:
            task.cancel()
        self._say(said)

    def describe_failure(self, error: BaseException, *, is_lost: bool) -> str:
        """What this process says when it ends with an error; `is_lost` says that another one ended before."""
        if isinstance(error, asyncio.CancelledError) and not is_lost:
            return f"{self.own_name} was interrupted"
        return f"{self.own_name} failed: {format_error(error)}"[:2000]

    def log_absent(self) -> None:
        """Name those that never connected: one of them may be what an error here comes from."""
        for rank in sorted(self._absent):
            _logger.error("%s has not connected to %s: it may have failed before", self._names[rank], self.own_name)

    def _be_first(self, store: Store, key: str) -> None:
        try:
            server, own_host = _listen()
        except (OSError, KeyError, ValueError) as error:
            store.set(key, json.dumps([self.own_name, "", 0, ""]))
            _logger.warning(
                "%s cannot listen for the others (%s): if a rank is lost, they do not learn which",
                self.own_name,
                format_error(error),
            )
            return
        token = secrets.token_hex(16)
        store.set(key, json.dumps([self.own_name, own_host, server.getsockname()[1], token]))
        self._start(self._accept(server, token))
        self._absent.update(set(self._names) - {0})
        self._start(self._expect(store, key))

    async def _reach_first(self, store: Store, key: str) -> None:
        try:
            await asyncio.to_thread(store.wait, [key], timedelta(seconds=_MEET_S))
            name, host, port, token = json.loads(store.get(key))
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise TrainingError(
                f"{self._names[0]} has failed before this one, {self.own_name}, could connect to it: its log may say "
                "more; the same commands continue from the last checkpoint"
            ) from error
        self._names[0] = name
        if not host:
            return
        from unbroken.rollout.process import channel  # noqa: F401  # `_follow` loads it while it is waited for

        said = _NOT_CONNECTED
        try:
            connection = await asyncio.to_thread(socket.create_connection, (host, port), _CONNECT_S)
        except OSError as error:
            _logger.warning(
                "%s cannot connect to %s:%d (%s): if a rank is lost, it does not learn which",
                self.own_name,
                host,
                port,
                error,
            )
        else:
            greeted = asyncio.Event()
            following = self._start(self._follow(connection, token, greeted))
            following.add_done_callback(lambda _: greeted.set())
            await greeted.wait()  # the run may compute in this thread for longer than the first one waits for a name
            said = _NOT_CONNECTED if following.done() else _CONNECTED
        # It came as far as here, whatever the first one computes meanwhile. A store that has gone has gone with the
        # first one, whose connection says how.
        with suppress(RuntimeError):
            store.set(f"{key}/{self._index}", said)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, server: socket.socket, token: str) -> None:
        # sock_accept, cancelled while a connection waits, prints its own error.
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        with server, self._open(server):
            server.setblocking(False)
            loop.add_reader(server, ready.set)
            try:
                while await ready.wait():
                    ready.clear()
                    with suppress(OSError):  # it has gone again
                        self._start(self._follow(server.accept()[0], token))
            finally:
                loop.remove_reader(server)

    async def _expect(self, store: Store, key: str) -> None:
        """Wait until each process has connected, or said that it cannot; one that did neither is lost.

        The store knows who came, for this process may have computed for all of the time, and let nobody in: whoever is
        at its door then has the same turn of the loop as the end of the wait, and is let in during the next ones. One
        that is not was shut out as a stranger, because it said its name too late.
        """
        await asyncio.sleep(_MEET_S)
        for rank in sorted(self._absent):
            has_come = await asyncio.to_thread(store.check, [own := f"{key}/{rank}"])
            if has_come and await asyncio.to_thread(store.get, own) == _NOT_CONNECTED.encode():
                self._absent.discard(rank)
            for _ in range(_NUM_TURNS if has_come else 0):
                if rank in self._absent:
                    await asyncio.sleep(_HANDSHAKE_S / _NUM_TURNS)
            if rank in self._absent:  # or it has come in since
                self._lose(f"{self._names[rank]} has not connected within {_MEET_S:g} s: it was lost before")

    async def _follow(self, connection: socket.socket, token: str, greeted: asyncio.Event | None = None) -> None:
        from unbroken.rollout.process.channel import keep_alive  # it loads numpy, and commands load this module

        keep_alive(connection)
        with self._open(connection):
            reader, writer = await asyncio.open_connection(sock=connection)
            try:
                process = 0 if self._index > 0 else await self._welcome(reader, token)
                if process is None:
                    return
                if self._index > 0:
                    writer.write(f"{token} {self._index} {self.own_name}\n".encode())
                self._writers.append(writer)
                if greeted is not None:
                    greeted.set()
                if self._loss.done():  # before it came
                    self._say(self._loss.result())
                said = ""
                with suppress(OSError):
                    said = (await reader.read()).decode("utf-8", "replace")
                if said != _ENDED:
                    self._lose(said or f"{self._names[process]} was lost (killed, or its machine went away)")
            finally:
                if writer not in self._writers:
                    writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, token: str) -> int | None:
        """Read which process has connected; None for a stranger, who is given a few seconds."""
        reading = asyncio.ensure_future(reader.readline())
        try:
            # Not `asyncio.timeout`: it drops a line that came while this process computed for longer.
            await asyncio.wait([reading], timeout=_HANDSHAKE_S)
            line = reading.result().decode("utf-8", "replace")
            given, number, name = line.rstrip("\n").split(" ", 2)
        except (OSError, ValueError, asyncio.InvalidStateError):  # ValueError: a line without an end, or another text
            return None
        finally:
            reading.cancel()
        if not secrets.compare_digest(given.encode(), token.encode()):
            return None
        self._names[int(number)] = name
        self._absent.discard(int(number))
        return int(number)

    def _lose(self, reason: str) -> None:
        if not self._loss.done():
            self._loss.set_result(reason)

    def _pass_on(self, loss: asyncio.Future[str]) -> None:
        if not loss.cancelled():
            _logger.error("%s ends, because %s", self.own_name, loss.result())
            self.call_off_exit = exit_in(_THREADS_S, status=1)
            self._say(loss.result())

    def _say(self, text: str) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.write(text.encode())
            writer.close()

    @contextmanager
    def _open(self, opened: socket.socket) -> Iterator[None]:
        self._sockets.add(opened)
        try:
            yield
        finally:
            self._sockets.discard(opened)

    def _close_sockets(self) -> None:
        for opened in self._sockets:
            opened.close()


def _make_store() -> dict[str, Any]:
    """The store in which the run's processes meet, and what else `init_process_group` takes with it.

    The store that torch makes by itself listens at every address of the machine, whatever MASTER_ADDR is, and whoever
    reaches it reads and writes its keys.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.constants import default_pg_timeout

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port, listening = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None
    if rank == 0:
        try:
            server, host = _listen(port)
        except OSError as error:
            raise InvalidInputError(
                f"MASTER_ADDR and MASTER_PORT must be an address and a free port of the first process's machine, got "
                f"{host} and {port}: {error}"
            ) from error
        port = server.getsockname()[1]
        listening = server.detach()
    store = TCPStore(host, port, size, rank == 0, timeout=default_pg_timeout, master_listen_fd=listening)
    return {"store": store, "rank": rank, "world_size": size}


def _listen(port: int = 0) -> tuple[socket.socket, str]:
    """A server, and the host at which others reach it: the address from which it reaches the store they meet in."""
    host, master_port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, own = find_own_address(host, master_port or 1)
    if not is_loopback(own.partition("%")[0]) or is_loopback(host):
        return socket.create_server((own, port), family=family), own
    # A name that means 127.0.1.1 on its own machine, and elsewhere the right address, which is not known here.
    return socket.create_server(("", port), family=family), host


def find_own_address(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """The address of this machine on the way to a host, at which that can reach it; nothing is sent.

    Raises:
        OSError: the host has no address.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        own: str = probe.getsockname()[0]
    return family, own


@contextmanager
def without_launcher() -> Iterator[None]:
    """Remove the launcher's environment variables, for processes that the block starts.

    With `TORCHELASTIC_USE_AGENT_STORE`, torch in them would look for a server of their group that does not exist, and
    libraries read `RANK` and `LOCAL_RANK` as their own.
    """
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_SET_BY_LAUNCHERS)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _is_one_of_several() -> bool:
    """Whether accelerate's launcher was asked for several processes, which it starts only on GPUs."""
    variables = os.environ
    return "ACCELERATE_MIXED_PRECISION" in variables and "MASTER_ADDR" in variables and "WORLD_SIZE" not in variables
