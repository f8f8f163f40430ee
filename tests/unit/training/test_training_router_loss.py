"""The load-balancing loss of a mixture of experts, against transformers' own on one padded batch of all rows."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from support.adapted import with_lora
from support.architectures import tiny_model
from support.gradients import SUBTRACT_GRADIENT
from support.rows import group, random_rows, trajectory
from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.training.config import Packing, SharedPrefixes, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer

ROWS = random_rows(np.random.default_rng(3), 7)


def changes_of(model: Any, rows=ROWS, **config) -> tuple[dict[str, torch.Tensor], float]:
    """What a step subtracts from each trained parameter, and the balance that it measured."""
    trainer = Trainer(model, TrainerConfig(optimizer=SUBTRACT_GRADIENT, **config))
    before = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
    measured = step_metrics(trainer.step(rows))["train/router_loss"]
    return {name: before[name] - weight.detach().double() for name, weight in model.named_parameters()}, measured


def gradient_of_balance(model: Any) -> tuple[dict[str, torch.Tensor], float]:
    """By transformers, for the ids that predict another one."""
    ids = torch.zeros(len(ROWS), max(len(row.token_ids) for row in ROWS) - 1, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(ROWS):
        fed = row.token_ids[:-1].astype(np.int64)
        ids[number, : len(fed)], mask[number, : len(fed)] = torch.from_numpy(fed), 1
    loss = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    loss.backward()
    zero = torch.zeros(())
    return {name: zero if each.grad is None else each.grad for name, each in model.named_parameters()}, float(
        loss.detach()
    )


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    "config",
    [
        {"packing": Packing.NEVER},
        {"packing": Packing.NEVER, "tokens_per_micro_batch": 25},
        {"packing": Packing.ONE_LANE, "tokens_per_micro_batch": 40},
        {"packing": Packing.ONE_LANE, "gradient_checkpointing": True},
    ],
)
def test_the_balance_is_that_of_all_ids_of_an_update_however_they_are_laid_out(architecture, config):
    expected, loss = gradient_of_balance(tiny_model(architecture, num_experts_per_tok=2))
    without, none = changes_of(tiny_model(architecture, num_experts_per_tok=2), **config)
    found, measured = changes_of(tiny_model(architecture, num_experts_per_tok=2), router_loss_weight=0.5, **config)
    assert none is None
    assert measured == pytest.approx(loss, rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        off = (found[name] - without[name] - 0.5 * gradient).abs().max()
        assert off < 2e-4 * largest, name


def test_adapters_get_the_gradient_of_the_balance_too():
    model = with_lora(tiny_model("qwen3_moe"), target_modules=["q_proj", "v_proj"])
    without, _ = changes_of(copy.deepcopy(model))
    found, measured = changes_of(model, router_loss_weight=2.0)
    assert measured > 2
    assert {name for name in found if not torch.equal(found[name], without[name])} == {
        name for name in found if "lora_" in name
    }


def test_recorded_experts_can_be_replayed_beside_it():
    """The balance is of what the routers would choose now."""
    (_, measured), (_, replayed) = (
        changes_of(tiny_model("qwen3_moe"), router_loss_weight=0.5, routing_replay=replays) for replays in (False, True)
    )
    assert replayed == pytest.approx(measured)


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_groups_of_equal_rewards_are_trained_on_for_the_balance(weight):
    groups = [group(trajectory(1.0), trajectory(1.0))]
    units = asyncio.run(PolicyGradient().make_units(groups, Counters(), TrainerConfig(router_loss_weight=weight)))
    assert [len(unit.rows) for unit in units] == [int(weight > 0)] * 2
    assert [len(unit.idle_rows) for unit in units] == [int(weight == 0)] * 2


def test_what_has_no_balance_is_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"Qwen3ForCausalLM must be a mixture of experts with .*router_loss"):
        Trainer(tiny_model("qwen3"), TrainerConfig(router_loss_weight=0.1))
    for name, value in (("shared_prefixes", SharedPrefixes.ALWAYS), ("compile", True)):
        with pytest.raises(InvalidInputError, match=rf"TrainerConfig\.{name} must be .* router_loss_weight"):
            TrainerConfig(router_loss_weight=0.1, **{name: value})
