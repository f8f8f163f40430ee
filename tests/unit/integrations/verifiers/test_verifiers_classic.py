"""Environments of verifiers 0.1 over a stand-in: their loop, their rubric, and the ids of the session."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.gateways import CALL
from support.servers import encode
from support.verifiers_attempts import load, sample
from unbroken.errors import InvalidInputError
from unbroken.integrations.verifiers import load_environment
from unbroken.integrations.verifiers.classic import AttemptError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.runs.prompts.built_in import ProblemMaker
from unbroken.runs.recipe import load_recipe

ANSWER = "It is 17.<|im_end|>"


@pytest.fixture(autouse=True)
def _installed(install: Callable[[str], None]) -> None:
    install("0_1")


async def test_i1_the_environments_own_loop_becomes_a_row_with_the_sampled_ids(tmp_path: Path) -> None:
    group, engine = await sample(tmp_path, CALL, ANSWER, name="look")
    (trajectory,) = group.trajectories
    (row,) = export_samples(trajectory.tree, 1.0)
    assert row.token_ids[row.loss_mask].tolist() == encode(CALL) + encode(ANSWER)
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.COMPLETED, 1.0)
    assert trajectory.reward_parts == {"num_turns": 2.0}
    assert [message["role"] for message in trajectory.messages] == ["user", "user", "assistant", "tool", "assistant"]
    assert {request.params.top_p for request in engine.requests} == {1.0}  # the run's, not the environment's


async def test_what_the_model_did_wrong_is_scored_and_what_it_did_not_fails_the_attempt(tmp_path: Path) -> None:
    scored, _ = await sample(tmp_path / "a", ANSWER, name="look", error="empty")
    failed, _ = await sample(tmp_path / "b", ANSWER, name="look", error="sandbox")
    assert [each.status for each in scored.trajectories] == [TrajectoryStatus.COMPLETED]
    assert [each.status for each in failed.trajectories] == [TrajectoryStatus.FAILED]
    assert isinstance(failed.trajectories[0].error, AttemptError)
    assert "no sandbox" in str(failed.trajectories[0].error)


async def test_a_rubric_with_group_rewards_compares_the_attempts(tmp_path: Path) -> None:
    group, _ = await sample(tmp_path, ANSWER, name="look", compares=True, size=3)
    assert group.rewards == (3.0, 3.0, 3.0)
    assert [dict(each.reward_parts) for each in group.trajectories] == [{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}]


async def test_a_failed_attempt_is_not_compared_with_the_others(tmp_path: Path) -> None:
    group, _ = await sample(tmp_path, ANSWER, name="look", compares=True, error="sandbox", size=2)
    assert group.rewards == (None, None)
    assert {each.status for each in group.trajectories} == {TrajectoryStatus.FAILED}


def test_each_epoch_has_every_row_in_an_order_of_its_own_and_evaluations_have_theirs() -> None:
    problems = load("verifiers:look", seed=3, cells=8)
    train, evaluation = problems.make(evaluation=False), problems.make(evaluation=True)
    assert train.agent is not None
    epochs = [[train.agent(8 * epoch + k).task["example_id"] for k in range(8)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(8)]] * 2
    assert epochs[0] != epochs[1]
    assert (train.num_problems, evaluation.num_problems) == (8, 1)
    assert train.source == load("verifiers:look", seed=4, cells=8).make(evaluation=False).source
    assert train.source != load("verifiers:look", seed=3, cells=9).make(evaluation=False).source


def test_an_environment_of_the_package_itself_is_named_by_its_class() -> None:
    assert len(load_environment("LookEnv", {"cells": 5}).rows(evaluation=False)) == 5
    with pytest.raises(InvalidInputError, match="Could not import 'Rubric'"):  # a class, but no environment
        load_environment("Rubric", {})


def test_an_environment_does_not_take_the_signals_of_the_run() -> None:
    before = signal.getsignal(signal.SIGTERM)
    load_environment("look", {})
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("lok", {}, "environment must be one that verifiers 0.1.14 can load, got 'lok': ValueError: Could not import"),
        ("look", {"cell": 2}, "got 'look': TypeError"),
        ("look", {"cells": 0}, "environment 'look' has no rows: its data set is empty"),
        ("look", {"cells": -1}, "environment 'look' has no rows to train on: dataset is not set"),
        ("harness", {"compares": True}, "environment 'harness' cannot be trained on: its harness starts and scores"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_the_start(name: str, arguments: dict, words: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        load(f"verifiers:{name}", **arguments).make(evaluation=False)
    assert words in str(raised.value)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(InvalidInputError, match="need the package verifiers, which an environment's own package"):
        load_environment("look", {})


def test_a_toml_file_names_an_environment_with_its_arguments(tmp_path: Path) -> None:
    found = read(tmp_path, "environment_arguments.cells = 5")
    assert ProblemMaker(found).make(found.data, split="train").num_problems == 5


@pytest.mark.parametrize(
    "line", ['data.file = "rows.jsonl"', 'tools = ["a.py:b"]', 'evaluation_sets = [{data = {file = "a.json"}}]']
)
def test_what_an_environment_of_verifiers_has_itself_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidInputError, match=r"must be left out with verifiers:look, which has its own"):
        read(tmp_path, line)


def read(folder: Path, line: str) -> Any:
    file = folder / "recipe.toml"
    file.write_text(f'model = "m"\nloop.num_steps = 1\nenvironment = "verifiers:look"\n{line}\n')
    return load_recipe(file).configure(["--output", str(folder / "out")])
