"""Several policies in one rollout: who speaks, whose ids, whose reward, and which frozen copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from support.fake_renderer import END, FakeRenderer, encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.env import Continue, Done, EnvStart, Reply, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.policies import PoliciesConfig
from unbroken.rollout.runner import run_group
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.runs.records.record import _make_untrained_rows, make_record
from unbroken.types import SamplingParams

TWO = PoliciesConfig(names=("solver", "critic"))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def say(text: str) -> list[int]:
    return [*encode(text), END]


class Talk:
    """An environment that answers each reply by the next outcome, and then gives its rewards."""

    def __init__(self, *outcomes: Any, rewards: Any, first: str | None = "solver") -> None:
        self._outcomes, self._rewards, self._first = list(outcomes), rewards, first
        self.rewarded: Sequence[Any] = ()

    async def start(self) -> EnvStart:
        return EnvStart(messages=[user("Solve it.")], policy=self._first)

    async def step(self, reply: Reply) -> Any:
        return self._outcomes.pop(0) if self._outcomes else Done()

    async def reward(self, messages: Sequence[Any]) -> Any:
        self.rewarded = messages
        return self._rewards

    async def close(self) -> None:
        pass


async def play(
    env: Talk | Callable[[], Talk],
    engine: ScriptedEngine,
    policies: PoliciesConfig | None = TWO,
    n: int = 1,
    seed: int = 3,
    limits: Limits | None = None,
) -> TrajectoryGroup:
    return await run_group(
        (lambda: env) if isinstance(env, Talk) else env,
        n,
        engine=engine,
        renderer=FakeRenderer(),
        sampling=SamplingParams(seed=seed),
        limits=limits or Limits(),
        group_id="g",
        policies=policies,
    )


def talker(*replies: str, kind: type[ScriptedEngine] | None = None) -> ScriptedEngine:
    """An engine that says these; the conversations of two policies are no continuation of each other."""
    return (kind or Later)([say(reply) for reply in replies], allow_forks=True)


class Later(ScriptedEngine):
    """An engine whose weights are of version 70."""

    policy_version = 70


class First(ScriptedEngine):
    """An engine that no update has brought adapters yet."""

    policy_version = 0


def debate() -> Talk:
    return Talk(
        Continue(messages=[user("He says 4.")], policy="critic"),
        Continue(messages=[user("She says no.")], policy="solver", reward=0.5),
        rewards={"solver": 1.0, "critic": -1.0},
    )


def against_the_past() -> Talk:
    return Talk(Continue(messages=[user("?")], policy="solver@past"), rewards={"solver": 1.0})


async def test_each_policy_has_a_conversation_of_its_own() -> None:
    engine = talker("4", "no", "5")
    (trajectory,) = (await play(debate(), engine)).trajectories
    assert [request.adapter for request in engine.requests] == ["solver", "critic", "solver"]
    assert [turn.policy for turn in trajectory.turns] == ["solver", "critic", "solver"]
    first, second, third = (request.prompt_ids.tolist() for request in engine.requests)
    assert third[: len(first)] == first  # the solver's own conversation goes on, by a bridge
    assert encode("He says 4.")[0] in second
    assert first[:5] != second[:5]
    texts = {name: [message["content"] for message in part.messages] for name, part in trajectory.parts.items()}
    assert texts == {"solver": ["Solve it.", "4", "She says no.", "5"], "critic": ["He says 4.", "no"]}


async def test_before_the_first_update_every_policy_is_the_model_itself_which_engines_need_not_know_by_name() -> None:
    engine = talker("4", "no", "5", kind=First)
    (trajectory,) = (await play(debate(), engine)).trajectories
    assert [request.adapter for request in engine.requests] == [None, None, None]
    assert [turn.policy for turn in trajectory.turns] == ["solver", "critic", "solver"]


def test_the_adapters_of_an_engine_are_the_policies_and_the_copies_that_speak_and_as_many_as_it_has_room_for() -> None:
    config = PoliciesConfig(names=("x", "y"), copy_every=20, num_copies=2)
    assert config.list_adapters(0) == ()
    assert config.list_adapters(20) == ("x", "y", "x@20", "y@20")  # the copy at 0 is the base
    assert config.list_adapters(70) == ("x", "y", "x@40", "x@60", "y@40", "y@60")
    assert PoliciesConfig(names=("x", "y")).list_adapters(70) == ("x", "y")


def test_an_engine_needs_room_for_the_copies_that_the_versions_of_a_run_have_and_no_more() -> None:
    config = PoliciesConfig(names=("x", "y"), copy_every=20, num_copies=2)
    for versions in (range(11), range(21), range(15, 40), range(30, 41), range(100)):
        assert config.count_adapters(versions) == max(len(config.list_adapters(version)) for version in versions)
    assert [config.count_adapters(range(num)) for num in (1, 20, 21, 41)] == [2, 2, 4, 6]
    assert config.count_adapters(None) == 6
    assert PoliciesConfig(names=("x", "y")).count_adapters(None) == 2


def test_several_processes_are_refused_and_one_is_not() -> None:
    config = PoliciesConfig(names=("x", "y"))
    config.check_processes(1)
    with pytest.raises(InvalidInputError, match=r"policies must be left out with several processes, got 2: .* in one"):
        config.check_processes(2)


async def test_rows_rewards_and_turn_rewards_are_those_of_their_own_policy() -> None:
    env = debate()
    (trajectory,) = (await play(env, talker("4", "no", "5"))).trajectories
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"solver": 1.0, "critic": -0.5})
    assert {name: part.reward for name, part in trajectory.parts.items()} == {"solver": 1.0, "critic": -0.5}
    assert trajectory.turn_rewards == (0.0, 0.5, 0.0)  # that of the turn which it answers, the critic's
    rows = export_samples(trajectory.tree, 0.0)
    assert [(row.policy, int(row.loss_mask.sum())) for row in rows] == [("solver", 4), ("critic", 3)]
    for row in rows:
        (alone,) = export_samples(trajectory.parts[row.policy].tree, 0.0)
        assert alone.token_ids.tolist() == row.token_ids.tolist()
    assert [message["content"] for message in env.rewarded] == [
        "Solve it.",
        "4",
        "He says 4.",
        "no",
        "She says no.",
        "5",
    ]


@pytest.mark.parametrize("limits", [Limits(max_turns=1), Limits(max_tokens=2)])
async def test_a_policy_that_a_limit_keeps_from_its_first_turn_did_not_speak_and_needs_no_reward(limits) -> None:
    env = Talk(Continue(messages=[user("He says 4.")], policy="critic"), rewards={"solver": 1.0})
    (trajectory,) = (await play(env, talker("4", "no"), limits=limits)).trajectories
    assert trajectory.status in (TrajectoryStatus.MAX_TURNS, TrajectoryStatus.MAX_TOKENS)
    assert (trajectory.reward, list(trajectory.parts)) == (1.0, ["solver"])


async def test_the_record_says_who_spoke_each_turn_and_which_messages_are_whose() -> None:
    (trajectory,) = (await play(debate(), talker("4", "no", "5"))).trajectories
    record = make_record("g", trajectory, _make_untrained_rows(trajectory))
    assert [turn["policy"] for turn in record["turns"]] == ["solver", "critic", "solver"]
    assert [row["turns"] for row in record["rows"]] == [[0, 2], [1]]
    spoken = [[record["messages"][number]["content"] for number in row["messages"]] for row in record["rows"]]
    assert spoken == [["Solve it.", "4", "She says no.", "5"], ["He says 4.", "no"]]


async def test_a_rewritten_history_is_that_of_the_policy_that_speaks_next() -> None:
    outcomes = (
        Continue(messages=[user("Well?")], policy="critic"),
        Rewrite(messages=[user("Anew.")], policy="solver"),
    )
    env = Talk(*outcomes, rewards={"solver": 0, "critic": 0})
    (trajectory,) = (await play(env, talker("4", "no", "5"))).trajectories
    assert trajectory.counters["forks/rewritten_history"] == 1
    assert [message["content"] for message in trajectory.parts["solver"].messages] == ["Anew.", "5"]
    assert [row.policy for row in export_samples(trajectory.tree, 0.0)] == ["solver", "solver", "critic"]


async def test_siblings_play_against_the_same_frozen_copy_of_which_no_id_is_trained() -> None:
    policies = PoliciesConfig(names=("solver",), copy_every=10, num_copies=3)
    drawn = set()
    for seed in range(20):
        engine = Later([say("4"), say("4"), say("no"), say("no")], allow_forks=True)
        group = await play(against_the_past, engine, policies, n=2, seed=seed)
        names = [trajectory.turns[1].policy for trajectory in group.trajectories]
        assert names[0] == names[1]
        assert all(list(trajectory.parts) == ["solver"] for trajectory in group.trajectories)
        drawn.add(names[0])
    assert drawn == {"solver@50", "solver@60", "solver@70"}


def test_copies_are_of_versions_that_the_current_one_tells() -> None:
    config = PoliciesConfig(names=("solver",), copy_every=20, num_copies=3)
    assert config.list_copies(0) == (0,)
    assert config.list_copies(59) == (0, 20, 40)
    assert config.list_copies(70) == (20, 40, 60)
    assert PoliciesConfig(names=("solver",)).list_copies(70) == (0,)


@pytest.mark.parametrize(
    ("env", "policies", "message"),
    [
        (Talk(first="judge", rewards={}), TWO, "one of solver, critic.*got 'judge'"),
        (Talk(first=None, rewards={}), TWO, "EnvStart.policy must be one of"),
        (Talk(first="solver@past", rewards={}), TWO, "set policies.copy_every"),
        (Talk(first="solver@7", rewards={}), TWO, "got 'solver@7'"),
        (Talk(first="solver", rewards=1.0), None, "policies.names must have 'solver'"),
        (Talk(rewards=1.0), TWO, "must be a mapping"),
        (Talk(rewards={"critic": 1.0}), TWO, r"has none for \['solver'\]"),
        (Talk(rewards={"solver": float("nan")}), TWO, "the reward of solver"),
    ],
)
async def test_what_an_environment_may_not_do_fails_its_rollout_by_name(env, policies, message) -> None:
    (trajectory,) = (await play(env, talker("4"), policies)).trajectories
    assert trajectory.status is TrajectoryStatus.FAILED
    with pytest.raises(type(trajectory.error), match=message):
        raise trajectory.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ()}, "at least one"),
        ({"names": ("solver", "solver")}, "different names"),
        ({"names": ("a",)}, "no part of 'lora_'"),
        ({"names": ("Solver",)}, "lower-case"),
        ({"copy_every": -1}, "copy_every must be >= 0"),
        ({"num_copies": 0}, "num_copies >= 1"),
    ],
)
def test_names_and_numbers_that_cannot_be(changes, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        PoliciesConfig(**{"names": ("solver",), **changes})
