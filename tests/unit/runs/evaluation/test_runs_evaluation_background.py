"""Evaluations beside training: steps go on meanwhile, and the line says the versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import letters_recipe
from support.evaluations import count_steps, read_evaluations, wait_for_steps
from support.processes import run_two
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.runs.evaluation.evaluator import Evaluator
from unbroken.runs.export.files import read_info

RECIPE = Path(letters_recipe.__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(output: Path, model: Path, *options: str, num_steps: int = 8) -> int:
    words = ["train", str(RECIPE), f"--output={output}", f"--model={model}", f"--loop.num-steps={num_steps}"]
    words += ["--evaluation.num-problems=3", "--evaluation.every=3", "--loop.max-staleness=2", "--export.every=1"]
    words.append("--checkpoints.every=1")
    return main([*words, *options])


def test_steps_are_made_while_an_evaluation_runs_and_the_best_model_is_the_one_it_began_with(
    tmp_path, model, monkeypatch
):
    """An evaluation that waits until three more steps are made ends only if they are."""
    wait_for_steps(monkeypatch, tmp_path)
    assert train(tmp_path, model) == 0
    lines = read_evaluations(tmp_path)
    assert [line["step"] for line in lines] == [0, 3, 6, 8]
    assert all(line["policy_version/min"] <= line["policy_version/max"] for line in lines)
    by_step = {line["step"]: line for line in lines}
    assert (by_step[0]["policy_version/min"], by_step[0]["policy_version/max"]) == (0, 0)
    assert by_step[3]["policy_version/max"] > 3
    assert (by_step[8]["policy_version/min"], by_step[8]["policy_version/max"]) == (8, 8)
    best = max(lines[1:], key=lambda line: line["reward/mean"])
    info = read_info(tmp_path / "best")
    assert (info.step, info.evaluation["reward/mean"]) == (best["step"], best["reward/mean"])
    kept = load_file(tmp_path / "best" / "model.safetensors")
    of_step = load_file(tmp_path / "models" / f"step-{best['step']:08}" / "model.safetensors")
    assert all((kept[name] == of_step[name]).all() for name in of_step)
    assert not (tmp_path / "best-candidate").exists()


def test_a_killed_run_evaluates_again_what_was_not_recorded(tmp_path, model, monkeypatch):
    class KilledError(Exception):
        pass

    sample = Evaluator.sample

    async def killed(self):
        if count_steps(tmp_path) >= 3:
            raise KilledError
        return await sample(self)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "sample", killed)
        assert train(tmp_path, model) == 1
    assert [line["step"] for line in read_evaluations(tmp_path)] == [0]
    made = count_steps(tmp_path)
    assert train(tmp_path, model) == 0
    steps = [line["step"] for line in read_evaluations(tmp_path)]
    assert steps[0] == 0
    assert 3 <= steps[1] <= made + 1
    assert steps[-1] == 8
    assert sorted(set(steps)) == steps


@pytest.mark.e2e
def test_two_processes_evaluate_their_parts_beside_training(tmp_path, model):
    words = ["train", str(RECIPE), f"--output={tmp_path}", f"--model={model}", "--loop.num-steps=6"]
    words += ["--evaluation.num-problems=3", "--evaluation.every=2", "--loop.max-staleness=1"]
    run_two("unbroken", *words, "--rollouts.sampling.max-tokens=8")
    lines = read_evaluations(tmp_path)
    assert [(line["step"], line["num_rollouts"]) for line in lines] == [(step, 3) for step in (0, 2, 4, 6)]
    assert count_steps(tmp_path) == 6
    best = max(lines[1:], key=lambda line: line["reward/mean"])
    assert read_info(tmp_path / "best").step == best["step"]
    assert not (tmp_path / "best-candidate").exists()
