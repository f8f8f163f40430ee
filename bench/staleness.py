"""What staleness costs in learning: the demo's task at several `max_staleness`, with equal numbers of trained groups.

    PYTHONPATH=src python bench/staleness.py --jobs 14                            # 32 runs: 4, 8 x 4 settings x 4 seeds
    PYTHONPATH=src python bench/staleness.py --jobs 2 --seeds 0 --staleness 2 --settings default --num-steps 3

Each run is a process of its own with one thread of torch. It needs one core; the rest is waiting for the engine of its
own process. 50 steps take 2 to 3 minutes on a core of 2 to 3 GHz, and for each seed a model is warmed up before (40 s,
all seeds at once): 32 runs on 14 cores are three waves, about 9 minutes. Add `--limit-s 540` to end what is not done
by then. Finished runs stay in `--output` and are not made again, so the same command goes on, and more settings can be
added to the same table. The package need not be installed.

For each seed the same warmed-up model is trained by `recipes/lookup.py`. The engine always samples as far ahead as the
staleness allows, or a fast one would keep ids young (`adapt_ahead`). After each run `table.md` and `table.json` are
written: the evaluation before and after (`--num-problems` problems), `last`, the mean reward of the last five steps,
and `lowest`, the smallest mean reward of a step after the first that reached 0.9 (none: it never did).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
REACHED = 0.9
NUM_LAST = 5
SAMPLER = ("--trainer.old-logprobs=sampler",)
RECOMPUTE = ("--trainer.old-logprobs=recompute",)
SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "none": (*RECOMPUTE, "--trainer.correction.kind=none"),
    "tis": (*RECOMPUTE, "--trainer.correction.kind=tis"),
    "icepop": (*RECOMPUTE, "--trainer.correction.kind=icepop"),
    "mask": (*RECOMPUTE, "--trainer.correction.kind=token_mask", "--trainer.correction.low=0.5"),
    "mis": (*RECOMPUTE, "--trainer.correction.kind=mis"),
    "sequence_truncate": (*RECOMPUTE, "--trainer.correction.kind=sequence_truncate"),
    "sampler": SAMPLER,
    "sampler_dual": (*SAMPLER, "--trainer.clip.dual=3"),
    "sampler_tight": (*SAMPLER, "--trainer.clip.low=0.1", "--trainer.clip.high=0.14", "--trainer.clip.dual=2"),
    "sampler_sapo": (*SAMPLER, "--loss=sapo"),
    "sampler_cispo": (*SAMPLER, "--loss=cispo"),
    "sampler_gspo": (*SAMPLER, "--loss=gspo", "--trainer.clip.low=0.05", "--trainer.clip.high=0.05"),
}
"""What a name adds to the command; `NAME/4` divides the learning rate by 4 too."""
LEARNING_RATE = 5e-4
"""The recipe's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What one run is judged by."""

    staleness: int
    setting: str
    seed: int
    before: float
    after: float
    last: float
    lowest: float | None
    mean_staleness: float
    k3: float
    """Median over the steps."""
    left_out: float
    """The share of ids that were clipped or corrected, mean over the steps."""
    rewards: list[float]
    """Of each step."""


def run_recipe(
    output: Path, options: Sequence[str], *, python: str = sys.executable, deadline: float | None = None
) -> bool:
    """Make one run of the recipe in a process of its own; whether it ended well."""
    command = [python, "-m", "unbroken", "train", str(ROOT / "recipes" / "lookup.py"), f"--output={output}", *options]
    return run_command(command, output.with_suffix(".log"), deadline=deadline)


def run_command(command: Sequence[str], log: Path, *, deadline: float | None, gpus: str = "") -> bool:
    """Run a command with this tree's package, one thread and these GPUs until it ends or the deadline; whether it ended
    well.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": gpus}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        try:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ended = subprocess.run(command, stdout=file, stderr=file, check=False, env=env, timeout=left_s)
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def find_gpus() -> list[str]:
    """The numbers of the GPUs that may be used; one that is empty if there are none."""
    there = ",".join(map(str, range(torch.cuda.device_count())))
    return os.environ.get("CUDA_VISIBLE_DEVICES", there).split(",")


def get_options(setting: str) -> tuple[str, ...]:
    """The options of a setting's name."""
    name, _, divisor = setting.partition("/")
    slower = (f"--trainer.optimizer.learning-rate={LEARNING_RATE / float(divisor)}",) if divisor else ()
    return (*SETTINGS[name], *slower)


def warm_up(seed: int, arguments: argparse.Namespace, deadline: float | None) -> Path:
    """Write a seed's model, unless it is there: a run of one step makes it."""
    model: Path = arguments.output / f"seed-{seed}" / "model"
    if not model.exists():
        output = arguments.output / f"seed-{seed}" / "warm-up"
        run_recipe(output, [f"--seed={seed}", "--loop.num-steps=1", "--evaluation.num-problems=0"], deadline=deadline)
        (output / "model").rename(model)
    return model


def make_run(case: tuple[int, str, int], arguments: argparse.Namespace, deadline: float | None) -> Numbers | None:
    """Make one run, unless it is there, and read its numbers; None if it failed."""
    seed, setting, staleness = case
    output: Path = arguments.output / f"seed-{seed}" / f"{setting.replace('/', '-slower-')}-{staleness}"
    options = [
        f"--seed={seed}", f"--model={arguments.output / f'seed-{seed}' / 'model'}",
        f"--loop.max-staleness={staleness}", "--loop.adapt-ahead=false", f"--loop.num-steps={arguments.num_steps}",
        f"--evaluation.num-problems={arguments.num_problems}", "--rollout-log.groups=none", "--checkpoints.every=1000",
        *get_options(setting), *arguments.options,
    ]  # fmt: skip
    started = time.monotonic()
    if not (output / "final").exists() and not run_recipe(output, options, deadline=deadline):
        print(f"{output.name}, seed {seed}: failed or out of time, see {output.with_suffix('.log')}", flush=True)
        return None
    numbers = read_numbers(output, staleness=staleness, setting=setting, seed=seed)
    print(
        f"{output.name}, seed {seed}: {time.monotonic() - started:.0f} s, after {numbers.after:.3f}, "
        f"last {numbers.last:.3f}, lowest {numbers.lowest}",
        flush=True,
    )
    return numbers


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_numbers(output: Path, *, staleness: int, setting: str, seed: int) -> Numbers:
    """What a finished run wrote."""
    evaluations = [line["reward/mean"] for line in read_lines(output / "evaluation.jsonl")]
    lines = read_lines(output / "metrics" / "metrics.jsonl")
    rewards = [line["reward/mean"] or 0.0 for line in lines]
    trained = [line for line in lines if line["train/num_rows"]]
    start = next((i for i, reward in enumerate(rewards) if reward >= REACHED), None)
    return Numbers(
        staleness=staleness,
        setting=setting,
        seed=seed,
        before=evaluations[0],
        after=evaluations[-1],
        last=float(np.mean(rewards[-NUM_LAST:])),
        lowest=None if start is None else min(rewards[start:]),
        mean_staleness=float(np.mean([line["staleness/mean"] or 0.0 for line in trained])),
        k3=float(np.median([line["mismatch/k3"] for line in trained])),
        left_out=float(np.mean([line["train/corrected_fraction"] + line["train/clip_fraction"] for line in trained])),
        rewards=[round(reward, 3) for reward in rewards],
    )


def write_table(found: Sequence[Numbers], folder: Path) -> str:
    """Write `table.json` with all runs and `table.md` with a row for each case, and return the latter."""
    (folder / "table.json").write_text(json.dumps([asdict(each) for each in found], indent=1))
    lines = [
        "| `max_staleness` | setting | mean staleness | k3 | left out | after, by seed | mean | last five steps | "
        "lowest after 0.9 | mean reward of each tenth of the steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(found, key=lambda each: (each.staleness, each.setting, each.seed))
    for (staleness, setting), group in itertools.groupby(ordered, key=lambda each: (each.staleness, each.setting)):
        runs = list(group)
        lowest = " ".join("-" if run.lowest is None else f"{run.lowest:.2f}" for run in runs)
        tenths = [[float(np.mean(part)) for part in np.array_split(run.rewards, 10) if len(part)] for run in runs]
        lines.append(
            f"| {staleness} | {setting} | {np.mean([run.mean_staleness for run in runs]):.2f} | "
            f"{np.mean([run.k3 for run in runs]):.1e} | {np.mean([run.left_out for run in runs]):.3f} | "
            f"{' '.join(f'{run.after:.3f}' for run in runs)} | {np.mean([run.after for run in runs]):.3f} | "
            f"{' '.join(f'{run.last:.2f}' for run in runs)} | {lowest} | "
            f"{' '.join(f'{value:.2f}' for value in np.mean(tenths, axis=0))} |"
        )
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text)
    return text


def main() -> None:
    """Make all runs, the oldest staleness first, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2, 3])
    parser.add_argument("--staleness", type=lambda text: [int(part) for part in text.split(",")], default=[8, 4])
    parser.add_argument("--settings", default="tis,sampler_dual,mis,tis/4", help=f"of {', '.join(SETTINGS)}, or NAME/4")
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--num-problems", type=int, default=128, help="of the evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit-s", type=float, help="end what is not done after so many seconds")
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"))
    parser.add_argument("options", nargs="*", help="more options of `unbroken train`, after --")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    deadline = None if arguments.limit_s is None else time.monotonic() + arguments.limit_s
    cases = [
        (seed, setting, staleness)
        for staleness in arguments.staleness
        for setting in arguments.settings.split(",")
        for seed in arguments.seeds
    ]
    found: list[Numbers] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(partial(warm_up, arguments=arguments, deadline=deadline), arguments.seeds))
        runs = [pool.submit(make_run, case, arguments, deadline) for case in cases]
        for run in as_completed(runs):
            if (numbers := run.result()) is not None:
                found.append(numbers)
                write_table(found, arguments.output)
    print(write_table(found, arguments.output), end="")


if __name__ == "__main__":
    main()
