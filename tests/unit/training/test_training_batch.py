"""Rows into tensors: the worked example, and packing into micro batches."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.rows import random_rows, row
from unbroken.training.batch import Batch, ScoredRow, collate, idle_batch, micro_batches

CPU = torch.device("cpu")


def batch_of(rows, old_logprobs, weights=None, references=None) -> Batch:
    references = references or [None] * len(rows)
    scored = [
        ScoredRow(sample=r, old_logprobs=old, reference_logprobs=reference)
        for r, old, reference in zip(rows, old_logprobs, references, strict=True)
    ]
    return collate(scored, weights or [1.0] * len(rows), CPU)


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
    assert batch.normalization_N.tolist() == [0.25, 0.25, 0.5]
    assert batch.versions_N.tolist() == [0, 0, 3]
    assert batch.num_row_tokens == (2, 1)
    assert batch.num_loss_tokens == 3


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


def test_micro_batches_of_a_worked_example():
    # budget 12: 6 + 6 fit, 4 + 4 + 4 would hold 12 and so do 4 + 3 + 2
    assert micro_batches([3, 6, 2, 6, 4], 12) == [[1, 3], [4, 0, 2]]


def test_a_row_longer_than_the_budget_is_alone_and_whole():
    assert micro_batches([100, 5, 5], 10) == [[0], [1, 2]]


def test_no_rows_make_no_micro_batches():
    assert micro_batches([], 10) == []


@settings(max_examples=500, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_for_any_lengths_each_row_is_in_one_micro_batch_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
