"""`unbroken simulate`: fields from the command line, a file and a run."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.simulation.clock import run_on_virtual_clock
from unbroken.simulation.command import simulate_words
from unbroken.simulation.config import EngineTimes, LengthConfig, SimulationConfig, TrainerTimes, WorkloadConfig
from unbroken.simulation.engine import SimulatedEngine
from unbroken.simulation.fitting import MeasuredRollout, fit_engine, fit_times
from unbroken.simulation.measured import measure_run
from unbroken.simulation.schedule import simulate
from unbroken.simulation.workload import RandomPlan
from unbroken.timeline import Timeline, TraceFile

FAST = ("--num-steps=8", "--num-warmup=2", "--workload.groups-per-step=2", "--workload.group-size=2")


def step_seconds(text: str) -> dict[int, float]:
    """From the table: seconds a step by staleness."""
    rows = re.findall(r"^ +(\d+) +(\d+\.\d{3}) ", text, flags=re.MULTILINE)
    return {int(staleness): float(seconds) for staleness, seconds in rows}


def test_a_table_has_a_line_for_each_staleness(capsys, tmp_path):
    words = ["--workload.lengths.distribution=constant", "--workload.lengths.median", "300", "--trainer.publish-s=0.5"]
    assert main(["simulate", *FAST, *words, "--max-staleness=0,2", "--timelines", str(tmp_path)]) == 0
    assert step_seconds(capsys.readouterr().out) == {0: 3.0 + 1.0 + 0.5, 2: pytest.approx(1.333, abs=0.35)}
    assert {path.name for path in tmp_path.iterdir()} == {"staleness-0.json", "staleness-2.json"}


def test_values_come_from_a_file_and_the_command_line_overrides_them(tmp_path):
    file = tmp_path / "times.toml"
    file.write_text(
        'max_staleness = [0]\n[trainer]\nstep_s = 7.0\npublish_s = 0.0\n[workload.lengths]\ndistribution = "constant"'
    )
    assert step_seconds(simulate_words([str(file), *FAST])) == {0: 9.0}
    assert step_seconds(simulate_words([str(file), *FAST, "--trainer.step-s=1"])) == {0: 3.0}


def test_wrong_words_are_refused(capsys, tmp_path):
    assert main(["simulate", "--engine.ids-s", "1"]) == 1
    assert "did you mean" in capsys.readouterr().err
    assert main(["simulate", "--from", str(tmp_path)]) == 1
    assert "--from must be the folder of a run with metrics/metrics.jsonl" in capsys.readouterr().err
    assert main(["simulate", "--help"]) == 0
    assert "--engine.id-s-per-request FLOAT" in capsys.readouterr().out


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


@pytest.mark.parametrize("has_timeline", [True, False])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_times_of_a_run_are_found_in_its_files(tmp_path, max_staleness, has_timeline):
    """The files of a run are written with the numbers of a simulation, which another one must reproduce."""
    config = SimulationConfig(
        num_steps=30,
        workload=WorkloadConfig(
            groups_per_step=3, group_size=4, prompt_ids=50, num_turns=2, lengths=LengthConfig(sigma=0.3)
        ),
        engine=EngineTimes(first_s=0.3, id_s=0.01),
        trainer=TrainerTimes(step_s=2.0, id_s=0.0005, publish_s=0.4),
        timelines=tmp_path / "timeline",
    )
    outcome = simulate(config, max_staleness)
    write_run(tmp_path, config, outcome, max_staleness)
    traces = tmp_path / "timeline" / f"staleness-{max_staleness}.json"
    traces.rename(tmp_path / "timeline" / "rank-0.json")
    if not has_timeline:
        (tmp_path / "timeline" / "rank-0.json").unlink()
    with (tmp_path / "metrics" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "train/num_ro')  # being written, or when the run was killed
    run = measure_run(tmp_path)
    assert run.config.engine.first_s == pytest.approx(0.3, rel=0.02)
    assert run.config.engine.id_s == pytest.approx(0.01, rel=0.02)
    assert run.config.trainer.step_s == pytest.approx(2.0, rel=0.02)
    assert run.config.trainer.id_s == pytest.approx(0.0005, rel=0.02)
    assert run.config.trainer.publish_s == pytest.approx(0.4, rel=0.02)
    assert run.config.max_staleness == (max_staleness,)
    text = simulate_words(["--from", str(tmp_path), "--num-steps=40", f"--max-staleness={max_staleness}"])
    assert step_seconds(text)[max_staleness] == pytest.approx(outcome.step_s, rel=0.1)
    assert re.search(
        rf"the run, max_staleness {max_staleness}: [\d.]+ s a step; simulated: [\d.]+ \([+-]\d\.\d%\)", text
    )


@pytest.mark.parametrize(
    ("settings", "every", "end_s"),
    [
        ({"loop.max_staleness": 0}, 5, 0.5),
        ({"loop.max_staleness": 2}, 5, 2.5),
        ({"loop.max_staleness": 0, "evaluation.engine.kind": "server"}, 0, 2.5),
    ],
    ids=["between steps", "beside them", "on servers of their own"],
)
def test_the_time_after_a_step_is_without_the_evaluations_that_are_in_it(tmp_path, settings, every, end_s):
    """Of two sets, 4 s and 6 s, each five steps; 2.5 s a step pass after the step."""
    config = SimulationConfig(num_steps=30, workload=WorkloadConfig(groups_per_step=1, group_size=2))
    write_run(tmp_path, config, simulate(config, 0), 0)
    found = json.loads((tmp_path / "recipe.json").read_text())
    found["settings"] |= {"evaluation.every": 5, **settings}
    (tmp_path / "recipe.json").write_text(json.dumps(found))
    with run_on_a_clock(tmp_path / "timeline" / "rank-0.json") as (timeline, clock):
        for num_steps in range(0, 30, 5):
            for name, seconds in (("math", 4.0), ("code", 6.0)):
                with timeline.span(f"evaluation of {name}", num_steps=num_steps):
                    clock.append(seconds)
        for _ in range(30):
            with timeline.span("after the step"):
                clock.append(2.5)
    trainer = measure_run(tmp_path).config.trainer
    assert trainer.evaluation_every == every
    assert trainer.evaluation_s == pytest.approx(10.0 if every else 0.0)
    assert trainer.end_s == pytest.approx(end_s)


@contextmanager
def run_on_a_clock(file) -> Iterator[tuple[Timeline, list[float]]]:
    """A timeline whose time is the sum of the numbers in the list."""
    clock = [0.0]
    timeline = Timeline(TraceFile(file, max_bytes=None), clock=lambda: sum(clock))
    yield timeline, clock
    timeline.close()


def test_a_run_that_is_too_short_is_refused(tmp_path):
    config = SimulationConfig(num_steps=7, workload=WorkloadConfig(groups_per_step=1, group_size=2))
    write_run(tmp_path, config, simulate(config, 0), 0)
    with pytest.raises(InvalidInputError, match="must have trained at least 5 steps"):
        measure_run(tmp_path)


def write_run(folder, config, outcome, max_staleness) -> None:
    """The files of a run whose steps are those of a simulation, of which the first are left out."""
    settings = {
        "loop.max_staleness": max_staleness,
        "rollouts.problems_per_step": config.workload.groups_per_step,
        "rollouts.group_size": config.workload.group_size,
    }
    (folder / "recipe.json").write_text(json.dumps({"recipe": "r.py", "settings": settings}))
    num_members = config.workload.groups_per_step * config.workload.group_size
    lines, ended_s = [], 0.0
    for step, made in enumerate(outcome.steps, config.num_warmup):
        num_ids = made.num_ids + num_members * config.workload.prompt_ids
        lines.append({
            "step": step, "train/num_rows": num_members, "groups/num": config.workload.groups_per_step,
            "rollout/num_trajectories": num_members, "rollout/prompt_tokens_mean": config.workload.prompt_ids,
            "rollout/num_sampled_tokens": made.num_ids, "rollout/completion_tokens_mean": made.num_ids / num_members,
            "seconds/train": config.trainer.step_s + config.trainer.id_s * num_ids,
            "seconds/publish": config.trainer.publish_s, "seconds/step": made.ended_s - (ended_s or made.ended_s),
        })  # fmt: skip
        ended_s = made.ended_s
    (folder / "metrics").mkdir()
    (folder / "metrics" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = RandomPlan(config=config.workload, seed=config.seed)
    rollouts = []
    for number, member in np.ndindex(60, config.workload.group_size):
        lengths = [turn.num_ids for turn in plan.turns(number, member)]
        seconds = config.engine.first_s * len(lengths) + config.engine.id_s * sum(lengths)
        turns = [{"num_sampled": length} for length in lengths]
        rollouts.append({"kind": "trajectory", "turns": turns, "wall_time_s": seconds})
    text = "".join(json.dumps(line) + "\n" for line in [{"kind": "step", "format": 1}, *rollouts])
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "step-00000005.rank-0.jsonl.gz").write_bytes(gzip.compress(text.encode()))
