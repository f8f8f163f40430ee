"""`unbroken train` with servers of a file: one is killed in mid run, and another starts at another address."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.served import Served, save_tiny_model, served
from support.watched_run import LONGEST_S, WatchedRun

pytestmark = pytest.mark.e2e

RECIPE = Path(__file__).parents[1] / "support" / "letters_recipe.py"
NUM_AFTER = 5
"""Steps after the new server has sampled."""


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
        output = tmp_path / "run"
        run = WatchedRun(
            output, "train", RECIPE, f"--output={output}", f"--model={model}", "--engine.kind=server",
            f"--engine.urls-file={listed}", f"--engine.weights-dir={weights}", "--loop.num-steps=1000",
            f"--loop.max-staleness={max_staleness}", "--rollout-log.groups=none", f"--rollouts.samplers={samplers}",
            "--trainer.optimizer.learning-rate=1e-4",
        )  # fmt: skip
        stack.callback(run.process.kill)
        run.wait_for_steps(3)
        assert num_sampled(dies) > 0
        dies.process.kill()
        gap_s = run.wait_for_steps(2, more=True)  # the first may have been sampled before
        starts_s = time.monotonic()
        comes = serve()
        serves_s = time.monotonic() - starts_s
        write(stays, dies, comes)
        joins_s = run.wait_until(lambda: num_sampled(comes) > 0)
        run.wait_for_steps(NUM_AFTER, more=True)
        write(comes)
        run.wait_until(lambda: f"{stays.url} is no longer listed" in run.text())
        run.wait_for_steps(NUM_AFTER, more=True)
        num_calm = len(run.steps())
        comes.process.kill()  # the last one
        run.wait_until(lambda: "waiting up to" in run.text())
        write(serve())
        run.wait_for_steps(NUM_AFTER, more=True)
        run.process.kill()
        run.process.wait(LONGEST_S)
    print(f"two steps after the kill {gap_s:.2f} s; start {serves_s:.2f} s, from then to its first ids {joins_s:.2f} s")
    assert gap_s < 60
    assert joins_s < 60
    lines = run.steps()
    versions = [line["train/policy_version"] for line in lines]
    assert versions == list(range(1, len(lines) + 1))
    assert all(line["outages/num_losses"] == 0 for line in lines[:num_calm])
    assert any(line["outages/num_losses"] > 0 for line in lines[num_calm:])
    for line in lines:
        assert line["train/num_rows"] == 16
        assert line["staleness/max"] <= max_staleness
        assert line["mismatch/k3_lag_0"] is None or line["mismatch/k3_lag_0"] < 1e-8
    # The rollouts of a step are written beside the next one: those of the last one before the kill may be missing.
    num_written = 2 * (len(lines) - 1)
    problems = run.problems()[:num_written]
    assert sorted(problems) == list(range(num_written))
