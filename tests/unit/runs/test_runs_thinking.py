"""A run whose turns think up to a number of ids: what is given is never trained, and all tools know it."""

import json
from pathlib import Path

import numpy as np
import pytest

from support import letters_recipe
from support.served import save_tiny_model
from support.templates import CHATML, QWEN_THINKING
from unbroken.cli import main
from unbroken.runs.records.files import read_records
from unbroken.runs.records.recorded import read_step

N = 5


def save_with_template(folder: Path, template: str) -> Path:
    from transformers import AutoTokenizer

    save_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model in whose template each turn begins inside its reasoning, which it hardly ever ends by itself."""
    template = QWEN_THINKING.replace("open_thinking is defined", "true")
    return save_with_template(tmp_path_factory.mktemp("model"), template)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model) -> Path:
    output = tmp_path_factory.mktemp("runs") / "letters"
    words = ["train", str(Path(letters_recipe.__file__)), f"--output={output}", f"--model={model}"]
    words += ["--trainer.numerics=exact", "--loop.num-steps=2", "--preflight=false", "--rollouts.group-size=4"]
    assert main([*words, "--rollouts.sampling.max-tokens=12", f"--rollouts.limits.thinking-tokens={N}"]) == 0
    return output


def records_of(run):
    for step in range(2):
        yield from (
            line for line in read_records(run / "rollouts" / f"step-{step:08}.rank-0.jsonl.gz") if "rows" in line
        )


def test_trainer_and_sampler_agree_on_all_ids_around_those_that_were_given(run):
    metrics = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    for step in metrics:
        assert step["mismatch/k3"] <= 1e-10
        assert step["rollout/closed_turns"] > 0.5
        assert step["rollout/given_ids"] > 0
        assert step["counters/closings/thinking"] == step["rollout/closed_turns"] * step["rollout/num_trajectories"]
        assert step["train/num_loss_tokens"] == step["rollout/num_sampled_tokens"]


def test_no_row_trains_a_given_id_and_the_record_says_which_they_are(run):
    closed = 0
    for record in records_of(run):
        (row,), (turn,) = record["rows"], record["turns"]
        sampled = [k for start, stop, _ in row["policy_versions"] for k in range(start, stop)]
        assert [k for start, stop in row["loss"] for k in range(start, stop)] == sampled
        assert len(row["rollout_logprobs"]) == len(sampled) == turn["num_sampled"]
        assert row["trainer_logprobs"] is None or len(row["trainer_logprobs"]) == len(sampled)
        first = row["segments"][0]["stop"]
        if turn["num_given"]:
            closed += 1
            assert turn["num_sampled"] <= 12
            assert row["policy_versions"][0][:2] == [first, first + N]
            assert row["policy_versions"][1][0] == first + N + turn["num_given"]
        else:
            assert sampled == list(range(first, len(row["token_ids"])))
    assert closed


def test_a_recorded_step_gives_the_groups_again(run):
    step = read_step(run / "rollouts" / "step-00000001.rank-0.jsonl.gz")
    assert step.find_changed_texts() is None
    members = [member for group in step.make_groups() for member in group.trajectories]
    for member, record in zip(members, step.records, strict=True):
        (turn,) = member.turns
        assert len(turn.sequence.completion_ids) - turn.sequence.num_sampled == record["turns"][0]["num_given"]
        (row,) = record["rows"]
        logprobs = turn.sequence.rollout_logprobs[turn.sequence.sampled_mask]
        assert np.array_equal(logprobs, np.float32(row["rollout_logprobs"]))


def test_the_run_is_verified(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert "verified (2 of 2 steps" in capsys.readouterr().out


def test_an_export_has_the_given_ids_outside_both_masks(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    assert main(["export", str(run), str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(row["num_given"] != [0] for row in rows)
    for row in rows:
        assert row["loss_mask"] == row["sampled_mask"] == [each is not None for each in row["rollout_logprobs"]]
        (num_given,) = row["num_given"]
        first = row["sampled_mask"].index(True)
        assert row["sampled_mask"][first:].count(False) == num_given


def test_a_template_without_reasoning_is_refused_before_anything_is_sampled(tmp_path, capsys):
    folder = save_with_template(tmp_path / "model", CHATML)
    words = ["train", str(Path(letters_recipe.__file__)), f"--output={tmp_path / 'run'}", f"--model={folder}"]
    assert main([*words, "--preflight=false", "--rollouts.limits.thinking-tokens=5"]) != 0
    assert (
        "rollouts.limits.thinking_tokens must be left out, got 5: the chat template has no" in capsys.readouterr().err
    )
