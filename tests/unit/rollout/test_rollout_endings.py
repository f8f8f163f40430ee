"""How a rollout ends: statuses and limits."""

import asyncio
from dataclasses import replace

from support.fake_renderer import END, call_ids
from support.rollouts import HELLO, MORE, expect_free, play
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import (
    ContextOverflowError,
)
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


async def test_an_engine_that_hangs_ends_as_timeout_and_is_rid_of_the_request():
    engine = ScriptedEngine([HELLO, HELLO, HELLO])
    env = PausingEnv(engine)
    trajectory = await play(env, engine, limits=Limits(timeout_s=0.5))
    assert trajectory.status is TrajectoryStatus.TIMEOUT
    assert trajectory.error is None
    assert trajectory.reward is None
    assert env.calls == ["start", "step", "close"]
    assert trajectory.counters["limits/time"] == 1
    assert len(trajectory.turns) == 1
    await expect_free(engine, "t/1")


async def test_a_reward_that_hangs_ends_as_timeout_whatever_limit_came_before():
    class Slow(ScriptedEnv):
        async def reward(self, messages):
            return await asyncio.sleep(60)

    trajectory = await play(Slow([MORE]), ScriptedEngine([HELLO]), limits=Limits(max_turns=1, timeout_s=0.05))
    assert trajectory.status is TrajectoryStatus.TIMEOUT
    assert trajectory.reward is None
    assert trajectory.counters.as_dict() == {"limits/time": 1, "status/timeout": 1}


async def test_a_tool_that_hangs_is_within_the_timeout_of_the_rollout():
    @tool(timeout_s=60)
    async def hang() -> None:
        """Hang."""
        await asyncio.sleep(60)

    env = ToolEnv([{"role": "user", "content": "?"}], [hang], lambda messages: 1.0)
    trajectory = await play(env, ScriptedEngine([[*call_ids("hang", {}), END]]), limits=Limits(timeout_s=0.05))
    assert trajectory.status is TrajectoryStatus.TIMEOUT


async def test_a_timeout_inside_the_environment_is_its_own_failure():
    trajectory = await play(ScriptedEnv([TimeoutError("sandbox")]), ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, TimeoutError)
