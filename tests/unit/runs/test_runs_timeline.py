"""A run leaves a timeline of what it did when."""

from __future__ import annotations

import json
from collections import Counter

from support import letters_recipe
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.timeline import read_timeline


def count_slices(path) -> Counter[str]:
    return Counter(event["name"].split(",")[0] for event in read_timeline(path) if event["ph"] == "B")


def test_a_run_and_its_continuation_write_one_timeline(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    words = ["train", letters_recipe.__file__, f"--model={model}", f"--output={tmp_path / 'run'}"]
    words += ["--evaluation.num-problems=2", "--evaluation.every=1"]
    assert main([*words, "--loop.num-steps=2"]) == 0
    path = tmp_path / "run" / "timeline" / "rank-0.json"
    found = count_slices(path)
    assert {found[name] for name in ("wait for groups", "train", "checkpoint", "after the step")} == {2}
    assert (found["publish version 1"], found["publish version 2"]) == (1, 1)
    assert (found["step 0"], found["step 1"], found["final model"]) == (1, 1, 1)
    assert found["evaluation of evaluation"] == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["idle/trainer"] < 1 and line["idle/trainer"] + line["idle/sampler"] == 1 for line in lines)
    assert main([*words, "--loop.num-steps=3"]) == 0
    assert json.loads(path.read_text())
    assert count_slices(path)["step 2"] == 1
    assert {event["pid"] for event in read_timeline(path)} == {1, 2}
