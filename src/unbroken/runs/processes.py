"""The processes of one run: `torchrun` or `accelerate launch`, with `-m unbroken train ...`, starts several."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from unbroken.errors import InvalidInputError, TrainingError, UnbrokenError
from unbroken.rollout.failures import format_error, must_propagate
from unbroken.server.config import is_loopback
from unbroken.threads import exit_in

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_SET_BY_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "MASTER_",
    "TORCHELASTIC_",
)  # fmt: skip
"""Prefixes of environment variables that say which process of a group this is."""
_LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
"""Variables of which launchers, and MPI, set one for each of their processes."""
_ENDED = "ended"
"""What a process says that has done its work."""
_CONNECT_S = 30.0
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
        InvalidInputError: a launcher was asked for several processes, and they would be a run each.
    """
    from accelerate import PartialState

    from unbroken.training.checks import check_num_processes

    state = PartialState(cpu=uses_cpu())
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


async def end_together(main: Coroutine[Any, Any, T]) -> T:
    """Await `main` in each process of the run. If one is killed or fails, all end within seconds, and say which one.

    Each is connected to the first one. A kernel closes connections however a process ends, so nothing is sent before:

        rank 2 is killed ──► rank 0 reads the end of its connection ──► tells ranks 1 and 3 ──► each ends

    Launchers end the processes of the same machine. Those of others would not know before they next communicate, and
    their error would name an address.

    Raises:
        TrainingError: another process was lost or has failed, while this one had no error that explains itself.
    """
    if not os.environ.keys() & set(_LAUNCHED) or (state := join_processes()).num_processes == 1:
        return await main
    loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    others = await _Others.connect(state, loss)
    task = asyncio.ensure_future(main)
    loss.add_done_callback(lambda _: asyncio.get_running_loop().call_later(_OWN_ERROR_S, task.cancel))
    said = _ENDED
    try:
        return await task
    except BaseException as error:
        said = f"{others.own_name} failed: {format_error(error)}"[:2000]
        if isinstance(error, UnbrokenError):
            raise
        if isinstance(error, asyncio.CancelledError) and not loss.done():
            said = f"{others.own_name} was interrupted"
        elif not isinstance(error, asyncio.CancelledError):
            await asyncio.wait([loss], timeout=_OWN_ERROR_S)  # of another process: the error may be there before
        if not loss.done() or must_propagate(error):
            raise
        raise TrainingError(
            f"{loss.result()}: its log may say more; the same commands continue from the last checkpoint"
        ) from error
    finally:
        others.close(said)


class _Others:
    """Connections between the first process and each other one, over which each says how it ended."""

    def __init__(self, names: Sequence[str], index: int, loss: asyncio.Future[str]) -> None:
        self.own_name = names[index]
        self._names = names
        self._index = index
        self._loss = loss
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(cls, state: PartialState, loss: asyncio.Future[str]) -> _Others:
        """Connect this process; all call it together. The first one that does not end well becomes the `loss`."""
        from accelerate.utils import gather_object

        index, num_processes = state.process_index, state.num_processes
        name = f"rank {index} of {num_processes} (process {os.getpid()} on {socket.gethostname()})"
        server, own_host = _listen() if index == 0 else (None, "")
        address = server and (own_host, server.getsockname()[1], secrets.token_hex(16))
        gathered: list[Any] = gather_object([(name, address)])
        others = cls([each for each, _ in gathered], index, loss)
        loss.add_done_callback(others._pass_on)
        host, port, token = gathered[0][1]
        if server is not None:
            others._tasks.append(asyncio.create_task(others._accept(server, token)))
            return others
        try:
            connection = await asyncio.to_thread(socket.create_connection, (host, port), _CONNECT_S)
            others._tasks.append(asyncio.create_task(others._follow(connection, token)))
        except OSError as error:
            _logger.warning(
                "%s cannot connect to %s:%d (%s): if a rank is lost, it does not learn which", name, host, port, error
            )
        return others

    def close(self, said: str) -> None:
        """Tell the others how this process ended, unless they know of a loss."""
        for task in self._tasks:
            task.cancel()
        self._say(said)

    async def _accept(self, server: socket.socket, token: str) -> None:
        with server:
            server.setblocking(False)
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(server)
                self._tasks.append(asyncio.create_task(self._follow(connection, token)))

    async def _follow(self, connection: socket.socket, token: str) -> None:
        os.register_at_fork(after_in_child=connection.close)  # or it would stay open as long as a fork lives
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items():
            if hasattr(socket, option):  # of Linux; a machine without power is lost after 90 s
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        reader, writer = await asyncio.open_connection(sock=connection)
        process, said = (0 if self._index > 0 else None), ""  # None: it has not said who it is
        with suppress(OSError, ValueError):  # ValueError: a line without an end, of a stranger
            if self._index > 0:
                writer.write(f"{token} {self._index}\n".encode())
            else:
                given, _, number = (await reader.readline()).decode("utf-8", "replace").partition(" ")
                if given != token:
                    writer.close()
                    return
                process = int(number)
            self._writers.append(writer)
            said = (await reader.read()).decode("utf-8", "replace")
        if process is not None and said != _ENDED and not self._loss.done():
            self._loss.set_result(said or f"{self._names[process]} was lost (killed, or its machine went away)")

    def _pass_on(self, loss: asyncio.Future[str]) -> None:
        if not loss.cancelled():
            _logger.error("%s ends, because %s", self.own_name, loss.result())
            exit_in(_THREADS_S, status=1)
            self._say(loss.result())

    def _say(self, text: str) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.write(text.encode())
            writer.close()


def _listen() -> tuple[socket.socket, str]:
    """A server, and the host at which others reach it: the address from which it reaches the store they have met in."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # it sends nothing
        probe.connect(target)
        own: str = probe.getsockname()[0]
    if not is_loopback(own.partition("%")[0]) or is_loopback(host):
        return socket.create_server((own, 0), family=family), own
    # A name that means 127.0.1.1 on its own machine, and elsewhere the right address, which is not known here.
    return socket.create_server(("", 0), family=family), host


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
