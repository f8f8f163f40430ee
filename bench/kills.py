"""Kill -9 the trainer, or the server, at random points of a run through a server, and check the run.

    python bench/kills.py --num-kills 20 --num-steps 100
    python bench/kills.py --num-kills 3 --num-steps 16 --engine vllm
    python bench/kills.py --num-kills 20 --num-steps 100 --max-staleness 2

Three runs of one recipe with the same seeds: one without kills; one whose `unbroken train` is killed and started again
until it ends; one whose `unbroken serve` is killed and started again while the trainer waits. Each must have every step
once, in order, trained only on ids of that step's weights. The last two are compared with the first: how many steps
have equal rewards before a different id is sampled, and the largest difference of the final weights.

With `--max-staleness` the engine samples while the trainer trains: ids may be that many versions old, and each problem
must be trained once (`problems once`); which step it is in may differ from run to run, so nothing else is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from unbroken.runs.records.files import find_records, read_records

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.served import save_tiny_model  # type: ignore[import-not-found,import-untyped,unused-ignore]

RECIPE = Path(__file__).resolve().parent.parent / "tests" / "support" / "letters_recipe.py"
ENGINE_OPTIONS = {
    "transformers": [],
    "vllm": ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"],
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PATIENCE_S = 300.0
ROW = "{:8} {:>10} {:>13} {:>13} {:>9} {:>8} {:>6} {:>5} {:>9} {:>7}"
PROBLEMS_PER_STEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings that all three runs share."""

    model: Path
    engine: str
    num_steps: int
    num_kills: int
    learning_rate: float
    transport: str
    max_staleness: int


class Process:
    """A command in its own session, so that its child processes can be found."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT}, start_new_session=True
            )

    def kill(self) -> None:
        """Kill -9 the process itself, and a little later the processes that it started."""
        self._process.kill()
        self._process.wait()
        time.sleep(0.2)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """`unbroken serve`, which can be started repeatedly on one port."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{port}"
        self.weights = directory / "weights"
        self._command = [
            sys.executable, "-m", "unbroken", "serve", "--model", str(plan.model), "--engine", plan.engine,
            "--port", str(port), "--weights-dir", str(self.weights), "--exit-with-parent",
            *ENGINE_OPTIONS[plan.engine],
        ]  # fmt: skip
        self._log = directory / "server.log"

    def start(self) -> Process:
        """Start the server, without waiting until it answers."""
        return Process(self._command, self._log)

    def is_up(self) -> bool:
        """Whether the server answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False


def start_trainer(directory: Path, server: Server, plan: Plan) -> Process:
    """Start `unbroken train`, for the first time or again."""
    command = [
        sys.executable, "-m", "unbroken", "train", str(RECIPE), f"--model={plan.model}",
        f"--output={directory / 'run'}", "--engine.kind=server", f"--engine.urls={server.url}",
        f"--engine.transport={plan.transport}",
        *([f"--engine.weights-dir={server.weights}"] if plan.transport == "files" else []),
        f"--engine.wait-s={PATIENCE_S}", f"--loop.outages.wait-s={PATIENCE_S}", "--loop.outages.max-losses=100",
        f"--loop.max-staleness={plan.max_staleness}", "--rollout-log.groups=none",
        f"--loop.num-steps={plan.num_steps}", f"--trainer.optimizer.learning-rate={plan.learning_rate}",
    ]  # fmt: skip
    return Process(command, directory / "trainer.log")


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """The complete lines of the metrics so far."""
    path = directory / "run" / "metrics" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run_whole(directory: Path, plan: Plan) -> None:
    """Run without kills."""
    server = Server(directory, plan)
    serving = server.start()
    check_ended(start_trainer(directory, server, plan).wait(600), directory)
    serving.kill()


def run_with_trainer_kills(directory: Path, plan: Plan, rng: random.Random) -> None:
    """Kill the trainer up to four seconds after it begins to train, `num_kills` times."""
    server = Server(directory, plan)
    serving = server.start()
    for kill in range(plan.num_kills):
        metrics = directory / "run" / "metrics"
        before = len(list(metrics.glob("events*")))
        trainer, started = start_trainer(directory, server, plan), time.monotonic()
        while len(list(metrics.glob("events*"))) == before and trainer.wait(0.02) is None:
            assert time.monotonic() < started + PATIENCE_S
        pause_s = rng.uniform(0.0, 4.0)
        code = trainer.wait(pause_s)
        if code is not None:
            check_ended(code, directory)
            print(f"  the run ended before kill {kill + 1}")
            break
        trainer.kill()
        logged = len(read_steps(directory))
        print(f"  trainer, kill {kill + 1:2}: {pause_s:4.2f} s into training, {logged:2} steps logged", flush=True)
    check_ended(start_trainer(directory, server, plan).wait(600), directory)
    serving.kill()


def run_with_server_kills(directory: Path, plan: Plan, rng: random.Random) -> None:
    """Start the server after the trainer, and kill it up to four seconds after it answers, `num_kills` times."""
    server = Server(directory, plan)
    trainer = start_trainer(directory, server, plan)
    serving = server.start()
    for kill in range(plan.num_kills):
        started = time.monotonic()
        while not (server.is_up() and (kill > 0 or read_steps(directory))) and trainer.wait(0.05) is None:
            assert time.monotonic() < started + PATIENCE_S
        pause_s = rng.uniform(0.0, 4.0)
        code = trainer.wait(pause_s)
        if code is not None:
            check_ended(code, directory)
            print(f"  the run ended before kill {kill + 1}")
            break
        serving.kill()
        logged = len(read_steps(directory))
        print(f"  server, kill {kill + 1:2}: {pause_s:4.2f} s after it answered, {logged:2} steps logged", flush=True)
        time.sleep(rng.uniform(0.0, 2.0))
        serving = server.start()
    check_ended(trainer.wait(600), directory)
    serving.kill()


def check_ended(code: int | None, directory: Path) -> None:
    """Exit unless the trainer ended with 0."""
    if code != 0:
        raise SystemExit(f"the trainer ended with {code}: {(directory / 'trainer.log').read_text()[-3000:]}")


def has_problems_once(directory: Path, num_steps: int) -> bool:
    """Whether each problem is in the rollouts of one step."""
    groups = [
        {record["group"] for record in read_records(path) if record["kind"] == "trajectory"}
        for path in find_records(directory / "run" / "rollouts").values()
    ]
    trained = sorted(int(name.rpartition("-")[2]) for of_step in groups for name in of_step)
    return trained == list(range(num_steps * PROBLEMS_PER_STEP))


def report(name: str, directory: Path, whole: Path, plan: Plan) -> None:
    """Print one line of the table."""
    num_steps = plan.num_steps
    lines, expected = read_steps(directory), read_steps(whole)
    are_once = [line["step"] for line in lines] == list(range(num_steps))
    trained = [line for line in lines if line["train/num_rows"]]
    versions = [line["train/policy_version"] for line in trained] == list(range(1, len(trained) + 1))
    stale = max(line["staleness/max"] for line in trained)
    k3 = max(line["mismatch/k3"] for line in trained)
    are_same = [one["reward/mean"] == other["reward/mean"] for one, other in zip(lines, expected, strict=False)]
    same = [*are_same, False].index(False)
    waits = sum(line["seconds/outages"] > 0.5 for line in lines)
    losses = sum(line["outages/num_losses"] for line in lines)
    found, wanted = final_weights(directory), final_weights(whole)
    difference = max(float((found[key] - wanted[key]).abs().max()) for key in wanted)
    is_equal = all(torch.equal(found[key], wanted[key]) for key in wanted)
    cells = (
        name, "yes" if are_once else "NO", "yes" if has_problems_once(directory, num_steps) else "NO",
        "yes" if versions else "NO", stale, f"{k3:.1e}", losses, waits,
        *(("-", "-") if plan.max_staleness else (f"{same}/{num_steps}", "equal" if is_equal else f"{difference:.1e}")),
    )  # fmt: skip
    print(ROW.format(*cells))


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The trainer's weights after the last step."""
    newest = max((directory / "run" / "checkpoints").glob("step-*"))
    return load_file(next(newest.glob("weights/version-*/00000.safetensors")))


def main() -> None:
    """Make the three runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINE_OPTIONS, default="transformers")
    parser.add_argument("--transport", choices=("files", "broadcast"), default="files")
    parser.add_argument("--num-kills", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    directory = arguments.directory or Path(tempfile.mkdtemp())
    rng = random.Random(arguments.seed)
    plan = Plan(
        model=save_tiny_model(directory / "model"),
        engine=arguments.engine,
        num_steps=arguments.num_steps,
        num_kills=arguments.num_kills,
        learning_rate=arguments.learning_rate,
        transport=arguments.transport,
        max_staleness=arguments.max_staleness,
    )
    run_whole(directory / "whole", plan)
    run_with_trainer_kills(directory / "trainer", plan, rng)
    run_with_server_kills(directory / "server", plan, rng)
    print(
        ROW.format(
            "killed",
            "steps once",
            "problems once",
            "versions rise",
            "staleness",
            "max k3",
            "losses",
            "waits",
            "rewards =",
            "weights",
        )
    )
    for name in ("whole", "trainer", "server"):
        report(name, directory / name, directory / "whole", plan)


if __name__ == "__main__":
    main()
