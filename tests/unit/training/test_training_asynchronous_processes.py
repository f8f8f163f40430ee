"""Two processes train asynchronously together, each on groups of its own: also when one of them loses or fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.ahead_process import CASES, MAX_STALENESS, NUM_STEPS, REPLACED_CASES
from support.processes import run_two

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of both processes, and what each of them has of each case."""
    directory = tmp_path_factory.mktemp("ahead")
    run_two("support.ahead_process", directory)
    return directory, [json.loads((directory / f"results-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", [case for case in CASES if case != "fails"])
def test_each_process_trains_each_of_its_groups_once(results, case):
    directory, (first, second) = results
    for rank, found in enumerate((first[case], second[case])):
        assert found["error"] == ""
        assert sorted(found["trained"]) == list(range(NUM_STEPS * (2 - rank)))
    assert first[case]["version"] == second[case]["version"] == NUM_STEPS
    assert first[case]["weights"] == second[case]["weights"]
    path = directory / case / "metrics-0" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(NUM_STEPS))
    assert all(line["train/num_rows"] == 6 for line in lines)
    assert max(line["staleness/max"] for line in lines) <= MAX_STALENESS
    losses = sum(line["outages/num_losses"] for line in lines)
    assert losses == (1 if case == "outage" else 0)


def test_a_process_that_does_not_publish_hears_what_became_of_each_version(results):
    _, (_, second) = results
    assert second["notices"]["heard"] == [True, False]


@pytest.mark.parametrize("case", REPLACED_CASES)
def test_each_process_fills_its_own_part_of_a_step_up_to_its_bound(results, case):
    directory, (first, second) = results
    for found in (first[case], second[case]):
        assert found["error"] == ""
        assert sorted(found["trained"]) == list(range(len(found["trained"])))
    assert first[case]["weights"] == second[case]["weights"]
    lines = [json.loads(line) for line in (directory / case / "metrics-0" / "metrics.jsonl").read_text().splitlines()]
    num_replaced = sum(line["groups/num_replaced"] for line in lines)
    assert len(first[case]["trained"]) + len(second[case]["trained"]) == 3 * NUM_STEPS + num_replaced
    assert {line["train/num_rows"] for line in lines} == {4, 6}  # 4 where the second process had nothing left
    assert all(line["groups/num_replaced"] <= 3 for line in lines)


@pytest.mark.parametrize("case", ["whole", "shared"])
def test_servers_with_weights_that_are_too_old_are_ignored_from_each_publication_on(results, case):
    for found in (each[case] for each in results[1]):
        assert found["required"] == [max(version - MAX_STALENESS, 0) for version in range(1, NUM_STEPS + 1)]


def test_an_error_of_one_process_ends_both(results):
    _, (first, second) = results
    assert second["fails"]["error"] == "RewardError: row 4: nan"
    assert first["fails"]["error"].startswith("TrainingError: process 1 failed: RewardError: row 4: nan")
