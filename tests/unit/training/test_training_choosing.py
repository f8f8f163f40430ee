"""Sources that choose the next problem by the results so far: each number is recorded once, also in runs that go on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.pretend import PretendEngine, PretendSource, PretendTrainer, run
from unbroken.errors import CheckpointError, RewardError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig


class Choosing(PretendSource):
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

    def record(self, number: int, group: TrajectoryGroup) -> None:
        assert group.group_id == str(number)
        del self.chosen[number]
        self.recorded.append(number)

    def choices(self) -> Mapping[str, Any]:
        return {"chosen": [list(pair) for pair in self.chosen.items()], "recorded": self.recorded, "count": self.count}

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        self.chosen, self.recorded, self.count = dict(choices["chosen"]), choices["recorded"], choices["count"]


def make(seed: int, per_step: int) -> Choosing:
    rng = random.Random(seed)
    source = Choosing(PretendEngine(), lambda *_: rng.choice((0, 3.1, 30.3)), per_step)
    source.rewards = lambda number: (1.0, 1.0) if number % 3 == 0 else (0.0, 1.0)
    return source


class KilledError(Exception):
    pass


@settings(max_examples=num_cases(20, in_fuzz=400))
@given(seed=st.integers(0, 10**6), per_step=st.integers(1, 4), kill_step=st.integers(0, 5))
def test_an_asynchronous_run_that_goes_on_samples_the_same_problems_and_records_each_once(seed, per_step, kill_step):
    config = LoopConfig(num_steps=6, max_staleness=2, max_replacements=1)

    def killed(step: int) -> float:
        if step == kill_step + 1:
            raise KilledError
        return 4

    first = make(seed, per_step)
    trainer = PretendTrainer(killed)
    try:
        run(first, first.engine, trainer, config)
    except KilledError:
        trainer.groups.pop()
        trainer.sampled.pop()
    last = trainer.states[-1]
    chosen = [list(pair) for pair in last.groups["choices"]["chosen"]]
    second = make(seed + 1, per_step)
    again = PretendTrainer(policy_version=trainer.policy_version)
    second.engine.policy_version = trainer.policy_version
    run(second, second.engine, again, config, after=last)
    done = sorted(trainer.trained + trainer.replaced + again.trained + again.replaced)
    assert sorted(second.recorded) == done == list(range(len(done)))
    for number, problem in chosen:
        assert second.seen.get(number, {problem}) == {problem}
    assert all(len(problems) == 1 for problems in [*first.seen.values(), *second.seen.values()])


def failing(at: int) -> Choosing:
    """A source that cannot record the result of a number."""

    class Fails(Choosing):
        def record(self, number: int, group: TrajectoryGroup) -> None:
            if number == at:
                raise RewardError("record")
            super().record(number, group)

    return Fails(PretendEngine(), lambda *_: 1, 2)


@pytest.mark.parametrize("at", [0, 9])
def test_an_error_when_a_result_is_recorded_ends_the_run_also_at_its_last_step(at):
    source = failing(at)
    with pytest.raises(RewardError, match="record"):
        run(source, source.engine, PretendTrainer(), LoopConfig(num_steps=5, max_staleness=1))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_step_whose_result_cannot_be_recorded_is_not_trained(max_staleness):
    source, trainer = failing(3), PretendTrainer()
    with pytest.raises(RewardError, match="record"):
        run(source, source.engine, trainer, LoopConfig(num_steps=5, max_staleness=max_staleness))
    assert trainer.trained == [0, 1]


def test_a_synchronous_step_that_lost_its_engine_records_each_group_once():
    source = make(1, 3)
    source.seconds = lambda number, num_before: 5 if number == 4 else 1
    first = source.sample

    async def sample(number: int) -> TrajectoryGroup:
        if number == 5 and 5 not in source.num_starts:
            source.engine.goes_away()
        return await first(number)

    source.sample = sample
    trainer = PretendTrainer()
    run(source, source.engine, trainer, LoopConfig(num_steps=3, max_replacements=1))
    assert source.engine.num_outages == 1
    assert sorted(source.recorded) == sorted(trainer.trained + trainer.replaced) == list(range(len(source.recorded)))
    assert all(len(problems) == 1 for problems in source.seen.values())


def test_a_run_with_a_curriculum_does_not_go_on_without():
    source, trainer = make(1, 3), PretendTrainer()
    run(source, source.engine, trainer, LoopConfig(num_steps=3))
    last, other = trainer.states[-1], make(2, 3)
    other.engine.policy_version = 3
    run(other, other.engine, PretendTrainer(policy_version=3), LoopConfig(num_steps=3), after=last)
    assert other.recorded == source.recorded
    without = PretendSource(PretendEngine(), lambda *_: 1, 3)
    with pytest.raises(CheckpointError, match="began with a curriculum and cannot continue without"):
        run(without, without.engine, PretendTrainer(), LoopConfig(num_steps=4), after=last)
