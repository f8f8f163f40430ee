"""`unbroken train` with two policies that play a game, killed with SIGKILL in mid run and started again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from support import forks, talking
from support.equal_runs import find_differences, read_metrics, read_rollouts
from support.forks import ForkedPython
from support.killed_chain import Kill, train
from support.served import save_tiny_model
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


KILLS = (
    Kill(command=0, point="write", count=2),  # the first checkpoint has one policy, and not yet the other
    Kill(command=0, point="update", count=4),  # in the second step one policy was updated
    Kill(command=0, point="finish", count=2),  # the second checkpoint has both, and not yet its name
    Kill(command=0, point="publish", count=3),  # the third step was made, and its weights were not given to the engine
)
"""In the order in which the run comes to them. The first leaves no checkpoint, the next two that of the first step, the
last one that of the second.
"""


def test_policies_that_are_killed_and_go_on_equal_those_that_were_not_bit_for_bit(tmp_path: Path) -> None:
    """With exact numerics, and frozen copies that answer in half of the rollouts."""
    (tmp_path / "talk.toml").write_text(
        f'model = "{save_tiny_model(tmp_path / "model")}"\nenvironment = "{talking.__file__}:Talk"\n'
        'policies.names = ["first", "second"]\npolicies.copy_every = 1\nlora.rank = 2\nlora.alpha = 3\n'
        'trainer.numerics = "exact"\ntrainer.optimizer.learning_rate = 1e-2\nloop.num_steps = 4\n'
        "checkpoints.every = 2\ncheckpoints.num_kept = 9\nevaluation.num_problems = 0\n"
        "rollouts.problems_per_step = 4\nrollouts.group_size = 2\nrollouts.sampling.max_tokens = 4\n"
    )

    def start(name: str, kill: Kill | None = None) -> int:
        words = ["train", str(tmp_path / "talk.toml"), f"--output={tmp_path / name}", "--preflight=false"]
        return forks.call(train, folder=str(tmp_path), words=words, kill=kill)

    def explain() -> str:
        return (tmp_path / "log").read_text()[-3000:]

    for kill in KILLS:
        assert start("killed", kill) == -signal.SIGKILL, (kill, explain())
    assert start("killed") == start("whole") == 0, explain()
    assert find_differences(tmp_path / "killed", tmp_path / "whole") == []
    assert [line["step"] for line in read_metrics(tmp_path / "whole")] == list(range(4))
    assert all(line["mismatch/equal_share"] == 1 for line in read_metrics(tmp_path / "whole"))
    records = [each for of_step in read_rollouts(tmp_path / "whole").values() for each in of_step]
    spoke = {turn["policy"] for each in records if each["kind"] == "trajectory" for turn in each["turns"]}
    assert {"first", "second", "second@1"} < spoke
