"""Simulated schedules: on a clock of their own, the same each time, as long as arithmetic says, within the bound."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation import (
    EngineTimes,
    MeasuredRollout,
    PlannedTurn,
    RandomPlan,
    SimulatedEngine,
    SimulationConfig,
    TrainerTimes,
    WorkloadConfig,
    fit_engine,
    fit_times,
    run_on_virtual_clock,
    simulate,
)
from unbroken.errors import InvalidInputError
from unbroken.types import VersionSpan

THREE_SECONDS = WorkloadConfig(groups_per_step=4, group_size=2, median=300, sigma=0)


def make_config(**changes) -> SimulationConfig:
    """Groups of 3 s, steps of 2 s, and half a second to publish."""
    times = {"engine": EngineTimes(id_s=0.01), "trainer": TrainerTimes(step_s=2.0, publish_s=0.5)}
    return SimulationConfig(**{"workload": THREE_SECONDS, "num_steps": 20, **times, **changes})


def test_the_clock_jumps_from_timer_to_timer():
    started = time.perf_counter()
    seen = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append(asyncio.get_running_loop().time())

    async def main() -> None:
        await asyncio.gather(*(wait(seconds) for seconds in (5000.0, 3.0, 0.25)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()

    run_on_virtual_clock(main())
    assert seen == [0.25, 3.0, 5000.0]
    assert time.perf_counter() - started < 5


def test_tasks_that_wait_for_each_other_are_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="stands still"):
        run_on_virtual_clock(main())


def test_one_after_the_other_a_step_takes_the_sum():
    outcome = simulate(make_config(), 0)
    assert outcome.step_s == pytest.approx(3.0 + 2.0 + 0.5)
    assert outcome.mean_idle("idle/trainer") == pytest.approx(3.0 / 5.5)
    assert outcome.mean_idle("idle/sampler") == pytest.approx(2.5 / 5.5)
    assert outcome.ids_by_staleness == {0: 15 * 8 * 300}


@pytest.mark.parametrize(("step_s", "expected_s"), [(2.0, 3.0), (4.0, 4.0)])
def test_sampling_while_training_takes_the_longer_of_the_two(step_s, expected_s):
    """As many groups in flight as a step has: groups of 3 s leave the sampler every 3 s."""
    config = make_config(trainer=TrainerTimes(step_s=step_s, publish_s=0.5), max_groups_in_flight=4)
    outcome = simulate(config, 2)
    assert outcome.step_s == pytest.approx(expected_s, rel=0.01)
    assert outcome.mean_idle("idle/trainer") == pytest.approx(1 - step_s / expected_s, abs=0.01)


def test_without_a_limit_the_trainer_is_never_idle():
    outcome = simulate(make_config(), 4)
    assert outcome.step_s == pytest.approx(2.0)
    assert outcome.mean_idle("idle/trainer") == 0


def test_the_end_of_a_run_in_which_nothing_more_is_sampled_does_not_count():
    """What counts is what a longer run has there: an engine with few requests at once is the limit, groups wait."""
    config = make_config(engine=EngineTimes(id_s=0.01, max_requests=8), trainer=TrainerTimes(step_s=2.0))
    short, long = (simulate(replace(config, num_steps=num_steps), 3) for num_steps in (10, 30))
    assert short.steps == long.steps[: len(short.steps)]
    assert len(short.steps) == 10 - config.num_warmup


def test_the_parts_of_a_step_add_up():
    trainer = TrainerTimes(
        step_s=1.0, id_s=0.001, snapshot_s=9.0, publish_s=0.5, save_s=0.25, save_every=2, end_s=0.1,
        evaluation_s=3.0, evaluation_every=5,
    )  # fmt: skip
    workload = replace(THREE_SECONDS, prompt_ids=100, num_turns=2, tool_s=0.5, reply_ids=50)
    outcome = simulate(make_config(trainer=trainer, workload=workload, num_steps=15), 0)
    collect_s = 2 * 3.0 + 0.5
    train_s = 1.0 + 0.001 * 8 * (100 + 2 * 300 + 50)
    assert outcome.step_s == pytest.approx(collect_s + train_s + 0.5 + 0.25 / 2 + 0.1 + 3.0 / 5)


def test_the_trainer_waits_for_no_evaluation_that_runs_beside_it():
    trainer = TrainerTimes(step_s=5.0, publish_s=0.5, evaluation_s=100.0, evaluation_every=2)
    publish_s = 0.5 / 2  # it begins with the weights of its step
    assert simulate(make_config(trainer=trainer), 2).step_s == pytest.approx(5.0 + publish_s, rel=0.01)
    assert simulate(make_config(trainer=trainer), 0).step_s > 50


def test_requests_share_the_engine_and_wait_for_a_place():
    async def main(times: EngineTimes) -> list[float]:
        engine = SimulatedEngine(times)
        loop = asyncio.get_running_loop()

        async def sample(num_ids: int) -> float:
            await engine.sample(num_ids, num_prompt_ids=10, num_new_ids=10)
            return loop.time()

        return await asyncio.gather(*(sample(num_ids) for num_ids in (10, 20, 30)))

    def run(**times) -> list[float]:
        return run_on_virtual_clock(main(EngineTimes(**times)))

    assert run(id_s=1.0) == pytest.approx([10, 20, 30])
    assert run(id_s=1.0, id_s_per_request=1.0) == pytest.approx([40, 70, 90])
    assert run(id_s=1.0, first_s=5.0) == pytest.approx([15, 25, 35])
    assert run(id_s=1.0, max_requests=1) == pytest.approx([10, 30, 60])
    assert run(id_s=1.0, max_requests=2) == pytest.approx([10, 20, 40])
    assert run(id_s=1.0, prompt_id_s=0.1) == pytest.approx([13, 23, 33])


def test_i6_ids_after_an_update_have_the_newer_version_and_the_cache_is_computed_again():
    async def main(*, recomputes_kv: bool) -> tuple[tuple[VersionSpan, ...], float]:
        engine = SimulatedEngine(EngineTimes(id_s=1.0, prompt_id_s=0.1, update_s=2.0, recomputes_kv=recomputes_kv))
        task = asyncio.create_task(engine.sample(10, num_prompt_ids=20, num_new_ids=0))
        await asyncio.sleep(4.5)
        await engine.update(7)
        return await task, asyncio.get_running_loop().time()

    spans, end_s = run_on_virtual_clock(main(recomputes_kv=False))
    expected = [(0, 4, 0), (4, 10, 7)]
    assert [(span.start, span.stop, span.policy_version) for span in spans] == expected
    assert end_s == pytest.approx(12.0)
    assert run_on_virtual_clock(main(recomputes_kv=True))[1] == pytest.approx(12.0 + 0.1 * (20 + 4))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    sigma=st.floats(0, 1.5),
    step_s=st.floats(0.1, 10),
    publish_s=st.floats(0, 5),
    max_drops=st.integers(0, 2),
    publish_beside_step=st.booleans(),
)
def test_no_id_is_trained_beyond_the_bound(
    seed, max_staleness, groups_per_step, sigma, step_s, publish_s, max_drops, publish_beside_step
):
    config = make_config(
        seed=seed,
        num_steps=8,
        max_drops=max_drops,
        publish_beside_step=publish_beside_step,
        workload=WorkloadConfig(groups_per_step=groups_per_step, group_size=2, sigma=sigma),
        trainer=TrainerTimes(step_s=step_s, publish_s=publish_s),
    )
    outcome = simulate(config, max_staleness)
    assert max(outcome.ids_by_staleness) <= max_staleness
    assert min(outcome.ids_by_staleness) >= 0
    assert all(step.num_groups == groups_per_step for step in outcome.steps)


def test_a_simulation_gives_the_same_each_time_and_another_seed_something_else():
    config = make_config(workload=WorkloadConfig(groups_per_step=3, group_size=2), num_steps=10)
    first = simulate(config, 2)
    assert simulate(config, 2) == first
    assert simulate(replace(config, seed=1), 2).step_s != first.step_s


def test_a_plan_of_ones_own_takes_the_place_of_the_lengths():
    class Plan:
        def turns(self, number: int, member: int) -> list[PlannedTurn]:
            return [PlannedTurn(num_ids=50, tool_s=0.5), PlannedTurn(num_ids=100)]

    assert simulate(make_config(), 0, plan=Plan()).step_s == pytest.approx(0.5 + 0.5 + 1.0 + 2.0 + 0.5)


def test_lengths_are_lognormal():
    plan = RandomPlan(config=WorkloadConfig(median=100, sigma=0.5, max_ids=250), seed=0)
    drawn = sorted(plan.turns(number, 0)[0].num_ids for number in range(300))
    assert drawn[-1] == 250
    assert 90 < drawn[150] < 110


def test_a_simulation_of_its_warmup_alone_is_refused():
    with pytest.raises(InvalidInputError, match=r"num_warmup must be >= 1 and < num_steps \(5\), got 5"):
        SimulationConfig(num_steps=5)


def test_times_are_fitted_without_negative_ones():
    ones = [1.0, 1.0, 1.0]
    assert fit_times([ones, [1, 2, 3]], [5, 7, 9]) == pytest.approx([3, 2])
    assert fit_times([ones, [1, 2, 3]], [9, 7, 5]) == pytest.approx([7, 0])
    assert fit_times([ones, [2, 2, 2]], [3, 4, 5]) == pytest.approx([4, 0])
    assert fit_times([ones, [1, 2, 3]], [1, 4, 7]) == pytest.approx([0, 30 / 14])


@pytest.mark.parametrize("recorded", [32, 8])
def test_an_engine_that_slows_down_with_its_requests_is_found_from_rollouts_that_begin_together(recorded):
    times = EngineTimes(first_s=0.2, id_s=0.01, id_s_per_request=0.0005)
    rng = np.random.default_rng(0)

    async def sample_together(step: int) -> list[MeasuredRollout]:
        engine, clock = SimulatedEngine(times), asyncio.get_running_loop().time

        async def sample(num_ids: int) -> MeasuredRollout:
            await engine.sample(num_ids, num_prompt_ids=1, num_new_ids=1)
            return MeasuredRollout(step=step, lengths=[num_ids], seconds=clock())

        lengths = np.maximum(1, rng.lognormal(5, 0.8, 32)).astype(int).tolist()
        return (await asyncio.gather(*(sample(num_ids) for num_ids in lengths)))[:recorded]

    rollouts = [each for step in range(40) for each in run_on_virtual_clock(sample_together(step))]
    found = fit_engine(rollouts, num_together=32)
    if recorded == 32:
        expected = (times.first_s, times.id_s, times.id_s_per_request)
        assert (found.first_s, found.id_s, found.id_s_per_request) == pytest.approx(expected, rel=0.02)
    assert found.id_s + 16 * found.id_s_per_request == pytest.approx(times.id_s + 16 * times.id_s_per_request, rel=0.2)
