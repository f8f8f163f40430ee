"""Rows into tensors: the worked example, and what stays flat."""

from __future__ import annotations

import numpy as np
import torch

from support.rows import random_rows, row
from unbroken.training.model.batch import Batch, ScoredRow, collate, idle_batch

CPU = torch.device("cpu")


def batch_of(rows, old_logprobs, weights=None, references=None) -> Batch:
    references = references or [None] * len(rows)
    scored = [
        ScoredRow(sample=r, old_logprobs=old, reference_logprobs=reference)
        for r, old, reference in zip(rows, old_logprobs, references, strict=True)
    ]
    return collate([[each] for each in scored], weights or [1.0] * len(rows), CPU)


def test_the_worked_example_of_the_module():
    rows = [
        row([5, 6, 7, 8], sampled=[2, 3], advantage=2.0, logprob=-0.5),
        row([5, 9], sampled=[1], advantage=-1.0, logprob=-0.25, version=3),
    ]
    old = [np.array([9, 9, -1, -2], np.float32), np.array([9, -3], np.float32)]
    references = [np.array([9, 9, -4, -5], np.float32), np.array([9, -6], np.float32)]
    batch = batch_of(rows, old, [0.25, 0.5], references)
    assert batch.token_ids_BT.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert batch.loss_mask_BT.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch.rollout_logprobs_N.tolist() == [-0.5, -0.5, -0.25]
    assert batch.old_logprobs_N.tolist() == [-1, -2, -3]
    assert batch.advantages_N.tolist() == [2, 2, -1]
    assert batch.reference_logprobs_N.tolist() == [-4, -5, -6]
    assert batch.weights_N.tolist() == [0.25, 0.25, 0.5]
    assert batch.versions_N.tolist() == [0, 0, 3]
    assert batch.num_row_tokens == (2, 1)
    assert batch.num_loss_tokens == 3
    assert batch.num_padding == 2
    assert batch.position_ids_BT is None


def test_no_nan_of_an_unsampled_id_reaches_the_batch():
    rows = random_rows(np.random.default_rng(0), 20)
    assert any(np.isnan(r.rollout_logprobs).any() for r in rows)
    batch = batch_of(rows, [r.rollout_logprobs for r in rows])
    for values in (batch.rollout_logprobs_N, batch.old_logprobs_N, batch.advantages_N):
        assert values.isfinite().all()
        assert len(values) == int(batch.loss_mask_BT.sum())


def test_flat_values_stand_in_the_order_in_which_the_mask_picks_them():
    rows = random_rows(np.random.default_rng(1), 7)
    numbered = [np.arange(len(r.token_ids), dtype=np.float32) + 100 * i for i, r in enumerate(rows)]
    batch = batch_of(rows, numbered)
    rows_B, columns_B = batch.loss_mask_BT.nonzero(as_tuple=True)
    assert batch.old_logprobs_N.tolist() == (100 * rows_B + columns_B).tolist()


def test_an_idle_batch_has_no_loss_token():
    assert idle_batch(CPU).num_loss_tokens == 0
    assert not idle_batch(CPU).loss_mask_BT.any()
