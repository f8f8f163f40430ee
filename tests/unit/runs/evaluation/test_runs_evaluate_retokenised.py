"""`unbroken eval --retokenised`: what retokenising would have changed in the rollouts that were evaluated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.served import save_tiny_model, served
from unbroken.cli import main
from unbroken.retokenising.changes import Cause
from unbroken.runs.records.files import find_records, read_records
from unbroken.viewer.resources import open_runs

TASK = "unbroken.demo.lookup:LookupConversation"
FEW = ["--problems=4", "--rollouts.sampling.max-tokens=24", "--rollouts.limits.max-turns=3", "--retokenised"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def evaluate(output: Path, model: Path | str, *words: str) -> dict[str, Any]:
    assert main(["eval", TASK, f"--model={model}", f"--output={output}", *FEW, *words]) == 0
    report = json.loads((output / "report.json").read_text())
    found: dict[str, Any] = report["models"][0]["sets"]["evaluation"]["retokenised"]
    return found


def test_the_report_has_shares_causes_and_ratios_and_the_table_shows_them(model, tmp_path, capsys):
    found = evaluate(tmp_path / "out", model)
    shown = capsys.readouterr().out
    compared, changed = found["compared"], found["changed"]
    assert compared["num_rollouts"] + sum(found["left_out"].values()) == 4
    assert compared["num_turns"] + found["num_turns_left_out"] >= 4
    assert set(found["causes"]) == {cause.value for cause in Cause}
    assert changed["share_of_rollouts"] > 0.5, "a random model spells nothing as the tokenizer does"
    assert changed["num_ids"] <= compared["num_ids"]
    assert found["exact"]["num_tokens"] == compared["num_ids"]
    assert found["exact"]["share_off_20pct"] == 0.0
    assert found["exact"]["k3"] < 1e-6 < found["retokenised"]["k3"] < math.inf
    assert f"{changed['share_of_rollouts']:.1%} of {compared['num_rollouts']}" in shown
    assert "rollouts: bpe_split" in shown
    ((_, path),) = find_records(tmp_path / "out" / "evaluations" / "evaluation").items()
    _, *rollouts = read_records(path)
    page = open_runs([tmp_path / "out"]).get("run/0/step/0@evaluation/rollout/0/retokenised")
    assert len(rollouts) == 4
    assert page["rows"][-1]["num_sampled"] > 0


@pytest.mark.e2e
def test_a_served_model_is_compared_like_one_of_this_process(model, tmp_path):
    here = evaluate(tmp_path / "here", model)
    with served(model, engine="transformers") as server:
        there = evaluate(tmp_path / "there", server.url, f"--tokenizer={model}")
    assert {name: there[name] for name in ("compared", "changed", "causes")} == {
        name: here[name] for name in ("compared", "changed", "causes")
    }
    assert there["exact"]["share_off_20pct"] == 0.0
