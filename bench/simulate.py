"""A simulated schedule beside a real one: the loop, trainer and rollouts of bench/overlap.py with its timed engine.

    OMP_NUM_THREADS=1 python bench/simulate.py
    OMP_NUM_THREADS=1 python bench/simulate.py --tasks one_turn --staleness 0,2 --num-steps 6
    OMP_NUM_THREADS=1 python bench/simulate.py --recorded FOLDER        # cases of bench/overlap.py --record FOLDER

The lengths and tools are those of the real rollouts, and the seconds of a turn and of an id the engine's. Those of a
step are from the real run (`simulated`), or for all staleness from the one with staleness 0 (`predicted`). On a CPU
with other work a step takes longer while the engine samples, which nothing can predict. It prints as it goes, and a
table at the end. With `--recorded` nothing runs: the cases are those of an earlier run, as on GPUs, and the engine's
times are fitted to the rollouts of its synchronous case of one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_task import CONTEXT_LENGTH, ENGINE_SIZES, save_model
from overlap import TimedTrainer, Watch, run_case
from overlap_task import TASKS, Task, TaskSource, TimedEngine, sample_order
from simulation import (
    EngineTimes,
    MeasuredRollout,
    Outcome,
    PlannedTurn,
    SimulationConfig,
    TrainerTimes,
    WorkloadConfig,
    fit_engine,
    simulate,
)
from unbroken.rendering.template import TemplateRenderer
from unbroken.runs.engines import RunEngine
from unbroken.training.config import LoopConfig, OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.weights.in_process import InProcessPublisher

FIRST_S = 0.02
COLUMNS = (
    "task", "S", "real s/step", "simulated", "off", "predicted", "off", "idle train", "simulated", "idle sampl",
    "simulated", "stale", "simulated", "given up", "simulated",
)  # fmt: skip
RECORDED = ("task", "S", "steps", "real s/step", "simulated", "off", "predicted", "off", "stale", "predicted")
RECORDED_ROW = "{:>10} {:>2} {:>5} {:>11} {:>9} {:>6} {:>9} {:>6} {:>5} {:>9}"
ROW = "{:>10} {:>2} {:>11} {:>9} {:>6} {:>9} {:>6} {:>10} {:>9} {:>10} {:>9} {:>5} {:>9} {:>8} {:>9}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The turns that `TaskSource` draws."""

    task: Task
    seed: int

    def turns(self, number: int, member: int) -> Sequence[PlannedTurn]:
        """See `Plan`."""
        task, rng = self.task, np.random.default_rng([self.seed, number, member])
        rng.integers(2**31)  # the seed of the sampling
        turns = []
        for left in reversed(range(task.num_turns)):
            length = int(np.clip(rng.lognormal(np.log(task.median), task.sigma), 4, task.max_ids))
            turns.append(PlannedTurn(num_ids=length, tool_s=float(rng.uniform(*task.tool_s)) if left else 0.0))
        return turns


def find_times(watch: Watch) -> TrainerTimes:
    """The trainer's times in a real run; beside a step a publication in the process takes no time."""
    lines = watch.lines[watch.num_warmup :]

    def mean(name: str) -> float:
        return float(np.mean([line.get(name) or 0.0 for line in lines]))

    others = mean("seconds/step") - mean("seconds/collect") - mean("seconds/publish")
    return TrainerTimes(step_s=others, publish_s=mean("seconds/publish"))


def compare(watch: Watch, outcome: Outcome, predicted: Outcome) -> tuple[object, ...]:
    """A row of the table."""
    lines = watch.lines[watch.num_warmup :]
    whole_s = sum(line["seconds/step"] or 0.0 for line in lines)
    real_s = (watch.ends_s[-1] - watch.ends_s[watch.num_warmup - 1]) / len(lines)

    def mean(name: str) -> float:
        return float(np.mean([line.get(name) or 0.0 for line in lines]))

    given_up = sum(mean(f"sampler/num_{fate}") for fate in ("cancelled", "dropped"))

    def weigh(name: str) -> float:
        return sum((line[name] or 0.0) * (line["seconds/step"] or 0.0) for line in lines) / whole_s

    pairs = [(weigh(f"idle/{name}"), outcome.mean_idle(f"idle/{name}")) for name in ("trainer", "sampler")]
    return (
        watch.task, watch.max_staleness,
        f"{real_s:.3f}", f"{outcome.step_s:.3f}", f"{outcome.step_s / real_s - 1:+.1%}",
        f"{predicted.step_s:.3f}", f"{predicted.step_s / real_s - 1:+.1%}",
        *(f"{share:.0%}" for pair in pairs for share in pair),
        f"{mean('staleness/mean'):.2f}", f"{outcome.mean_staleness:.2f}",
        f"{given_up / (given_up + mean('groups/num')):.0%}", f"{outcome.given_up_share:.0%}",
    )  # fmt: skip


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """All cases, with one trainer."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-5),
        old_logprobs=OldLogprobs.RECOMPUTE,
        correction=Correction(kind=CorrectionKind.TIS),
    )
    trainer = TimedTrainer(policy, config, accelerator=Accelerator(cpu=True))
    trainer.least_s = arguments.train_s
    renderer = TemplateRenderer(AutoTokenizer.from_pretrained(folder))
    engine = TimedEngine(
        context_length=CONTEXT_LENGTH, vocab_size=policy.config.vocab_size, first_s=FIRST_S, id_s=arguments.id_s
    )
    rows = []
    for name in arguments.tasks.split(","):
        task, times = TASKS[name].scaled(arguments.length_factor), TrainerTimes()
        for staleness in arguments.staleness:
            watch = Watch(
                task=name, max_staleness=staleness, num_warmup=arguments.num_warmup, num_steps=arguments.num_steps,
                until_s=time.perf_counter() + 3600,
            )  # fmt: skip
            source = TaskSource(
                sample_order=partial(sample_order, engine=engine, renderer=renderer), task=task,
                groups_per_step=arguments.problems, group_size=arguments.group_size, seed=0,
            )  # fmt: skip
            sampler = RunEngine(engine=engine, publisher=InProcessPublisher(engine))
            await run_case(watch, source, trainer, sampler, arguments)
            times = find_times(watch) if staleness == 0 else times
            own, predicted = [
                await asyncio.to_thread(simulate_case, arguments, task, staleness, each)
                for each in (find_times(watch), times)
            ]
            rows.append(compare(watch, own, predicted))
            print(ROW.format(*COLUMNS), ROW.format(*map(str, rows[-1])), sep="\n", flush=True)
    print(f"\n{arguments.problems} groups of {arguments.group_size}, steps of {arguments.train_s} s")
    print(ROW.format(*COLUMNS), *(ROW.format(*map(str, row)) for row in rows), sep="\n", flush=True)


def simulate_case(arguments: argparse.Namespace, task: Task, staleness: int, times: TrainerTimes) -> Outcome:
    """The same case on a virtual clock."""
    config = SimulationConfig(
        num_steps=arguments.num_steps + arguments.num_warmup,
        num_warmup=arguments.num_warmup,
        max_drops=arguments.max_drops,
        publish_beside_step=not arguments.publish_between_steps,
        workload=WorkloadConfig(groups_per_step=arguments.problems, group_size=arguments.group_size),
        engine=EngineTimes(first_s=FIRST_S, id_s=arguments.id_s),
        trainer=times,
    )
    started = time.perf_counter()
    outcome = simulate(config, staleness, plan=TaskPlan(task=task, seed=0))
    print(f"  simulated in {time.perf_counter() - started:.1f} s: {times}", flush=True)
    return outcome


def simulate_recorded(folder: Path, tasks: Sequence[str], seed: int = 0) -> None:
    """Simulate the cases that bench/overlap.py has recorded, and print a table."""
    engine = fit_recorded_engine(read_case(folder, "one_turn", 0))
    print(f"{engine}\n{RECORDED_ROW.format(*RECORDED)}", flush=True)
    for name in tasks:
        synchronous: TrainerTimes | None = None
        for path in sorted(folder.glob(f"{name}-*.json")):
            case = json.loads(path.read_text())
            staleness, num_warmup, ends_s = case["max_staleness"], case["num_warmup"], case["ends_s"]
            num_steps = len(ends_s) - num_warmup
            watch = Watch(
                task=name, max_staleness=staleness, num_warmup=num_warmup, num_steps=num_steps, until_s=0,
                lines=case["metrics"],
            )  # fmt: skip
            if not num_steps:
                continue
            own = find_recorded_times(watch)
            synchronous = own if staleness == 0 else synchronous
            real_s = (ends_s[-1] - ends_s[num_warmup - 1]) / num_steps
            config = SimulationConfig(
                num_steps=len(watch.lines),
                num_warmup=num_warmup,
                workload=WorkloadConfig(groups_per_step=case["groups_per_step"], group_size=case["group_size"]),
                engine=engine,
                trainer=own,
            )
            plan = TaskPlan(task=TASKS[name].scaled(case["length_factor"]), seed=seed)
            simulated = simulate(config, staleness, plan=plan)
            predicted = simulate(replace(config, trainer=synchronous or own), staleness, plan=plan)
            cells = [name, staleness, num_steps, f"{real_s:.3f}"]
            for outcome in (simulated, predicted):
                cells += [f"{outcome.step_s:.3f}", f"{outcome.step_s / real_s - 1:+.1%}"]
            stale = np.mean([line.get("staleness/mean") or 0.0 for line in watch.lines[num_warmup:]])
            print(RECORDED_ROW.format(*cells, f"{stale:.2f}", f"{predicted.mean_staleness:.2f}"), flush=True)


def read_case(folder: Path, task: str, staleness: int) -> dict[str, Any]:
    """A case that bench/overlap.py has recorded."""
    content: dict[str, Any] = json.loads((folder / f"{task}-{staleness}.json").read_text())
    return content


def fit_recorded_engine(case: dict[str, Any]) -> EngineTimes:
    """The engine's times, from rollouts of one turn that began together."""
    rollouts = [
        MeasuredRollout(step=step, lengths=lengths, seconds=seconds)
        for step, lengths, seconds in case["rollouts"]
        if step >= case["num_warmup"]
    ]
    times = fit_engine(rollouts, num_together=case["groups_per_step"] * case["group_size"])
    return replace(times, max_requests=int(ENGINE_SIZES[-1]))


def find_recorded_times(watch: Watch) -> TrainerTimes:
    """The trainer's times where a publication beside a step takes none of the trainer's."""
    times = find_times(watch)
    if watch.max_staleness == 0:
        return times
    lines = watch.lines[watch.num_warmup :]
    return replace(times, step_s=float(np.mean([line["seconds/train"] or 0.0 for line in lines])))


def main() -> None:
    """Read the options, make the model and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="one_turn,four_turns")
    parser.add_argument(
        "--staleness", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2, 4],
        help="0 comes first: its times are those of all",
    )  # fmt: skip
    parser.add_argument("--problems", type=int, default=4, help="groups in a step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--num-warmup", type=int, default=2)
    parser.add_argument("--max-drops", type=int, default=LoopConfig(num_steps=1).max_drops)
    parser.add_argument("--publish-between-steps", action="store_true")
    parser.add_argument("--train-s", type=float, default=3.0, help="the least seconds of a step")
    parser.add_argument("--id-s", type=float, default=0.024, help="seconds for an id")
    parser.add_argument(
        "--length-factor", type=float, default=0.25, help="of all lengths, so that a step computes little"
    )
    parser.add_argument("--recorded", type=Path, help="simulate the cases in this folder of bench/overlap.py --record")
    arguments = parser.parse_args()
    if arguments.recorded:
        simulate_recorded(arguments.recorded, arguments.tasks.split(","))
        return
    arguments.shape, arguments.dtype = "tiny", "float32"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(folder, arguments)
        asyncio.run(run(arguments, folder))


if __name__ == "__main__":
    main()
