"""What changes logits (a bias, allowed ids, bad words, penalties, ...): the trainer's distribution is the sampler's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from support.effort import num_cases
from support.gradients import pull, step_gradient
from support.reference_sampling import reference_logprobs
from support.rows import unscored
from unbroken.errors import InvalidInputError
from unbroken.logit_edits import LogitEdits
from unbroken.training.backend import TrainerBackend
from unbroken.training.config import OldLogprobs, Packing, SharedPrefixes, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.model.scores import Entropy, KeptTokens, LogitScaling, RoundedHead, rounded_scores
from unbroken.types import ControlSpan, KeptIds, LogitControls, SamplingParams, TrainingSample
from unit.training.test_training_kept_ids import make_trainer, rows_of, sharp_model

PARAMS = SamplingParams(max_tokens=8, return_kept_ids=True)
BIAS = tuple((token_id, 3.0 if token_id % 2 else -2.0) for token_id in range(20))
CONTROLS: tuple[dict[str, Any], ...] = (
    {"logit_bias": BIAS},
    {"allowed_token_ids": (3, 5, 9, 11, 40, 41, 42)},
    {"min_tokens": 5, "stop_token_ids": tuple(range(0, 60, 2))},
    {"bad_words_ids": ((7,), (8, 9), *((number, number) for number in range(64)))},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5},
)
ALL = {name: value for one in CONTROLS for name, value in one.items()} | {
    "allowed_token_ids": tuple(range(3, 60)),
    "temperature": 0.7,
}


def name_of(controls: dict[str, Any]) -> str:
    return next(iter(controls)) if len(controls) < 3 else "all"


def find_reference(model: Any, row: TrainingSample, params: SamplingParams) -> list[np.ndarray]:
    """[V] of each sampled id of a row of two turns, in float64, by a sampler that shares no code with ours."""
    with torch.no_grad():
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double().numpy()
    found, start = [], 0
    for place in np.flatnonzero(row.sampled_mask).tolist():
        start = start if row.sampled_mask[place - 1] else place
        before = row.token_ids.tolist()[:place]
        found.append(reference_logprobs(logits[place - 1], params, before[:start], before[start:]))
    return found


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
@pytest.mark.parametrize("controls", [*CONTROLS, ALL], ids=name_of)
def test_at_equal_weights_the_mismatch_is_rounding_under_every_control(controls, packing):
    params = replace(PARAMS, **controls)
    rows = rows_of(params)
    assert all(span.controls == params.controls for row in rows for span in row.controls)
    assert [len(row.controls) for row in rows] == [2] * len(rows)
    metrics = step_metrics(make_trainer(sharp_model(), packing=packing, old_logprobs=OldLogprobs.RECOMPUTE).step(rows))
    assert metrics["mismatch/max_abs"] < 2e-5  # of logits that a penalty made larger
    assert metrics["mismatch/k3"] < 1e-10
    for row in rows:
        expected = find_reference(sharp_model(), row, params)
        sampled = row.token_ids[row.sampled_mask]
        wanted = [each[token_id] for each, token_id in zip(expected, sampled, strict=True)]
        np.testing.assert_allclose(row.rollout_logprobs[row.sampled_mask], wanted, atol=2e-5)


@pytest.mark.parametrize("controls", CONTROLS, ids=name_of)
def test_without_its_controls_the_same_rows_have_a_mismatch(controls):
    """The test above could fail: what the model alone says is far from what was sampled from."""
    rows = [replace(row, controls=()) for row in rows_of(replace(PARAMS, **controls))]
    assert step_metrics(make_trainer(sharp_model()).step(rows))["mismatch/max_abs"] > 0.02


@settings(max_examples=10)
@given(data=st.data())
def test_for_any_controls_engine_and_trainer_agree(data):
    ids = st.integers(0, 59)
    params = replace(
        PARAMS,
        max_tokens=6,
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([0, 20])),
        logit_bias=tuple(data.draw(st.dictionaries(ids, st.floats(-5, 5), max_size=8)).items()),
        allowed_token_ids=tuple(data.draw(st.sampled_from([(), range(10, 64)]))),
        min_tokens=data.draw(st.integers(0, 7)),
        stop_token_ids=tuple(data.draw(st.sets(ids, max_size=9))),
        bad_words_ids=tuple(map(tuple, data.draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=8)))),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.7, 1.5])),
        presence_penalty=data.draw(st.floats(-2, 2)),
        frequency_penalty=data.draw(st.floats(-2, 2)),
        seed=data.draw(st.integers(0, 99)),
    )
    rows = rows_of(params, num_rows=2)
    for row, logprobs in zip(rows, make_trainer(sharp_model()).logprobs(rows), strict=True):
        assert bool(row.controls) == (params.controls is not None)
        # A low penalty and temperature make logits three times as large, and their rounding.
        assert np.abs(logprobs - row.rollout_logprobs)[row.sampled_mask].max() < 3e-5
        expected = find_reference(sharp_model(), row, params)
        wanted = [each[token_id] for each, token_id in zip(expected, row.token_ids[row.sampled_mask], strict=True)]
        np.testing.assert_allclose(logprobs[row.sampled_mask], wanted, atol=2e-5)


def plain_logprobs(model: Any, row: TrainingSample) -> torch.Tensor:
    """[S] of the sampled ids under `ALL`, with a gradient, one by one in the model's precision."""
    ids = row.token_ids.tolist()
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    found, start = [], 0
    for place in np.flatnonzero(row.sampled_mask).tolist():
        start = start if row.sampled_mask[place - 1] else place
        scores = logits[place - 1].clone()
        for token_id, bias in ALL["logit_bias"]:
            scores[token_id] = scores[token_id] + bias
        for token_id in set(ids[:place]):
            factor = ALL["repetition_penalty"]
            scores[token_id] = scores[token_id] / factor if scores[token_id] > 0 else scores[token_id] * factor
        for token_id in set(ids[start:place]):
            count = ids[start:place].count(token_id)
            scores[token_id] = scores[token_id] - ALL["frequency_penalty"] * count - ALL["presence_penalty"]
        words = ALL["bad_words_ids"]
        banned = {word[-1] for word in words if [*ids[start:place], word[-1]][-len(word) :] == list(word)}
        banned |= set(ALL["stop_token_ids"]) if place - start < ALL["min_tokens"] else set()
        possible = [one for one in range(len(scores)) if one in ALL["allowed_token_ids"] and one not in banned]
        found.append(scores[ids[place]] / 0.7 - (scores[possible] / 0.7).logsumexp(0))
    return torch.stack(found)


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
def test_the_gradient_is_that_of_a_plain_reference_in_float64(packing):
    rows = rows_of(replace(PARAMS, **ALL))
    model = sharp_model()
    exact = copy.deepcopy(model).double()
    for row in rows:
        (-torch.from_numpy(row.advantages[row.sampled_mask]) * plain_logprobs(exact, row)).sum().backward()
    config = {"packing": packing, "logprob_chunk_size": 7}
    backend = TrainerBackend(model, TrainerConfig(**config), accelerator=Accelerator())
    backend.forward_backward(unscored(rows), pull, weights=[1.0] * len(rows))
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    largest = max(float(each.abs().max()) for each in expected.values())
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-5 * largest


@pytest.mark.parametrize("entropy", Entropy)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_head_on_tensor_cores_has_the_gradient_of_automatic_differentiation(entropy, softcap):
    torch.manual_seed(0)
    num, width, vocab_size = 11, 6, 17
    hidden = torch.randn(num, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab_size, width, dtype=torch.float64, requires_grad=True)
    ids = np.random.default_rng(0).integers(0, vocab_size, 20).astype(np.int32)
    controls = LogitControls(
        logit_bias=((3, 1.5),), repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
    )
    places = np.arange(4, 4 + num)[np.random.default_rng(1).permutation(num)]
    edits = LogitEdits.of([(ids, (ControlSpan(start=2, stop=9, controls=controls),), places)])
    tokens = KeptTokens.of(KeptIds.whole(num), torch.device("cpu"), edits=edits)
    scaling, targets = LogitScaling(factor=0.8, softcap=softcap), torch.from_numpy(ids[places].astype(np.int64))
    head = RoundedHead(
        scaling=scaling, temperature=0.7, chunk_size=4, entropy=entropy, dtype=torch.float64, kept=tokens
    )
    found = rounded_scores(hidden, weight, targets, head)
    logprobs_NV = (edits.apply(scaling.apply(hidden @ weight.T)) / 0.7).log_softmax(-1)
    expected = logprobs_NV.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs_N, expected)
    total, wanted = found.logprobs_N.square().sum(), expected.square().sum()
    if entropy is Entropy.TRAINED:
        total = total + found.entropies_N.sum()
        wanted = wanted - (logprobs_NV.exp() * logprobs_NV).sum()
    for gradient, other in zip(
        torch.autograd.grad(total, [hidden, weight]), torch.autograd.grad(wanted, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(gradient, other)


def test_rows_that_share_prefixes_have_the_logprobs_and_the_gradient_that_they_have_alone():
    """Also if the same ids were sampled under other controls, or a turn began elsewhere."""
    params = replace(PARAMS, min_tokens=3, stop_token_ids=(4, 5), presence_penalty=1.0, repetition_penalty=1.2)
    rows = rows_of(params, num_rows=3, prompt=range(5, 25))
    first, second = rows[0].controls
    other = replace(first, controls=replace(first.controls, presence_penalty=0.0))
    rows.append(replace(rows[0], controls=(other, second), advantages=-2 * rows[0].advantages))
    rows.append(replace(rows[1], controls=(replace(rows[1].controls[0], start=10), rows[1].controls[1])))
    together = make_trainer(sharp_model(), shared_prefixes=SharedPrefixes.ALWAYS)
    alone = make_trainer(sharp_model(), shared_prefixes=SharedPrefixes.NEVER, packing=Packing.NEVER)
    for found, expected in zip(together.logprobs(rows), alone.logprobs(rows), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    stats, gradient = step_gradient(together, rows)
    _, expected = step_gradient(alone, rows)
    assert stats.shared_share > 0.2
    largest = max(float(each.abs().max()) for each in expected.values())
    assert max(float((gradient[name] - expected[name]).abs().max()) for name in expected) < 1e-4 * largest


def test_controls_of_another_model_are_refused():
    (row,) = rows_of(replace(PARAMS, logit_bias=((5, 1.0),)), num_rows=1)
    controls = LogitControls(logit_bias=((1000, 1.0),))
    broken = replace(row, controls=(replace(row.controls[0], controls=controls),))
    with pytest.raises(InvalidInputError, match=r"controls contains 1000, and the model's vocabulary ends at"):
        make_trainer(sharp_model()).logprobs([broken])


@settings(max_examples=num_cases(15, in_fuzz=300))
@given(data=st.data())
def test_parts_of_tokens_are_changed_as_they_are_among_all(data):
    """As for chunks, and for processes that share the ids of a lane."""
    num, vocab_size = 12, 9
    ids = np.array(data.draw(st.lists(st.integers(0, 8), min_size=20, max_size=20)), dtype=np.int32)
    controls = LogitControls(
        logit_bias=((2, 1.0),),
        repetition_penalty=1.5,
        presence_penalty=0.5,
        bad_words_ids=((1,), (3, 4)),
        min_tokens=3,
        stop_token_ids=(5,),
    )
    spans = tuple(ControlSpan(start=start, stop=stop, controls=controls) for start, stop in ((3, 8), (10, 15)))
    edits = LogitEdits.of([(ids, spans, np.arange(4, 4 + num))])
    tokens = KeptTokens.of(KeptIds.whole(num), torch.device("cpu"), edits=edits)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(num, vocab_size)))
    whole = tokens.edit(logits)
    assert torch.equal(whole[[4, 5, 11]], logits[[4, 5, 11]])  # of no completion
    size = data.draw(st.integers(1, num))
    parts = [part.edit(rows) for part, rows in zip(tokens.split(size), logits.split(size), strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    assert torch.equal(tokens.pick(mask).edit(logits[mask]), whole[mask])


def test_logits_are_copied_once_whatever_the_number_of_completions():
    """An engine has a completion in each row: a copy of all rows for each would be the square."""
    controls = LogitControls(presence_penalty=0.5, repetition_penalty=1.1)
    ids = np.arange(20, dtype=np.int32)
    rows = [(ids, (ControlSpan(start=10, stop=21, controls=controls),), np.array([20])) for _ in range(50)]
    edits, logits = LogitEdits.of(rows), torch.randn(50, 30)
    for call in (lambda: edits.apply(logits), lambda: edits.pull_back(logits, logits)):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
        assert {each.key: each.count for each in seen.key_averages()}["aten::index_copy"] == 1
