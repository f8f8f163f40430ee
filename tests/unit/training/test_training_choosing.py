"""Sources that choose the next problem by the results so far: each number is recorded once, also in runs that go on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.turns import TurnEngine, TurnMaker, TurnSource, has_variance
from unbroken.errors import CheckpointError, RewardError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig
from unbroken.training.groups import ChoosingSource, GroupNumbers
from unbroken.training.loop import run_steps


class Choosing(TurnSource):
    """Each problem is one more than the last, and a hundred times the number of results so far."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.chosen: dict[int, int] = {}
        self.recorded: list[int] = []
        self.count = 0
        self.seen: dict[int, set[int]] = {}

    async def sample(self, number: int) -> TrajectoryGroup:
        if number not in self.chosen:
            self.chosen[number] = 100 * len(self.recorded) + self.count
            self.count += 1
        self.seen.setdefault(number, set()).add(self.chosen[number])
        return await super().sample(number)

    def tell(self, number: int, group: TrajectoryGroup) -> None:
        assert group.group_id == str(number)
        del self.chosen[number]
        self.recorded.append(number)

    def choices(self) -> Mapping[str, Any]:
        return {"chosen": [list(pair) for pair in self.chosen.items()], "recorded": self.recorded, "count": self.count}

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        self.chosen, self.recorded, self.count = dict(choices["chosen"]), choices["recorded"], choices["count"]


def make(seed: int, per_step: int) -> Choosing:
    rng = random.Random(seed)
    source = Choosing(TurnEngine(), lambda *_: rng.choice((0, 3, 30)), per_step)
    source.rewards = lambda number: (1.0, 1.0) if number % 3 == 0 else (0.0, 1.0)
    assert isinstance(source, ChoosingSource)
    assert not isinstance(TurnSource(TurnEngine(), lambda *_: 0, 1), ChoosingSource)
    return source


class KilledError(Exception):
    pass


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), per_step=st.integers(1, 4), kill_step=st.integers(0, 5))
def test_an_asynchronous_run_that_goes_on_samples_the_same_problems_and_tells_each_once(seed, per_step, kill_step):
    config = LoopConfig(num_steps=6, max_staleness=2, max_replacements=1)

    def killed(step: int) -> int:
        if step == kill_step + 1:
            raise KilledError
        return 4

    def run(source: Choosing, maker: TurnMaker, **options) -> None:
        asyncio.run(run_steps(source, maker, config, has_variance=has_variance, **options))

    first = make(seed, per_step)
    maker = TurnMaker(first.engine, killed)
    try:
        run(first, maker, numbers=GroupNumbers(6 * per_step, chooser=first))
    except KilledError:
        maker.taken.pop()
    state = maker.states[-1]
    second = make(seed + 1, per_step)
    again = TurnMaker(second.engine, lambda step: 3, policy_version=maker.policy_version)
    second.engine.policy_version = maker.policy_version
    numbers = GroupNumbers(6 * per_step, chooser=second)
    numbers.restore(state)
    run(second, again, first_step=len(maker.states), numbers=numbers)
    done = sorted(maker.trained + maker.replaced + again.trained + again.replaced)
    assert sorted(second.recorded) == done == list(range(len(done)))
    for number, problem in state["choices"]["chosen"]:
        assert second.seen.get(number, {problem}) == {problem}
    assert all(len(problems) == 1 for problems in [*first.seen.values(), *second.seen.values()])


@pytest.mark.parametrize("failing", [0, 9])
def test_an_error_when_a_result_is_told_ends_the_run_also_after_its_last_step(failing):
    class Fails(Choosing):
        def tell(self, number: int, group: TrajectoryGroup) -> None:
            if number == failing:
                raise RewardError("tell")

    source = Fails(TurnEngine(), lambda *_: 1, 2)
    maker = TurnMaker(source.engine)
    with pytest.raises(RewardError, match="tell"):
        asyncio.run(
            run_steps(source, maker, LoopConfig(num_steps=5, max_staleness=1), numbers=GroupNumbers(10, chooser=source))
        )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_step_whose_result_cannot_be_told_is_not_trained(max_staleness):
    class Fails(Choosing):
        def tell(self, number: int, group: TrajectoryGroup) -> None:
            if number == 3:
                raise RewardError("tell")
            super().tell(number, group)

    source = Fails(TurnEngine(), lambda *_: 1, 2)
    maker = TurnMaker(source.engine)
    with pytest.raises(RewardError, match="tell"):
        asyncio.run(run_steps(source, maker, LoopConfig(num_steps=5, max_staleness=max_staleness)))
    assert maker.trained == [0, 1]


def test_a_synchronous_step_that_lost_its_engine_tells_each_group_once():
    source = make(1, 3)
    source.turns = lambda number, num_before: 5 if number == 4 else 1
    maker = TurnMaker(source.engine)
    config = LoopConfig(num_steps=3, max_replacements=1)
    first = source.sample

    async def sample(number: int) -> TrajectoryGroup:
        if number == 5 and 5 not in source.num_starts:
            source.engine.is_away = True
        return await first(number)

    source.sample = sample
    asyncio.run(run_steps(source, maker, config, has_variance=has_variance))
    assert maker.num_recoveries == 1
    assert sorted(source.recorded) == sorted(maker.trained + maker.replaced) == list(range(len(source.recorded)))
    assert all(len(problems) == 1 for problems in source.seen.values())


def test_a_run_with_a_curriculum_does_not_go_on_without():
    source = make(1, 3)
    maker = TurnMaker(source.engine)
    asyncio.run(run_steps(source, maker, LoopConfig(num_steps=3)))
    state = maker.states[-1]
    other = make(2, 3)
    GroupNumbers(12, chooser=other).restore(state)
    assert other.recorded == source.recorded
    with pytest.raises(CheckpointError, match="began with a curriculum and cannot continue without"):
        GroupNumbers(12).restore(state)
