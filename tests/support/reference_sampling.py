"""The processed distribution as `SamplingParams` describes it: one row, one id at a time, in float64, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from unbroken.types import SamplingParams


def reference_logprobs(
    logits: Any, params: SamplingParams, prompt_ids: Sequence[int], completion_ids: Sequence[int]
) -> Any:
    """[V] log-probabilities after these ids; -inf for ids that cannot be sampled."""
    scores = np.asarray(logits, dtype=np.float64).copy()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    for token_id in {*prompt_ids, *completion_ids}:
        factor = params.repetition_penalty
        scores[token_id] = scores[token_id] / factor if scores[token_id] > 0 else scores[token_id] * factor
    for token_id, count in Counter(completion_ids).items():
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id in range(len(scores)):
        if not _is_possible(token_id, params, list(completion_ids)):
            scores[token_id] = -np.inf
    kept = {token_id for token_id, score in enumerate(scores) if score > -np.inf}
    if params.temperature > 0:
        scores /= params.temperature
        kept &= _kept(np.exp(scores - scores.max()), params)
    scores -= scores.max()
    total = sum(np.exp(scores[i]) for i in kept)
    return np.array([scores[i] - np.log(total) if i in kept else -np.inf for i in range(len(scores))])


def _is_possible(token_id: int, params: SamplingParams, completion_ids: list[int]) -> bool:
    if params.allowed_token_ids and token_id not in params.allowed_token_ids:
        return False
    if token_id in params.stop_token_ids and len(completion_ids) < params.min_tokens:
        return False
    text = [*completion_ids, token_id]
    return not any(text[-len(word) :] == list(word) for word in params.bad_words_ids)


def _kept(weights: Any, params: SamplingParams) -> set[int]:
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    ranked = [i for i in ranked if weights[i] >= params.min_p * weights.max()]
    ranked = ranked[: params.top_k or None]
    total, kept, mass = sum(weights[i] for i in ranked), set(), 0.0
    for i in ranked:
        if params.top_p == 1 or mass < params.top_p:
            kept.add(i)
        mass += weights[i] / total
    return kept
