"""The event loop stays free: rendering, bridging and parsing run in threads, and long results are cut."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from support.fake_renderer import END, FakeRenderer, call_ids, encode
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rollout.env import Continue, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import _cut_text, cut_tool_result, tool
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.types import SamplingParams

MORE = Continue(messages=[{"role": "user", "content": "more"}])
QUESTION = [{"role": "user", "content": "hi"}]
ANSWER = [*encode("done"), END]


class ThreadRecorder(FakeRenderer):
    """Records the thread of each call; `wait_s` makes each of them slow."""

    def __init__(self, wait_s: float = 0.0) -> None:
        super().__init__()
        self.threads: dict[str, set[threading.Thread]] = {}
        self.may_go_on = threading.Event()
        self._wait_s = wait_s

    def _record(self, name: str) -> None:
        self.threads.setdefault(name, set()).add(threading.current_thread())
        self.may_go_on.wait(self._wait_s)

    def render(self, *args: Any, **kwargs: Any) -> Any:
        self._record("render")
        return super().render(*args, **kwargs)

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> Any:
        self._record("bridge")
        return super().bridge_to_next_turn(*args, **kwargs)

    def parse_response(self, *args: Any, **kwargs: Any) -> Any:
        self._record("parse")
        return super().parse_response(*args, **kwargs)


async def play(env: Any, engine: ScriptedEngine, *, renderer: Any = None, **limits: Any) -> Trajectory:
    return await run_rollout(
        env,
        engine=engine,
        renderer=renderer or FakeRenderer(),
        sampling=SamplingParams(max_tokens=100),
        limits=Limits(**limits),
    )


def tool_that(result: Any = None, error: Exception | None = None) -> Any:
    async def look() -> Any:
        """Look at something."""
        if error is not None:
            raise error
        return result

    return tool(look)


async def play_tool(own: Any, **limits: Any) -> Trajectory:
    engine = ScriptedEngine([[*call_ids("look", {}), END], ANSWER], context_length=10_000_000)
    return await play(ToolEnv(QUESTION, [own], lambda _: 1.0), engine, **limits)


async def test_the_renderer_never_works_in_the_event_loop():
    renderer = ThreadRecorder()
    env = ScriptedEnv([MORE, Rewrite(messages=QUESTION)])
    trajectory = await play(env, ScriptedEngine([ANSWER] * 3, allow_forks=True), renderer=renderer)
    assert trajectory.error is None
    assert renderer.threads.keys() == {"render", "bridge", "parse"}
    assert not any(threading.main_thread() in threads for threads in renderer.threads.values())


async def test_a_timeout_fires_while_the_renderer_works():
    start, renderer = time.perf_counter(), ThreadRecorder(60.0)
    trajectory = await play(ScriptedEnv([MORE]), ScriptedEngine([ANSWER] * 2), renderer=renderer, turn_timeout_s=0.2)
    renderer.may_go_on.set()
    assert trajectory.status is TrajectoryStatus.FAILED
    assert time.perf_counter() - start < 30


async def test_an_abandoned_rendering_changes_nothing_in_the_record():
    trajectory = await play(
        ScriptedEnv([MORE]), ScriptedEngine([ANSWER] * 2), renderer=ThreadRecorder(0.3), turn_timeout_s=0.4
    )
    num_turns, num_nodes = len(trajectory.turns), len(trajectory.tree.nodes)
    await asyncio.sleep(0.5)
    assert (len(trajectory.turns), len(trajectory.tree.nodes)) == (num_turns, num_nodes)


@pytest.mark.parametrize(
    ("own", "num_chars"),
    [
        (tool_that("x" * 2_000_000), 2_000_000),
        (tool_that({"rows": ["y" * 1_000_000]}), 1_000_014),
        (tool_that(error=ValueError("z" * 1_000_000)), 1_000_036),
    ],
    ids=["text", "json", "exception"],
)
async def test_a_long_result_is_cut_with_a_mark_and_counted(own, num_chars):
    trajectory = await play_tool(own, max_result_chars=1_000)
    content = trajectory.messages[2]["content"]
    assert f"\n[... {num_chars - 1_000} of {num_chars} characters were cut ...]\n" in content
    assert len(content) < 1_100
    assert trajectory.counters["cuts/tool_result"] == 1
    assert trajectory.status is TrajectoryStatus.COMPLETED


async def test_by_default_a_result_of_two_megabytes_is_cut_and_one_of_100_000_characters_is_not():
    long, short = await play_tool(tool_that("x" * 2_000_000)), await play_tool(tool_that("x" * 100_000))
    assert (long.counters["cuts/tool_result"], short.counters["cuts/tool_result"]) == (1, 0)
    assert short.messages[2]["content"] == "x" * 100_000


async def test_without_a_limit_the_model_sees_all_of_a_result():
    trajectory = await play_tool(tool_that("x" * 200_000), max_result_chars=None)
    assert trajectory.messages[2]["content"] == "x" * 200_000
    assert not any(key.startswith("cuts") for key in trajectory.counters.as_dict())


async def test_first_messages_and_messages_of_other_roles_are_not_cut():
    more = Continue(messages=[{"role": "user", "content": "m" * 50}])
    env = ScriptedEnv([more], messages=[{"role": "user", "content": "q" * 50}])
    trajectory = await play(env, ScriptedEngine([ANSWER] * 2), max_result_chars=10)
    assert [len(trajectory.messages[k]["content"]) for k in (0, 2)] == [50, 50]


def test_a_cut_text_keeps_its_beginning_and_its_end():
    assert _cut_text("abcdefghij", 10) == "abcdefghij"
    assert _cut_text("abcdefghij", 5) == "abc\n[... 5 of 10 characters were cut ...]\nij"
    assert _cut_text("abcdefghij", 1) == "a\n[... 9 of 10 characters were cut ...]\n"


def test_text_parts_share_the_room_and_images_stay():
    image = {"type": "image", "image": np.zeros(1)}
    parts = [{"type": "text", "text": "abcd"}, image, {"type": "text", "text": "efgh"}, {"type": "text", "text": "ij"}]
    message: Any = {"role": "tool", "tool_call_id": "1", "content": parts}
    assert cut_tool_result(message, 6)
    assert [part.get("text") for part in message["content"]] == [
        "abcd",
        None,
        "e\n[... 2 of 4 characters were cut ...]\nh",
        "\n[... 2 of 2 characters were cut ...]\n",
    ]
    assert message["content"][1] is image
