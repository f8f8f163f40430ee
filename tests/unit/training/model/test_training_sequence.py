"""Two and four processes that share the ids of each lane compute what one computes (Ulysses, over gloo)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support import sequence_process, sequence_training
from support.processes import run_processes
from unbroken.errors import InvalidInputError
from unbroken.training.config import ParallelConfig, TrainerConfig

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


@pytest.fixture(scope="module", params=NUMBERS)
def trained(request, tmp_path_factory) -> tuple[Path, int]:
    """The folder that processes saved weights and statistics into, and how many they are."""
    folder = tmp_path_factory.mktemp("trained")
    run_processes("support.sequence_training", folder, codes=[0] * request.param)
    return folder, request.param


@pytest.mark.parametrize(("kind", "name"), sequence_training.CASES)
def test_processes_that_share_rows_train_as_one_process(trained, kind, name):
    folder, num_processes = trained
    trainer = sequence_training.make_trainer(name)
    before = {key: weight.clone() for key, weight in trainer.named_weights()}
    expected = sequence_training.train(name, trainer, (0, 1))
    weights = dict(trainer.named_weights())
    assert max(float((weights[key] - before[key]).abs().max()) for key in weights) > 1e-3
    for rank in range(num_processes):
        found = torch.load(folder / f"weights-{kind}-{name}-{rank}.pt")
        for key, weight in weights.items():
            torch.testing.assert_close(found[key], weight, atol=1e-5, rtol=0, msg=key)
        rows = sequence_training.make_rows(name, 0, 0)[: 2 + rank]
        for ours, theirs in zip(
            trainer.logprobs(rows), torch.load(folder / f"logprobs-{kind}-{name}-{rank}.pt"), strict=True
        ):
            torch.testing.assert_close(theirs, torch.from_numpy(ours), atol=1e-4, rtol=0, equal_nan=True)
        for ours, theirs in zip(
            expected, json.loads((folder / f"stats-{kind}-{name}-{rank}.json").read_text()), strict=True
        ):
            for key in ("num_rows", "num_tokens", "num_loss_tokens", "num_updates", "policy_version", "routing"):
                assert theirs[key] == ours[key]
            for key in ("loss", "grad_norm", "mean_ratio", "k3", "entropy", "router_loss", "reference_k3"):
                assert theirs[key] == (None if ours[key] is None else pytest.approx(ours[key], rel=1e-3, abs=1e-5)), key


@pytest.mark.parametrize("other", [{"tensor": 2}, {"expert": 2, "fsdp": 2}])
def test_other_exchanges_in_a_pass_are_refused_with_it(other):
    with pytest.raises(InvalidInputError, match=r"sequence must be >= 1, and 1 with tensor .* or expert .* above 1"):
        ParallelConfig(sequence=2, **other)


def test_it_must_divide_the_number_of_processes_and_layers_are_not_compiled():
    with pytest.raises(
        InvalidInputError, match=r"trainer.parallel.sequence = 2 must divide the number of processes, 3"
    ):
        ParallelConfig(sequence=2).check_processes(3)
    with pytest.raises(InvalidInputError, match="parallel must be sequence 1 with compile"):
        TrainerConfig(compile=True, parallel=ParallelConfig(sequence=2))
