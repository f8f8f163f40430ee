"""Evaluations every N steps: on each set, in the file and in TensorBoard, and the best model kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support import letters_recipe
from support.evaluations import read_evaluations
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.runs.evaluation.schedule import format_numbers

RECIPE = Path(letters_recipe.__file__)
SETS = """
data.file = "prompts.jsonl"
rollouts.problems_per_step = 2
rollouts.group_size = 2
rollouts.sampling.max_tokens = 4
rollouts.limits.max_turns = 1
loop.num_steps = 1
[[rewards]]
function = "rewards.py:length"
[[evaluation_sets]]
name = "easy"
data.file = "prompts.jsonl"
num_samples = 3
sampling.temperature = 0.5
[[evaluation_sets]]
name = "hard"
data.file = "prompts.jsonl"
num_problems = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(output: Path, model: Path, *options: str) -> int:
    return main(["train", str(RECIPE), f"--output={output}", f"--model={model}", *options])


def curve(output: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(output / "metrics"))
    events.Reload()
    return {each.step: each.value for each in events.Scalars(name)}


def test_a_run_evaluates_every_n_steps_and_keeps_the_best_model(tmp_path, model, capsys):
    options = ["--evaluation.num-problems=3", "--evaluation.num-samples=4", "--evaluation.every=2"]
    options += ["--evaluation.sampling.temperature=0.8", "--export.every=1", "--evaluation.pass-reward=0.5"]
    assert train(tmp_path, model, *options, "--loop.num-steps=4") == 0
    assert [line["step"] for line in read_evaluations(tmp_path)] == [0, 2, 4]
    assert train(tmp_path, model, *options, "--loop.num-steps=5") == 0  # it continues, and evaluates nothing twice
    found = {line["step"]: line for line in read_evaluations(tmp_path)}
    assert list(found) == [0, 2, 4, 5]
    assert {(line["num_problems"], line["num_samples"], line["num_rollouts"]) for line in found.values()} == {
        (3, 4, 12)
    }
    assert all({"pass@1", "pass@2", "pass@4", "reward/standard_error"} <= line.keys() for line in found.values())
    assert curve(tmp_path, "evaluation/reward_mean") == pytest.approx(
        {step: line["reward/mean"] for step, line in found.items()}
    )
    about = json.loads((tmp_path / "best/unbroken.json").read_text())
    best = max((step for step in found if step > 0), key=lambda step: found[step]["reward/mean"])
    assert about["step"] == best
    assert about["evaluation"]["reward/mean"] == found[best]["reward/mean"]
    kept = load_file(tmp_path / "best/model.safetensors")
    of_step = load_file(tmp_path / f"models/step-{best:08}/model.safetensors")
    assert all((kept[name] == of_step[name]).all() for name in kept)
    assert "reward after 2 steps 0." in capsys.readouterr().out


def test_without_evaluations_between_the_ends_no_best_model_is_kept(tmp_path, model):
    assert train(tmp_path, model, "--evaluation.num-problems=1", "--loop.num-steps=1") == 0
    assert [line["step"] for line in read_evaluations(tmp_path)] == [0, 1]
    assert not (tmp_path / "best").exists()


def test_several_named_sets_have_their_own_problems_samples_and_sampling(tmp_path, model, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(3)))
    (tmp_path / "rewards.py").write_text(
        "def length(completions):\n    return [len(text) / 8 for text in completions]\n"
    )
    (tmp_path / "recipe.toml").write_text(SETS)

    def run(name: str, *options: str) -> int:
        return main(
            ["train", str(tmp_path / "recipe.toml"), f"--output={tmp_path / name}", f"--model={model}", *options]
        )

    assert run("run") == 0
    found = [
        (line["step"], line["set"], line["num_problems"], line["num_samples"])
        for line in read_evaluations(tmp_path / "run")
    ]
    assert found == [(0, "easy", 3, 3), (0, "hard", 1, 1), (1, "easy", 3, 3), (1, "hard", 1, 1)]
    printed = capsys.readouterr().out
    assert "easy: reward before" in printed
    assert "hard: reward after" in printed
    assert run("other", "--evaluation.best-set=soft") == 1
    assert "evaluation.best_set must be one of ['easy', 'hard'], got 'soft'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("num_problems", -1), ("num_samples", 0), ("every", -1)])
def test_wrong_numbers_are_refused_by_name(tmp_path, model, capsys, name, value):
    assert train(tmp_path / "run", model, f"--evaluation.{name}={value}") == 1
    assert f"evaluation.{name} must be >= " in capsys.readouterr().err


def test_the_line_of_an_evaluation_has_each_of_several_rewards():
    numbers = {"reward/mean": 0.5, "reward/standard_error": 0.05, "pass@1": 0.4, "pass@4": 0.75}
    assert format_numbers(numbers | {"reward_parts/correct": 0.5}) == "0.500 ± 0.050  pass@4 0.750"
    both = numbers | {"reward_parts/short": None, "reward_parts/one": 0.25, "reward_parts/correct": 0.475}
    assert format_numbers(both) == "0.500 ± 0.050 (correct 0.475, one 0.25)  pass@4 0.750"
