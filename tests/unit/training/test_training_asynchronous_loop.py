"""The loop: no id is trained beyond the bound, each group is trained once, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.turns import Seen, TurnEngine, TurnMaker, TurnSource, has_variance
from unbroken.errors import EngineError, OutageError, RewardError, RolloutError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig, OutageConfig
from unbroken.training.groups import GroupNumbers
from unbroken.training.loop import run_steps
from unbroken.training.observer import EventKind


def run(source: TurnSource, maker: TurnMaker, config: LoopConfig, **options) -> Seen:
    seen = Seen()

    async def make() -> None:
        async with asyncio.timeout(60):
            await run_steps(source, maker, config, observe=seen.observe, **options)

    asyncio.run(make())
    return seen


def check(source: TurnSource, maker: TurnMaker, config: LoopConfig, seen: Seen) -> None:
    """What holds for every run."""
    num_groups = config.num_steps * source.groups_per_step + len(maker.replaced)
    assert sorted(maker.trained + maker.replaced) == list(range(num_groups))
    assert all(len(taken.groups) == source.groups_per_step for taken in maker.taken)
    assert maker.ended == list(range(config.num_steps))
    assert max(maker.staleness) <= config.max_staleness
    assert source.num_running == 0
    assert source.engine.policy_version == maker.policy_version
    most = max(event.num_in_flight + event.num_queued for event in seen.events)
    assert most <= (config.max_staleness + 1) * source.groups_per_step
    counts = [taken.counts for taken in maker.taken]
    assert sum(count.num_cancelled for count in counts) == seen.count(EventKind.GROUP_CANCELLED)
    assert sum(count.num_dropped for count in counts) == seen.count(EventKind.GROUP_DROPPED)
    num_drops = seen.count(EventKind.GROUP_CANCELLED) + seen.count(EventKind.GROUP_DROPPED)
    assert num_drops <= config.max_drops * len(maker.trained)


@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    max_drops=st.integers(0, 2),
    limit=st.none() | st.integers(1, 6),
    publish_beside_step=st.booleans(),
    adapt_ahead=st.booleans(),
)
def test_no_group_is_too_old_and_each_is_trained_once(
    seed, max_staleness, groups_per_step, max_drops, limit, publish_beside_step, adapt_ahead
):
    rng = random.Random(seed)
    engine = TurnEngine()
    slow = rng.random() * 0.3

    def turns(number: int, num_before: int) -> int:
        return rng.randint(50, 200) if rng.random() < slow else rng.randint(0, 12)

    source = TurnSource(engine, turns, groups_per_step)
    maker = TurnMaker(engine, lambda step: rng.randint(0, 20), lambda version: rng.randint(0, 15))
    maker.trains = lambda step: rng.random() < 0.9
    config = LoopConfig(
        num_steps=rng.randint(1, 12),
        max_staleness=max_staleness,
        max_drops=max_drops,
        max_groups_in_flight=limit,
        publish_beside_step=publish_beside_step,
        adapt_ahead=adapt_ahead,
    )
    seen = run(source, maker, config)
    check(source, maker, config, seen)
    has_limit = limit is not None and max_staleness > 0
    assert not has_limit or source.max_running <= limit + groups_per_step * (max_staleness + 1) * (max_drops > 0)


def test_the_engine_samples_while_the_trainer_trains():
    engine = TurnEngine()
    source, maker = TurnSource(engine, lambda *_: 10, 2), TurnMaker(engine, lambda step: 10)
    seen = run(source, maker, LoopConfig(num_steps=20, max_staleness=1))
    begun = [event for event in seen.events if event.kind is EventKind.STEP_BEGUN]
    ended = [event for event in seen.events if event.kind is EventKind.STEP_ENDED]
    assert [event.version for event in begun] == list(range(20))
    assert sum(event.num_in_flight + event.num_queued > 0 for event in ended) >= 19
    assert seen.count(EventKind.GROUP_CANCELLED) == 0


def test_without_staleness_nothing_is_sampled_from_when_groups_are_taken_until_the_step_has_ended():
    """An engine of the process may sleep during the step, and an evaluation has it alone after it."""

    class Busy(TurnMaker):
        async def end_step(self, step: int) -> None:
            for _ in range(5):
                running.append(source.num_running)
                await asyncio.sleep(0)
            await super().end_step(step)

    engine, running = TurnEngine(), []
    source = TurnSource(engine, lambda *_: 10, 2)
    maker = Busy(engine, lambda step: 10, lambda version: 4)
    maker.trains = lambda step: step % 3 > 0
    seen = run(source, maker, LoopConfig(num_steps=9))
    check(source, maker, LoopConfig(num_steps=9), seen)
    quiet = (EventKind.STEP_BEGUN, EventKind.STEP_ENDED, EventKind.PUBLISH_BEGUN, EventKind.PUBLISH_ENDED)
    assert {each.num_in_flight + each.num_queued for each in seen.events if each.kind in quiet} == {0}
    assert set(running) == {0}
    assert set(maker.staleness) == {0}


@pytest.mark.parametrize("max_drops", [0, 1, 2])
def test_a_group_that_is_always_slow_is_given_up_max_drops_times_and_then_waited_for(max_drops):
    engine = TurnEngine()
    source = TurnSource(engine, lambda number, _: 300 if number == 3 else 2, 2)
    maker = TurnMaker(engine)
    config = LoopConfig(num_steps=30, max_staleness=2, max_drops=max_drops)
    seen = run(source, maker, config)
    check(source, maker, config, seen)
    assert source.num_starts[3] == max_drops + 1
    assert seen.count(EventKind.GROUP_CANCELLED) == max_drops


@pytest.mark.parametrize("adapt_ahead", [True, False])
def test_a_sampler_that_is_fast_keeps_ids_young_unless_it_shall_not(adapt_ahead):
    engine = TurnEngine()
    source, maker = TurnSource(engine, lambda *_: 5, 4), TurnMaker(engine, lambda step: 30)
    config = LoopConfig(num_steps=40, max_staleness=4, adapt_ahead=adapt_ahead)
    check(source, maker, config, run(source, maker, config))
    staleness = sum(maker.staleness[80:]) / len(maker.staleness[80:])
    assert staleness < 2.2 if adapt_ahead else staleness > 3.5, staleness


def test_a_finished_group_that_was_overtaken_is_dropped_and_sampled_again():
    """Number 1 finishes while the step is made after which it is too old."""
    engine = TurnEngine()
    source = TurnSource(engine, lambda number, num_before: 30 if number == 1 and not num_before else 1, 1)
    maker = TurnMaker(engine, lambda step: 20)
    config = LoopConfig(num_steps=12, max_staleness=3, max_drops=1, adapt_ahead=False)
    seen = run(source, maker, config)
    check(source, maker, config, seen)


def test_groups_of_an_engine_that_goes_away_are_sampled_again_once_it_is_back():
    engine = TurnEngine()
    source, maker = TurnSource(engine, lambda number, _: 5 + number % 3, 2), TurnMaker(engine)
    calls = []

    def trains(step: int) -> bool:
        if step in (3, 6) and step not in calls:
            calls.append(step)
            engine.is_away = True
        return True

    maker.trains = trains
    config = LoopConfig(num_steps=10, max_staleness=2)
    seen = run(source, maker, config)
    check(source, maker, config, seen)
    assert maker.num_recoveries == seen.count(EventKind.OUTAGE_BEGUN) == 2
    assert seen.count(EventKind.GROUP_LOST) >= 2


def test_a_group_that_ends_its_engine_each_time_ends_the_run():
    engine = TurnEngine()

    def turns(number: int, num_before: int) -> int:
        engine.is_away = engine.is_away or number == 5
        return 2

    source, maker = TurnSource(engine, turns, 2), TurnMaker(engine)
    config = LoopConfig(num_steps=10, max_staleness=1, outages=OutageConfig(max_losses=3))
    with pytest.raises(OutageError, match="lost 3 times although the engine came back"):
        run(source, maker, config)
    assert source.num_running == 0


def turns_until(error: BaseException) -> Callable[[int, int], int]:
    """Two turns for each group, but for the sixth, which ends with the error."""

    def turns(number: int, num_before: int) -> int:
        if number == 5:
            raise error
        return 2

    return turns


@pytest.mark.parametrize("error", [RewardError("row 5"), EngineError("no such adapter")])
def test_an_error_that_is_no_outage_ends_the_run_and_leaves_nothing_in_flight(error):
    class Refuses(TurnMaker):
        async def is_outage(self, error):
            return False

    engine = TurnEngine()
    source = TurnSource(engine, turns_until(error), 2)
    with pytest.raises(type(error), match=str(error)):
        run(source, Refuses(engine), LoopConfig(num_steps=10, max_staleness=1))
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
    engine = TurnEngine()
    source = TurnSource(engine, turns_until(error), 2)
    with pytest.raises(RolloutError, match=message):
        run(source, TurnMaker(engine), LoopConfig(num_steps=10, max_staleness=1))
    assert source.num_running == 0


@given(seed=st.integers(0, 10**6), kill_step=st.integers(0, 8))
def test_a_run_that_goes_on_from_a_state_trains_the_rest_once(seed, kill_step):
    rng = random.Random(seed)
    config = LoopConfig(num_steps=9, max_staleness=3)

    def make() -> tuple[TurnSource, TurnMaker]:
        engine = TurnEngine()
        source = TurnSource(engine, lambda *_: rng.choice((0, 3, 40)), 3)
        return source, TurnMaker(engine, lambda step: rng.randint(0, 9))

    class KilledError(Exception):
        pass

    source, maker = make()

    def step_turns(step: int) -> int:
        if step == kill_step + 1:
            raise KilledError
        return 4

    maker.step_turns = step_turns
    try:
        run(source, maker, config)
    except KilledError:
        maker.taken.pop()
    assert len(maker.states) == len(maker.taken) == min(kill_step + 1, 9)
    again, second = make()
    again.engine.policy_version = second.policy_version = maker.policy_version
    numbers = GroupNumbers(27)
    numbers.restore(maker.states[-1])
    run(again, second, config, first_step=len(maker.states), numbers=numbers)
    assert sorted(maker.trained + second.trained) == list(range(27))


@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(0, 3),
    max_drops=st.integers(0, 1),
    max_replacements=st.floats(0, 4),
    kill_step=st.integers(0, 8),
)
def test_groups_without_variance_are_replaced_up_to_the_bound_also_in_a_run_that_goes_on(
    seed, max_staleness, max_drops, max_replacements, kill_step
):
    rng = random.Random(seed)
    share, per_step, num_steps = rng.random(), rng.randint(1, 4), 8
    equal = {number for number in range(500) if rng.random() < share}
    config = LoopConfig(
        num_steps=num_steps, max_staleness=max_staleness, max_drops=max_drops, max_replacements=max_replacements
    )
    bound = config.get_max_replaced(per_step)

    class KilledError(Exception):
        pass

    def make(step_turns) -> tuple[TurnSource, TurnMaker]:
        engine = TurnEngine()
        source = TurnSource(engine, lambda *_: rng.choice((0, 3, 40)), per_step)
        source.rewards = lambda number: (1.0, 1.0) if number in equal else (0.0, 1.0)
        return source, TurnMaker(engine, step_turns)

    def killed(step: int) -> int:
        if step == kill_step + 1:
            raise KilledError
        return 4

    source, maker = make(killed)
    try:
        run(source, maker, config, has_variance=has_variance)
    except KilledError:
        maker.taken.pop()
    again, second = make(lambda step: rng.randint(0, 9))
    again.engine.policy_version = second.policy_version = maker.policy_version
    numbers = GroupNumbers(num_steps * per_step)
    numbers.restore(maker.states[-1])
    run(again, second, config, first_step=len(maker.states), numbers=numbers, has_variance=has_variance)
    taken = maker.taken + second.taken
    replaced = maker.replaced + second.replaced
    assert sorted(maker.trained + second.trained + replaced) == list(range(num_steps * per_step + len(replaced)))
    assert set(replaced) <= equal
    assert all(len(each.replaced) <= bound and len(each.groups) == per_step for each in taken)


def test_a_replaced_group_is_seen_by_the_observer_and_the_step_is_full():
    engine = TurnEngine()
    source, maker = TurnSource(engine, lambda *_: 2, 2), TurnMaker(engine)
    source.rewards = lambda number: (1.0, 1.0) if number % 2 else (0.0, 1.0)
    config = LoopConfig(num_steps=6, max_staleness=1, max_replacements=3)
    seen = run(source, maker, config, has_variance=has_variance)
    check(source, maker, config, seen)
    assert all(number % 2 == 0 for number in maker.trained)
    assert seen.count(EventKind.GROUP_REPLACED) == len(maker.replaced) > 8


def test_an_error_of_the_judgement_ends_the_run():
    engine = TurnEngine()
    source, maker = TurnSource(engine, lambda *_: 2, 2), TurnMaker(engine)

    def judge(group: TrajectoryGroup) -> bool:
        raise RewardError("nan")

    with pytest.raises(RewardError, match="nan"):
        run(source, maker, LoopConfig(num_steps=6, max_staleness=1, max_replacements=3), has_variance=judge)


def test_the_work_for_a_group_does_not_grow_with_the_groups_in_flight():
    """A step may have thousands of groups. With work that grows, ten times the groups took 65 times the CPU."""

    class Shared(TurnSource):
        async def sample(self, number: int) -> TrajectoryGroup:
            await asyncio.sleep(0.001 * (number % 20))
            return made

    def measure(num_groups: int) -> float:
        engine = TurnEngine()
        source = Shared(engine, lambda *_: 0, num_groups)
        started = time.process_time()
        asyncio.run(run_steps(source, TurnMaker(engine), LoopConfig(num_steps=1)))
        return time.process_time() - started

    made = asyncio.run(TurnSource(TurnEngine(), lambda *_: 0, 1).sample(0))
    measure(10)
    assert measure(3000) < 45 * measure(300)
