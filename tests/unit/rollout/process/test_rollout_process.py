"""Groups from other processes: what comes back, cancellations, errors, strangers, and the end of either process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.waits import wait_until
from unbroken.counters import Counters, Effort, add_effort, count_effort
from unbroken.errors import ContextOverflowError, InvalidInputError, RolloutError, ServerUnreachableError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.process import pool, worker
from unbroken.rollout.process.channel import Hello
from unbroken.rollout.process.pool import SamplerPool
from unbroken.rollout.process.worker import OpenWork, leave_end_to_parent, serve_orders
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.runs.signals import cancelled_by_sigterm


def make_trajectory(number: int, **fields: Any) -> Trajectory:
    tree = TokenTree()
    tree.add_given([1, 2, number], Origin.PROMPT, parent=None)
    default = {
        "trajectory_id": str(number), "tree": tree, "turns": (), "messages": (), "tools": (),
        "status": TrajectoryStatus.COMPLETED, "reward": 0.5, "counters": Counters(), "error": None, "wall_time_s": 0.1,
    }  # fmt: skip
    return Trajectory(**(default | fields))


def make_group(number: int, **fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=str(number), trajectories=(make_trajectory(number, **fields),))


def find_process(group: TrajectoryGroup) -> float:
    return group.trajectories[0].reward_parts["pid"]


class LocalWork:
    """Work by a function; notes news and its end in a file."""

    def __init__(self, sample: Callable[[Any], Any], notes: Path) -> None:
        self.sample = sample
        self._notes = notes

    def tell(self, news: Any) -> None:
        with self._notes.open("a") as file:
            file.write(f"{news}\n")


KEY = "secret"
Forked = multiprocessing.get_context("fork").Process


def start_sampler(
    address: tuple[str, int],
    open_work: OpenWork,
    *,
    key: str = KEY,
    name: str = "forked",
    identity: Mapping[str, str] | None = None,
    ends_with_parent: bool = True,
) -> Any:
    """Fork a process that samples until the pool at an address ends."""

    def serve() -> None:
        if ends_with_parent:
            leave_end_to_parent()
        hello = Hello(name, identity or {})
        asyncio.run(serve_orders(address, key=key, hello=hello, open_work=open_work, wait_s=60.0))

    process = Forked(target=serve)
    process.start()
    return process


def start_program(pids: list[int], *program: str) -> Callable[[str, Path], Any]:
    """Local samplers that are a program."""

    async def start(name: str, log: Path) -> asyncio.subprocess.Process:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *program, name, stdout=output, stderr=output, start_new_session=True
            )
        pids.append(process.pid)
        return process

    return start


def listen() -> tuple[socket.socket, tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()


@asynccontextmanager
async def started(listener: socket.socket, **options: Any) -> AsyncIterator[SamplerPool]:
    made = await SamplerPool.start(listener, **{"key": KEY, "identity": {}, "logs": {}, "start_local": None, **options})
    try:
        yield made
    finally:
        await made.close()


def make_opening(sample: Callable[[Any], Any], notes: Path = Path(os.devnull)) -> OpenWork:
    @asynccontextmanager
    async def open_work(facts: Any) -> AsyncIterator[LocalWork]:
        work = LocalWork(sample, notes)
        work.tell(facts)
        yield work
        work.tell("closed")

    return open_work


@asynccontextmanager
async def opened(
    sample: Callable[[Any], Any], notes: Path = Path(os.devnull), *, num_samplers: int = 1
) -> AsyncIterator[SamplerPool]:
    """A pool with samplers that are forks of this process; closing it ends them."""
    listener, address = listen()
    async with started(listener) as made:
        processes = [start_sampler(address, make_opening(sample, notes)) for _ in range(num_samplers)]
        await made.open("opened")
        yield made
    for process in processes:
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode is not None


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_groups_come_back_as_they_were_made_by_another_process(tmp_path: Path) -> None:
    async def sample(order: int) -> TrajectoryGroup:
        await asyncio.sleep(0.1 if order == 0 else 0)  # the first is answered last
        return make_group(order, reward_parts={"pid": float(os.getpid())})

    async with opened(sample, tmp_path / "notes") as process:
        groups = await asyncio.gather(*(process.sample(number, name="it") for number in range(3)))
        process.tell("key", "news")
    assert [group.group_id for group in groups] == ["0", "1", "2"]
    (pid,) = set(map(find_process, groups))
    assert pid != os.getpid()
    ids = groups[1].trajectories[0].tree.nodes[0].token_ids
    assert ids.tolist() == [1, 2, 1]
    assert not ids.flags.writeable
    assert (tmp_path / "notes").read_text().split() == ["opened", "news", "closed"]


class OwnOSError(OSError):
    """As those of the clients of HTTP."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class OwnNewError(Exception):
    """Its `__new__` does not take what the error keeps."""

    def __new__(cls, *, code: int) -> OwnNewError:
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class UnreadableError(Exception):
    """Its `str` fails."""

    def __init__(self) -> None:
        self.value = lambda: None  # which no other process can get

    def __str__(self) -> str:
        raise ValueError


class PanicError(BaseException):
    """As those that the Rust parts of a package raise."""


@pytest.mark.parametrize(
    "error",
    [
        ServerUnreachableError("nobody there"),
        ContextOverflowError(num_prompt_tokens=9, context_length=8),
        OSError(28, "no space"),
        FileNotFoundError(2, "No such file", "rows.json"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        OwnOSError("the connection was refused", code=3),
        OwnNewError(code=3),
        ExceptionGroup("two", [ContextOverflowError(num_prompt_tokens=9, context_length=8), OSError(28, "no space")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_keep_their_class_and_attributes(error: Exception) -> None:
    async def sample(order: str) -> TrajectoryGroup:
        if order == "raise":
            raise error
        return make_group(0, status=TrajectoryStatus.FAILED, reward=None, error=error)

    async with opened(sample) as process:
        with pytest.raises(type(error)) as raised:
            await process.sample("raise", name="it")
        failed = (await process.sample("return", name="it")).trajectories[0].error
    assert "in sample" in raised.value.__notes__[0]  # where it was raised there
    for found in (raised.value, failed):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert {name: found.__dict__[name] for name in error.__dict__} == error.__dict__


async def test_an_error_that_cannot_be_pickled_becomes_its_text() -> None:
    class LocalError(Exception):
        """Another process cannot import it."""

    async def sample(order: None) -> TrajectoryGroup:
        raise LocalError("of the environment")

    async with opened(sample) as process:
        with pytest.raises(RuntimeError, match="LocalError: of the environment"):
            await process.sample(None, name="it")


async def test_an_error_that_only_the_rollouts_can_import_becomes_its_text() -> None:
    """A module that user code makes there, such as a file that it loads in the middle of a run."""

    async def sample(order: str) -> TrajectoryGroup:
        module = sys.modules["made_there"] = ModuleType("made_there")
        exec("class OwnError(Exception):\n    pass", module.__dict__)
        error = module.OwnError("of the environment")
        if order == "raise":
            raise error
        return make_group(0, status=TrajectoryStatus.FAILED, reward=None, error=ExceptionGroup("two", [error, error]))

    async with opened(sample) as process:
        failed = (await process.sample("return", name="it")).trajectories[0].error
        with pytest.raises(RuntimeError, match="OwnError: of the environment"):
            await process.sample("raise", name="it")
    assert isinstance(failed, ExceptionGroup)
    assert list(map(str, failed.exceptions)) == ["OwnError: of the environment"] * 2


async def test_an_error_whose_text_cannot_be_read_ends_only_its_rollout() -> None:
    async def sample(order: None) -> TrajectoryGroup:
        return make_group(0, status=TrajectoryStatus.FAILED, reward=None, error=UnreadableError())

    async with opened(sample) as process:
        error = (await process.sample(None, name="it")).trajectories[0].error
    assert str(error) == "UnreadableError: (its message cannot be read: ValueError)"


@pytest.mark.parametrize("kind", [PanicError, UnreadableError])
async def test_no_error_of_the_work_leaves_its_order_without_an_answer(kind: type[BaseException]) -> None:
    async def sample(order: None) -> TrajectoryGroup:
        raise kind

    async with opened(sample) as process, asyncio.timeout(60):
        with pytest.raises((RolloutError, RuntimeError), match=kind.__name__):
            await process.sample(None, name="it")


async def test_a_group_that_cannot_be_pickled_says_so_and_others_still_come() -> None:
    async def sample(order: int) -> TrajectoryGroup:
        message = {"role": "user", "content": "", "extra": (lambda: None) if order == 0 else None}
        return make_group(order, messages=(message,))

    async with opened(sample) as process:
        with pytest.raises(RolloutError, match="must be values that Python can pickle"):
            await process.sample(0, name="it")
        assert (await process.sample(1, name="it")).group_id == "1"


async def test_a_cancelled_call_returns_when_its_work_has_ended_and_its_ids_are_counted(tmp_path: Path) -> None:
    (tmp_path / "ended").touch()

    async def sample(order: int) -> TrajectoryGroup:
        add_effort(5)
        add_effort(2)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            (tmp_path / "ended").write_text("yes")
        raise AssertionError

    async with opened(sample) as process:
        effort = Effort()
        with count_effort(effort):
            task = asyncio.create_task(process.sample(0, name="it"))
        await wait_until(lambda: effort.num_ids == 7)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (tmp_path / "ended").read_text() == "yes"
    assert effort.num_ids == 7


async def test_a_call_that_is_cancelled_before_its_work_has_begun_returns() -> None:
    """The process gets the order and its cancellation at once."""

    async def sample(order: int) -> TrajectoryGroup:
        await asyncio.sleep(order)
        return make_group(order)

    async with opened(sample) as process:
        for _ in range(20):
            tasks = [asyncio.create_task(process.sample(600, name="it")) for _ in range(8)]
            await asyncio.sleep(0)  # they have sent their orders
            for task in tasks:
                task.cancel()
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert (await process.sample(0, name="it")).group_id == "0"


async def test_work_that_cancels_itself_is_an_error() -> None:
    async def sample(order: None) -> TrajectoryGroup:
        raise asyncio.CancelledError

    async with opened(sample) as process:
        with pytest.raises(RolloutError, match="cancels its own task"):
            await process.sample(None, name="it")


async def test_orders_go_to_the_sampler_that_has_the_fewest(tmp_path: Path) -> None:
    async def sample(order: str) -> TrajectoryGroup:
        await wait_until(lambda: not order or Path(order).exists())
        return make_group(0, reward_parts={"pid": float(os.getpid())})

    async with opened(sample, num_samplers=2) as process, asyncio.timeout(60):
        both: set[int] = set()
        while len(both) < 2:  # until the second has joined
            both = set(map(find_process, await asyncio.gather(*(process.sample("", name="it") for _ in range(2)))))
        busy = asyncio.create_task(process.sample(str(tmp_path / "end"), name="it"))
        await asyncio.sleep(0)
        others = {find_process(await process.sample("", name="it")) for _ in range(5)}
        (tmp_path / "end").touch()
        assert others == both - {find_process(await busy)}


async def test_what_a_killed_sampler_had_is_sampled_by_another_one_once(tmp_path: Path) -> None:
    """The first that gets the order kills itself."""

    async def sample(order: int) -> TrajectoryGroup:
        with (tmp_path / "begun").open("a") as file:
            file.write(f"{order}\n")
        if order == 3 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.2)
        return make_group(order)

    async with opened(sample, num_samplers=2) as process, asyncio.timeout(60):
        groups = await asyncio.gather(*(process.sample(number, name="it") for number in range(8)))
    assert [group.group_id for group in groups] == list("01234567")
    begun = (tmp_path / "begun").read_text().split()
    assert begun.count("3") == 2


async def test_an_order_waits_for_a_sampler_and_can_be_cancelled_meanwhile() -> None:
    async def sample(order: int) -> TrajectoryGroup:
        if order == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_group(order)

    listener, address = listen()
    async with started(listener) as process, asyncio.timeout(60):
        start_sampler(address, make_opening(sample))
        await process.open("opened")
        process.tell("key", "old")
        process.tell("key", "new")
        lost = asyncio.create_task(process.sample(0, name="it"))
        await asyncio.sleep(0.5)
        later = asyncio.create_task(process.sample(1, name="it"))
        await asyncio.sleep(0)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        start_sampler(address, make_opening(sample))
        assert (await later).group_id == "1"


async def test_a_sampler_that_comes_later_gets_the_newest_news(tmp_path: Path) -> None:
    async def sample(order: int) -> TrajectoryGroup:
        return make_group(os.getpid())

    listener, address = listen()
    async with started(listener) as process, asyncio.timeout(60):
        first = start_sampler(address, make_opening(sample), ends_with_parent=False)
        await process.open("opened")
        for news in ("old", "new"):
            process.tell("key", news)
        assert (await process.sample(0, name="it")).group_id == str(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        second = start_sampler(address, make_opening(sample, tmp_path / "notes"))
        while (await process.sample(0, name="it")).group_id != str(second.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.to_thread(second.join, 60)
    assert (tmp_path / "notes").read_text().split() == ["opened", "new", "closed"]


async def test_an_order_that_ends_three_samplers_ends_the_run_with_its_name() -> None:
    async def sample(order: str) -> TrajectoryGroup:
        if order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(60)
        raise AssertionError

    async with opened(sample, num_samplers=4) as process, asyncio.timeout(60):
        waiting = [asyncio.create_task(process.sample(order, name=f"problem {order}")) for order in ("wait", "kill")]
        await asyncio.wait(waiting)
        for each in waiting:
            assert isinstance(each.exception(), RolloutError)
        assert "problem kill: 3 samplers have ended while they sampled it" in str(waiting[1].exception())
        with pytest.raises(RolloutError, match="problem kill"):
            await process.sample("later", name="it")


DYING = """
import os, sys
print("no memory for", sys.argv[1], flush=True)
os._exit(7)
"""


async def test_a_local_sampler_that_ends_again_and_again_ends_the_run_with_its_log(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pool, "_MAX_DEATHS", 3)
    pids: list[int] = []
    start = start_program(pids, sys.executable, "-c", DYING)
    listener, _ = listen()
    async with started(listener, logs={"0-0": tmp_path / "log"}, start_local=start) as process, asyncio.timeout(60):
        with pytest.raises(RolloutError, match=r"(?s)0-0 ended 3 times in a row .*with status 7: .*no memory for 0-0"):
            await process.open("opened")
    assert len(pids) == 3


LEAVING_CHILD = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


async def test_closing_leaves_no_local_sampler_and_nothing_that_it_has_started(tmp_path) -> None:
    pids: list[int] = []
    start, log = start_program(pids, sys.executable, "-c", LEAVING_CHILD), tmp_path / "log"
    listener, _ = listen()
    async with started(listener, logs={"0-0": log}, start_local=start):
        await wait_until(lambda: log.read_text().endswith("\n"))
        pids.append(int(log.read_text()))
        assert all(map(is_alive, pids))
    await wait_until(lambda: not any(map(is_alive, pids)))


async def start_sleeping(name: str, log: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)


@asynccontextmanager
async def never_opens(facts: Any) -> AsyncIterator[Any]:
    raise InvalidInputError(f"facts must be right, got {facts}")
    yield


async def test_an_error_of_a_local_samplers_opening_is_raised(tmp_path) -> None:
    listener, address = listen()
    local = {"logs": {"0-0": tmp_path / "log"}, "start_local": start_sleeping}
    async with started(listener, **local) as process, asyncio.timeout(60):
        start_sampler(address, never_opens, name="0-0")
        with pytest.raises(InvalidInputError, match="got wrong"):
            await process.open("wrong")


async def test_a_sampler_of_another_recipe_is_refused_with_what_differs(tmp_path, capfd) -> None:
    listener, address = listen()
    local = {"logs": {"0-0": tmp_path / "log"}, "start_local": start_sleeping}
    async with started(listener, identity={"seed": "1", "size": "2"}, **local) as process, asyncio.timeout(60):
        other = start_sampler(address, never_opens, identity={"seed": "1", "size": "3"})
        await asyncio.to_thread(other.join)
        assert other.exitcode == 1
        assert "size is 3 there, and 2 in the trainer" in capfd.readouterr().err
        start_sampler(address, never_opens, name="0-0", identity={"seed": "7", "size": "2"})
        with pytest.raises(InvalidInputError, match="seed is 7 there, and 1 in the trainer"):
            await process.open("opened")


async def test_a_process_with_another_key_is_told_so_and_nothing_of_it_is_read(capfd, monkeypatch) -> None:
    async def sample(order: int) -> TrajectoryGroup:
        return make_group(order)

    monkeypatch.setattr(pool, "_GREET_S", 0.5)
    listener, address = listen()
    async with started(listener) as process, asyncio.timeout(60):
        other = start_sampler(address, make_opening(sample), key="another")
        await asyncio.to_thread(other.join)
        assert other.exitcode == 1
        assert "the key must be that of the trainer at 127.0.0.1" in capfd.readouterr().err
        for sent in (b"", b"x" * 64, pickled_attack(64)):  # silent; with a wrong proof; without any
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            assert len(await reader.read()) in (32, 64)  # its number and its proof, and it has closed
            writer.close()
        start_sampler(address, make_opening(sample))
        await process.open("opened")
        assert (await process.sample(1, name="it")).group_id == "1"


def pickled_attack(size: int) -> bytes:
    """What fails the test if it is unpickled."""
    return (b"cpytest\nfail\n(S'unpickled'\ntR." * size)[:size]


async def test_a_sampler_trusts_no_process_that_lacks_the_key() -> None:
    """Somebody else may listen where the trainer did."""
    asked = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = await reader.readexactly(32)
        writer.write(number)  # as its own
        proof = await reader.readexactly(32)
        writer.write(proof)
        received = await reader.read()
        writer.close()
        asked.set_result(received)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, asyncio.timeout(60):
        with pytest.raises(InvalidInputError, match="and is another"):
            await serve_orders(
                server.sockets[0].getsockname(), key=KEY, hello=Hello("a", {}), open_work=never_opens, wait_s=0
            )
        assert await asked == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_that_all_processes_of_a_job_get_leaves_it_to_the_first_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As Ctrl-C in a terminal, and `scancel` or `systemctl stop`; what the work starts gets it too."""

    async def sample(order: None) -> TrajectoryGroup:
        started = await asyncio.create_subprocess_exec("sleep", "60")
        started.send_signal(number)
        return make_group(os.getpid(), reward_parts={"status": float(await started.wait())})

    async with opened(sample, tmp_path / "notes") as process, asyncio.timeout(60):
        first = await process.sample(None, name="it")
        os.kill(int(first.group_id), number)
        second = await process.sample(None, name="it")
    assert first.group_id == second.group_id
    assert first.trajectories[0].reward_parts == {"status": -number}
    assert not is_alive(int(first.group_id))
    assert "closed" in (tmp_path / "notes").read_text()


@contextmanager
def child_that(work: Callable[[], None]) -> Any:
    """A child process that does the work, and is killed at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_it_ends_when_the_process_that_forked_it_is_killed(tmp_path: Path, monkeypatch, is_stuck: bool) -> None:
    monkeypatch.setattr(worker, "_CLOSE_S", 0.5)

    async def sample(order: None) -> TrajectoryGroup:
        (tmp_path / "pid.part").write_text(str(os.getpid()))
        (tmp_path / "pid.part").rename(tmp_path / "pid")
        if is_stuck:
            time.sleep(600)  # noqa: ASYNC251  # user code that holds up all rollouts
        try:
            await asyncio.sleep(600)
        finally:
            (tmp_path / "closed").touch()
        raise AssertionError

    async def order() -> None:
        async with opened(sample) as process:
            await process.sample(None, name="it")

    with child_that(lambda: asyncio.run(order())):
        asyncio.run(wait_until((tmp_path / "pid").exists))
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
    asyncio.run(wait_until(lambda: not is_alive(pid)))
    assert (tmp_path / "closed").exists() is not is_stuck


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_sampler_that_nobody_answers_says_so(is_silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.rollout.process.worker._CONNECT_S", 0.5)
    listener, address = listen()
    if not is_silent:
        listener.close()
    with (
        closing(listener),
        pytest.raises(RolloutError, match=rf"no trainer has answered at 127.0.0.1:{address[1]} for 0.6 s"),
    ):
        await serve_orders(address, key=KEY, hello=Hello("a", {}), open_work=never_opens, wait_s=0.6)


async def test_a_sampler_that_was_never_opened_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, address = listen()
    has_joined = asyncio.Event()
    monkeypatch.setattr(pool, "_compare", lambda *_: has_joined.set())
    async with started(listener):
        child = start_sampler(address, lambda facts: pytest.fail("nothing is opened"))
        await has_joined.wait()
    await asyncio.to_thread(child.join, 60)
    assert child.exitcode == 0


async def test_a_sampler_that_is_told_to_end_leaves_its_orders_to_others(tmp_path: Path) -> None:
    """Again and again: none of these ends counts as a failure of the order."""

    begun = tmp_path / "begun"

    async def sample(order: int) -> TrajectoryGroup:
        with begun.open("a") as file:
            file.write(f"{os.getpid()}\n")
        await asyncio.sleep(0.1 if len(begun.read_text().split()) == 5 else 60)
        return make_group(order)

    listener, address = listen()
    async with started(listener) as process, asyncio.timeout(60):
        children = [start_ended_by_signal(address, make_opening(sample))]
        await process.open("opened")
        group = asyncio.create_task(process.sample(1, name="it"))
        for _ in range(4):
            await wait_until(lambda: begun.exists() and str(children[-1].pid) in begun.read_text().split())
            os.kill(children[-1].pid, signal.SIGTERM)
            children.append(start_ended_by_signal(address, make_opening(sample)))
        assert (await group).group_id == "1"


def start_ended_by_signal(address: tuple[str, int], open_work: OpenWork) -> Any:
    async def serve() -> None:
        with cancelled_by_sigterm():
            await serve_orders(address, key=KEY, hello=Hello("remote", {}), open_work=open_work, wait_s=60.0)

    process = Forked(target=lambda: asyncio.run(serve()))
    process.start()
    return process
