"""What staleness costs in learning: the demo's task at several `max_staleness`, with equal numbers of trained groups.

    OMP_NUM_THREADS=1 python bench/staleness.py --seeds 0,1,2                          # about 3 minutes a run
    OMP_NUM_THREADS=1 python bench/staleness.py --seeds 0 --num-steps 20 --cases 0,4

A case is a staleness, as 4, or as 8:none without any correction, or as 8:sampler with PPO's clip around the sampler.
For each seed the same warmed-up model is trained by `recipes/lookup.py` in each case, one after the other. It prints
the evaluation before and after and the mean reward of every tenth of the steps, and at the end means over the seeds.
The engine always samples as far ahead as the staleness allows, or a fast one would keep ids young (`adapt_ahead`).
Runs stay in `--output`; those that are finished are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "lookup.py"
LOSSES = {
    "": (),
    "none": ("--trainer.old-logprobs=recompute", "--trainer.correction.kind=none"),
    "sampler": ("--trainer.old-logprobs=sampler",),
}
NUM_POINTS = 10


def make_run(case: str, seed: int, arguments: argparse.Namespace) -> Path | None:
    """Make one run, unless it is there; None if it fails."""
    staleness, _, loss = case.partition(":")
    output: Path = arguments.output / f"seed-{seed}" / case.replace(":", "-")
    if (output / "final").exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    model = arguments.output / f"seed-{seed}" / "model"
    command = [
        sys.executable, "-m", "unbroken", "train", str(RECIPE), f"--seed={seed}", f"--output={output}",
        f"--loop.max-staleness={staleness}", f"--loop.num-steps={arguments.num_steps}",
        "--loop.adapt-ahead=false", f"--evaluation.num-problems={arguments.num_problems}", "--rollout-log.groups=0",
        *LOSSES[loss],
        *([f"--model={model}"] if model.exists() else []), *arguments.options,
    ]  # fmt: skip
    started = time.perf_counter()
    with output.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code != 0:
        print(f"seed {seed}, {case}: ended with {code}, see {output.with_suffix('.log')}", flush=True)
        return None
    if not model.exists():  # the first case has warmed it up
        (output / "model").rename(model)
    print(f"seed {seed}, staleness {case}: {time.perf_counter() - started:.0f} s", flush=True)
    return output


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(output: Path) -> list[float]:
    """The mean reward of each tenth of the steps."""
    rewards = [line["reward/mean"] or 0.0 for line in read(output / "metrics" / "metrics.jsonl")]
    return [float(np.mean(part)) for part in np.array_split(rewards, NUM_POINTS)]


def show(name: str, output: Path) -> list[float]:
    """Print a run's numbers: the evaluations before and after, staleness, corrected share, k3, and the curve."""
    evaluations = [line["reward/mean"] for line in read(output / "evaluation.jsonl")]
    lines = [line for line in read(output / "metrics" / "metrics.jsonl") if line["train/num_rows"]]
    stale = np.mean([line["staleness/mean"] for line in lines])
    corrected = np.mean([line["train/corrected_fraction"] for line in lines])
    k3 = np.median([line["mismatch/k3"] for line in lines])
    points = curve(output)
    print(
        f"{name:>20}  before {evaluations[0]:.3f}  after {evaluations[-1]:.3f}  staleness {stale:.2f}  "
        f"corrected {corrected:.3f}  k3 {k3:.1e}  reward", *(f"{point:.2f}" for point in points), flush=True,
    )  # fmt: skip
    return [evaluations[0], evaluations[-1], float(stale), *points]


def main() -> None:
    """Make all runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--cases", default="0,1,4,8,8:none")
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--num-problems", type=int, default=256, help="of the evaluations")
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"))
    parser.add_argument("options", nargs="*", help="more options of `unbroken train`, after --")
    arguments = parser.parse_args()
    numbers: dict[str, list[list[float]]] = defaultdict(list)
    for seed in arguments.seeds:
        for case in arguments.cases.split(","):
            output = make_run(case, seed, arguments)
            if output is not None:
                numbers[case].append(show(f"seed {seed}, {case}", output))
    print("\nmeans over seeds (after: with the standard error)")
    for case, runs in numbers.items():
        means, after = np.mean(runs, axis=0), [run[1] for run in runs]
        error = np.std(after, ddof=1) / len(after) ** 0.5 if len(after) > 1 else float("nan")
        points = " ".join(f"{point:.2f}" for point in means[3:])
        print(
            f"{case:>12}  before {means[0]:.3f}  after {means[1]:.3f} ± {error:.3f}  "
            f"staleness {means[2]:.2f}  reward {points}"
        )


if __name__ == "__main__":
    main()
