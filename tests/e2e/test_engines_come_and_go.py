"""`unbroken train` with servers of a file: one is killed in mid run, and another starts at another address."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.forks import ForkedPython
from support.served import Served, save_tiny_model, served
from unbroken.runs.records.files import find_records, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

RECIPE = Path(__file__).parents[1] / "support" / "letters_recipe.py"
LONGEST_S = 120.0
NUM_AFTER = 5
"""Steps after the new server has sampled."""


class Run:
    """A run in a process, seen by its files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._output = folder / "run"
        self.log = folder / "trainer.log"
        command = ["train", str(RECIPE), f"--output={self._output}", *arguments]
        self.process = ForkedPython("unbroken", *command, output=self.log)

    def lines(self) -> list[dict]:
        path = self._output / "metrics" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def problems(self) -> list[int]:
        """Those of each step, in the order of the steps."""
        groups = [
            {record["group"] for record in read_records(path) if record["kind"] == "trajectory"}
            for _, path in sorted(find_records(self._output / "rollouts").items())
        ]
        return [int(name.rpartition("-")[2]) for of_step in groups for name in sorted(of_step)]

    def wait_until(self, holds: Callable[[], bool]) -> float:
        """Returns how long it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < LONGEST_S, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.01)
        return time.monotonic() - began_s


def num_sampled(server: Served) -> float:
    """Ids that a server has sampled."""
    text = httpx.get(f"{server.url}/metrics").text
    return float(re.search(r"^unbroken_sampled_ids_total (\S+)$", text, re.M)[1])


@pytest.mark.parametrize(("max_staleness", "samplers"), [(0, 0), (2, 2)])
def test_a_server_is_killed_and_another_starts_elsewhere_while_the_run_goes_on(tmp_path, max_staleness, samplers):
    model, weights, listed = save_tiny_model(tmp_path / "model"), tmp_path / "weights", tmp_path / "engines.txt"

    def write(*servers: Served) -> None:
        listed.with_suffix(".new").write_text("".join(f"{each.url}\n" for each in servers))
        listed.with_suffix(".new").rename(listed)

    with ExitStack() as stack:

        def serve() -> Served:
            return stack.enter_context(served(model, "--weights-dir", str(weights), engine="transformers"))

        stays, dies = serve(), serve()
        write(stays, dies)
        run = Run(
            tmp_path, f"--model={model}", "--engine.kind=server", f"--engine.urls-file={listed}",
            f"--engine.weights-dir={weights}", "--loop.num-steps=1000", f"--loop.max-staleness={max_staleness}",
            "--rollout-log.groups=none", f"--rollouts.samplers={samplers}",
            "--trainer.optimizer.learning-rate=1e-4",
        )  # fmt: skip
        stack.callback(run.process.kill)
        run.wait_until(lambda: len(run.lines()) >= 3)
        assert num_sampled(dies) > 0
        dies.process.kill()
        num_before = len(run.lines())
        # The next two steps: the first may have been sampled before.
        gap_s = run.wait_until(lambda: len(run.lines()) >= num_before + 2)
        starts_s = time.monotonic()
        comes = serve()
        serves_s = time.monotonic() - starts_s
        write(stays, dies, comes)
        joins_s = run.wait_until(lambda: num_sampled(comes) > 0)
        num_before = len(run.lines())
        run.wait_until(lambda: len(run.lines()) >= num_before + NUM_AFTER)
        write(comes)
        run.wait_until(lambda: f"{stays.url} is no longer listed" in run.log.read_text())
        num_before = len(run.lines())
        run.wait_until(lambda: len(run.lines()) >= num_before + NUM_AFTER)
        num_calm = len(run.lines())
        comes.process.kill()  # the last one
        run.wait_until(lambda: "waiting up to" in run.log.read_text())
        write(serve())
        num_before = len(run.lines())
        run.wait_until(lambda: len(run.lines()) >= num_before + NUM_AFTER)
        run.process.kill()
        run.process.wait(LONGEST_S)
    print(f"two steps after the kill {gap_s:.2f} s; start {serves_s:.2f} s, from then to its first ids {joins_s:.2f} s")
    assert gap_s < 30
    assert joins_s < 30
    lines = run.lines()
    versions = [line["train/policy_version"] for line in lines]
    assert versions == list(range(1, len(lines) + 1))
    assert all(line["outages/num_losses"] == 0 for line in lines[:num_calm])
    assert any(line["outages/num_losses"] > 0 for line in lines[num_calm:])
    for line in lines:
        assert line["train/num_rows"] == 16
        assert line["staleness/max"] <= max_staleness
        assert line["mismatch/k3_lag_0"] is None or line["mismatch/k3_lag_0"] < 1e-8
    problems = run.problems()[: 2 * len(lines)]
    assert sorted(problems) == list(range(2 * len(lines)))
