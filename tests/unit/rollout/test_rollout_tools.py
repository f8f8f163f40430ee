"""Tools: whatever a call does, it is answered."""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from unbroken.errors import ToolDefinitionError
from unbroken.rollout.tools import Tool, ToolOutcome, ToolStatus, tool


def tool_returning(value: object, *, timeout_s: float = 30.0) -> Tool:
    def give() -> object:
        """Give a value."""
        return value

    return tool(give, timeout_s=timeout_s)


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def test_a_plain_function_runs_outside_the_event_loop():
    threads = []

    @tool
    def where() -> str:
        """Say where."""
        threads.append(threading.current_thread())
        return "here"

    assert await where.call({}) == ToolOutcome(status=ToolStatus.OK, content="here")
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon


async def test_an_async_function_runs_in_the_event_loop():
    @tool
    async def where(number: int) -> str:
        """Say where.

        Args:
            number: A number.
        """
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert (await where.call({"number": 1})).content == threading.current_thread().name


def test_the_decorator_works_with_and_without_arguments():
    @tool(timeout_s=5)
    def look() -> str:
        """Look."""
        return ""

    assert (look.name, look.timeout_s) == ("look", 5)
    assert (double.name, double.timeout_s) == ("double", 30.0)
    assert double.schema["function"]["description"] == "Double a number."


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_a_timeout_that_is_not_a_positive_number_is_refused(timeout_s):
    with pytest.raises(ToolDefinitionError, match="timeout_s must be a finite number of seconds > 0"):
        tool(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as it is", "as it is"),
        ("", ""),
        (42, "42"),
        (None, "null"),
        (True, "true"),
        ({"key": "käse"}, '{"key": "käse"}'),
        ([1, "a"], '[1, "a"]'),
    ],
)
async def test_a_string_is_answered_as_it_is_and_the_rest_as_json(value, content):
    assert await tool_returning(value).call({}) == ToolOutcome(status=ToolStatus.OK, content=content)


@dataclass
class Hit:
    title: str
    score: Any


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (np.float32(1.5), "1.5"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        ({"mean": np.float32(0.5), np.int64(7): np.arange(2)}, '{"mean": 0.5, "7": [0, 1]}'),
        (float("nan"), "NaN"),
        ({"a": [1, None], "é": float("inf")}, '{"a": [1, null], "é": Infinity}'),
        (b"plain", "plain"),
        ({"page": "käse".encode()}, '{"page": "käse"}'),
        (Decimal("4.20"), "4.20"),
        ([date(2026, 1, 2), PurePosixPath("/a")], '["2026-01-02", "/a"]'),
        ({3}, "[3]"),
        ({(1, 2): "x"}, '{"[1, 2]": "x"}'),
        (Hit("a", np.float64(0.5)), '{"title": "a", "score": 0.5}'),
        (MappingProxyType({"a": 1}), '{"a": 1}'),
    ],
)
async def test_a_result_is_json_where_it_can_be_and_text_otherwise(value, content):
    assert await tool_returning(value).call({}) == ToolOutcome(status=ToolStatus.OK, content=content)


async def test_a_result_that_cannot_be_written_is_said_to_the_user_once(caplog):
    given = tool_returning(object())
    for _ in range(3):
        assert (await given.call({})).status is ToolStatus.ERROR
    (record,) = caplog.records
    assert f"tool {given.name}: its result of type object cannot be written for the model" in record.getMessage()
    await tool_returning({"a": 1}).call({})
    assert len(caplog.records) == 1


async def test_a_tool_can_be_called_as_its_function():
    @tool
    def add(a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    @tool
    async def wait() -> str:
        """Wait."""
        return "done"

    assert (add(1, 2), add(a=1)) == (3, 2)
    assert await wait() == "done"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "TypeError: Object of type object is not JSON serializable"),
        ([lambda: 1], "TypeError: Object of type function is not JSON serializable"),
        (b"\xff\x00", "UnicodeDecodeError"),
        ("\ud800", "UnicodeEncodeError"),
    ],
)
async def test_a_result_that_cannot_be_written_down_is_an_error(value, says):
    outcome = await tool_returning(value).call({})
    assert outcome.status is ToolStatus.ERROR
    assert says in outcome.content
    outcome.content.encode()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such row"),
        StopIteration(),
        KeyError("k"),
        SystemExit(1),
        TimeoutError("upstream"),
        RuntimeError("\ud800"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_tool_raises_is_answered(error, is_async):
    def fail_plainly() -> None:
        """Fail."""
        raise error

    async def fail_async() -> None:
        """Fail."""
        raise error

    outcome = await tool(fail_async if is_async else fail_plainly).call({})
    assert outcome.status is ToolStatus.ERROR
    outcome.content.encode()


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Panic(BaseException):
    """What extensions in other languages raise when they crash."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MuteError(), "MuteError: (its message cannot be read: ValueError)"),
        (Panic("out of range"), "Panic: out of range"),
        (asyncio.CancelledError("mine"), "CancelledError: mine"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_exception_of_an_odd_kind_is_answered_too(error, says, is_async):
    def fail_plainly() -> None:
        """Fail."""
        raise error

    async def fail_async() -> None:
        """Fail."""
        raise error

    failing = tool(fail_async if is_async else fail_plainly)
    outcome = await failing.call({})
    assert outcome == ToolOutcome(status=ToolStatus.ERROR, content=f"Error: {failing.name} failed with {says}")


async def test_a_tool_that_cancels_a_task_of_its_own_and_awaits_it_is_answered():
    @tool
    async def look() -> None:
        """Look."""
        task = asyncio.create_task(asyncio.sleep(30))
        task.cancel()
        await task

    assert (await look.call({})).status is ToolStatus.ERROR


async def test_a_tool_that_changes_its_arguments_changes_a_copy():
    @tool
    def take(record: dict[str, list[int]]) -> int:
        """Take.

        Args:
            record: The record.
        """
        record["a"].append(2)
        return len(record.pop("a"))

    arguments = {"record": {"a": [1]}}
    assert (await take.call(arguments)).content == "2"
    assert arguments == {"record": {"a": [1]}}


async def test_arguments_nested_deeper_than_the_stack_are_answered():
    @tool
    def take(row: int) -> None:
        """Take.

        Args:
            row: The row.
        """

    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    outcome = await take.call({"row": deep})
    assert outcome.status is ToolStatus.ERROR
    assert "RecursionError" in outcome.content


async def test_an_error_names_the_tool_the_exception_and_its_message():
    @tool
    def look() -> None:
        """Look."""
        raise ValueError("no such row")

    outcome = await look.call({})
    assert outcome.content == "Error: look failed with ValueError: no such row"


async def test_arguments_that_do_not_fit_never_reach_the_function():
    called = []

    @tool
    def look(row: int) -> None:
        """Look.

        Args:
            row: The row.
        """
        called.append(row)

    outcome = await look.call({"row": "one"})
    assert outcome == ToolOutcome(
        status=ToolStatus.INVALID_ARGUMENTS, content="Error: look: argument 'row' must be integer, got 'one'"
    )
    assert called == []


async def test_a_plain_function_that_hangs_is_left_behind_at_its_timeout():
    release = threading.Event()

    @tool(timeout_s=0.05)
    def hang() -> None:
        """Hang."""
        release.wait(30)

    started = time.perf_counter()
    outcome = await hang.call({})
    release.set()
    assert time.perf_counter() - started < 20
    assert outcome == ToolOutcome(status=ToolStatus.TIMEOUT, content="Error: hang did not answer within 0.05 s")


async def test_an_async_function_that_hangs_is_cancelled_at_its_timeout():
    cancelled = []

    @tool(timeout_s=0.02)
    async def hang() -> None:
        """Hang."""
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    assert (await hang.call({})).status is ToolStatus.TIMEOUT
    assert cancelled == [True]


async def test_a_cancellation_from_outside_passes_through():
    @tool
    async def hang() -> None:
        """Hang."""
        await asyncio.sleep(30)

    call = asyncio.create_task(hang.call({}))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_tool_that_hangs_holds_up_neither_the_loop_nor_the_interpreter():
    program = """
        import asyncio, time
        from unbroken.rollout.tools import tool

        @tool(timeout_s=0.1)
        def hang() -> None:
            '''Hang.'''
            time.sleep(600)

        print(asyncio.run(hang.call({})).status)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "timeout"
    assert done.stderr == ""


def test_a_tool_that_returns_after_its_loop_is_gone_disturbs_nobody():
    release = threading.Event()
    threads = []

    @tool(timeout_s=0.5)
    def late() -> str:
        """Answer late."""
        threads.append(threading.current_thread())
        release.wait(30)
        return "too late"

    assert asyncio.run(late.call({})).status is ToolStatus.TIMEOUT
    release.set()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_rollouts_and_tools_load_neither_torch_nor_transformers():
    program = """
        import sys
        import unbroken.rollout.runner, unbroken.rollout.tool_env, unbroken.ledger.tree
        from unbroken.rollout.tools import tool

        @tool
        def look(row: int) -> None:
            '''Look.

            Args:
                row: The row.
            '''

        print([name for name in ("torch", "transformers", "tokenizers", "vllm") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_an_outcome_that_a_tool_returns_is_the_answer_as_it_is():
    refused = ToolOutcome(status=ToolStatus.ERROR, content="not today")
    assert await tool_returning(refused).call({}) == refused

    @tool
    async def refuse() -> ToolOutcome:
        """Refuse."""
        return refused

    assert await refuse.call({}) == refused


async def test_arguments_that_a_function_checks_itself_are_not_compared_with_the_schema():
    checked = double.call({"number": "x"})
    assert (await checked).status is ToolStatus.INVALID_ARGUMENTS
    assert (await replace(double, checks_arguments=False).call({"number": "x"})).content == "xx"
