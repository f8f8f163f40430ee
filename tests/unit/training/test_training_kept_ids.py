"""Top-k, top-p and min-p: the trainer's distribution is that of the sampler, over the ids that the engine kept."""

from __future__ import annotations

import asyncio
import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from support.architectures import tiny_model
from support.effort import num_cases
from support.gradients import SUBTRACT_GRADIENT, pull, step_gradient
from support.rows import unscored
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.training.backend import TrainerBackend
from unbroken.training.config import OldLogprobs, Packing, SharedPrefixes, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.model.scores import (
    Entropy,
    KeptTokens,
    LogitScaling,
    RoundedHead,
    TokenScores,
    chunked_scores,
    rounded_scores,
)
from unbroken.training.trainer import Trainer
from unbroken.types import KeptIds, SampleRequest, SamplingParams, TrainingSample, token_ids

CUTS = (
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"top_k": 12, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
)
PARAMS = SamplingParams(max_tokens=8, return_kept_ids=True)


async def sample_rows(model: Any, params: SamplingParams, *, num_rows: int = 4, prompt: Any = None) -> list[Any]:
    """Rows of two turns each, as an engine with this model sampled them; all begin with `prompt`, if there is one."""
    engine = TransformersEngine(model)

    async def sample_row(number: int) -> list[Any]:
        rng = np.random.default_rng(number)
        tree = TokenTree()
        end, ids = None, token_ids([])
        for turn, origin in enumerate((Origin.PROMPT, Origin.BRIDGE)):
            given = token_ids(rng.integers(3, 60, int(rng.integers(3, 9))))
            given = given if prompt is None or turn else token_ids(prompt)
            ids = token_ids([*ids, *given])
            own = replace(params, seed=10 * number + turn)
            result = await engine.sample(SampleRequest(request_id=f"{number}/{turn}", prompt_ids=ids, params=own))
            (sequence,) = result.sequences
            end = tree.add_sampled(sequence, parent=tree.add_given(given, origin, parent=end))
            ids = token_ids([*ids, *sequence.completion_ids])
        return export_samples(tree, float(rng.normal()))

    rows = await asyncio.gather(*(sample_row(number) for number in range(num_rows)))
    await engine.close()
    return [row for of_tree in rows for row in of_tree]


def rows_of(params: SamplingParams, **options: Any) -> list[TrainingSample]:
    return list(_rows_of(params, **options))


@functools.lru_cache(32)
def _rows_of(params: SamplingParams, **options: Any) -> list[TrainingSample]:
    return asyncio.run(sample_rows(sharp_model(), params, **options))


def sharp_model() -> Any:
    """Logits far enough from one another that cuts leave sets of many sizes."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    return model


def make_trainer(model: Any, **config: Any) -> Trainer:
    config = {"optimizer": SUBTRACT_GRADIENT, **config}
    return Trainer(model, TrainerConfig(**config), accelerator=Accelerator())


def reference_logprobs(model: Any, row: TrainingSample) -> torch.Tensor:
    """[S] of the sampled ids, in the model's own precision, one by one: the plainest way."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / row.temperature
    found = []
    for position in np.flatnonzero(row.sampled_mask):
        kept = row.kept_ids.token_ids[row.kept_ids.offsets[position] : row.kept_ids.offsets[position + 1]]
        scores = logits[position - 1]
        chosen = scores if not len(kept) else scores[torch.from_numpy(kept.astype(np.int64))]
        found.append(scores[ids[position]] - chosen.logsumexp(0))
    return torch.stack(found)


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_at_equal_weights_the_mismatch_is_rounding_for_every_cut(cut, packing):
    rows = rows_of(replace(PARAMS, temperature=0.7, **cut))
    assert any(row.kept_ids.sizes.max() > 1 for row in rows)
    trainer = make_trainer(sharp_model(), packing=packing, old_logprobs=OldLogprobs.RECOMPUTE)
    metrics = step_metrics(trainer.step(rows))
    assert metrics["mismatch/max_abs"] < 2e-5  # sharp logits over a temperature of 0.7, which round as they are large
    assert metrics["mismatch/k3"] < 1e-10


@pytest.mark.parametrize("shared_prefixes", [SharedPrefixes.ALWAYS, SharedPrefixes.NEVER])
def test_a_step_says_the_entropy_of_what_was_kept_and_that_of_the_whole_vocabulary(shared_prefixes):
    rows = rows_of(replace(PARAMS, top_k=5), prompt=range(5, 25))
    config = {"shared_prefixes": shared_prefixes}
    metrics = step_metrics(make_trainer(sharp_model(), **config).step(rows))
    whole = [replace(row, kept_ids=None) for row in rows]
    of_whole = step_metrics(make_trainer(sharp_model(), **config).step(whole))
    assert metrics["train/entropy"] < metrics["train/full_entropy"] - 0.01
    assert metrics["train/full_entropy"] == pytest.approx(of_whole["train/entropy"], rel=1e-5)
    assert of_whole["train/full_entropy"] == of_whole["train/entropy"]


def test_without_its_sets_the_same_rows_have_a_mismatch():
    """The tests above could fail: the whole softmax is far from what was sampled from."""
    rows = [replace(row, kept_ids=None) for row in rows_of(replace(PARAMS, top_k=5))]
    assert step_metrics(make_trainer(sharp_model()).step(rows))["mismatch/max_abs"] > 0.1


@settings(max_examples=num_cases(8, in_fuzz=150))
@given(
    top_k=st.integers(0, 70),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.3, 3.0),
    seed=st.integers(0, 99),
)
def test_for_any_cut_and_temperature_engine_and_trainer_agree(top_k, top_p, min_p, temperature, seed):
    params = replace(PARAMS, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, max_tokens=5, seed=seed)
    rows = rows_of(params, num_rows=2)
    for row, logprobs in zip(rows, make_trainer(sharp_model()).logprobs(rows), strict=True):
        assert (row.kept_ids is None) == (not params.truncates)
        assert np.abs(logprobs - row.rollout_logprobs)[row.sampled_mask].max() < 1e-5


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
def test_the_gradient_is_that_of_a_plain_reference_in_float64(packing, gradient_checkpointing):
    """Weights some updates later, where the sampler's sets are not those that the cuts would leave now."""
    rows = rows_of(replace(PARAMS, top_k=12, top_p=0.8, temperature=1.3))
    moved = sharp_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    exact = copy.deepcopy(moved).double()
    for row in rows:
        logprobs = reference_logprobs(exact, row)
        (-torch.from_numpy(row.advantages[row.sampled_mask]) * logprobs).sum().backward()
    config = {"packing": packing, "gradient_checkpointing": gradient_checkpointing, "logprob_chunk_size": 7}
    backend = TrainerBackend(moved, TrainerConfig(**config), accelerator=Accelerator())
    backend.forward_backward(unscored(rows), pull, weights=[1.0] * len(rows))
    found = {name: parameter.grad for name, parameter in moved.named_parameters()}
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    largest = max(float(each.abs().max()) for each in expected.values())
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-5 * largest


@pytest.mark.parametrize("other_sets", [False, True])
def test_rows_that_share_prefixes_have_the_logprobs_and_the_gradient_that_they_have_alone(other_sets):
    """Also if equal ids after equal ids were kept among other ids, as by other weights."""
    rows = rows_of(replace(PARAMS, top_k=9), num_rows=3, prompt=range(5, 25))
    rows.append(replace(rows[0], advantages=-2 * rows[0].advantages))
    if other_sets:
        sets = np.split(rows[0].kept_ids.token_ids, rows[0].kept_ids.offsets[1:-1])
        first = int(np.flatnonzero(rows[0].sampled_mask)[0])
        sets[first] = np.union1d(sets[first], [1, 2])
        rows[-1] = replace(rows[-1], kept_ids=KeptIds.of(sets))
    together = make_trainer(sharp_model(), shared_prefixes=SharedPrefixes.ALWAYS)
    alone = make_trainer(sharp_model(), shared_prefixes=SharedPrefixes.NEVER, packing=Packing.NEVER)
    stats, gradient = step_gradient(together, rows)
    expected_stats, expected = step_gradient(alone, rows)
    assert stats.shared_share > 0.2
    assert step_metrics(stats)["mismatch/max_abs"] == pytest.approx(
        step_metrics(expected_stats)["mismatch/max_abs"], abs=1e-5
    )
    largest = max(float(each.abs().max()) for each in expected.values())
    assert max(float((gradient[name] - expected[name]).abs().max()) for name in expected) < 1e-4 * largest


def test_kept_ids_of_another_model_are_refused():
    (row,) = rows_of(replace(PARAMS, top_k=5), num_rows=1)
    sets = np.split(row.kept_ids.token_ids, row.kept_ids.offsets[1:-1])
    first = int(np.flatnonzero(row.sampled_mask)[0])
    sets[first] = np.append(sets[first], 1000)
    broken = replace(row, kept_ids=KeptIds.of(sets))
    with pytest.raises(InvalidInputError, match=r"kept_ids contains 1000, and the model's vocabulary ends at"):
        make_trainer(sharp_model()).logprobs([broken])


def random_kept(rng: np.random.Generator, targets: np.ndarray, vocab_size: int) -> KeptIds:
    """A set for most tokens, of any size."""
    sets = [
        np.union1d(rng.choice(vocab_size, int(rng.integers(0, vocab_size)), replace=False), [target])
        if rng.random() < 0.8
        else []
        for target in targets
    ]
    return KeptIds.of([np.asarray(each, dtype=np.int64) for each in sets])


@pytest.mark.parametrize("entropy", Entropy)
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_scores_and_gradients_of_both_heads_are_those_of_a_softmax_over_the_sets(entropy, is_rounded, softcap):
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    num, width, vocab_size, chunk = 11, 6, 17, 4
    hidden = torch.randn(num, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab_size, width, dtype=torch.float64, requires_grad=True)
    targets = rng.integers(0, vocab_size, num)
    kept = random_kept(rng, targets, vocab_size)
    tokens, scaling = KeptTokens.of(kept, torch.device("cpu")), LogitScaling(factor=0.8, softcap=softcap)
    targets_N = torch.from_numpy(targets)
    if is_rounded:
        head = RoundedHead(
            scaling=scaling, temperature=0.7, chunk_size=chunk, entropy=entropy, dtype=torch.float64, kept=tokens
        )
        found = rounded_scores(hidden, weight, targets_N, head)
    else:
        found = chunked_scores(
            hidden,
            targets_N,
            lambda h: scaling.apply(h @ weight.T),
            temperature=0.7,
            chunk_size=chunk,
            entropy=entropy,
            kept=tokens,
        )
    expected = plain_scores(scaling.apply(hidden @ weight.T) / 0.7, targets_N, kept)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N)
    total, expected_total = found.logprobs_N.square().sum(), expected.logprobs_N.square().sum()
    if entropy is not Entropy.NONE:
        torch.testing.assert_close(found.entropies_N, expected.entropies_N)
        torch.testing.assert_close(found.full_entropies_N, expected.full_entropies_N)
        assert not found.full_entropies_N.requires_grad
    else:
        assert found.full_entropies_N is None
    if entropy is Entropy.RANKED:
        assert found.ranks_N.tolist() == expected.ranks_N.tolist()
    if entropy is Entropy.TRAINED:
        total, expected_total = total + 1e3 * found.entropies_N.sum(), expected_total + 1e3 * expected.entropies_N.sum()
    gradients = torch.autograd.grad(total, [hidden, weight])
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected_total, [hidden, weight]), strict=True):
        torch.testing.assert_close(gradient, wanted)


def plain_scores(logits_NV: torch.Tensor, targets_N: torch.Tensor, kept: KeptIds) -> TokenScores:
    logprobs, entropies, ranks, full = [], [], [], []
    for number, logits_V in enumerate(logits_NV):
        ids = kept.token_ids[kept.offsets[number] : kept.offsets[number + 1]].astype(np.int64)
        own = logits_V if not len(ids) else logits_V[torch.from_numpy(ids)]
        logprobs_K = own.log_softmax(0)
        logprobs.append(logits_V[targets_N[number]] - own.logsumexp(0))
        entropies.append(-(logprobs_K.exp() * logprobs_K).sum())
        full.append(-(logits_V.softmax(0) * logits_V.log_softmax(0)).sum())
        ranks.append(1 + (own > logits_V[targets_N[number]]).sum())
    return TokenScores(
        torch.stack(logprobs), torch.stack(entropies), torch.stack(ranks), full_entropies_N=torch.stack(full)
    )
