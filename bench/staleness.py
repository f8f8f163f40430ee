"""What stale ids cost in learning: tasks x staleness x losses x learning rates x seeds, against synchronous runs.

    python bench/staleness.py --device cpu --tasks lookup,long --jobs 20 --limit-s 560 --output OUT &
    python bench/staleness.py --device cuda --tasks sums --model FOLDER --jobs 12 --limit-s 560 --output OUT; wait
    python bench/staleness.py --report OUT                                       # the tables of all that is there
    python bench/staleness.py --tasks lookup --seeds 0 --staleness 2 --methods default --jobs 2 --versions 3   # a try

Each cell is `unbroken train` in a process with one thread (bench/staleness_run.py): after the first steps every id is
exactly S versions old, the most that `loop.max_staleness` S allows, and nothing depends on who is faster. Its line in
OUTPUT/results.jsonl is written when it ends; a cell that is there is not run again, and a run that is cut keeps what it
has. Seeds come one after the other, so what is cut is the last seed. Tasks, by their recipes:

    lookup   the demo's tiny model: chains of 2 or 3 lookups with a tool, 0.46 before      recipes/lookup.py
    long     the same model, chains of 4 or 5: up to seven turns, 0.1 before               recipes/lookup.py
    sums     a pretrained chat model, SmolLM2-135M of tools/real_model.py: one turn        bench/real_task.py

The tiny models are made first (`--models`; a minute for each seed), unless they are there. A method is what a run's
options change; `default` is what `loop.max_staleness` chooses. With S steps of lag a run makes S more steps, so that
all runs of a task have rewards of the same policy versions. `end` is the gain of the mean reward of the last five
versions over that of the first version, `pace` that of the mean of all versions: both as shares of the gain of the
synchronous run with the same task, learning rate and seed. A run has collapsed if its end is below half of its best
five versions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unbroken.training.config import TrainerConfig
from unbroken.training.objective.policy_gradient import PolicyGradient

ROOT = Path(__file__).resolve().parent.parent
RUN = Path(__file__).with_name("staleness_run.py")
WINDOW = 5
NUM_SHOWN = 600
"""Of the log of a run that failed."""
LEAST_GAIN = 0.03
"""Shares of a smaller synchronous gain say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A recipe, its options, and how long it is trained."""

    recipe: str
    options: tuple[str, ...]
    learning_rates: tuple[float, float]
    versions: int
    """Policy versions whose rewards are compared."""
    lookups: str = "2-3"
    is_warmed: bool = True
    """Whether it begins with the demo's warmed-up model; otherwise with `--model`."""


TASKS = {
    "lookup": Task(
        recipe="recipes/lookup.py", options=("--rollouts.problems-per-step=12",), learning_rates=(5e-4, 2e-4),
        versions=30,
    ),
    "long": Task(
        recipe="recipes/lookup.py", options=("--rollouts.problems-per-step=12", "--rollouts.limits.max-turns=7"),
        learning_rates=(5e-4, 2e-4), versions=30, lookups="4-5",
    ),
    "sums": Task(
        recipe="bench/real_task.py",
        options=(
            "--task=sums", "--rollouts.limits.max-turns=1", "--rollouts.sampling.max-tokens=24",
            "--rollouts.problems-per-step=16", "--precision=float32", "--trainer.tokens-per-micro-batch=8192",
        ),
        learning_rates=(3e-5, 1e-5), versions=20, is_warmed=False,
    ),
}  # fmt: skip


def get_default() -> tuple[str, ...]:
    """The options of what `loop.max_staleness` chooses by itself."""
    chosen = PolicyGradient().for_stale_rows(TrainerConfig())
    options = {
        "old-logprobs": chosen.old_logprobs,
        "correction.kind": None if chosen.correction is None else chosen.correction.kind,
        **{f"clip.{name}": value for name, value in asdict(chosen.clip).items()},
    }
    return tuple(f"--trainer.{name}={value}" for name, value in options.items() if value is not None)


_SAMPLER, _RECOMPUTE = "--trainer.old-logprobs=sampler", "--trainer.old-logprobs=recompute"
METHODS: Mapping[str, tuple[str, ...]] = {
    "default": get_default(),
    "tight": (_SAMPLER, "--trainer.clip.low=0.1", "--trainer.clip.high=0.14", "--trainer.clip.dual=2"),
    "tis": (_RECOMPUTE, "--trainer.correction.kind=tis"),
    "clip": (_SAMPLER,),
    "dual": (_SAMPLER, "--trainer.clip.dual=2"),
    "cispo": (_SAMPLER, "--loss=cispo"),
    "icepop": (_RECOMPUTE, "--trainer.correction.kind=icepop"),
    "mis": (_RECOMPUTE, "--trainer.correction.kind=mis"),
    "none": (_RECOMPUTE, "--trainer.correction.kind=none"),
    "sapo": (_SAMPLER, "--loss=sapo"),
}
"""What a name adds to the command. `clip` is the synchronous default, 0.2 and 0.28 around the sampler, without a
correction; `dual` adds a dual clip, and is the default of stale rows; `tight` was that before; `cispo` is around the
sampler too."""
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    task: str
    learning_rate: float
    seed: int
    staleness: int
    method: str

    @property
    def name(self) -> str:
        return f"{self.task}-{self.learning_rate:g}-{self.method}-{self.staleness}-{self.seed}"


def plan(arguments: argparse.Namespace) -> list[Cell]:
    """The cells in the order in which they start: a whole seed at a time, its synchronous runs first."""
    cells = []
    for seed, task in itertools.product(arguments.seeds, arguments.tasks):
        rates = arguments.learning_rates or TASKS[task].learning_rates
        cases = [(0, SYNCHRONOUS), *itertools.product((s for s in arguments.staleness if s), arguments.methods)]
        cells += [
            Cell(task=task, learning_rate=rate, seed=seed, staleness=staleness, method=method)
            for (staleness, method), rate in itertools.product(cases, rates)
        ]
    order = {seed: k for k, seed in enumerate(arguments.seeds)}
    return sorted(cells, key=lambda cell: (order[cell.seed], cell.staleness > 0))


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


class Runner:
    """Runs cells in processes, as many at once as there are jobs, and keeps each result at once."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments = arguments
        self._scratch = scratch
        self._lock = threading.Lock()
        self._models: dict[int, Future[bool]] = {}
        self._slots: queue.Queue[str] = queue.Queue()
        gpus = find_gpus() if arguments.device == "cuda" else [""]
        for job in range(arguments.jobs):
            self._slots.put(gpus[job % len(gpus)])

    def run_all(self, cells: Sequence[Cell]) -> int:
        """Run what has no result yet; returns how many failed or were cut."""
        done = {cell_of(result) for result in read_results(self._arguments.output)}
        left = [cell for cell in cells if cell not in done]
        print(f"{len(left)} of {len(cells)} cells to run, {self._arguments.jobs} at a time", flush=True)
        with ThreadPoolExecutor(self._arguments.jobs) as pool:
            seeds = dict.fromkeys(cell.seed for cell in left if TASKS[cell.task].is_warmed)
            self._models = {seed: pool.submit(self._warm_up, seed) for seed in seeds}
            return sum(not done for done in pool.map(self._run, left))

    def _get_model(self, cell: Cell) -> Path:
        if not TASKS[cell.task].is_warmed:
            return Path(self._arguments.model)
        return Path(self._arguments.models) / f"lookup-{cell.seed}"

    def _warm_up(self, seed: int) -> bool:
        folder: Path = self._arguments.models / f"lookup-{seed}"
        if folder.exists():
            return True
        command = [sys.executable, str(RUN), "--warm-up", str(seed), str(folder)]
        return run_command(command, self._scratch / f"lookup-{seed}.log", deadline=self._arguments.deadline)

    def _run(self, cell: Cell) -> bool:
        if cell.seed in self._models and TASKS[cell.task].is_warmed and not self._models[cell.seed].result():
            print(f"{cell.name}: there is no warmed-up model", flush=True)
            return False
        if self._arguments.deadline - time.monotonic() < self._arguments.least_s:
            return False
        task, started, output = TASKS[cell.task], time.monotonic(), self._scratch / cell.name
        versions = self._arguments.versions or task.versions
        options = [
            f"--model={self._get_model(cell)}", f"--output={output}", f"--seed={cell.seed}", *task.options,
            f"--trainer.optimizer.learning-rate={cell.learning_rate}", f"--loop.num-steps={versions + cell.staleness}",
            "--evaluation.num-problems=0", "--rollout-log.groups=0", "--checkpoints.every=100000",
            "--trackers.names=[]", "--loop.max-empty-steps=none",
            *(() if cell.method == SYNCHRONOUS else METHODS[cell.method]), *self._arguments.options,
        ]  # fmt: skip
        last = {option.partition("=")[0]: option for option in options}.values()  # those of the command line win
        command = [sys.executable, str(RUN), str(cell.staleness), task.lookups, str(ROOT / task.recipe), *last]
        log = self._scratch / f"{cell.name}.log"
        gpu = self._slots.get()
        try:
            is_done = run_command(command, log, deadline=self._arguments.deadline, gpus=gpu)
        finally:
            self._slots.put(gpu)
        if not is_done:
            print(f"{cell.name}: failed or out of time: {log.read_text(errors='replace')[-NUM_SHOWN:]}", flush=True)
            return False
        result = {**asdict(cell), "seconds": round(time.monotonic() - started, 1), **read_numbers(output, cell)}
        with self._lock, (self._arguments.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        shutil.rmtree(output)
        means = result["rewards"][-WINDOW:]
        print(f"{cell.name}: {result['seconds']:.0f} s, last {np.mean(means):.3f}", flush=True)
        return True


def read_numbers(output: Path, cell: Cell) -> dict[str, Any]:
    """What a run has measured: the rewards of each policy version, and how far the sampler was off."""
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["train/num_rows"]]
    rewards = [round(line["reward/mean"] or 0.0, 4) for line in lines]
    late = trained[cell.staleness :] or trained
    return {
        "first": rewards[: cell.staleness],
        "rewards": rewards[cell.staleness :],
        "num_trained": len(trained),
        "mean_staleness": mean(line["staleness/mean"] for line in late),
        "k3": statistics.median(line["mismatch/k3"] for line in late) if late else None,
        "left_out": mean(line["train/corrected_fraction"] + line["train/clip_fraction"] for line in trained),
        "entropy": [round(line["train/entropy"], 4) for line in trained],
    }


def mean(values: Iterable[float]) -> float | None:
    """The mean; None of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else None


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of a folder."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cell_of(result: Mapping[str, Any]) -> Cell:
    """The cell of a result."""
    return Cell(**{name: result[name] for name in Cell.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a run reached of the synchronous run's gain."""

    end: float
    pace: float
    has_collapsed: bool
    k3: float
    left_out: float


def find_shares(results: Iterable[Mapping[str, Any]]) -> dict[Cell, Share]:
    """The shares of all cells whose synchronous run is there and learned something."""
    by_cell = {cell_of(result): result for result in results}
    shares = {}
    for cell, result in by_cell.items():
        fields = {**asdict(cell), "staleness": 0, "method": SYNCHRONOUS}
        base = by_cell.get(Cell(**fields))
        if base is None:
            continue
        firsts = [
            reward
            for other, found in by_cell.items()
            if (other.task, other.seed) == (cell.task, cell.seed)
            for reward in (*found["first"], found["rewards"][0])
        ]
        before = float(np.mean(firsts))
        gains = [(np.mean(of["rewards"][-WINDOW:]) - before, np.mean(of["rewards"]) - before) for of in (result, base)]
        if gains[1][0] < LEAST_GAIN or gains[1][1] <= 0 or result["k3"] is None:
            continue
        windows = np.convolve(result["rewards"], np.ones(WINDOW) / WINDOW, "valid")
        shares[cell] = Share(
            end=float(gains[0][0] / gains[1][0]),
            pace=float(gains[0][1] / gains[1][1]),
            has_collapsed=bool(windows[-1] < windows.max() / 2),
            k3=result["k3"],
            left_out=result["left_out"],
        )
    return shares


def write_tables(folder: Path) -> str:
    """Write `tables.md` of all results of a folder, and return it."""
    results = read_results(folder)
    shares = find_shares(results)
    stale = {cell: share for cell, share in shares.items() if cell.staleness}
    parts = [show_synchronous(results)]
    for title, keys in (
        ("Over all tasks and learning rates", ()),
        ("By task and learning rate", ("task", "learning_rate")),
    ):
        parts.append(f"\n{title}: shares of the synchronous gain, mean [least, most]\n")
        parts.append(show_shares(stale, keys))
    text = "\n".join(parts) + "\n"
    (folder / "tables.md").write_text(text)
    return text


def show_synchronous(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each task and learning rate of the synchronous runs."""
    lines = ["| synchronous | learning rate | seeds | first version | last five |", "|---|---|---|---|---|"]
    found = sorted(
        (result for result in results if result["method"] == SYNCHRONOUS),
        key=lambda result: (result["task"], -result["learning_rate"]),
    )
    for (task, rate), group in itertools.groupby(found, key=lambda result: (result["task"], result["learning_rate"])):
        runs = list(group)
        first = np.mean([run["rewards"][0] for run in runs])
        last = [float(np.mean(run["rewards"][-WINDOW:])) for run in runs]
        lines.append(f"| {task} | {rate:g} | {len(runs)} | {first:.3f} | {show_spread(last)} |")
    return "\n".join(lines)


def show_shares(shares: Mapping[Cell, Share], keys: Sequence[str]) -> str:
    """A row for each staleness and method, for each value of `keys`."""

    def key(cell: Cell) -> tuple[Any, ...]:
        return (*(getattr(cell, name) for name in keys), cell.staleness, cell.method)

    titles = [*(name.replace("_", " ") for name in keys), "S", "method", "runs", "end", "pace", "collapsed", "k3",
              "left out"]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for values, group in itertools.groupby(sorted(shares, key=key), key=key):
        runs = [shares[cell] for cell in group]
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        numbers = [
            str(len(runs)), show_spread([run.end for run in runs]), show_spread([run.pace for run in runs]),
            str(sum(run.has_collapsed for run in runs)), f"{np.median([run.k3 for run in runs]):.1e}",
            f"{np.mean([run.left_out for run in runs]):.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join([*shown, *numbers])} |")
    return "\n".join(lines)


def show_spread(values: Sequence[float]) -> str:
    """Mean, least and most."""
    return f"{np.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""

    def split(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=split, default=["lookup", "long"], help=f"of {', '.join(TASKS)}")
    parser.add_argument("--methods", type=split, default=["default", "tis", "clip", "cispo"], help=", ".join(METHODS))
    parser.add_argument("--staleness", type=lambda text: [int(part) for part in split(text)], default=[2, 4, 8])
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in split(text)], default=[0, 1, 2, 3])
    parser.add_argument("--learning-rates", type=lambda text: [float(part) for part in split(text)])
    parser.add_argument("--versions", type=int, help="policy versions that are compared; none: those of the task")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="folder of the pretrained model, for sums")
    parser.add_argument("--models", type=Path, help="folder of the warmed-up models; none: OUTPUT/models")
    parser.add_argument("--limit-s", type=float, default=1e9, help="end what is not done after so many seconds")
    parser.add_argument("--least-s", type=float, default=25.0, help="with less time left no run begins")
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--report", type=Path, help="print the tables of this folder, and run nothing")
    parser.add_argument("--scratch", help="folder for the runs, which are deleted")
    parser.add_argument("options", nargs="*", help="more options of `unbroken train`, after --")
    arguments = parser.parse_args()
    for given, known, name in ((arguments.tasks, TASKS, "--tasks"), (arguments.methods, METHODS, "--methods")):
        if unknown := set(given) - set(known):
            parser.error(f"{name} must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if (
        arguments.model is None
        and arguments.report is None
        and not all(TASKS[task].is_warmed for task in arguments.tasks)
    ):
        parser.error("sums needs --model FOLDER, a pretrained chat model")
    arguments.output = arguments.output.resolve()
    arguments.models = (arguments.models or arguments.output / "models").resolve()
    arguments.model = arguments.model and arguments.model.resolve()
    arguments.deadline = time.monotonic() + arguments.limit_s
    return arguments


def main() -> int:
    """Run all cells, and print the tables."""
    arguments = parse_arguments()
    if arguments.report is not None:
        print(write_tables(arguments.report), end="")
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        num_failed = Runner(arguments, Path(scratch)).run_all(plan(arguments))
    print(write_tables(arguments.output), end="")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
