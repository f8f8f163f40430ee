"""Two processes of which only one has images in a step train as one with all rows (DDP and FSDP2 over gloo)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support import train_images_process
from support.image_rows import Vision
from support.processes import run_two
from support.vision import FAMILIES
from unbroken.training.trainer import Trainer

pytest.importorskip("torchvision", reason="the image processors of transformers need it")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The folder that two processes saved their weights and statistics into."""
    directory = tmp_path_factory.mktemp("processes")
    for family in FAMILIES:
        Vision.make(directory / family, family)
    run_two("support.train_images_process", directory)
    return directory


@pytest.mark.parametrize("kind", train_images_process.KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_processes_with_and_without_images_train_as_one_with_all_rows(results, kind, family):
    vision = Vision.load(results / family, family)
    trainer = Trainer(vision.model(), train_images_process.config(), images=vision.images)
    steps = [
        trainer.step([row for rank in (0, 1) for row in train_images_process.rows_of(vision, rank, step)])
        for step in range(len(train_images_process.NUM_IMAGES))
    ]
    first, second = (torch.load(results / f"weights-{kind}-{family}-{rank}.pt") for rank in (0, 1))
    untrained = dict(vision.model().named_parameters())
    moved = {name: float((weight - untrained[name]).detach().abs().max()) for name, weight in trainer.named_weights()}
    for part in ("vis", "language_model"):
        assert max(distance for name, distance in moved.items() if part in name) > 1e-3
    for name, weight in trainer.named_weights():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=1e-5, rtol=0, msg=name)
    for ours, theirs in zip(steps, json.loads((results / f"stats-{kind}-{family}-0.json").read_text()), strict=True):
        assert (theirs["num_rows"], theirs["num_loss_tokens"]) == (ours.num_rows, ours.num_loss_tokens)
        for name in ("loss", "grad_norm", "k3"):
            assert theirs[name] == pytest.approx(getattr(ours, name), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", train_images_process.KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_one_process_refuses_is_refused_by_all_and_changes_nothing(results, kind, family):
    """Nobody waits for the process that stopped; that the steps after it train as ever, the test above shows."""
    by_other, by_itself = ((results / f"refused-{kind}-{family}-{rank}.txt").read_text() for rank in (0, 1))
    assert by_itself.startswith("samples[0].token_ids[")
    assert by_other == f"process 1 refuses its rows: {by_itself}"
