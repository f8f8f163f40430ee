"""Learning with real weights: reward against steps and seconds, k3, and the parts of a step; ours and TRL's.

    python bench/real.py --model FOLDER --output runs/real                       # one GPU, one process at a time
    python bench/real.py --model FOLDER --output runs/real --jobs 5 --sides fast,trl   # more seeds, without their times
    python bench/real.py --report runs/real                                      # the tables of all that is there
    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/real.py --model FOLDER --output runs/try --device cpu \
        --problems 4 --steps 3 --seeds 0                                         # everything once, on a CPU

FOLDER has a pretrained chat model, such as SmolLM2-135M-Instruct (`tools/real_model.py`). Tasks are in real_task.py:
`sums` is one turn, `tool` up to eight with a calculator between them. Three sides have the same problems in the same
order, 32 x 8 rollouts a step, the same limits and learning rate, and otherwise their defaults:

    fast     `unbroken train`, engine.kind colocated
    exact    the same with `--trainer.numerics exact`
    trl      TRL's GRPOTrainer, vLLM in the same process (real_trl.py)

Each task, side and seed is a process. Its line in OUTPUT/results.jsonl has every step: reward, k3, seconds of the wall
clock and of each part, and when the step's metrics arrived on the clock of this process, which times nothing else; the
seconds until the first step are apart. A later line of the same task, side, seed and number of jobs takes the place of
an earlier one, and a run that the limit has cut keeps its steps. With `--jobs` above 1 the processes share the GPU:
their curves over steps count, their times do not, and no table of seconds has them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

from real_task import CONTEXT, MAX_TURNS, options_of
from unbroken.reports import WIDTH, ReportTable

SIDES = ("fast", "exact", "trl")
FILE = "results.jsonl"
PARTS = (
    "collect", "sleep", "units", "score", "records", "train", "publish", "checkpoint", "metrics", "log", "after_step",
    "outages", "other",
)  # fmt: skip
"""Of `seconds/wall` (docs/metrics.md). TRL's `publish` is `sync_weights`, its `score` rewards and old logprobs, and
`train` the rest."""
NUM_WARMUP = 3
"""Steps that are not in medians."""
WINDOW = 5
"""Steps of the mean reward that a table shows at one of them: that step and those before it."""
SHARED_GPU = ("--trainer.tokens-per-micro-batch=8192",)
"""Several trainers would each take all of the memory that is free."""


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def vllm_options(arguments: argparse.Namespace) -> list[str]:
    """The options of our vLLM: what TRL's has too."""
    options = ["--max-model-len", str(CONTEXT)]
    if arguments.device == "cpu":
        return [*options, "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    options += ["--dtype", "bfloat16", "--gpu-memory-utilization", str(arguments.gpu_memory)]
    if arguments.kv_cache_memory_bytes is not None:
        options += ["--kv-cache-memory-bytes", str(arguments.kv_cache_memory_bytes)]
    return options


def command_of(task: str, side: str, seed: int, run: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of one process."""
    if side == "trl":
        own = ["--task", task, "--seed", str(seed), "--run", str(run)]
        return [sys.executable, __file__, *sys.argv[1:], *own]
    options = [
        f"--model={arguments.model}", f"--output={run}", f"--seed={seed}",
        f"--loop.num-steps={arguments.steps}", f"--rollouts.problems-per-step={arguments.problems}",
        f"--engine.kind={arguments.engine}", f"--trainer.numerics={side}", *options_of(task),
    ]  # fmt: skip
    if arguments.engine == "colocated":
        options.append(f"--engine.options={json.dumps(vllm_options(arguments))}")
    if arguments.device == "cpu":
        options.append("--precision=float32")
    if arguments.jobs > 1:
        options += SHARED_GPU
    return [sys.executable, "-m", "unbroken", "train", str(Path(__file__).with_name("real_task.py")), *options]


def run_one(task: str, side: str, seed: int, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run one process until it ends or the time is up, and return its result; None if it made no step."""
    name, left_s = f"{task}-{side}-{seed}", arguments.ends_s - time.monotonic()
    if left_s < arguments.least_s:
        say(f"{name} is left out: {left_s:.0f} s are left")
        return None
    run = scratch / name
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    say(f"{name} begins")
    began_s = time.monotonic()
    arrived_s: list[float] = []
    metrics, log = run / "metrics" / "metrics.jsonl", scratch / f"{name}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command_of(task, side, seed, run, arguments),
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "MASTER_PORT": str(port)},
        )
        try:
            while process.poll() is None and time.monotonic() < arguments.ends_s:
                time.sleep(0.02)
                note_arrivals(metrics, arrived_s, began_s)
        finally:
            code = end_process(process)
    note_arrivals(metrics, arrived_s, began_s)  # it may have ended right after a line
    lines = [json.loads(line) for line in metrics.read_text().splitlines()[: len(arrived_s)]] if arrived_s else []
    if code != 0 or len(lines) < arguments.steps:
        say(f"{name}: exit status {code} after {len(lines)} of {arguments.steps} steps; the end of its output:")
        print(log.read_text(errors="replace")[-arguments.shown_chars :], flush=True)
    if not lines:
        return None
    result = {
        "task": task, "side": side, "seed": seed, "jobs": arguments.jobs, "device": arguments.device_name,
        "model": arguments.model.name, "steps": arguments.steps, "startup_s": arrived_s[0] - lines[0]["seconds/wall"],
        "rewards": [line["reward/mean"] for line in lines], "wall_s": [line["seconds/wall"] for line in lines],
        "arrived_s": arrived_s, "k3": [line.get("mismatch/k3") for line in lines],
        "max_abs": [line.get("mismatch/max_abs") for line in lines],
        "parts": {part: [line.get(f"seconds/{part}") or 0.0 for line in lines] for part in PARTS},
    }  # fmt: skip
    print("RESULT " + json.dumps({**describe(result), "task": task, "side": side, "seed": seed}), flush=True)
    return result


def note_arrivals(metrics: Path, arrived_s: list[float], began_s: float) -> None:
    """Add the time to `arrived_s` for each whole line of a file of metrics that was not there before."""
    num_lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    arrived_s += [time.monotonic() - began_s] * (num_lines - len(arrived_s))


def end_process(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left of a process group, and return the exit status."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # an engine that has lost its parent
    return code


def run_all(arguments: argparse.Namespace) -> int:
    """Run all sides of all tasks and seeds; returns how many have no result."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    planned = [
        (task, side, seed)
        for task in arguments.tasks.split(",")
        for seed in map(int, arguments.seeds.split(","))
        for side in arguments.sides.split(",")
    ]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(run_and_keep, *one, Path(scratch), arguments) for one in planned]
        return sum(not each.result() for each in running)


def run_and_keep(task: str, side: str, seed: int, scratch: Path, arguments: argparse.Namespace) -> bool:
    """Run one process, and add its result to the file at once: the rest may be cut. Returns whether it has one."""
    result = run_one(task, side, seed, scratch, arguments)
    if result is not None:
        with (arguments.output / FILE).open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result is not None


def describe(result: dict[str, Any]) -> dict[str, Any]:
    """Medians of a run after its first steps, and what its parts add up to."""
    first = min(NUM_WARMUP, len(result["rewards"]) - 1)
    parts = {part: statistics.median(values[first:]) for part, values in result["parts"].items()}
    wall_s, arrived_s = result["wall_s"][first:], result["arrived_s"]
    k3 = [value for value in result["k3"] if value is not None]
    max_abs = [value for value in result["max_abs"] if value is not None]
    return {
        "steps": len(result["rewards"]),
        "first_reward": mean(result["rewards"][:WINDOW]),
        "last_reward": mean(result["rewards"][-WINDOW:]),
        "k3": statistics.median(k3) if k3 else None,
        "max_k3": max(k3, default=None),
        "max_abs": max(max_abs, default=None),
        "startup_s": result["startup_s"],
        "wall_s": statistics.median(wall_s),
        "known_share": 1 - sum(result["parts"]["other"][first:]) / sum(wall_s),
        "clock_share": sum(result["wall_s"][1:]) / (arrived_s[-1] - arrived_s[0]) if len(arrived_s) > 1 else None,
        "parts": {part: seconds for part, seconds in parts.items() if seconds},
    }


def mean(values: Iterable[float | None]) -> float:
    """The mean of those that are there; NaN of none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of a folder; of those with one task, side, seed and number of jobs, the last."""
    found = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return list({tuple(each[key] for key in ("task", "side", "seed", "jobs")): each for each in found}.values())


def choose_curves(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result of each seed for curves over steps: the one that has more steps, and of these the one run alone."""
    ranked = sorted(results, key=lambda each: (len(each["rewards"]), -each["jobs"]))
    return list({each["seed"]: each for each in ranked}.values())


def reward_at(result: dict[str, Any], step: int) -> float | None:
    """The mean reward of a step and those before it in the window; None if the run did not come so far."""
    if step >= len(result["rewards"]):
        return None
    return mean(result["rewards"][max(0, step - WINDOW + 1) : step + 1])


def reward_after(result: dict[str, Any], seconds: float) -> float | None:
    """The reward, as `reward_at`, of the last step that had ended so many seconds after the first began."""
    ended, passed_s = -1, 0.0
    for step, wall_s in enumerate(result["wall_s"]):
        passed_s += wall_s
        if passed_s > seconds:
            return None if ended < 0 else reward_at(result, ended)
        ended = step
    return None


def report(folder: Path) -> None:
    """Print the tables of a folder."""
    results = read_results(folder)
    for task in MAX_TURNS:
        of_task = {side: [each for each in results if (each["task"], each["side"]) == (task, side)] for side in SIDES}
        if not any(of_task.values()):
            continue
        print(f"\n== {task}: {', '.join(sorted({each['device'] for of in of_task.values() for each in of}))}")
        print(f"\nreward by step, mean of {WINDOW} steps; in brackets the least and the most of the seeds")
        curves = {side: choose_curves(found) for side, found in of_task.items()}
        last = max(len(each["rewards"]) for of in curves.values() for each in of) - 1
        print_curves("step", [*range(0, last, 10), last], curves, reward_at)
        alone = {side: [each for each in found if each["jobs"] == 1] for side, found in of_task.items()}
        if not any(alone.values()):
            print("\nall runs shared the GPU: their seconds are not comparable, and are left out")
            continue
        longest_s = max(sum(each["wall_s"]) for of in alone.values() for each in of)
        stride = max(1, round(longest_s / 8))
        print("\nreward by seconds since the first step began, of runs that had the GPU for themselves")
        print_curves("seconds", range(stride, int(longest_s) + 1, stride), alone, reward_after)
        print_parts(alone)


def print_curves(title: str, places: Iterable[float], curves: dict[str, list[dict[str, Any]]], find: Any) -> None:
    """Print a row for each place, with the mean, least and most over the seeds of each side."""
    rows = [[title, *(f"{side} ({len(found)})" for side, found in curves.items() if found)]]
    for place in places:
        row = [str(place)]
        for found in filter(None, curves.values()):
            values = [value for each in found if (value := find(each, place)) is not None]
            spread = f" [{min(values):.3f}, {max(values):.3f}]" if values else ""
            row.append(f"{mean(values):.3f}{spread}" if values else "-")
        rows.append(row)
    print_table(rows)


def print_parts(alone: dict[str, list[dict[str, Any]]]) -> None:
    """Print medians over steps, then over seeds, of each part; their sum against the step; and k3."""
    found = {side: [describe(each) for each in of] for side, of in alone.items() if of}

    def middle(side: str, name: str) -> float | None:
        values = [each[name] for each in found[side] if each[name] is not None]
        return statistics.median(values) if values else None

    def row(title: str, name: str, form: str) -> list[str]:
        values = [middle(side, name) for side in found]
        return [title, *("-" if value is None else format(value, form) for value in values)]

    theirs = middle("trl", "wall_s") if "trl" in found else None
    print(f"\nmedians of steps from the {NUM_WARMUP + 1}th on, seconds; in brackets the number of seeds")
    rows = [["", *(f"{side} ({len(of)})" for side, of in found.items())]]
    for part in PARTS:
        medians = [statistics.median([each["parts"].get(part, 0.0) for each in of]) for of in found.values()]
        if any(medians):
            rows.append([part, *(f"{seconds:.4f}" for seconds in medians)])
    rows.append(row("step", "wall_s", ".3f"))
    ratios = [f"{(middle(side, 'wall_s') or 0) / theirs:.2f}" if theirs else "-" for side in found]
    rows.append(["step / TRL's", *ratios])
    rows.append(row("parts / step, without other", "known_share", ".3f"))
    rows.append(row("steps / clock outside", "clock_share", ".3f"))
    rows.append(row("before the first step", "startup_s", ".1f"))
    rows.append(row("k3, median", "k3", ".2e"))
    rows.append(["k3, largest", *(format_largest(of, "max_k3") for of in found.values())])
    rows.append(["difference, largest", *(format_largest(of, "max_abs") for of in found.values())])
    print_table(rows)


def format_largest(described: Sequence[dict[str, Any]], name: str) -> str:
    """The largest value over the seeds."""
    values = [each[name] for each in described if each[name] is not None]
    return f"{max(values):.2e}" if values else "-"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns that are as wide as their widest cell; the first row has their names."""
    columns, *others = rows
    print(*ReportTable(columns=columns, rows=others).to_lines(WIDTH), sep="\n", flush=True)


def name_device(device: str) -> str:
    """The name of the GPU, without a CUDA context in this process."""
    if device == "cpu" or which("nvidia-smi") is None:
        return {"cpu": "CPU", "cuda": "GPU"}[device]
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "GPU"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained chat model")
    parser.add_argument("--output", type=Path, default=Path("runs/real"), help="folder to which results are added")
    parser.add_argument("--report", type=Path, help="print the tables of this folder, and run nothing")
    parser.add_argument("--tasks", default=",".join(MAX_TURNS), help=f"of {', '.join(MAX_TURNS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--problems", type=int, default=32, help="of a step, 8 rollouts each")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the GPU at the same time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", choices=("colocated", "embedded"), default="colocated", help="of our sides")
    parser.add_argument("--gpu-memory", type=float, help="vLLM's share of the memory; 0.3, and with jobs 0.05")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="with jobs 3 GiB, instead of the rest of the share")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all; what runs by then is cut")
    parser.add_argument("--least-s", type=float, default=60.0, help="with less time left no process begins")
    parser.add_argument("--shown-chars", type=int, default=3000, help="of the output of a process that fails")
    parser.add_argument("--scratch", help="folder for the runs, which are deleted")
    for name, kind in (("--task", str), ("--seed", int), ("--run", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for given, known, name in ((arguments.tasks, MAX_TURNS, "--tasks"), (arguments.sides, SIDES, "--sides")):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{name} must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    is_shared = arguments.jobs > 1
    if arguments.gpu_memory is None:
        arguments.gpu_memory = 0.05 if is_shared else 0.3
    if arguments.kv_cache_memory_bytes is None and is_shared:
        arguments.kv_cache_memory_bytes = 3 * 2**30
    return arguments


def main() -> int:
    """Run or report."""
    arguments = parse_arguments()
    if arguments.run is not None:
        import real_trl

        real_trl.run(arguments)
        sys.stdout.flush()
        os._exit(0)  # vLLM's and TRL's threads may hold up a regular exit
    if arguments.report is not None:
        report(arguments.report)
        return 0
    if arguments.model is None:  # `make bench` runs each file as it is
        print("bench/real.py needs --model FOLDER, a pretrained chat model: nothing was measured")
        return 0
    arguments.ends_s = time.monotonic() + arguments.limit_s
    for number in (signal.SIGTERM, signal.SIGINT):  # the processes end, and what they have made is kept
        signal.signal(number, lambda *_: setattr(arguments, "ends_s", 0.0))
    arguments.device_name = name_device(arguments.device)
    num_failed = run_all(arguments)
    if arguments.jobs > 1:
        say(f"{arguments.jobs} processes shared the device: their seconds are not comparable with those of others")
    report(arguments.output)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
