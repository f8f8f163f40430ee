"""Groups from a process of their own: what comes back, cancellations, errors, and the end of either process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unbroken.counters import Counters, Effort, add_effort, count_effort
from unbroken.errors import ContextOverflowError, InvalidInputError, RolloutError, ServerUnreachableError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.process import worker
from unbroken.rollout.process.process import RolloutProcess
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus


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


class LocalWork:
    """Work by a function; notes news and its end in a file."""

    def __init__(self, sample: Callable[[Any], Any], notes: Path) -> None:
        self.sample = sample
        self._notes = notes

    def tell(self, news: Any) -> None:
        with self._notes.open("a") as file:
            file.write(f"{news}\n")


@asynccontextmanager
async def opened(sample: Callable[[Any], Any], notes: Path = Path(os.devnull)) -> AsyncIterator[RolloutProcess]:
    @asynccontextmanager
    async def open_work(facts: Any) -> AsyncIterator[LocalWork]:
        work = LocalWork(sample, notes)
        work.tell(facts)
        yield work
        work.tell("closed")

    process = RolloutProcess.fork(open_work)
    try:
        await process.open("opened")
        yield process
    finally:
        await process.close()


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


async def test_groups_come_back_as_they_were_made_by_another_process(tmp_path: Path) -> None:
    async def sample(order: int) -> TrajectoryGroup:
        await asyncio.sleep(0.1 if order == 0 else 0)  # the first is answered last
        return make_group(order, reward_parts={"pid": float(os.getpid())})

    async with opened(sample, tmp_path / "notes") as process:
        groups = await asyncio.gather(*(process.sample(number) for number in range(3)))
        process.tell("news")
    assert [group.group_id for group in groups] == ["0", "1", "2"]
    (pid,) = {group.trajectories[0].reward_parts["pid"] for group in groups}
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
            await process.sample("raise")
        failed = (await process.sample("return")).trajectories[0].error
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
            await process.sample(None)


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
        failed = (await process.sample("return")).trajectories[0].error
        with pytest.raises(RuntimeError, match="OwnError: of the environment"):
            await process.sample("raise")
    assert isinstance(failed, ExceptionGroup)
    assert list(map(str, failed.exceptions)) == ["OwnError: of the environment"] * 2


async def test_an_error_whose_text_cannot_be_read_ends_only_its_rollout() -> None:
    async def sample(order: None) -> TrajectoryGroup:
        return make_group(0, status=TrajectoryStatus.FAILED, reward=None, error=UnreadableError())

    async with opened(sample) as process:
        error = (await process.sample(None)).trajectories[0].error
    assert str(error) == "UnreadableError: (its message cannot be read: ValueError)"


@pytest.mark.parametrize("kind", [PanicError, UnreadableError])
async def test_no_error_of_the_work_leaves_its_order_without_an_answer(kind: type[BaseException]) -> None:
    async def sample(order: None) -> TrajectoryGroup:
        raise kind

    async with opened(sample) as process, asyncio.timeout(20):
        with pytest.raises((RolloutError, RuntimeError), match=kind.__name__):
            await process.sample(None)


async def test_a_group_that_cannot_be_pickled_says_so_and_others_still_come() -> None:
    async def sample(order: int) -> TrajectoryGroup:
        message = {"role": "user", "content": "", "extra": (lambda: None) if order == 0 else None}
        return make_group(order, messages=(message,))

    async with opened(sample) as process:
        with pytest.raises(RolloutError, match="must be values that Python can pickle"):
            await process.sample(0)
        assert (await process.sample(1)).group_id == "1"


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
            task = asyncio.create_task(process.sample(0))
        while effort.num_ids < 7:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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
            tasks = [asyncio.create_task(process.sample(60)) for _ in range(8)]
            await asyncio.sleep(0)  # they have sent their orders
            for task in tasks:
                task.cancel()
            async with asyncio.timeout(20):
                await asyncio.gather(*tasks, return_exceptions=True)
        assert (await process.sample(0)).group_id == "0"


async def test_work_that_cancels_itself_is_an_error() -> None:
    async def sample(order: None) -> TrajectoryGroup:
        raise asyncio.CancelledError

    async with opened(sample) as process:
        with pytest.raises(RolloutError, match="cancels its own task"):
            await process.sample(None)


async def test_an_error_of_the_opening_is_raised_by_it() -> None:
    @asynccontextmanager
    async def open_work(facts: Any) -> AsyncIterator[Any]:
        raise InvalidInputError(f"facts must be right, got {facts}")
        yield

    process = RolloutProcess.fork(open_work)
    with pytest.raises(InvalidInputError, match="got wrong"):
        await process.open("wrong")
    await process.close()


async def test_a_killed_process_fails_what_waits_for_it_and_what_comes_later() -> None:
    async def sample(order: str) -> TrajectoryGroup:
        if order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(60)
        raise AssertionError

    async with opened(sample) as process:
        waiting = [asyncio.create_task(process.sample(order)) for order in ("wait", "kill")]
        done, _ = await asyncio.wait(waiting)
        for each in done:
            assert isinstance(each.exception(), RolloutError)
            assert "status -9" in str(each.exception())
        with pytest.raises(RolloutError, match="status -9"):
            await process.sample("later")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_that_all_processes_of_a_job_get_leaves_it_to_the_first_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As Ctrl-C in a terminal, and `scancel` or `systemctl stop`; what the work starts gets it too."""

    async def sample(order: None) -> TrajectoryGroup:
        started = await asyncio.create_subprocess_exec("sleep", "60")
        started.send_signal(number)
        return make_group(os.getpid(), reward_parts={"status": float(await started.wait())})

    async with opened(sample, tmp_path / "notes") as process, asyncio.timeout(20):
        first = await process.sample(None)
        os.kill(int(first.group_id), number)
        second = await process.sample(None)
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
            time.sleep(60)  # noqa: ASYNC251  # user code that holds up all rollouts
        try:
            await asyncio.sleep(60)
        finally:
            (tmp_path / "closed").touch()
        raise AssertionError

    async def order() -> None:
        async with opened(sample) as process:
            await process.sample(None)

    with child_that(lambda: asyncio.run(order())):
        wait_until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
    wait_until(lambda: not is_alive(pid))
    assert (tmp_path / "closed").exists() is not is_stuck


async def test_one_that_was_never_opened_ends_too() -> None:
    already = set(multiprocessing.active_children())
    process = RolloutProcess.fork(lambda facts: pytest.fail("nothing is opened"))
    (child,) = set(multiprocessing.active_children()) - already
    await process.close()
    await process.close()
    assert not child.is_alive()
