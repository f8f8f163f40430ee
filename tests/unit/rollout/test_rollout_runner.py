"""The loop: an episode in order, what the engine is asked, and groups."""

import asyncio

import pytest

from support.fake_renderer import END, STOP_IDS, FakeRenderer, call_ids, encode
from support.rollouts import HELLO, MORE, play
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError
from unbroken.rollout.env import EnvStart
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group, run_rollout
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.types import SamplingParams


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


# --- groups ----------------------------------------------------------------------------------------------


async def group_of(n, engine, make_env=ScriptedEnv, *, limits=None, **sampling):
    return await run_group(
        make_env,
        n,
        engine=engine,
        renderer=FakeRenderer(),
        sampling=SamplingParams(**sampling),
        limits=limits or Limits(),
        group_id="g",
    )


async def test_a_group_plays_its_siblings_concurrently():
    all_there = asyncio.Barrier(3)

    class Meeting(ScriptedEnv):
        async def start(self) -> EnvStart:
            await asyncio.wait_for(all_there.wait(), 60)
            return await super().start()

    group = await group_of(3, ScriptedEngine([HELLO] * 3), Meeting)
    assert group.rewards == (1.0, 1.0, 1.0)
    assert [trajectory.trajectory_id for trajectory in group.trajectories] == ["g/0", "g/1", "g/2"]
    assert group.counters.as_dict() == {"status/completed": 3}


async def test_i1_every_sibling_goes_on_from_its_own_first_turn_with_its_own_budget():
    def double_something(prompt_ids):
        if len(prompt_ids) > num_asked:
            return [*encode("done"), END]
        return [*call_ids("double", {"number": 10 ** next(digits)}), END]

    digits = iter(range(4))
    question = [{"role": "user", "content": "Double a number."}]
    num_asked = len(FakeRenderer().render(question, tools=[double.schema]).token_ids)
    engine = ScriptedEngine(double_something)
    limits = Limits(max_tokens=80)
    group = await group_of(4, engine, lambda: ToolEnv(question, [double], lambda _: 1.0), limits=limits)
    second = {r.request_id: r for r in engine.requests if len(r.prompt_ids) > num_asked}
    assert len(second) == 4
    for trajectory in group.trajectories:
        first, _ = trajectory.turns
        request = second[f"{trajectory.trajectory_id}/1"]
        own = [*FakeRenderer().render(question, tools=[double.schema]).token_ids, *first.sequence.completion_ids]
        assert request.prompt_ids[: len(own)].tolist() == own
        assert request.params.max_tokens == 80 - len(first.sequence.completion_ids)
    assert len({tuple(r.prompt_ids.tolist()) for r in second.values()}) == 4


async def test_one_bad_sibling_ends_itself_only():
    envs = iter([ScriptedEnv(), ScriptedEnv(messages=()), ScriptedEnv()])
    group = await group_of(3, ScriptedEngine([HELLO] * 3), lambda: next(envs))
    assert group.rewards == (1.0, None, 1.0)
    assert group.counters.as_dict() == {"status/completed": 2, "status/failed": 1}


async def test_siblings_of_a_seeded_group_do_not_draw_the_same_numbers():
    engine = ScriptedEngine([HELLO] * 3)
    await group_of(3, engine, seed=1)
    assert len({request.params.seed for request in engine.requests}) == 3


async def test_an_environment_that_cannot_be_made_fails_its_own_trajectory_only():
    rows = iter([{"question": "hi"}, {}, {"question": "hi"}])

    def make_env():
        return ScriptedEnv(messages=[{"role": "user", "content": next(rows)["question"]}])

    group = await group_of(3, ScriptedEngine([HELLO] * 3), make_env)
    assert group.rewards == (1.0, None, 1.0)
    failed = group.trajectories[1]
    assert failed.status is TrajectoryStatus.FAILED
    assert isinstance(failed.error, KeyError)
    assert failed.messages == failed.turns == ()


class NoReward(ScriptedEnv):
    reward = None


@pytest.mark.parametrize("made", [None, object(), "env", NoReward()])
async def test_something_that_is_no_environment_is_named(made):
    group = await group_of(1, ScriptedEngine([HELLO]), lambda: made)
    with pytest.raises(InvalidInputError, match="the environment must be Env, got "):
        raise group.trajectories[0].error


@pytest.mark.parametrize("n", [0, -1])
async def test_a_group_of_none_is_refused(n):
    with pytest.raises(InvalidInputError, match=f"n must be >= 1 trajectories in a group, got {n}"):
        await group_of(n, ScriptedEngine([]))
