"""`unbroken train` with two policies that play a game, killed with SIGKILL in mid run and started again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from support.forks import ForkedPython
from support.watched_run import read_lines
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.export.checkpoint import export_checkpoint
from unbroken.runs.records.files import find_records, read_records
from unbroken.training.model.pretrained import ModelForm

RECIPE = Path(__file__).parents[2] / "recipes" / "count_to_seven.py"
SMALL = [
    *("--rollouts.problems-per-step", "2", "--rollouts.group-size", "4", "--loop.num-steps", "5"),
    *("--checkpoints.every", "1", "--evaluation.num-problems", "2", "--preflight", "false"),
]


def test_a_game_of_two_policies_that_is_killed_goes_on_with_both(tmp_path: Path, capsys) -> None:
    output, model = tmp_path / "run", tmp_path / "model"
    words = ["train", str(RECIPE), "--output", str(output), "--model", str(model), *SMALL]
    process = ForkedPython("unbroken", *words, output=tmp_path / "log")
    metrics, deadline_s = output / "metrics" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.kill()
    process.wait(60)
    assert main(words) == 0
    lines = read_lines(metrics)
    assert [line["step"] for line in lines] == list(range(5))
    for name in ("first", "second"):
        assert lines[-1][f"policy/{name}/mismatch_k3"] < 1e-6
        matrices = load_file(output / "final" / name / "adapter_model.safetensors")
        assert any(each.any() for key, each in matrices.items() if "lora_B" in key)
        exported = export_checkpoint(output / "checkpoints" / "step-00000005" / name, tmp_path / name, form=ModelForm())
        assert exported.name == name
    with pytest.raises(InvalidInputError, match=r"that of one policy, and .* has \['first', 'second'\]"):
        export_checkpoint(output, tmp_path / "none", form=ModelForm())
    (path, *_) = find_records(output / "rollouts").values()
    record = next(each for each in read_records(path) if each["kind"] == "trajectory" and len(each["turns"]) > 1)
    assert [turn["policy"] for turn in record["turns"]][:2] == ["first", "second"]
    evaluations = [json.loads(line) for line in (output / "evaluation.jsonl").read_text().splitlines()]
    assert [each["set"] for each in evaluations] == ["first", "second"] * 2
    capsys.readouterr()


def test_a_game_is_sampled_by_a_server_that_learns_of_the_policies_by_updates(
    tmp_path: Path, capsys, forked_commands: None
) -> None:
    """Self-play, with a copy of each version: which adapters the server has changes with each update. With exact
    numerics its logprobs have the trainer's bits.
    """
    output, model = tmp_path / "run", tmp_path / "model"
    words = ["train", str(RECIPE), "--output", str(output), "--model", str(model), *SMALL]
    own = ["--policies.names", '["first"]', "--policies.copy-every", "1"]
    started = ["--engine.kind", "started", "--engine.options", '["--engine", "transformers"]']
    assert main([*words, *own, *started, "--trainer.numerics", "exact"]) == 0
    lines = read_lines(output / "metrics" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(5))
    assert {line["mismatch/k3"] for line in lines} == {0.0}
    assert (
        {line["mismatch/equal_share"] for line in lines} == {line["mismatch/proven_share"] for line in lines} == {1.0}
    )
    records = [each for path in find_records(output / "rollouts").values() for each in read_records(path)]
    spoke = {turn["policy"] for each in records if each["kind"] == "trajectory" for turn in each["turns"]}
    assert {"first", "first@0"} < spoke
    capsys.readouterr()
