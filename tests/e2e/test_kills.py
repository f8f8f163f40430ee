"""Kill -9 in mid run: of `unbroken train` and `unbroken serve`, started again by a supervisor, and of samplers."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
from safetensors.numpy import load_file

from support.forks import ForkedPython
from support.processes import free_port
from support.served import save_tiny_model
from support.watched_run import read_lines, read_problems
from unbroken.runs.records.files import find_records, read_records

pytestmark = pytest.mark.e2e

RECIPE = Path(__file__).parents[1] / "support" / "letters_recipe.py"
NUM_STEPS = 10
LONGEST_S = 120.0


class Supervisor:
    """Starts a command again whenever it was killed, until it ends by itself or the block ends."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        self._arguments = arguments
        self._process: ForkedPython | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._supervise)
        self.codes: list[int] = []

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        if self.is_running:
            self.kill()
        self._thread.join(LONGEST_S)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        """Kill -9 what runs, which is started again."""
        assert self._process is not None
        self._process.kill()

    def _supervise(self) -> None:
        while not self._stopped and set(self.codes) <= {-signal.SIGKILL}:
            self._process = ForkedPython("unbroken", *self._arguments, output=self._log)
            self.codes.append(self._process.wait(LONGEST_S))


def wait_until(holds: Callable[[], bool], running: Supervisor | None = None) -> None:
    deadline_s = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < deadline_s
        assert running is None or running.is_running
        time.sleep(0.02)


@pytest.mark.parametrize(("max_staleness", "samplers"), [(0, 0), (2, 2)])
def test_a_run_whose_trainer_and_server_are_killed_has_each_step_and_problem_once(tmp_path, max_staleness, samplers):
    model, output, weights = save_tiny_model(tmp_path / "model"), tmp_path / "run", tmp_path / "weights"
    port = free_port()

    def lines() -> list[dict]:
        return read_lines(output / "metrics" / "metrics.jsonl")

    train = Supervisor(
        tmp_path / "trainer.log", "train", str(RECIPE), f"--model={model}", f"--output={output}",
        "--engine.kind=server", f"--engine.urls=http://127.0.0.1:{port}", f"--engine.weights-dir={weights}",
        f"--loop.num-steps={NUM_STEPS}", f"--loop.max-staleness={max_staleness}", "--rollout-log.groups=none",
        f"--rollouts.samplers={samplers}", "--checkpoints.every=3",
    )  # fmt: skip
    serve = Supervisor(
        tmp_path / "server.log", "serve", f"--model={model}", "--engine=transformers", f"--port={port}",
        f"--weights-dir={weights}",
    )  # fmt: skip
    rng = random.Random(0)
    with serve, train:
        for num_steps, victim in ((2, serve), (4, train), (6, serve), (8, train)):
            wait_until(lambda num_steps=num_steps: len(lines()) >= num_steps, train)
            time.sleep(rng.uniform(0.0, 0.3))
            victim.kill()
        wait_until(lambda: not train.is_running)
    assert train.codes[-1] == 0
    assert len(train.codes) >= 3
    assert len(serve.codes) >= 3
    assert [line["step"] for line in lines()] == list(range(NUM_STEPS))
    versions = [line["train/policy_version"] for line in lines()]
    assert versions == sorted({*versions})  # steps that were lost have left some out
    assert versions[-1] >= NUM_STEPS
    for line in lines():
        assert line["train/num_rows"] == 16
        assert line["counters/dropped_rows"] == 0
        assert line["staleness/max"] <= max_staleness
        assert line["mismatch/k3_lag_0"] is None or line["mismatch/k3_lag_0"] < 1e-8
    assert sorted(read_problems(output)) == list(range(2 * NUM_STEPS))


def test_a_run_whose_teacher_is_killed_waits_for_it_and_has_each_step_and_problem_once(tmp_path):
    model, teacher, output = (
        save_tiny_model(tmp_path / "model"),
        save_tiny_model(tmp_path / "teacher"),
        tmp_path / "run",
    )
    port = free_port()

    def lines() -> list[dict]:
        return read_lines(output / "metrics" / "metrics.jsonl")

    serve = Supervisor(
        tmp_path / "server.log", "serve", f"--model={teacher}", "--engine=transformers", f"--port={port}"
    )
    train = Supervisor(
        tmp_path / "trainer.log", "train", str(RECIPE), f"--model={model}", f"--output={output}", "--preflight=false",
        "--algorithm=distillation", f"--teacher.models=http://127.0.0.1:{port}", "--rollouts.group-size=1",
        f"--loop.num-steps={NUM_STEPS}", "--rollout-log.groups=none", "--checkpoints.every=3",
    )  # fmt: skip
    rng = random.Random(0)
    with serve, train:
        for num_steps, victim in ((2, train), (4, serve)):
            wait_until(lambda num_steps=num_steps: len(lines()) >= num_steps, train)
            time.sleep(rng.uniform(0.0, 0.1))
            victim.kill()
        wait_until(lambda: not train.is_running)
    log = (tmp_path / "trainer.log").read_text()
    assert train.codes == [-signal.SIGKILL, 0], log
    assert len(serve.codes) >= 2
    assert [line["step"] for line in lines()] == list(range(NUM_STEPS))
    for line in lines():
        assert line["train/num_rows"] == 2
        assert line["teacher/token_share"] == 1
        assert abs(line["teacher/kl"]) < 1e-5 or line["step"] > 0  # the policy begins as its teacher
    assert sorted(read_problems(output)) == list(range(2 * NUM_STEPS))


NUM_KILLS = 10
GATED_RECIPE = """
import asyncio
from pathlib import Path
from unbroken.rollout.tool_env import ToolEnv
from unbroken.runs.collector import Problems
from unbroken.runs.python_files import load_module
from unbroken.runs.recipe import Task

letters = load_module(Path(LETTERS))
Config = letters.Config

async def make_task(config):
    kills = config.output.with_suffix(".kills")

    def env(number):
        async def reward(messages):
            while len(kills.read_text().split()) < min(number // 2, NUM_KILLS):
                await asyncio.sleep(0.05)
            return letters.share_of_letters(messages)

        return ToolEnv([{"role": "user", "content": f"Write {number}."}], [], reward)

    return Task(model=config.model, train_on=Problems(env=env), evaluate_on=Problems(env=env))
"""
"""Rollouts of step N end only after N kills, so each kill comes while groups are sampled."""


def find_samplers(trainer: int) -> list[int]:
    """The samplers of a trainer, the oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == trainer and b"sampler" in (stat.parent / "cmdline").read_bytes().split(b"\0"):
                found.append((int(fields[19]), int(stat.parent.name)))
        except OSError:
            continue
    return [pid for _, pid in sorted(found)]


def train_gated(folder: Path, model: Path, *, samplers: int) -> tuple[Path, ForkedPython]:
    """Start a run whose steps wait for kills; returns its folder."""
    recipe, output = folder / "recipe.py", folder / f"run-{samplers}"
    recipe.write_text(f"LETTERS, NUM_KILLS = {str(RECIPE)!r}, {NUM_KILLS}\n{GATED_RECIPE}")
    trainer = ForkedPython(
        "unbroken", "train", recipe, f"--model={model}", f"--output={output}", "--engine.kind=started",
        '--engine.options=["--engine","transformers"]',
        f"--loop.num-steps={NUM_KILLS + 1}", "--rollout-log.groups=none",
        f"--rollouts.samplers={samplers}", "--trainer.old-logprobs=recompute", output=folder / f"{samplers}.log",
    )  # fmt: skip
    return output, trainer


def read_ids(output: Path) -> list[tuple[str, list[int]]]:
    """The ids of each rollout that was trained."""
    return sorted(
        (record["trajectory"], [row["token_ids"] for row in record["rows"]])
        for path in find_records(output / "rollouts").values()
        for record in read_records(path)
        if record["kind"] == "trajectory"
    )


def test_samplers_that_are_killed_ten_times_lose_nothing_and_sample_nothing_twice(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "run-0.kills").write_text("kill\n" * NUM_KILLS)
    undisturbed, trainer = train_gated(tmp_path, model, samplers=0)
    assert trainer.wait(LONGEST_S) == 0, (tmp_path / "0.log").read_text()
    kills = tmp_path / "run-2.kills"
    kills.touch()
    output, trainer = train_gated(tmp_path, model, samplers=2)
    log, rng = tmp_path / "2.log", random.Random(0)
    try:
        for number in range(NUM_KILLS):

            def is_ready(number: int = number) -> bool:
                """Whether the steps that may end have ended, and a sampler that has opened samples the next one."""
                assert trainer.poll() is None, log.read_text()
                ready = sum(path.read_text().count("is ready") for path in (output / "samplers").glob("*.log"))
                return ready > number and len(read_lines(output / "metrics" / "metrics.jsonl")) >= number

            wait_until(is_ready)
            time.sleep(rng.uniform(0.0, 0.3))
            os.kill(find_samplers(trainer.pid)[0], signal.SIGKILL)
            with kills.open("a") as file:
                file.write("kill\n")
        assert trainer.wait(LONGEST_S) == 0, log.read_text()
        assert find_samplers(trainer.pid) == []
    finally:
        trainer.kill()
    assert read_ids(output) == read_ids(undisturbed)
    assert len(read_ids(output)) == 2 * 8 * (NUM_KILLS + 1)
    ours, theirs = (load_file(each / "final" / "model.safetensors") for each in (output, undisturbed))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
