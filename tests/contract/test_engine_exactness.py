"""Logprobs are those of a plain forward pass of transformers, before and after new weights, whichever engine it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.engine_subjects import PROMPT_IDS, VOCAB_SIZE, Subject, ask, embedded, sample_one
from support.reference_sampling import reference_logprobs
from unbroken.types import SampleChunk, SamplingParams, token_ids
from unbroken.weights.sources import TensorSource

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(params=["embedded", "vllm_subject"])
def any_subject(request: pytest.FixtureRequest) -> Any:
    """Those with a model."""
    return embedded() if request.param == "embedded" else request.getfixturevalue(request.param)


async def renew(subject: Subject, seed: int, **options: Any) -> Any:
    """Give the engine the weights of `seed`, and return the model that has them."""
    model = subject.make_model(seed)
    version = subject.engine.policy_version + 1
    await subject.engine.update_weights(TensorSource(model.named_parameters()), policy_version=version, **options)
    return model


def logprobs_of(model: Any, ids: Any, temperature: float = 1.0) -> Any:
    """[T - 1] of each id after the first, by a plain forward pass."""
    ids = torch.tensor(np.asarray(ids).tolist())
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_are_those_of_the_distribution(subject: Subject, temperature: float) -> None:
    model = await renew(subject, 1)
    request = ask(n=3, max_tokens=30, temperature=temperature)
    for sequence in (await subject.engine.sample(request)).sequences:
        expected = logprobs_of(model, [*PROMPT_IDS, *sequence.completion_ids], temperature)
        np.testing.assert_allclose(sequence.rollout_logprobs, expected[len(PROMPT_IDS) - 1 :], atol=1e-5)


async def test_scores_are_those_of_the_temperature_of_each_call(subject: Subject) -> None:
    model = await renew(subject, 2)
    ids = token_ids(np.random.default_rng(0).integers(0, VOCAB_SIZE, 100))
    temperatures = [0.3, 1.0, 0.7, 2.0, 1.0, 0.3]
    calls = (subject.engine.score(ids, temperature=t, num_top_logprobs=2) for t in temperatures)
    for temperature, scored in zip(temperatures, await asyncio.gather(*calls), strict=True):
        np.testing.assert_allclose(scored.logprobs, logprobs_of(model, ids, temperature), atol=2e-5)


CUTS = ({"top_k": 5}, {"top_k": 7, "top_p": 0.6}, {"top_k": 6, "min_p": 0.6}, {"top_k": 7, "top_p": 0.9, "min_p": 0.3})
"""Below the 8 logprobs that the vLLM of the tests gives."""


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_kept_ids_are_those_that_the_cuts_leave_and_logprobs_are_over_them(
    subject: Subject, cut: dict[str, Any], temperature: float
) -> None:
    model = await renew(subject, 1)
    request = ask(n=3, max_tokens=20, temperature=temperature, return_kept_ids=True, **cut)
    result = await subject.engine.sample(request)
    result.check_answers(request)
    for sequence in result.sequences:
        ids = [*PROMPT_IDS.tolist(), *sequence.completion_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().numpy()
        for position, kept in enumerate(sequence.kept_ids.to_lists()):
            length = len(PROMPT_IDS) + position
            expected = reference_logprobs(logits[length - 1], request.params, [], [])
            assert kept == np.flatnonzero(np.isfinite(expected)).tolist()
            assert abs(expected[ids[length]] - sequence.rollout_logprobs[position]) < 1e-5
    chunks = [chunk async for chunk in subject.engine.stream(replace(request, request_id="b", n=1))]
    streamed = SampleChunk.join(chunks, params=SamplingParams(temperature=temperature))
    assert len(streamed.kept_ids) == len(streamed.completion_ids) > 0
    uncut = ask(request_id="c", return_kept_ids=True, max_tokens=3)
    assert (await sample_one(subject, uncut)).kept_ids is None


CONTROLS: tuple[dict[str, Any], ...] = (
    {"logit_bias": ((3, 4.0), (5, -6.0), (9, 3.0)), "repetition_penalty": 1.6},
    {"allowed_token_ids": (3, 5, 9, 11, 12, 13), "presence_penalty": 1.5, "frequency_penalty": -0.7},
    {
        "bad_words_ids": ((7,), *((number, number) for number in range(30))),
        "logit_bias": tuple((k, 5.0) for k in range(8)),
    },
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, 60, 2)), "top_k": 6, "repetition_penalty": 0.8},
)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("controls", CONTROLS, ids=lambda controls: next(iter(controls)))
async def test_what_changes_logits_changes_them_as_a_plain_reference(
    subject: Subject, controls: dict[str, Any], temperature: float
) -> None:
    model = await renew(subject, 1)
    n = 1 if temperature == 0 else 3
    request = ask(n=n, max_tokens=14, temperature=temperature, return_kept_ids=True, **controls)
    result = await subject.engine.sample(request)
    result.check_answers(request)
    prompt_ids = PROMPT_IDS.tolist()
    for sequence in result.sequences:
        assert sequence.controls == request.params.controls
        ids = [*prompt_ids, *sequence.completion_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().numpy()
        for place in range(len(prompt_ids), len(ids)):
            before = prompt_ids, ids[len(prompt_ids) : place]
            expected = reference_logprobs(logits[place - 1], request.params, *before)
            assert abs(expected[ids[place]] - sequence.rollout_logprobs[place - len(prompt_ids)]) < 2e-5
        if "min_tokens" in controls:
            assert len(sequence.completion_ids) > 9


@pytest.mark.parametrize("reuse_kv", [False, True])
async def test_i6_ids_after_an_update_are_sampled_as_if_the_new_weights_had_read_all_before_unless_asked(
    subject: Subject, reuse_kv: bool
) -> None:
    old = await renew(subject, 5)
    version = subject.engine.policy_version
    running = asyncio.create_task(sample_one(subject, ask(max_tokens=200)))
    await subject.wait_for_ids(3)
    new = await renew(subject, 6, reuse_kv=reuse_kv)
    sequence = await running
    assert [span.policy_version for span in sequence.version_spans] == [version, version + 1]
    cut, ids = sequence.version_spans[0].stop, [*PROMPT_IDS, *sequence.completion_ids]
    before, after = (logprobs_of(model, ids)[len(PROMPT_IDS) - 1 :] for model in (old, new))
    np.testing.assert_allclose(sequence.rollout_logprobs[:cut], before[:cut], atol=1e-5)
    difference = np.abs(sequence.rollout_logprobs - after)[cut:].max()
    assert difference > 0.01 if reuse_kv else difference < 1e-5


@pytest.mark.parametrize("named", [lambda m: m.named_parameters(), lambda m: m.state_dict().items()])
async def test_tied_weights_may_come_once_or_under_both_names(subject: Subject, named: Any) -> None:
    model = subject.make_model(9)
    version = subject.engine.policy_version + 1
    await subject.engine.update_weights(TensorSource(named(model)), policy_version=version)
    scored = await subject.engine.score(PROMPT_IDS)
    np.testing.assert_allclose(scored.logprobs, logprobs_of(model, PROMPT_IDS), atol=1e-5)


async def test_a_seed_repeats_all_of_n_completions_which_differ_and_without_one_requests_do(subject: Subject) -> None:
    runs = [await subject.engine.sample(ask(n=4, max_tokens=12, seed=11)) for _ in range(2)]
    first, second = ([sequence.completion_ids.tolist() for sequence in run.sequences] for run in runs)
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4
    free = [await sample_one(subject, ask(str(k), max_tokens=12, seed=None)) for k in range(4)]
    assert len({tuple(sequence.completion_ids) for sequence in free}) == 4
