"""The processed distribution, against a reference that works on one row with plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.reference_sampling import reference_logprobs
from unbroken.engines.transformers.sampling import PARAMS_DTYPE, compute_logprobs, draw, pack_params
from unbroken.logit_edits import LogitEdits
from unbroken.types import ControlSpan, SamplingParams, token_ids

VOCAB_SIZE = 12
PROMPT_IDS, COMPLETION_IDS = token_ids([1, 2, 2]), token_ids([2, 3, 3, 5])

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.3]),
    logit_bias=st.sampled_from([(), ((1, 2.0), (5, -3.0))]),
    allowed_token_ids=st.sampled_from([(), (0, 1, 2, 5, 6, 7)]),
    min_tokens=st.sampled_from([0, 1, 50]),
    stop_token_ids=st.sampled_from([(), (2, 3)]),
    bad_words_ids=st.sampled_from([(), ((1,), (4, 6)), (tuple(COMPLETION_IDS.tolist()),)]),
)


def pack(rows: list[SamplingParams]) -> Any:
    return np.array([pack_params(params) for params in rows], dtype=PARAMS_DTYPE)


def edits_of(rows: list[SamplingParams]) -> LogitEdits | None:
    """What changes the next id of each row after the prompt and the ids so far."""
    ids, start = np.concatenate([PROMPT_IDS, COMPLETION_IDS]), len(PROMPT_IDS)
    spans = [
        () if row.controls is None else (ControlSpan(start=start, stop=99, controls=row.controls),) for row in rows
    ]
    return LogitEdits.of((ids, of_row, np.array([len(ids)])) for of_row in spans)


@settings(max_examples=400, derandomize=True)
@given(rows=st.lists(params_strategy, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_every_row_of_a_mixed_batch_has_its_own_distribution(rows: list[SamplingParams], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(rows), VOCAB_SIZE)).astype(np.float32)
    found = compute_logprobs(torch.from_numpy(logits), pack(rows), edits_of(rows)).numpy()
    for row, params in enumerate(rows):
        expected = reference_logprobs(logits[row], params, PROMPT_IDS.tolist(), COMPLETION_IDS.tolist())
        np.testing.assert_allclose(found[row], expected, atol=2e-5)


@settings(max_examples=100, derandomize=True)
@given(params=params_strategy, seed=st.integers(0, 10_000))
def test_logits_of_half_precision_are_processed_in_float32(params: SamplingParams, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (1, VOCAB_SIZE))).bfloat16()
    found = compute_logprobs(logits, pack([params]), edits_of([params]))
    assert found.dtype == torch.float32
    assert torch.equal(found, compute_logprobs(logits.float(), pack([params]), edits_of([params])))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equal_logits_keep_the_smaller_id(top_k: int) -> None:
    logprobs = compute_logprobs(torch.zeros(1, 6), pack([SamplingParams(top_k=top_k)]))
    assert torch.isfinite(logprobs[0]).nonzero()[:, 0].tolist() == list(range(top_k))


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_top_p_keeps_no_id_more_than_it_takes_to_reach_the_mass(top_p: float, num_kept: int) -> None:
    logprobs = compute_logprobs(torch.zeros(1, 4), pack([SamplingParams(top_p=top_p)]))
    assert torch.isfinite(logprobs[0]).nonzero()[:, 0].tolist() == list(range(num_kept))


def test_the_callers_logits_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    rows = [SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, top_k=2, temperature=0.5), SamplingParams()]
    compute_logprobs(logits, pack(rows), edits_of(rows))
    assert torch.equal(logits, before)


def test_an_id_of_probability_zero_is_never_drawn() -> None:
    logprobs = torch.log(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]))
    for uniform in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        ids, chosen = draw(logprobs, pack([SamplingParams()]), np.array([uniform]))
        assert ids[0] == (1 if uniform < 0.5 else 3)
        assert chosen[0] == pytest.approx(np.log(0.5))


@settings(max_examples=300, derandomize=True)
@given(seed=st.integers(0, 10_000), uniform=st.floats(0, 1, exclude_max=True))
def test_the_largest_uniform_number_still_draws_an_id(seed: int, uniform: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 8, (2, 50)).astype(np.float32))
    logprobs = torch.log_softmax(logits, -1)
    ids, _ = draw(logprobs, pack([SamplingParams()] * 2), np.array([uniform, 1 - 2**-53]))
    cumulative = logprobs.exp().double().cumsum(-1).numpy()
    for row, number in enumerate((uniform, 1 - 2**-53)):
        below = cumulative[row, ids[row] - 1] if ids[row] else 0.0
        assert below <= number * cumulative[row, -1] <= cumulative[row, ids[row]]
        assert cumulative[row, ids[row]] > below


def test_ids_are_drawn_as_often_as_they_are_likely() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = 20_000
    uniforms = np.random.default_rng(0).random(rows)
    ids, _ = draw(torch.log(probs).expand(rows, 4), pack([SamplingParams()] * rows), uniforms)
    frequencies = np.bincount(ids, minlength=4) / rows
    # Four standard deviations of a share of 0.5.
    assert np.abs(frequencies - probs.numpy()).max() < 4 * np.sqrt(0.25 / rows)


def test_greedy_rows_take_the_most_likely_id_whatever_the_uniform_number() -> None:
    logprobs = torch.log_softmax(torch.tensor([[0.0, 3.0, 1.0]] * 3), -1)
    rows = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0)]
    ids, chosen = draw(logprobs, pack(rows), np.array([0.0, 0.0, 0.999]))
    assert ids.tolist() == [1, 0, 1]
    assert chosen[0] == pytest.approx(float(logprobs[0, 1]))


EDGES = {
    "max_tokens": [1, 2**31 - 1],
    "temperature": [0, 0.01, 100],
    "top_k": [2**31 - 1],
    "top_p": [5e-324, 1],
    "min_p": [5e-324, 1],
    "repetition_penalty": [0.01, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in EDGES.items() for value in values])
def test_no_parameter_that_is_accepted_breaks_the_distribution(field: str, value: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1e4, (1, VOCAB_SIZE)).astype(np.float32))
    rows = [SamplingParams(**{field: value})]  # type: ignore[arg-type]
    _, chosen = draw(compute_logprobs(logits, pack(rows), edits_of(rows)), pack(rows), np.array([0.5]))
    assert np.isfinite(chosen).all()
