"""The loop: no id is trained beyond the bound, each group is trained once, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.pretend import PretendEngine, PretendSource, PretendTrainer, make_group, pretend_to_train, run
from unbroken.errors import EngineError, OutageError, RewardError, RolloutError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig, OutageConfig


def check(source: PretendSource, trainer: PretendTrainer, config: LoopConfig) -> None:
    """What holds for every run."""
    num_groups = config.num_steps * source.groups_per_step + len(trainer.replaced)
    assert sorted(trainer.trained + trainer.replaced) == list(range(num_groups))
    assert all(len(groups) == source.groups_per_step for groups in trainer.groups)
    assert trainer.ended == list(range(config.num_steps))
    assert max(trainer.staleness) <= config.max_staleness
    assert source.num_running == 0
    assert source.engine.policy_version == trainer.policy_version
    num_again = sum(source.num_starts.values()) - num_groups
    assert source.engine.num_outages > 0 or num_again == 0
    assert source.max_running <= (config.max_staleness + 1) * source.groups_per_step


@settings(max_examples=num_cases(40, in_fuzz=1000))
@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
)
def test_no_group_is_too_old_and_each_is_trained_once(seed, max_staleness, groups_per_step):
    rng = random.Random(seed)
    engine = PretendEngine(lambda version: rng.uniform(0, 15))
    slow = rng.random() * 0.3

    def seconds(number: int, num_before: int) -> float:
        return rng.uniform(50, 200) if rng.random() < slow else rng.uniform(0, 12)

    source = PretendSource(engine, seconds, groups_per_step)
    trainer = PretendTrainer(lambda step: rng.uniform(0, 20), trains=lambda step: rng.random() < 0.9)
    config = LoopConfig(
        num_steps=rng.randint(1, 12),
        max_staleness=max_staleness,
        max_empty_steps=None,
    )
    run(source, engine, trainer, config)
    check(source, trainer, config)


def test_the_engine_samples_while_the_trainer_trains():
    engine = PretendEngine()
    source = PretendSource(engine, lambda *_: 10, 2)
    ended = []

    async def after_step(num_steps: int) -> None:
        ended.append(source.num_running)

    trainer = PretendTrainer(lambda step: 9)
    run(source, engine, trainer, LoopConfig(num_steps=20, max_staleness=1), after_step=after_step)
    assert sum(number > 0 for number in ended) >= 18
    assert max(trainer.staleness) == 1
    assert sum(source.num_starts.values()) == 40


def test_without_staleness_nothing_is_sampled_from_when_groups_are_taken_until_the_step_has_ended():
    """An engine of the process may sleep during the step, and an evaluation has it alone after it."""
    running = []

    def step_s(step: int) -> float:
        running.append(source.num_running)
        return 10.0

    def publish_s(version: int) -> float:
        running.append(source.num_running)
        return 4.0

    async def after_step(num_steps: int) -> None:
        for _ in range(5):
            running.append(source.num_running)
            await asyncio.sleep(1)

    engine = PretendEngine(publish_s)
    source = PretendSource(engine, lambda *_: 10, 2)
    trainer = PretendTrainer(step_s, trains=lambda step: step % 3 > 0)
    config = LoopConfig(num_steps=9)
    run(source, engine, trainer, config, after_step=after_step)
    check(source, trainer, config)
    assert set(running) == {0}
    assert len(running) == 9 + 6 + 45
    assert set(trainer.staleness) == {0}


def test_a_group_that_is_always_slow_is_waited_for():
    engine = PretendEngine()
    source = PretendSource(engine, lambda number, _: 300 if number == 3 else 2, 2)
    trainer = PretendTrainer()
    config = LoopConfig(num_steps=30, max_staleness=2)
    run(source, engine, trainer, config)
    check(source, trainer, config)
    assert source.num_starts[3] == 1


def test_a_sampler_that_is_fast_keeps_ids_young():
    engine = PretendEngine()
    source, trainer = PretendSource(engine, lambda *_: 5, 4), PretendTrainer(lambda step: 30)
    config = LoopConfig(num_steps=60, max_staleness=4)
    run(source, engine, trainer, config)
    check(source, trainer, config)
    staleness = sum(trainer.staleness[160:]) / len(trainer.staleness[160:])
    assert staleness < 2.5, staleness


class Behind(PretendSource):
    """Groups 3 to 11 come from a server that has missed the last update, and still may sample."""

    async def sample(self, number: int) -> TrajectoryGroup:
        version = max(0, self.engine.policy_version - (2 < number < 12))
        await super().sample(number)
        return make_group(number, [version, version], self.rewards(number))


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("per_step", [1, 2])
def test_groups_that_a_server_behind_has_sampled_too_late_are_sampled_again_and_not_waited_for(max_staleness, per_step):
    engine = PretendEngine()
    source, trainer = Behind(engine, lambda *_: 2, per_step), PretendTrainer()
    config = LoopConfig(num_steps=10, max_staleness=max_staleness)
    run(source, engine, trainer, config)
    assert sorted(trainer.trained) == list(range(10 * per_step))
    assert max(trainer.staleness) <= max_staleness
    assert sum(source.num_starts.values()) > 10 * per_step


def test_groups_of_an_engine_that_goes_away_are_sampled_again_once_it_is_back():
    engine = PretendEngine()
    source = PretendSource(engine, lambda number, _: 5 + number % 3, 2)

    def step_s(step: int) -> float:
        if step in (3, 6):
            engine.goes_away()
        return 4.0

    trainer = PretendTrainer(step_s)
    config = LoopConfig(num_steps=10, max_staleness=2)
    run(source, engine, trainer, config)
    check(source, trainer, config)
    assert engine.num_outages == 2
    assert sum(source.num_starts.values()) >= 22


def test_an_engine_that_goes_away_between_sampling_and_publishing_gets_the_weights_once_it_is_back():
    """With and without staleness: what was sampled is trained, and the step is not made again."""
    for max_staleness in (0, 2):
        engine = PretendEngine()
        source = PretendSource(engine, lambda *_: 2, 2)

        def step_s(step: int, engine: PretendEngine = engine) -> float:
            if step == 2:
                engine.goes_away(num_refusals=9)
            return 3.0

        trainer = PretendTrainer(step_s)
        config = LoopConfig(num_steps=5, max_staleness=max_staleness)
        run(source, engine, trainer, config)
        check(source, trainer, config)
        assert engine.published[-1] == 5
        assert trainer.num_steps == 5


def test_a_group_that_ends_its_engine_each_time_ends_the_run():
    engine = PretendEngine()

    def seconds(number: int, num_before: int) -> float:
        if number == 5:
            engine.goes_away(2)
        return 2

    source, trainer = PretendSource(engine, seconds, 2), PretendTrainer()
    config = LoopConfig(num_steps=10, max_staleness=1, outages=OutageConfig(max_losses=3))
    with pytest.raises(OutageError, match="lost 3 times although the engine came back"):
        run(source, engine, trainer, config)
    assert source.num_running == 0


def seconds_until(error: BaseException) -> Callable[[int, int], float]:
    """Two seconds for each group, but for the sixth, which ends with the error."""

    def seconds(number: int, num_before: int) -> float:
        if number == 5:
            raise error
        return 2

    return seconds


@pytest.mark.parametrize("error", [RewardError("row 5"), EngineError("no such adapter")])
def test_an_error_that_is_no_outage_ends_the_run_and_leaves_nothing_in_flight(error):
    engine = PretendEngine()
    source = PretendSource(engine, seconds_until(error), 2)
    with pytest.raises(type(error), match=str(error)):
        run(source, engine, PretendTrainer(), LoopConfig(num_steps=10, max_staleness=1))
    assert source.num_running == 0


class PanicError(BaseException):
    """As those that the Rust parts of a package raise."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PanicError("index out of bounds"), "ended with PanicError: index out of bounds"),
        (asyncio.CancelledError(), "cancelled, and not by the run"),
    ],
    ids=["panic", "cancels itself"],
)
def test_a_group_that_ends_with_no_usual_exception_ends_the_run_rather_than_being_waited_for(error, message):
    engine = PretendEngine()
    source = PretendSource(engine, seconds_until(error), 2)
    with pytest.raises(RolloutError, match=message):
        run(source, engine, PretendTrainer(), LoopConfig(num_steps=10, max_staleness=1))
    assert source.num_running == 0


class KilledError(Exception):
    pass


@settings(max_examples=num_cases(40, in_fuzz=1000))
@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(0, 3),
    max_replacements=st.floats(0, 4),
    kill_step=st.integers(0, 8),
)
def test_a_run_that_is_killed_and_goes_on_trains_or_replaces_each_group_once_up_to_the_bound(
    seed, max_staleness, max_replacements, kill_step
):
    rng = random.Random(seed)
    share, per_step, num_steps = rng.random(), rng.randint(1, 4), 8
    equal = {number for number in range(500) if rng.random() < share}
    config = LoopConfig(num_steps=num_steps, max_staleness=max_staleness, max_replacements=max_replacements)

    def make(step_s: Callable[[int], float], version: int) -> tuple[PretendSource, PretendTrainer]:
        engine = PretendEngine(policy_version=version)
        source = PretendSource(engine, lambda *_: rng.choice((0, 3.1, 40.3)), per_step)
        source.rewards = lambda number: (1.0, 1.0) if number in equal else (0.0, 1.0)
        return source, PretendTrainer(step_s, policy_version=version)

    def killed(step: int) -> float:
        if step == kill_step + 1:
            raise KilledError
        return 4

    source, first = make(killed, 0)
    try:
        run(source, source.engine, first, config)
    except KilledError:
        first.groups.pop()
        first.sampled.pop()
    again, second = make(lambda step: rng.uniform(0, 9), first.policy_version)
    run(again, again.engine, second, config, after=first.states[-1])
    replaced = first.replaced + second.replaced
    assert sorted(first.trained + second.trained + replaced) == list(range(num_steps * per_step + len(replaced)))
    assert set(replaced) <= equal
    bound = config.get_max_replaced(per_step)
    assert all(len(groups) == per_step for groups in first.groups + second.groups)
    assert all(len(sampled) <= per_step + bound for sampled in first.sampled + second.sampled)


def test_a_replaced_group_is_seen_by_the_observer_and_the_step_is_full():
    engine = PretendEngine()
    source, trainer = PretendSource(engine, lambda *_: 2, 2), PretendTrainer()
    source.rewards = lambda number: (1.0, 1.0) if number % 2 else (0.0, 1.0)
    config = LoopConfig(num_steps=6, max_staleness=1, max_replacements=3)
    run(source, engine, trainer, config)
    check(source, trainer, config)
    assert all(number % 2 == 0 for number in trainer.trained)
    assert len(trainer.replaced) > 8


def test_an_error_of_the_judgement_ends_the_run():
    engine = PretendEngine()

    def judge(group: TrajectoryGroup) -> bool:
        raise RewardError("nan")

    source, trainer = PretendSource(engine, lambda *_: 2, 2), PretendTrainer(judge=judge)
    with pytest.raises(RewardError, match="nan"):
        run(source, engine, trainer, LoopConfig(num_steps=6, max_staleness=1, max_replacements=3))


def test_the_work_for_a_group_does_not_grow_with_the_groups_in_flight():
    """A step may have thousands of groups. With work that grows, ten times the groups took 65 times the CPU."""

    class Shared(PretendSource):
        async def sample(self, number: int) -> TrajectoryGroup:
            await asyncio.sleep(0.001 * (number % 20))
            return made

    def measure(num_groups: int) -> float:
        engine = PretendEngine()
        source = Shared(engine, lambda *_: 0, num_groups)
        started = time.process_time()
        asyncio.run(pretend_to_train(source, engine, PretendTrainer(lambda step: 0), LoopConfig(num_steps=1)))
        return time.process_time() - started

    made = asyncio.run(PretendSource(PretendEngine(), lambda *_: 0, 1).sample(0))
    measure(10)
    assert measure(3000) < 45 * measure(300)
