"""The one error boundary: what goes wrong in a rollout ends that rollout, and says why."""

import asyncio
import math

import numpy as np
import pytest

from support.fake_renderer import END, call_ids
from support.rollouts import HELLO, MORE, expect_free, play
from support.scripted_env import ScriptedEnv
from support.waits import wait_until
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EchoError, EngineError, InvalidInputError, MessagesError, RewardError
from unbroken.rollout.env import Continue, EnvStart
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import CloseFailure, TrajectoryStatus


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
    assert trajectory.counters.as_dict() == {"status/failed": 1}


async def test_i3_an_engine_that_reports_another_prompt_fails_the_trajectory():
    trajectory = await play(ScriptedEnv(), ScriptedEngine([HELLO], echo=lambda prompt_ids: prompt_ids[:-1]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, EchoError)
    assert trajectory.turns == ()


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (None, "ScriptedEnv.step must return Continue or Rewrite or Done, got None"),
        ([], "ScriptedEnv.step must return Continue or Rewrite or Done, got "),
        (Continue(messages=None), "messages must be a list of messages, got NoneType"),
    ],
)
async def test_an_env_whose_step_returns_no_outcome_is_told_what_it_returned(outcome, says):
    trajectory = await play(ScriptedEnv([outcome]), ScriptedEngine([HELLO, HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    with pytest.raises(InvalidInputError, match=says):
        raise trajectory.error


async def test_an_env_whose_start_returns_no_start_is_told_what_it_returned():
    class Broken(ScriptedEnv):
        async def start(self):
            return [{"role": "user", "content": "hi"}]

    trajectory = await play(Broken(), ScriptedEngine([HELLO]))
    with pytest.raises(InvalidInputError, match=r"Broken\.start must return EnvStart, got \["):
        raise trajectory.error


async def cancel_own_task():
    task = asyncio.create_task(asyncio.sleep(30))
    task.cancel()
    await task


async def exit_program():
    raise SystemExit(1)


@pytest.mark.parametrize("method", ["start", "step", "reward"])
@pytest.mark.parametrize(("fail", "error"), [(cancel_own_task, asyncio.CancelledError), (exit_program, SystemExit)])
async def test_a_cancellation_or_an_exit_of_its_own_making_fails_the_trajectory_only(method, fail, error):
    env = ScriptedEnv()

    async def broken(*_args):
        await fail()

    setattr(env, method, broken)
    trajectory = await play(env, ScriptedEngine([HELLO]))
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, error)
    assert env.calls[-1] == "close"


async def test_a_lone_error_of_a_task_group_is_taken_out_of_it():
    async def look():
        raise LookupError("no row")

    class Grouping(ScriptedEnv):
        async def step(self, reply):
            async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as group:
                outer.create_task(asyncio.sleep(0))
                group.create_task(look())

    trajectory = await play(Grouping(), ScriptedEngine([HELLO]))
    assert isinstance(trajectory.error, LookupError)


async def test_an_env_that_changes_what_it_was_given_changes_a_copy():
    class Vandal(ScriptedEnv):
        async def step(self, reply):
            outcome = await super().step(reply)
            reply.message["tool_calls"][0]["function"]["arguments"]["record"].clear()
            reply.parsed.tool_calls[0].arguments.clear()
            self.question[0]["content"] = "another question"
            more.messages[0]["content"] = "less"
            return outcome

        async def reward(self, messages):
            messages[1]["tool_calls"].clear()
            return 1.0

    more = Continue(messages=[{"role": "user", "content": "more"}])
    env = Vandal(messages=[{"role": "user", "content": "hi"}])
    env.question = env._messages
    engine = ScriptedEngine([[*call_ids("take", {"record": {"a": 1}}), END]])
    trajectory = await play(env, engine)
    assert trajectory.status is TrajectoryStatus.COMPLETED
    turn = trajectory.turns[0]
    assert turn.parsed.tool_calls[0].arguments == {"record": {"a": 1}}
    assert turn.message["tool_calls"][0]["function"]["arguments"] == {"record": {"a": 1}}
    assert trajectory.messages[0] == {"role": "user", "content": "hi"}
    assert trajectory.messages[1] == turn.message


class Leaky(ScriptedEnv):
    def __init__(self, *args, close):
        super().__init__(*args)
        self._close = close

    async def close(self):
        await super().close()
        await self._close()


async def hang():
    await asyncio.sleep(60)


async def break_down():
    raise OSError("still open")


@pytest.mark.parametrize(
    ("close", "error", "reason"),
    [
        (hang, TimeoutError, CloseFailure.TIMEOUT),
        (break_down, OSError, CloseFailure.ERROR),
        (cancel_own_task, asyncio.CancelledError, CloseFailure.ERROR),
    ],
)
async def test_an_env_that_fails_to_close_is_counted_and_keeps_its_status_and_reward(close, error, reason):
    env = Leaky(close=close)
    trajectory = await play(env, ScriptedEngine([HELLO]), limits=Limits(close_timeout_s=0.05))
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert trajectory.reward == 1.0
    assert trajectory.error is None
    assert isinstance(trajectory.close_error, error)
    assert trajectory.counters.as_dict() == {f"close_failures/{reason}": 1, "status/completed": 1}
    assert env.calls.count("close") == 1


async def test_a_close_that_hangs_is_named_with_its_time():
    trajectory = await play(Leaky(close=hang), ScriptedEngine([HELLO]), limits=Limits(close_timeout_s=0.05))
    assert str(trajectory.close_error) == "Leaky.close did not return within 0.05 s"


async def test_an_env_that_fails_and_then_fails_to_close_keeps_the_first_error():
    trajectory = await play(Leaky([ValueError("step")], close=break_down), ScriptedEngine([HELLO]))
    assert isinstance(trajectory.error, ValueError)
    assert isinstance(trajectory.close_error, OSError)


async def test_a_cancellation_passes_through_an_env_that_fails_to_close():
    engine = ScriptedEngine([HELLO])
    await engine.pause()
    for close in (break_down, hang):
        env = Leaky(close=close)
        rollout = asyncio.create_task(play(env, engine, limits=Limits(close_timeout_s=0.05)))
        await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert env.calls == ["start", "close"]


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
    await wait_until(lambda: engine.requests)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert env.calls == ["start", "close"]
    await expect_free(engine, "t/0")
