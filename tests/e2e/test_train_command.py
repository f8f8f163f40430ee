"""`unbroken train` as a user calls it, on the demo's task with a model that is hardly warmed up."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.served import served
from unbroken.cli import main
from unbroken.client import Client

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "--warm-up.max-drill-steps": "1",
    "--warm-up.num-demo-steps": "1",
    "--evaluation.num-problems": "4",
    "--rollouts.problems-per-step": "2",
    "--rollouts.group-size": "2",
    "--rollouts.sampling.max-tokens": "8",
}


def lookup(output: Path, **options: str) -> int:
    return main(["train", str(RECIPES / "lookup.py"), f"--output={output}", *words({**SMALL, **options})])


def words(options: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_writes_its_numbers_and_continues_with_more_steps(tmp_path, capsys):
    assert lookup(tmp_path, **{"--loop.num-steps": "1"}) == 0
    model = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert lookup(tmp_path, **{"--loop.num-steps": "3", "--loop.max-empty-steps": "none"}) == 0
    assert [line["step"] for line in lines(tmp_path / "metrics" / "metrics.jsonl")] == [0, 1, 2]
    assert [line["step"] for line in lines(tmp_path / "evaluation.jsonl")] == [0, 1, 3]
    assert {line["num_rollouts"] for line in lines(tmp_path / "evaluation.jsonl")} == {4}
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == model
    printed = capsys.readouterr().out
    assert "reward before 0.000" in printed
    assert printed.count("step 0 (1 of 3)  reward 0") == 1
    assert "step 2 (3 of 3)  reward 0" in printed
    assert "train: done" not in printed


def test_a_run_whose_rewards_are_all_equal_stops_with_a_sentence(tmp_path, capsys):
    assert lookup(tmp_path, **{"--loop.num-steps": "9", "--loop.max-empty-steps": "3"}) == 1
    printed = capsys.readouterr()
    assert "step 2 (3 of 9)  reward 0" in printed.out
    assert "3 steps in a row trained nothing; of the last one, 2 of 2 groups have equal rewards" in printed.err
    assert "With loop.max_empty_steps none a run continues" in printed.err
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("--algorithm", "rloo", "algorithm must be 'grpo' as in the run in {output}, got 'rloo'"),
        ("--trainer.optimizer.eps", "1", "trainer.optimizer.eps must be 1e-08 as in the run in {output}, got 1.0"),
        ("--rollouts.group-size", "1", "rollouts.group_size must be >= 2, got 1"),
        (
            "--learning-rate",
            "1",
            "did you mean --trainer.optimizer.learning-rate or --warm-start.learning-rate or --warm-up.learning-rate?",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(tmp_path, capsys, name, value, message):
    claim = tmp_path / "recipe.json"
    claim.write_text(json.dumps({"recipe": "lookup.py", "settings": settings(), "files": {}, "code": ""}))
    made = tmp_path / "checkpoints"
    (made / "step-00000001").mkdir(parents=True)
    assert lookup(tmp_path, **{name: value}) == 1
    assert message.format(output=tmp_path) in capsys.readouterr().err
    assert {*tmp_path.iterdir()} == {claim, made}


def settings() -> dict:
    from unbroken.runs.recipe import load_recipe
    from unbroken.runs.settings import describe

    chosen = {"trainer.numerics": "fast"}  # a run writes what it chose, and never `auto`
    return {**describe(load_recipe(RECIPES / "lookup.py").configure(words(SMALL))), **chosen}


def test_help_whose_reader_closes_the_pipe_is_not_an_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["train", str(RECIPES / "lookup.py"), "--help"]) == 0


def test_the_help_of_a_recipe_lists_every_field(capsys):
    assert main(["train", str(RECIPES / "lookup_through_server.toml"), "--help-all"]) == 0
    printed = capsys.readouterr().out
    assert "--trainer.optimizer.learning-rate FLOAT  (default: 0.0005)" in printed
    assert "--num-heads INT  (default: 2)" in printed
    assert "--engine.kind {embedded,colocated,started,server}  (default: started)" in printed
    assert "embedded: The transformers engine, in the trainer's process" in printed


def test_the_model_of_a_run_is_served_as_it_stands(tmp_path):
    assert lookup(tmp_path / "run", **{"--loop.num-steps": "1"}) == 0
    final = tmp_path / "run" / "final"
    ids = AutoTokenizer.from_pretrained(final)("What is k3?")["input_ids"]
    with torch.no_grad():
        logits_TV = AutoModelForCausalLM.from_pretrained(final)(torch.tensor([ids])).logits[0].float()
    theirs = torch.log_softmax(logits_TV, -1)[torch.arange(len(ids) - 1), ids[1:]]
    with served(final, engine="transformers") as server, Client(server.url) as client:
        (scored,) = client.score([ids])
        np.testing.assert_allclose(scored.logprobs, theirs, atol=1e-5, rtol=0)
        assert client.chat([{"role": "user", "content": "What is k3?"}], max_tokens=4)["choices"]
