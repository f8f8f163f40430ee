"""The whole loss of one update, by every normalization and correction, against a loop over rows in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.models import tiny_qwen3
from support.rows import random_rows, row
from support.slow_logprobs import slow_logprobs
from unbroken.errors import InvalidInputError
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.loss_config import Correction, CorrectionKind, LossNormalization
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.trainer import Trainer

LONGEST = 20


@pytest.fixture(scope="module")
def rows():
    return random_rows(np.random.default_rng(5), 7, longest=LONGEST)


def config_of(
    normalization=LossNormalization.TOKEN, kind=CorrectionKind.NONE, longest: int = LONGEST, **others
) -> TrainerConfig:
    return TrainerConfig(
        normalization=normalization,
        max_trajectory_tokens=longest if normalization is LossNormalization.CONSTANT else None,
        correction=Correction(kind=kind, low=0.3, high=1.5),
        old_logprobs=OldLogprobs.RECOMPUTE,
        optimizer=SUBTRACT_GRADIENT,
        tokens_per_micro_batch=30,
        **others,
    )


def divisor(config: TrainerConfig, trajectories, num_trajectory_tokens: int) -> float:
    match config.normalization:
        case LossNormalization.TOKEN:
            return sum(map(num_tokens, trajectories))
        case LossNormalization.SEQUENCE:
            return len(trajectories) * num_trajectory_tokens
        case LossNormalization.CONSTANT:
            return len(trajectories) * config.max_trajectory_tokens


def num_tokens(rows) -> int:
    return sum(int(row.loss_mask.sum()) for row in rows)


def corrected(kind, ratios: list[float]) -> list[float]:
    product = math.prod(ratios)
    return {
        CorrectionKind.NONE: [1.0] * len(ratios),
        CorrectionKind.TOKEN_TRUNCATE: [min(ratio, 1.5) for ratio in ratios],
        CorrectionKind.TOKEN_MASK: [ratio if 0.3 <= ratio <= 1.5 else 0.0 for ratio in ratios],
        CorrectionKind.SEQUENCE_TRUNCATE: [min(product, 1.5)] * len(ratios),
        CorrectionKind.SEQUENCE_MASK: [product if 0.3 <= product <= 1.5 else 0.0] * len(ratios),
    }[Correction(kind=kind).effect]


def slow_loss(model, trajectories, config: TrainerConfig, reference=None) -> torch.Tensor:
    """The first update's loss, whose ratio to the trainer's own logprobs is 1, a token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    samples = [row for rows in trajectories for row in rows]
    lengths = [num_tokens(rows) for rows in trajectories for _ in rows]
    frozen = [None] * len(samples) if reference is None else slow_logprobs(reference, samples)
    for sample, length, current, pull in zip(samples, lengths, slow_logprobs(model, samples), frozen, strict=True):
        sampled = sample.rollout_logprobs[sample.loss_mask].tolist()
        advantages = sample.advantages[sample.loss_mask].tolist()
        ratios = [math.exp(a - b) for a, b in zip(current.tolist(), sampled, strict=True)]
        for t, weight in enumerate(corrected(config.correction.kind, ratios)):
            loss = -weight * advantages[t] * (current[t] - current[t].detach()).exp()
            if pull is not None:
                gap = pull[t].detach() - current[t]
                loss = loss + config.kl_weight * (gap.exp() - gap - 1)
            total = total + loss / divisor(config, trajectories, length)
    return total


def check_update(samples, config: TrainerConfig, *, reference=None):
    """One step's loss and gradient, the latter read off the update, are those of the slow loss."""
    slow, model = tiny_qwen3(), tiny_qwen3()
    expected = slow_loss(slow, [unit.rows if hasattr(unit, "rows") else (unit,) for unit in samples], config, reference)
    expected.backward()
    gradients = {name: parameter.grad.double() for name, parameter in slow.named_parameters()}
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model, config, reference=reference)
    stats = trainer.step(samples)
    assert stats.loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in trainer.named_weights():
        moved = before[name] - weight.double()
        assert float((moved - gradients[name]).abs().max()) / largest < 1e-4, name
    return stats


@pytest.fixture(scope="module")
def ratios(rows) -> list[list[float]]:
    """Of the trainer's probability to the sampler's, of each id."""
    return [
        [math.exp(a - b) for a, b in zip(current.tolist(), row.rollout_logprobs[row.loss_mask], strict=True)]
        for row, current in zip(rows, slow_logprobs(tiny_qwen3(), rows), strict=True)
    ]


CASES = [
    (normalization, kind)
    for n, normalization in enumerate(LossNormalization)
    for k, kind in enumerate(CorrectionKind)
    if (n + k) % 3 == 0 or kind in (CorrectionKind.NONE, CorrectionKind.TOKEN_MASK)
]
"""What corrects an id does not ask what the sum is divided by: each with one of the divisors, two with all of them."""


@pytest.mark.parametrize(("normalization", "kind"), CASES)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(rows, ratios, normalization, kind):
    stats = check_update(rows, config_of(normalization, kind))
    beyond = {
        CorrectionKind.NONE: 0,
        CorrectionKind.TOKEN_TRUNCATE: sum(r > 1.5 for row in ratios for r in row),
        CorrectionKind.TOKEN_MASK: sum(not 0.3 <= r <= 1.5 for row in ratios for r in row),
        CorrectionKind.SEQUENCE_TRUNCATE: sum(len(row) for row in ratios if math.prod(row) > 1.5),
        CorrectionKind.SEQUENCE_MASK: sum(len(row) for row in ratios if not 0.3 <= math.prod(row) <= 1.5),
    }[Correction(kind=kind).effect]
    assert stats.corrected_fraction == pytest.approx(beyond / stats.num_loss_tokens)
    assert (beyond > 0) == (kind is not CorrectionKind.NONE)


@pytest.mark.parametrize("normalization", LossNormalization)
def test_the_pull_of_a_reference_is_that_of_a_loop_over_tokens(rows, normalization):
    reference = tiny_qwen3(seed=1)
    config = config_of(normalization, CorrectionKind.TOKEN_MASK, kl_weight=0.5)
    stats = check_update(rows, config, reference=reference)
    pairs = zip(slow_logprobs(tiny_qwen3(), rows), slow_logprobs(reference, rows), strict=True)
    gaps = torch.cat([theirs - ours for ours, theirs in pairs])
    assert stats.reference_k3 == pytest.approx(float((gaps.exp() - gaps - 1).mean().detach()), rel=1e-4)


@pytest.mark.parametrize("normalization", LossNormalization)
def test_a_trajectory_weighs_as_one_however_many_rows_it_became(rows, normalization):
    forked = [TrajectoryRows(rows=tuple(rows[:3])), rows[3], TrajectoryRows(rows=tuple(rows[4:6])), rows[6]]
    longest = max(map(num_tokens, ([*rows[:3]], [*rows[4:6]])))
    check_update(forked, config_of(normalization, longest=longest, kl_weight=0.5), reference=tiny_qwen3(seed=1))


def test_an_equal_reference_pulls_nowhere_and_stays_where_it_is(rows):
    still = [replace(row, advantages=np.zeros_like(row.advantages)) for row in rows]
    reference = tiny_qwen3()
    trainer = Trainer(tiny_qwen3(), config_of(kl_weight=1.0), reference=reference)
    stats = trainer.step(still)
    assert stats.reference_k3 == pytest.approx(0, abs=1e-9)
    assert stats.grad_norm < 1e-5
    trainer.step(rows)
    assert trainer.step(rows).reference_k3 > 1e-4
    for (_, weight), (_, before) in zip(reference.named_parameters(), tiny_qwen3().named_parameters(), strict=True):
        assert torch.equal(weight, before)


def test_no_reference_is_a_metric_without_a_number(rows):
    assert Trainer(tiny_qwen3(), config_of()).step(rows).reference_k3 is None


def test_a_reference_is_needed_exactly_where_it_is_used():
    with pytest.raises(InvalidInputError, match="got NoneType for one that needs it"):
        Trainer(tiny_qwen3(), config_of(kl_weight=0.1))
    with pytest.raises(InvalidInputError, match="got Qwen3ForCausalLM for one that does not need it"):
        Trainer(tiny_qwen3(), config_of(), reference=tiny_qwen3())


def test_a_reference_that_would_move_along_is_refused():
    model, assigned = tiny_qwen3(), tiny_qwen3(seed=1)
    assigned.load_state_dict(model.state_dict(), assign=True)
    for reference in (model, assigned):
        with pytest.raises(InvalidInputError, match=r"shares model\.embed_tokens\.weight with the model"):
            Trainer(model, config_of(kl_weight=0.1), reference=reference)


def test_a_reference_with_another_vocabulary_is_refused():
    with pytest.raises(InvalidInputError, match="vocabulary of 64 ids, got 65"):
        Trainer(tiny_qwen3(), config_of(kl_weight=0.1), reference=tiny_qwen3(vocab_size=65))


def test_a_trajectory_with_more_tokens_than_the_constant_is_refused(rows):
    config = TrainerConfig(normalization=LossNormalization.CONSTANT, max_trajectory_tokens=2)
    longer = next(row for row in rows if row.loss_mask.sum() > 2)
    with pytest.raises(InvalidInputError, match=rf"units\[0\] has {longer.loss_mask.sum()} loss tokens.*is 2"):
        Trainer(tiny_qwen3(), config).step([longer])
    parts = TrajectoryRows(rows=(row([1, 2, 3], sampled=[1, 2]), row([1, 5], sampled=[1])))
    with pytest.raises(InvalidInputError, match=r"units\[0\] has 3 loss tokens.*is 2"):
        Trainer(tiny_qwen3(), config).step([parts])
