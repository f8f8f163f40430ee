"""How a rollout ends: statuses and limits."""

import asyncio
import functools
import gc
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest

from support.fake_renderer import END, call_ids
from support.rollouts import HELLO, MORE, expect_free, play
from support.scripted_env import ScriptedEnv
from support.waits import wait_until
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import ContextOverflowError, EngineError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.env import Done
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.types import FinishReason, SamplingParams


async def test_the_rewards_of_turns_are_kept_and_added_to_the_episodes():
    env = ScriptedEnv([replace(MORE, reward=0.25), MORE, Done(reward=2)], reward=1.0)
    trajectory = await play(env, ScriptedEngine([HELLO] * 3))
    assert trajectory.turn_rewards == (0.25, 0.0, 2.0)
    assert trajectory.reward == 3.25


async def test_an_episode_that_a_limit_ends_keeps_the_rewards_of_its_turns():
    env = ScriptedEnv([replace(MORE, reward=0.25)] * 9, reward=0.0)
    trajectory = await play(env, ScriptedEngine([HELLO] * 9), limits=Limits(max_turns=2))
    assert (trajectory.turn_rewards, trajectory.reward) == ((0.25, 0.25), 0.5)


async def test_without_rewards_of_turns_there_are_none():
    trajectory = await play(ScriptedEnv([MORE]), ScriptedEngine([HELLO] * 2))
    assert (trajectory.turn_rewards, trajectory.reward) == ((), 1.0)


async def test_a_turns_reward_that_is_no_number_fails_the_episode_and_names_the_turn():
    trajectory = await play(ScriptedEnv([MORE, replace(MORE, reward=float("nan"))]), ScriptedEngine([HELLO] * 3))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert str(trajectory.error).startswith("the reward of turn 1 must be finite in float32, got nan")


async def test_a_turn_cut_by_its_own_length_ends_as_truncated_when_the_env_is_done():
    trajectory = await play(ScriptedEnv(), ScriptedEngine([[7] * 9]), sampling=SamplingParams(max_tokens=4))
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    assert trajectory.reward == 1.0
    assert trajectory.counters.as_dict() == {"limits/turn": 1, "status/truncated": 1, "truncations/turn": 1}


async def test_a_turn_cut_by_length_may_go_on_if_the_env_says_so():
    trajectory = await play(
        ScriptedEnv([MORE]), ScriptedEngine([[7] * 9, HELLO]), sampling=SamplingParams(max_tokens=6)
    )
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert trajectory.counters.as_dict() == {
        "bridges/derived": 1,
        "closings/truncated": 1,
        "status/completed": 1,
        "truncations/turn": 1,
    }


async def test_a_turn_cut_by_the_budget_of_the_rollout_ends_as_max_tokens():
    trajectory = await play(ScriptedEnv(), ScriptedEngine([[7] * 9]), limits=Limits(max_tokens=4))
    assert trajectory.status is TrajectoryStatus.MAX_TOKENS
    assert trajectory.counters.as_dict() == {"limits/tokens": 1, "status/max_tokens": 1, "truncations/tokens": 1}


async def test_a_budget_that_is_used_up_ends_the_rollout_before_the_next_prompt():
    env = ScriptedEnv([MORE, MORE])
    trajectory = await play(env, ScriptedEngine([HELLO]), limits=Limits(max_tokens=len(HELLO)))
    assert trajectory.status is TrajectoryStatus.MAX_TOKENS
    assert trajectory.counters.as_dict() == {"limits/tokens": 1, "status/max_tokens": 1}
    assert trajectory.messages[-1]["content"] == "more"
    assert env.calls == ["start", "step", "reward", "close"]


async def test_the_most_turns_end_the_rollout_after_the_env_saw_the_last():
    env = ScriptedEnv([MORE] * 9)
    trajectory = await play(env, ScriptedEngine([HELLO] * 9), limits=Limits(max_turns=2))
    assert trajectory.status is TrajectoryStatus.MAX_TURNS
    assert len(trajectory.turns) == 2
    assert len(env.replies) == 2
    assert trajectory.reward == 1.0
    assert trajectory.counters.as_dict() == {"bridges/derived": 1, "limits/turns": 1, "status/max_turns": 1}


async def test_a_prompt_that_grows_to_fill_the_context_ends_as_max_tokens():
    engine = ScriptedEngine([HELLO, HELLO], context_length=20)
    trajectory = await play(ScriptedEnv([MORE, MORE]), engine)
    assert trajectory.status is TrajectoryStatus.MAX_TOKENS
    assert trajectory.error is None
    assert trajectory.reward == 1.0
    assert trajectory.counters["limits/context"] == 1
    assert len(trajectory.turns) == 1


async def test_a_first_prompt_that_fills_the_context_fails_with_both_numbers():
    trajectory = await play(ScriptedEnv(), ScriptedEngine([HELLO], context_length=6))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, ContextOverflowError)
    assert (trajectory.error.num_prompt_tokens, trajectory.error.context_length) == (6, 6)


async def test_a_prompt_one_shorter_than_the_context_leaves_one_id_to_sample():
    trajectory = await play(ScriptedEnv(), ScriptedEngine([HELLO], context_length=7))
    assert trajectory.status is TrajectoryStatus.MAX_TOKENS
    assert trajectory.num_sampled == 1


async def test_an_aborted_completion_ends_the_rollout_unrecorded_and_unrewarded():
    env = ScriptedEnv([MORE])
    trajectory = await play(
        env, ScriptedEngine([HELLO, ScriptedReply(completion_ids=[1, 2], finish_reason=FinishReason.ABORT)])
    )
    assert trajectory.status is TrajectoryStatus.ABORTED
    assert trajectory.reward is None
    assert len(trajectory.turns) == 1
    assert trajectory.num_sampled == len(HELLO)
    assert env.calls == ["start", "step", "close"]
    assert trajectory.counters["status/aborted"] == 1


class PausingEnv(ScriptedEnv):
    """Makes the engine hang from the second turn on."""

    def __init__(self, engine):
        super().__init__([MORE])
        self._engine = engine

    async def step(self, reply):
        await self._engine.pause()
        return await super().step(reply)


async def test_an_engine_that_hangs_fails_the_rollout_by_its_own_limit_and_is_rid_of_the_request():
    engine = ScriptedEngine([HELLO, HELLO, HELLO])
    env = PausingEnv(engine)
    trajectory = await play(env, engine, limits=Limits(timeout_s=1.0, turn_timeout_s=1.5))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, EngineError)
    assert str(trajectory.error).startswith(
        "a turn (its prompt, the engine's queue, sampling) took longer than 1.5 s (Limits"
    )
    assert trajectory.reward is None
    assert env.calls == ["start", "step", "close"]
    assert len(trajectory.turns) == 1
    await expect_free(engine, "t/1")


async def test_waiting_for_the_engine_uses_up_no_time_of_the_rollout_and_is_measured():
    engine = ScriptedEngine([HELLO, HELLO])
    rollout = asyncio.create_task(play(PausingEnv(engine), engine, limits=Limits(timeout_s=1.0)))
    await wait_until(lambda: len(engine.requests) == 2)
    await asyncio.sleep(1.1)
    await engine.resume()
    trajectory = await rollout
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.COMPLETED, 1.0)
    assert 1.0 < trajectory.engine_s <= trajectory.wall_time_s


async def test_the_time_of_the_environment_counts_over_all_of_its_steps():
    class Slow(ScriptedEnv):
        async def step(self, reply):
            await asyncio.sleep(0.3)
            return await super().step(reply)

    env = Slow([MORE] * 9)
    trajectory = await play(env, ScriptedEngine([HELLO] * 9), limits=Limits(timeout_s=1.7))
    assert trajectory.status is TrajectoryStatus.TIMEOUT
    assert 1 < len(trajectory.turns) < 7
    assert env.calls.count("reward") == 0
    assert env.calls[-1] == "close"


class HangingEnv(ScriptedEnv):
    """Its second step never returns."""

    async def step(self, reply):
        if self.replies:
            await asyncio.sleep(60)
        return await super().step(reply)


async def test_a_time_out_is_worth_the_rewards_of_its_turns_and_its_rows_are_the_turns_that_ended():
    engine = ScriptedEngine([HELLO, HELLO])
    trajectory = await play(HangingEnv([replace(MORE, reward=0.25)]), engine, limits=Limits(timeout_s=1.0))
    assert (trajectory.status, trajectory.reward, trajectory.error) == (TrajectoryStatus.TIMEOUT, 0.25, None)
    assert trajectory.counters["limits/time"] == 1
    (row,) = export_samples(trajectory.tree, 0.25)
    assert row.token_ids[row.sampled_mask].tolist() == HELLO * 2
    assert np.isfinite(row.rollout_logprobs[row.sampled_mask]).all()


async def test_a_reward_that_takes_the_status_decides_what_a_time_out_is_worth():
    class Strict(HangingEnv):
        async def reward(self, messages, status):
            return {TrajectoryStatus.TIMEOUT: -1.0, TrajectoryStatus.MAX_TURNS: -0.5}.get(status, 1.0)

    async def get_reward(limits):
        return (await play(Strict([MORE]), ScriptedEngine([HELLO] * 2), limits=limits)).reward

    assert await get_reward(Limits(timeout_s=0.5)) == -1.0
    assert await get_reward(Limits(max_turns=1)) == -0.5


async def test_a_reward_may_be_any_callable_of_one_environment_and_keeps_none_alive():
    @dataclass
    class Weighted:  # equal to others of its weight, so it has no hash
        env: ScriptedEnv
        weight: float

        async def __call__(self, messages, status):
            return self.weight

    env = ScriptedEnv()
    env.reward = Weighted(env, 0.5)
    assert (await play(env, ScriptedEngine([HELLO]))).reward == 0.5
    env.reward = functools.partial(ScriptedEnv.reward, env)
    assert (await play(env, ScriptedEngine([HELLO]))).reward == 1.0
    kept, env = weakref.ref(env), None
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(("sees_status", "reward"), [(False, 0.0), (True, -2.0)])
async def test_so_does_the_reward_function_of_a_tool_env(sees_status, reward):
    @tool(timeout_s=60)
    async def hang() -> None:
        """Hang."""
        await asyncio.sleep(60)

    def with_status(messages, status):
        return -2.0 if status == "timeout" else 1.0

    score = with_status if sees_status else (lambda messages: 1.0)
    env = ToolEnv([{"role": "user", "content": "?"}], [hang], score)
    trajectory = await play(env, ScriptedEngine([[*call_ids("hang", {}), END]]), limits=Limits(timeout_s=0.5))
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.TIMEOUT, reward)


async def test_a_reward_that_hangs_ends_as_timeout_whatever_limit_came_before():
    class Slow(ScriptedEnv):
        async def reward(self, messages):
            return await asyncio.sleep(60)

    trajectory = await play(Slow([MORE]), ScriptedEngine([HELLO]), limits=Limits(max_turns=1, timeout_s=0.5))
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.TIMEOUT, 0.0)
    assert trajectory.counters.as_dict() == {"limits/time": 1, "status/timeout": 1}


async def test_a_reward_that_hangs_after_a_time_out_too_is_a_failure():
    class Slow(HangingEnv):
        async def reward(self, messages, status):
            return await asyncio.sleep(60)

    limits = Limits(timeout_s=0.5, close_timeout_s=0.05)
    trajectory = await play(Slow([MORE]), ScriptedEngine([HELLO] * 2), limits=limits)
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.FAILED, None)
    assert str(trajectory.error) == "its reward after a time-out took longer than 0.05 s"


async def test_a_timeout_inside_the_environment_is_its_own_failure():
    trajectory = await play(ScriptedEnv([TimeoutError("sandbox")]), ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, TimeoutError)
