"""Logprobs of rows from a model's own logits, one row at a time in float64, as the reference for the fast ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unbroken.types import TrainingSample


def slow_logprobs(model: Any, samples: Sequence[TrainingSample]) -> list[torch.Tensor]:
    """The logprobs of each row's loss tokens, with gradient."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        scores = (model(input_ids=ids[None]).logits[0, :-1].double() / sample.temperature).log_softmax(-1)
        picked = torch.from_numpy(sample.loss_mask[1:].copy())
        found.append(scores.gather(-1, ids[1:, None])[:, 0][picked])
    return found


def slow_entropies(model: Any, samples: Sequence[TrainingSample]) -> list[torch.Tensor]:
    """The entropy of the policy at each of a row's loss tokens, with gradient."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        scores = (model(input_ids=ids[None]).logits[0, :-1].double() / sample.temperature).log_softmax(-1)
        picked = torch.from_numpy(sample.loss_mask[1:].copy())
        found.append(-(scores.exp() * scores).sum(-1)[picked])
    return found
