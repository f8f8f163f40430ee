"""When turns and tool calls happened: in order, in seconds since the rollout began."""

from __future__ import annotations

import asyncio

from support.fake_renderer import END, call_ids, encode
from support.rollouts import HELLO, MORE, play
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.types import SamplingParams


@tool
async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


async def test_each_turn_has_its_times_and_those_of_its_calls():
    first = [*call_ids("wait", {"seconds": 0.05}), *call_ids("none", {}), END]
    member = await play(
        ToolEnv([{"role": "user", "content": "wait"}], [wait], lambda messages: 1.0),
        ScriptedEngine([first, [*encode("ok"), END]]),
        sampling=SamplingParams(max_tokens=200),
    )
    asked, ended = member.times
    assert [(call.name, call.status) for call in asked.calls] == [("wait", "ok"), ("none", "unknown_tool")]
    waited = asked.calls[0]
    assert waited.stop_s - waited.start_s >= 0.05
    assert asked.answered_s is not None
    assert ended.answered_s is not None
    order = [0.0, asked.start_s, asked.sampling_s, asked.sampled_s, waited.start_s, waited.stop_s, asked.answered_s]
    order += [ended.start_s, ended.sampling_s, ended.sampled_s, ended.answered_s, member.wall_time_s]
    assert order == sorted(order)
    assert ended.calls == ()


async def test_a_turn_that_the_environment_did_not_answer_says_so():
    member = await play(ScriptedEnv([MORE, RuntimeError("lost")]), ScriptedEngine([HELLO, HELLO]))
    assert [times.answered_s is None for times in member.times] == [False, True]
