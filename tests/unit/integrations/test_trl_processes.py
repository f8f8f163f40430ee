"""Two processes that roll out for TRL (gloo, on the CPU): what one cannot do is no riddle to the other."""

from __future__ import annotations

import json

import pytest

from support.processes import run_two

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """By process, what came of each case."""
    directory = tmp_path_factory.mktemp("trl")
    run_two("support.trl_process", directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_each_process_has_an_engine_of_its_own_at_one_version(results):
    whole = [[1] * 6] * 2
    assert [one["both publish"] for one in results] == [[whole, 1], [whole, 1]]


def test_a_process_whose_rollouts_all_failed_goes_on_with_the_other(results):
    assert results[0]["all of one fail"] == [[[0], [0]], 2]
    assert results[1]["all of one fail"] == [[[1] * 6] * 2, 2]


@pytest.mark.parametrize("process", [0, 1])
def test_no_row_in_any_process_ends_all(results, process):
    assert results[process]["all of both fail"].startswith(
        "RolloutError: no rollout of this generation can be trained on"
    )
    assert results[process]["no process publishes"].startswith(
        "InvalidInputError: at least one process must have a publisher"
    )


def test_i6_an_error_of_one_process_reaches_the_other(results):
    wrong = "were sampled by policy_version 3, but TRL trains version 4"
    assert results[1]["one has old weights"].startswith("InvariantError")
    assert wrong in results[1]["one has old weights"]
    assert results[0]["one has old weights"].startswith("RolloutError: process 1 failed: InvariantError")
    assert wrong in results[0]["one has old weights"]
