"""Two and four processes that share the ids of each lane compute what one computes (Ulysses, over gloo)."""

from __future__ import annotations

import json

import pytest

from support import sequence_process
from support.processes import run_processes

pytestmark = pytest.mark.e2e
NUMBERS = (2, 4)
REASONS = {
    "heads": "its 3 heads cannot be dealt out evenly",
    "windows": "attention in windows",
    "eager": "attends by eager",
    "loses_exchange": "its logprobs are off",
    "mamba": "its forward takes no position_ids",
}


@pytest.fixture(scope="module", params=NUMBERS)
def found(request, tmp_path_factory) -> list[dict]:
    """What each of the processes found."""
    folder = tmp_path_factory.mktemp("sequence")
    run_processes("support.sequence_process", folder, codes=[0] * request.param)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("case", sequence_process.CASES)
def test_scores_gradients_and_weights_after_three_updates_are_those_of_one_process(found, case):
    for of_rank in found:
        off = of_rank[case]
        assert (off["moved"] > 1e-2) == (off["num_scores"] > 0) == (case != "idle")
        assert off["scores"] < 1e-6
        assert off["gradients"] < 1e-5
        assert off["weights"] < 1e-6


@pytest.mark.parametrize("case", sequence_process.REFUSED)
def test_a_model_that_cannot_be_split_is_refused_by_name_on_all_processes(found, case):
    for of_rank in found:
        message = of_rank[f"refused {case}"]
        assert REASONS[case] in message
        assert f"{len(found)} processes" in message
        assert "trainer.parallel.sequence must be 1" in message
