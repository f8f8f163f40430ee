"""Trees of rows on a GPU, where FlexAttention computes them: each logprob, and the gradient, are those of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from support.gradients import SUBTRACT_GRADIENT
from support.models import wide_qwen3
from support.prefixes import branching_rows
from unbroken.training.config import SharedPrefixes, TrainerConfig
from unbroken.training.model.tree_attention import MaskKind
from unbroken.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOLERANCES = {"no": 1e-5, "bf16": 2e-2}


def train(rows, shared_prefixes, precision):
    """The logprobs of all rows, the gradient of a step, and the trainer."""
    AcceleratorState._reset_state()
    config = TrainerConfig(
        optimizer=SUBTRACT_GRADIENT, shared_prefixes=shared_prefixes, tokens_per_micro_batch=4096, logprob_chunk_size=64
    )
    trainer = Trainer(wide_qwen3(2), config, accelerator=Accelerator(mixed_precision=precision))
    logprobs = np.concatenate(trainer.logprobs(rows))
    before = {name: weight.detach().clone() for name, weight in trainer.named_weights()}
    stats = trainer.step(rows)
    gradient = torch.cat([(before[name] - weight).flatten().double() for name, weight in trainer.named_weights()])
    return logprobs, gradient, stats, trainer


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(("seed", "num_rows", "longest"), [(0, 8, 700), (1, 3, 200), (2, 16, 900)])
def test_trees_of_several_blocks_train_as_their_rows_do(precision, seed, num_rows, longest):
    rows = branching_rows(np.random.default_rng(seed), num_rows, longest=longest)
    logprobs, gradient, stats, trainer = train(rows, SharedPrefixes.ALWAYS, precision)
    assert trainer.backend.policy.tree_mask is MaskKind.BLOCKS
    assert stats.shared_share > 0
    expected_logprobs, expected, of_rows, _ = train(rows, SharedPrefixes.NEVER, precision)
    assert of_rows.shared_share == 0
    known = np.isfinite(expected_logprobs)
    tolerance = TOLERANCES[precision]
    assert np.abs(logprobs - expected_logprobs)[known].max() < tolerance * np.abs(expected_logprobs[known]).max()
    assert float((gradient - expected).norm() / expected.norm()) < tolerance
