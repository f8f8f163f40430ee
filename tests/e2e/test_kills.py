"""`unbroken train` against `unbroken serve`, both killed by kill -9 in mid run and started again by a supervisor."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

from support.forks import ForkedPython
from support.packed_sender import free_port
from support.served import save_tiny_model
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


@pytest.mark.parametrize(("max_staleness", "own_process"), [(0, "false"), (2, "true")])
def test_a_run_whose_trainer_and_server_are_killed_has_each_step_and_problem_once(tmp_path, max_staleness, own_process):
    model, output, weights = save_tiny_model(tmp_path / "model"), tmp_path / "run", tmp_path / "weights"
    port = free_port()

    def lines() -> list[dict]:
        path = output / "metrics" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    train = Supervisor(
        tmp_path / "trainer.log", "train", str(RECIPE), f"--model={model}", f"--output={output}",
        "--engine.kind=server", f"--engine.urls=http://127.0.0.1:{port}", f"--engine.weights-dir={weights}",
        f"--loop.num-steps={NUM_STEPS}", f"--loop.max-staleness={max_staleness}", "--rollout-log.groups=none",
        f"--rollouts.own-process={own_process}", "--checkpoints.every=3",
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
    groups = [
        {record["group"] for record in read_records(path) if record["kind"] == "trajectory"}
        for path in find_records(output / "rollouts").values()
    ]
    problems = sorted(int(name.rpartition("-")[2]) for of_step in groups for name in of_step)
    assert problems == list(range(2 * NUM_STEPS))
