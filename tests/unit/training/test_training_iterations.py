"""Several passes over the rows of a step, adaptive entropy, and a reference that follows, against plain torch loops."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.adapted import with_lora
from support.models import tiny_qwen3, wide_qwen3
from support.rows import random_pairs, random_rows
from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.training.config import OldLogprobs, OptimizerConfig, Reference, TrainerConfig
from unbroken.training.loss_config import ClipConfig, EntropyControl, ReferenceSync
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
CLIP = ClipConfig(low=0.05, high=0.1)
SYNC = ReferenceSync(every=2, mixup=0.3)


def rows_of(step: int) -> list[TrainingSample]:
    return random_rows(np.random.default_rng(step), 6)


def score(model: Any, rows: Sequence[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logprobs and the entropies at all loss tokens, each row alone."""
    found = []
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1)
        picked = torch.from_numpy(row.loss_mask[1:].copy())
        ids = torch.from_numpy(row.token_ids[1:].astype(np.int64))
        of_ids = logprobs.gather(-1, ids[:, None])[:, 0]
        found.append((of_ids[picked], -(logprobs.exp() * logprobs).sum(-1)[picked]))
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def of_loss(rows: Sequence[TrainingSample], name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(row, name)[row.loss_mask] for row in rows]))


def clipped(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps, weight_decay=0)


def update(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    optimizer.step()


def assert_same_weights(found: Iterator[tuple[str, torch.Tensor]], expected: Any) -> None:
    untrained = dict(tiny_qwen3().named_parameters())
    weights = dict(expected.named_parameters())
    for name, weight in found:
        assert (weight - untrained[name]).abs().max() > 1e-3
        torch.testing.assert_close(weight, weights[name], atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("old_logprobs", OldLogprobs)
def test_all_passes_over_the_rows_have_the_old_logprobs_of_before_the_first(old_logprobs):
    config = TrainerConfig(optimizer=OPTIMIZER, clip=CLIP, old_logprobs=old_logprobs, num_iterations=3)
    trainer, model, rows = Trainer(tiny_qwen3(), config), tiny_qwen3(), rows_of(0)
    stats = trainer.step(rows)
    optimizer, advantages = make_optimizer(model), of_loss(rows, "advantages")
    is_own = old_logprobs is OldLogprobs.RECOMPUTE
    old = score(model, rows)[0].detach() if is_own else of_loss(rows, "rollout_logprobs")
    for _ in range(3):
        update(model, optimizer, clipped(score(model, rows)[0], old, advantages).mean())
    assert_same_weights(trainer.named_weights(), model)
    assert stats.num_updates == 3
    assert stats.num_rows == 6
    assert stats.num_loss_tokens == len(advantages)
    assert 0 < stats.clip_fraction < 1
    assert stats.policy_version == 1


def test_each_pass_is_dealt_out_to_minibatches_anew():
    config = TrainerConfig(optimizer=OPTIMIZER, num_minibatches=2, num_iterations=2)
    trainer = Trainer(tiny_qwen3(), config)
    dealt: list[list[int]] = []
    deal = trainer._deal_out
    trainer._deal_out = lambda scored, idle: dealt.extend(deal(scored, idle)) or dealt[-2:]
    assert trainer.step(rows_of(0)).num_updates == 4
    assert sorted(dealt[0] + dealt[1]) == sorted(dealt[2] + dealt[3]) == list(range(6))
    assert dealt[:2] != dealt[2:]


def test_padding_and_sharing_are_shares_of_what_all_passes_computed():
    once, thrice = (Trainer(tiny_qwen3(), TrainerConfig(num_iterations=number)).step(rows_of(0)) for number in (1, 3))
    assert thrice.padding_share == pytest.approx(once.padding_share)
    assert thrice.num_tokens == once.num_tokens


def test_the_weight_of_the_entropy_follows_the_entropy_of_the_last_update():
    control = EntropyControl(target=3.585, delta=0.4, min_weight=0.2, max_weight=1.5)
    config = TrainerConfig(
        optimizer=OPTIMIZER, clip=CLIP, old_logprobs=OldLogprobs.RECOMPUTE, entropy_weight=1.0, entropy_control=control
    )
    trainer, model = Trainer(tiny_qwen3(), config), tiny_qwen3()
    optimizer, weight, last = make_optimizer(model), 1.0, np.inf
    bonuses, weights = [], []
    for step in range(6):
        rows = rows_of(step)
        logprobs, entropies = score(model, rows)
        bonuses.append(weight if last <= 3.585 else 0.0)
        loss = clipped(logprobs, logprobs.detach(), of_loss(rows, "advantages")) - bonuses[-1] * entropies
        update(model, optimizer, loss.mean())
        last = float(entropies.detach().mean())
        weight = min(weight + 0.4, 1.5) if last <= 3.585 else max(weight - 0.4, 0.2)
        weights.append(weight)
        stats = trainer.step(rows)
        assert stats.entropy == pytest.approx(last, rel=1e-4)
        assert step_metrics(stats)["train/entropy_weight"] == pytest.approx(weight)
    assert_same_weights(trainer.named_weights(), model)
    assert 0.0 in bonuses
    assert len(set(bonuses)) > 2
    assert {0.2, 1.5} <= set(weights)


def mixed(policy: Any, reference: Any, share: float) -> Any:
    """The mean of two models' weights."""
    out, weights = copy.deepcopy(reference), dict(policy.named_parameters())
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            parameter.copy_(share * weights[name] + (1 - share) * parameter)
    return out


@pytest.mark.parametrize("is_lora", [False, True])
def test_the_reference_follows_the_policy_every_so_many_steps(is_lora):
    config = TrainerConfig(optimizer=OPTIMIZER, kl_weight=0.1, reference_sync=SYNC)
    base = tiny_qwen3()
    model = with_lora(tiny_qwen3()) if is_lora else tiny_qwen3()
    trainer, reference = Trainer(model, config, reference=tiny_qwen3()), base
    for step in range(5):
        rows = rows_of(step)
        now = copy.deepcopy(model).merge_and_unload() if is_lora else copy.deepcopy(model)
        gaps = score(reference, rows)[0] - score(now, rows)[0]
        stats = trainer.step(rows)
        assert stats.reference_k3 == pytest.approx(float((gaps.expm1() - gaps).detach().mean()), rel=1e-3, abs=1e-6)
        if step % 2 == 1:
            now = copy.deepcopy(model).merge_and_unload() if is_lora else model
            reference = mixed(now, reference, 0.3)
    found = dict(trainer.backend._reference.model.named_parameters())
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0, msg=name)


def test_the_reference_follows_at_the_same_steps_when_versions_were_skipped(tmp_path):
    """A run that goes on skips the versions that its servers have already."""
    config = TrainerConfig(optimizer=OPTIMIZER, kl_weight=0.1, reference_sync=SYNC)
    whole, first, resumed = (Trainer(tiny_qwen3(), config, reference=tiny_qwen3(seed=1)) for _ in range(3))
    for trainer in (whole, first):
        trainer.step(rows_of(0))
    first.save(tmp_path / "one")
    resumed.load(tmp_path / "one")
    resumed.policy_version += 1
    for step in range(1, 5):
        for trainer in (whole, resumed):
            trainer.step(rows_of(step))
        pairs = zip(references(whole), references(resumed), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), step


def references(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach() for weight in trainer.backend._reference.model.parameters()]


def changing(*, is_lora: bool = False, sync: ReferenceSync | None = SYNC) -> Trainer:
    """A trainer whose reference and entropy weight change."""
    config = TrainerConfig(
        optimizer=OPTIMIZER,
        kl_weight=0.1,
        reference_sync=sync,
        entropy_weight=0.1,
        entropy_control=EntropyControl(target=3.585, delta=0.03),
        num_minibatches=2,
        num_iterations=2,
    )
    return Trainer(with_lora(tiny_qwen3()) if is_lora else tiny_qwen3(), config, reference=tiny_qwen3(seed=1))


@pytest.mark.parametrize("is_lora", [False, True])
def test_a_trainer_whose_reference_and_entropy_weight_change_goes_on_bit_for_bit(tmp_path, is_lora):
    trainer, resumed = changing(is_lora=is_lora), changing(is_lora=is_lora)
    for step in range(3):
        trainer.step(rows_of(step))
    trainer.save(tmp_path / "three")
    resumed.load(tmp_path / "three")
    for step in range(3, 5):
        whole, again = (each.step(rows_of(step)) for each in (trainer, resumed))
        assert whole.entropy_weight == again.entropy_weight
        assert whole.reference_k3 == again.reference_k3
    for ours, theirs in zip(trainer.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]


def test_a_checkpoint_without_a_reference_is_refused_by_one_that_follows(tmp_path):
    changing(sync=None).save(tmp_path / "none")
    with pytest.raises(CheckpointError, match="none has no reference to go on with: it began without reference_sync"):
        changing().load(tmp_path / "none")


def test_online_dpo_takes_a_reference_that_follows():
    config = TrainerConfig(optimizer=OPTIMIZER, reference_sync=ReferenceSync(every=1, mixup=1.0))
    trainer = Trainer(tiny_qwen3(), config, objective=OnlineDpo(), reference=tiny_qwen3(seed=1))
    trainer.step(random_pairs(np.random.default_rng(0), 3))
    found = dict(trainer.backend._reference.model.named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in trainer.named_weights())


def test_references_that_cannot_follow_are_refused_by_name():
    sync = TrainerConfig(kl_weight=0.1, reference_sync=SYNC)
    with pytest.raises(InvalidInputError, match=r"TrainerConfig\.reference_sync must be None with kl_weight 0"):
        Trainer(tiny_qwen3(), TrainerConfig(reference_sync=SYNC))
    with pytest.raises(InvalidInputError, match=r"reference must be a copy of the model \(with .* got base"):
        Trainer(with_lora(tiny_qwen3()), sync, reference=Reference.BASE)
    with pytest.raises(InvalidInputError, match=r"reference must be a copy of the model .* got Qwen3ForCausalLM"):
        Trainer(tiny_qwen3(), sync, reference=wide_qwen3(1))
