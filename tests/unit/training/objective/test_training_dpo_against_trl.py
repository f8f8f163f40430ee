"""The update of the same pairs by TRL's DPOTrainer and by ours: one loss, one gradient, the same metrics."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.rows import random_rows
from unbroken.demo.model import build_model, build_tokenizer
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import DpoConfig
from unbroken.training.model.lanes import lay_out
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.pairs import PreferencePair
from unbroken.training.trainer import Trainer

pytest.importorskip("trl", reason="needs TRL", exc_type=ModuleNotFoundError)

BETA = 0.3


def pairs_of_one_row_each() -> list[PreferencePair]:
    rows = random_rows(np.random.default_rng(3), 8)
    signed = [replace(row, advantages=sign * row.loss_mask) for row, sign in zip(rows, [1, -1] * 4, strict=True)]
    sides = zip(signed[::2], signed[1::2], strict=True)
    return [PreferencePair(chosen=(a,), rejected=(b,), score_margin=1.0) for a, b in sides]


def dpo_trainer(folder: Path, tokenizer: Any) -> Any:
    with warnings.catch_warnings():  # of what TRL imports
        warnings.simplefilter("ignore")
        from trl import DPOConfig, DPOTrainer
    from datasets import Dataset

    trainer = DPOTrainer(
        build_model(tokenizer, seed=0),
        build_model(tokenizer, seed=1),
        args=DPOConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, beta=BETA, report_to="none"
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )
    trainer.model.train()
    return trainer


def test_pairs_have_the_loss_the_gradient_and_the_metrics_of_trl(tmp_path):
    tokenizer, pairs = build_tokenizer(), pairs_of_one_row_each()
    theirs = dpo_trainer(tmp_path, tokenizer)
    rows = [pair.chosen[0] for pair in pairs] + [pair.rejected[0] for pair in pairs]
    fed = lay_out([[(row, row.loss_mask)] for row in rows], torch.device("cpu"))
    ones = lay_out([[(row, np.ones_like(row.loss_mask))] for row in rows], torch.device("cpu"))
    inputs = {
        "input_ids": fed.token_ids_BT,
        "attention_mask": ones.mask_BT.long(),
        "completion_mask": fed.mask_BT.long(),
    }
    loss = theirs._compute_loss(theirs.model, inputs, return_outputs=False)
    loss.backward()
    trainer = Trainer(
        build_model(tokenizer, seed=0),
        TrainerConfig(optimizer=SUBTRACT_GRADIENT, dpo=DpoConfig(beta=BETA), tokens_per_micro_batch=30),
        objective=OnlineDpo(),
        reference=build_model(tokenizer, seed=1),
    )
    before = {name: weight.double() for name, weight in trainer.named_weights()}
    ours = trainer.step(pairs)
    metrics = {name: values[-1] for name, values in theirs._metrics["train"].items()}
    assert ours.loss == pytest.approx(loss.item(), rel=1e-5)
    assert ours.objective is not None
    assert ours.objective.margin == pytest.approx(metrics["rewards/margins"], rel=1e-4)
    assert ours.objective.accuracy == pytest.approx(metrics["rewards/accuracies"])
    gradients = {name: parameter.grad.double() for name, parameter in theirs.model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in trainer.named_weights():
        assert float((before[name] - weight.double() - gradients[name]).abs().max()) / largest < 1e-4, name
