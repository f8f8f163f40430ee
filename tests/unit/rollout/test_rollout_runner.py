"""The loop: statuses, limits, the error boundary, and what the engine is asked."""

import asyncio
import math

import numpy as np
import pytest

from support.fake_renderer import END, STOP_IDS, FakeRenderer, call_ids, encode
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import (
    ContextOverflowError,
    EchoError,
    EngineError,
    InvalidInputError,
    MessagesError,
    RewardError,
)
from unbroken.rollout.env import Continue, EnvStart
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group, run_rollout
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.types import FinishReason, SamplingParams

MORE = Continue(messages=[{"role": "user", "content": "more"}])
HELLO = [*encode("hello"), END]


async def play(env, engine, *, renderer=None, sampling=None, limits=None) -> Trajectory:
    return await run_rollout(
        env,
        engine=engine,
        renderer=renderer or FakeRenderer(),
        sampling=sampling or SamplingParams(max_tokens=50),
        limits=limits or Limits(),
        trajectory_id="t",
    )


@tool
async def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def test_a_tool_episode_from_question_to_reward():
    env = ToolEnv([{"role": "user", "content": "2x21?"}], [double], lambda messages: messages[-1]["content"] == "42")
    engine = ScriptedEngine([[*call_ids("double", {"number": 21}), END], [*encode("42"), END]])
    trajectory = await play(env, engine)
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert trajectory.reward == 1.0
    assert trajectory.error is None
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["tool_call_id"] == trajectory.messages[1]["tool_calls"][0]["id"]
    assert trajectory.counters.as_dict() == {"bridges/derived": 1, "status/completed": 1}
    assert trajectory.tools == (double.schema,)
    assert len(trajectory.turns) == 2
    assert trajectory.num_sampled == len(call_ids("double", {"number": 21})) + 1 + 3


async def test_the_environment_is_asked_in_order_and_closed_once():
    env = ScriptedEnv([MORE])
    await play(env, ScriptedEngine([HELLO, HELLO]))
    assert env.calls == ["start", "step", "step", "reward", "close"]
    assert [message["content"] for message in env.rewarded] == ["hi", "hello", "more", "hello"]


# --- what the engine is asked ----------------------------------------------------------------------------


async def test_the_stop_ids_of_the_renderer_join_those_of_the_caller():
    engine = ScriptedEngine([HELLO])
    await play(ScriptedEnv(), engine, sampling=SamplingParams(stop_token_ids=(7, END)))
    assert engine.requests[0].params.stop_token_ids == (7, END, *(i for i in STOP_IDS if i != END))


async def test_every_request_has_an_id_of_its_own():
    engine = ScriptedEngine([HELLO, HELLO, HELLO])
    await play(ScriptedEnv([MORE, MORE]), engine)
    assert [request.request_id for request in engine.requests] == ["t/0", "t/1", "t/2"]


async def test_rollouts_without_a_name_get_different_ones():
    names = set()
    for _ in range(2):
        trajectory = await run_rollout(
            ScriptedEnv(),
            engine=ScriptedEngine([HELLO]),
            renderer=FakeRenderer(),
            sampling=SamplingParams(),
            limits=Limits(),
        )
        names.add(trajectory.trajectory_id)
    assert len(names) == 2


async def test_a_seed_gives_every_turn_its_own_and_the_same_again_on_repetition():
    engine = ScriptedEngine([HELLO] * 4, allow_forks=True)
    for _ in range(2):
        await play(ScriptedEnv([MORE]), engine, sampling=SamplingParams(seed=3))
    seeds = [request.params.seed for request in engine.requests]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


async def test_without_a_seed_none_is_made_up():
    engine = ScriptedEngine([HELLO])
    await play(ScriptedEnv(), engine)
    assert engine.requests[0].params.seed is None


async def test_a_turn_may_sample_what_is_left_of_turn_budget_and_context():
    engine = ScriptedEngine([HELLO, HELLO], context_length=60)
    await play(ScriptedEnv([MORE]), engine, sampling=SamplingParams(max_tokens=30), limits=Limits(max_tokens=100))
    first, second = engine.requests
    assert first.params.max_tokens == 30
    assert second.params.max_tokens == min(30, 60 - len(second.prompt_ids))
    assert second.params.max_tokens < 50
    engine = ScriptedEngine([HELLO, HELLO])
    await play(ScriptedEnv([MORE]), engine, limits=Limits(max_tokens=10))
    assert [request.params.max_tokens for request in engine.requests] == [10, 10 - len(HELLO)]


# --- how it ends -----------------------------------------------------------------------------------------


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
    trajectory = await play(env, engine, limits=Limits(timeout_s=0.05))
    assert trajectory.status is TrajectoryStatus.TIMEOUT
    assert trajectory.error is None
    assert trajectory.reward is None
    assert env.calls == ["start", "step", "close"]
    assert trajectory.counters["limits/time"] == 1
    assert len(trajectory.turns) == 1
    await expect_free(engine, "t/1")


async def expect_free(engine, request_id):
    """An engine refuses a request id that is still in use."""
    await engine.resume()
    assert engine.requests[-1].request_id == request_id
    await engine.sample(engine.requests[-1])


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


# --- the boundary ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (math.nan, "the reward must be finite in float32, got nan"),
        (10**400, "the reward must be finite in float32, got an integer"),
        (None, r"the reward must be one number, got None"),
        (np.ones(2), r"the reward must be one number, got shape \(2,\)"),
    ],
)
async def test_a_reward_that_is_not_one_finite_number_fails_the_trajectory(reward, says):
    env = ScriptedEnv(reward=reward)
    trajectory = await play(env, ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert trajectory.reward is None
    with pytest.raises(RewardError, match=says):
        raise trajectory.error
    assert env.calls[-1] == "close"


@pytest.mark.parametrize("reward", [True, 1, np.float32(1), np.int64(1), np.bool_(True)])
async def test_any_plain_number_is_a_reward(reward):
    trajectory = await play(ScriptedEnv(reward=reward), ScriptedEngine([HELLO]))
    assert trajectory.reward == 1.0
    assert type(trajectory.reward) is float


@pytest.mark.parametrize("messages", [(), [{"content": "hi"}], ["hi"], [{"role": "user", "content": 3}]])
async def test_messages_that_are_none_or_malformed_fail_the_trajectory(messages):
    env = ScriptedEnv(messages=messages)
    trajectory = await play(env, ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, MessagesError)
    assert env.calls == ["start", "close"]


async def test_an_env_that_continues_with_nothing_fails_the_trajectory():
    trajectory = await play(ScriptedEnv([Continue(messages=[])]), ScriptedEngine([HELLO, HELLO]))
    assert isinstance(trajectory.error, MessagesError)


async def test_an_engine_that_fails_keeps_the_turns_before_and_the_exception():
    env = ScriptedEnv([MORE])
    trajectory = await play(env, ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, EngineError)
    assert len(trajectory.turns) == 1
    assert env.calls == ["start", "step", "close"]
    assert trajectory.counters.as_dict() == {"bridges/derived": 1, "status/failed": 1}


async def test_i3_an_engine_that_reports_another_prompt_fails_the_trajectory():
    trajectory = await play(ScriptedEnv(), ScriptedEngine([HELLO], echo=lambda prompt_ids: prompt_ids[:-1]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, EchoError)
    assert trajectory.turns == ()


async def test_an_env_that_fails_to_close_fails_the_trajectory():
    class Leaky(ScriptedEnv):
        async def close(self):
            await super().close()
            raise OSError("still open")

    env = Leaky()
    trajectory = await play(env, ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, OSError)
    assert trajectory.reward is None
    assert env.calls.count("close") == 1


async def test_an_env_that_fails_to_start_is_closed():
    class Broken(ScriptedEnv):
        async def start(self) -> EnvStart:
            raise OSError("no sandbox")

    env = Broken()
    trajectory = await play(env, ScriptedEngine([HELLO]))
    assert isinstance(trajectory.error, OSError)
    assert env.calls == ["close"]


async def test_a_cancellation_passes_through_ends_the_request_and_closes_the_env():
    env, engine = ScriptedEnv(), ScriptedEngine([HELLO, HELLO])
    await engine.pause()
    rollout = asyncio.create_task(play(env, engine))
    await asyncio.sleep(0.01)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert env.calls == ["start", "close"]
    await expect_free(engine, "t/0")


# --- groups ----------------------------------------------------------------------------------------------


async def group_of(n, engine, make_env=ScriptedEnv, **sampling):
    return await run_group(
        make_env,
        n,
        engine=engine,
        renderer=FakeRenderer(),
        sampling=SamplingParams(**sampling),
        limits=Limits(),
        group_id="g",
    )


async def test_a_group_plays_its_siblings_concurrently():
    all_there = asyncio.Barrier(3)

    class Meeting(ScriptedEnv):
        async def start(self) -> EnvStart:
            await asyncio.wait_for(all_there.wait(), 5)
            return await super().start()

    group = await group_of(3, ScriptedEngine([HELLO] * 3), Meeting)
    assert group.rewards == (1.0, 1.0, 1.0)
    assert [trajectory.trajectory_id for trajectory in group.trajectories] == ["g/0", "g/1", "g/2"]
    assert group.counters.as_dict() == {"status/completed": 3}


async def test_one_bad_sibling_ends_itself_only():
    envs = iter([ScriptedEnv(), ScriptedEnv(messages=()), ScriptedEnv()])
    group = await group_of(3, ScriptedEngine([HELLO] * 3), lambda: next(envs))
    assert group.rewards == (1.0, None, 1.0)
    assert group.counters.as_dict() == {"status/completed": 2, "status/failed": 1}


async def test_siblings_of_a_seeded_group_do_not_draw_the_same_numbers():
    engine = ScriptedEngine([HELLO] * 3)
    await group_of(3, engine, seed=1)
    assert len({request.params.seed for request in engine.requests}) == 3


@pytest.mark.parametrize("n", [0, -1])
async def test_a_group_of_none_is_refused(n):
    with pytest.raises(InvalidInputError, match=f"n must be >= 1 trajectories in a group, got {n}"):
        await group_of(n, ScriptedEngine([]))
