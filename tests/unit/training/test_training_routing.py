"""Routing replay: with the sampler's experts a mixture of experts has a dense model's mismatch, and exact gradients."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from support.adapted import with_lora
from support.architectures import tiny_model
from support.gradients import SUBTRACT_GRADIENT, step_gradient
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import InvalidInputError
from unbroken.routing import Routers
from unbroken.runs.numerics import sample_row
from unbroken.training.config import OldLogprobs, Packing, TrainerConfig
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.model.backbone import enable_checkpointing
from unbroken.training.model.lanes import lay_out
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.routing import lay_out_experts
from unbroken.training.model.scores import Entropy
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams, TrainingSample


async def sample_rows(model: Any, num_rows: int = 6) -> list[TrainingSample]:
    """Rows of two turns each, as an engine with this model sampled them, with their experts."""
    engine = TransformersEngine(model, config=TransformersEngineConfig(records_routing=True))
    params = SamplingParams(max_tokens=12, return_routed_experts=True)
    rows = [await sample_row(engine, params, (0, number), [(5, 12), (8, 12)]) for number in range(num_rows)]
    await engine.close()
    return rows


def make_trainer(model: Any, *, mixed_precision: str = "no", reference: Any = None, **config: Any) -> Trainer:
    config = {"optimizer": SUBTRACT_GRADIENT, **config}
    accelerator = Accelerator(mixed_precision=mixed_precision)
    return Trainer(model, TrainerConfig(**config), accelerator=accelerator, reference=reference)


def perturb(model: Any, scale: float) -> Any:
    """The model some updates later: every weight a little elsewhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def gradient_of(rows: list[TrainingSample], model: Any, **config: Any) -> dict[str, torch.Tensor]:
    trainer = make_trainer(model, **config)
    return step_gradient(trainer, rows)[1]


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    largest = max(float(gradient.abs().max()) for gradient in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / largest


@pytest.fixture(scope="module")
def rows() -> list[TrainingSample]:
    return asyncio.run(sample_rows(tiny_model("qwen3_moe")))


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
@pytest.mark.parametrize("old_logprobs", OldLogprobs)
def test_at_equal_weights_no_expert_differs_and_the_mismatch_is_rounding(rows, packing, old_logprobs):
    trainer = make_trainer(tiny_model("qwen3_moe"), routing_replay=True, packing=packing, old_logprobs=old_logprobs)
    metrics = step_metrics(trainer.step(rows))
    assert metrics["mismatch/routing_differs"] == 0
    assert metrics["mismatch/routing_live_share"] == 0
    assert metrics["mismatch/k3"] < 1e-10
    assert metrics["mismatch/max_abs"] < 1e-5


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_experts_are_replayed_where_the_routers_would_choose_others(rows, packing, gradient_checkpointing):
    """Other weights: the replayed experts give the logprobs of a model whose routers are forced to them."""
    config = {"packing": packing, "gradient_checkpointing": gradient_checkpointing}
    trainer = make_trainer(perturb(tiny_model("qwen3_moe"), 0.05), routing_replay=True, **config)
    found = trainer.logprobs(rows)
    model = perturb(tiny_model("qwen3_moe"), 0.05)
    routers = Routers.find(model)
    for row, logprobs in zip(rows, found, strict=True):
        experts_NLK = torch.from_numpy(row.routed_experts[: len(row.token_ids) - 1].astype(np.int16))
        with routers.replaying(experts_NLK), torch.no_grad():
            ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
            expected = model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        own = expected.gather(1, ids[0, 1:, None])[:, 0].numpy()
        mask = row.sampled_mask
        np.testing.assert_allclose(logprobs[mask], own[mask[1:]], atol=2e-5)
    metrics = step_metrics(trainer.step(rows))
    assert metrics["mismatch/routing_differs"] > 0.01


def test_replay_is_closer_to_the_sampler_than_live_routing_after_an_update(rows):
    k3 = {}
    for replays in (False, True):
        trainer = make_trainer(perturb(tiny_model("qwen3_moe"), 0.01), routing_replay=replays)
        k3[replays] = mismatch_of_rows(rows, trainer.logprobs(rows)).k3
    assert k3[True] < k3[False]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_with_the_experts_that_the_routers_choose_gradients_are_those_without_replay(rows, gradient_checkpointing):
    """In float64, with all rows in one lane."""
    gradients = []
    for replays in (False, True):
        model = tiny_model("qwen3_moe")
        model.set_experts_implementation("eager")  # the others compute no float64
        routers = Routers.find(model.double())
        if gradient_checkpointing:
            enable_checkpointing(model, routers=routers)
        policy = PolicyLogprobs(model, chunk_size=64, packing=Packing.ONE_LANE, routers=routers)
        fed = lay_out([[(row, row.loss_mask) for row in rows]], torch.device("cpu"))
        experts = lay_out_experts([rows], fed.token_ids_BT.shape, routers if replays else None)
        arguments = (fed.token_ids_BT, fed.mask_BT, 1.0, None, fed.position_ids_BT, Entropy.NONE, experts)
        policy(*arguments).logprobs_N.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        counts = routers.take_counts()
        num_ids = fed.token_ids_BT.shape[1] - 1
        assert counts.num_replayed == (2 * (num_ids - len(rows) + 1) if replays else 0)
        assert counts.num_different == 0
    assert all(gradient.dtype == torch.float64 for gradient in gradients[0].values())
    assert largest_difference(*gradients) < 1e-10


def test_checkpointing_and_micro_batches_give_the_gradient_of_one_pass_where_experts_differ(rows):
    model = perturb(tiny_model("qwen3_moe"), 0.05)
    whole, parts = (
        gradient_of(rows, perturb(tiny_model("qwen3_moe"), 0.05), routing_replay=True, **config)
        for config in ({}, {"gradient_checkpointing": True, "tokens_per_micro_batch": 60, "packing": Packing.NEVER})
    )
    assert largest_difference(whole, parts) < 1e-4
    live = gradient_of(rows, model)
    assert largest_difference(whole, live) > 1e-3


def test_checkpointing_that_the_model_had_before_replays_too(rows):
    """transformers alone would compute the layers again with live experts."""
    model = perturb(tiny_model("qwen3_moe"), 0.05)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole = gradient_of(rows, perturb(tiny_model("qwen3_moe"), 0.05), routing_replay=True)
    assert largest_difference(whole, gradient_of(rows, model, routing_replay=True)) < 1e-5


def test_rows_without_experts_take_live_ones_and_are_counted(rows):
    mixed = [replace(row, routed_experts=None) if k % 2 else row for k, row in enumerate(rows)]
    trainer = make_trainer(tiny_model("qwen3_moe"), routing_replay=True)
    stats = trainer.step(mixed)
    num_ids = [len(row.token_ids) - 1 for row in rows]
    assert step_metrics(stats)["mismatch/routing_live_share"] == pytest.approx(sum(num_ids[1::2]) / sum(num_ids))
    assert stats.mismatch.k3 < 1e-10


def test_the_reference_takes_the_same_experts_so_its_distance_is_zero_at_equal_weights(rows):
    trainer = make_trainer(
        perturb(tiny_model("qwen3_moe"), 0.05),
        routing_replay=True,
        kl_weight=0.1,
        reference=perturb(tiny_model("qwen3_moe"), 0.05),
    )
    assert abs(step_metrics(trainer.step(rows))["train/reference_k3"]) < 1e-10


def test_a_trainer_without_replay_has_no_numbers_of_it(rows):
    metrics = step_metrics(make_trainer(tiny_model("qwen3_moe")).step(rows))
    assert [value for name, value in metrics.items() if "routing" in name] == [None, None]


def test_a_model_without_experts_and_rows_of_another_model_are_refused(rows):
    with pytest.raises(InvalidInputError, match="Qwen3ForCausalLM has no routers"):
        make_trainer(tiny_model("qwen3"), routing_replay=True)
    trainer = make_trainer(tiny_model("qwen3_moe"), routing_replay=True)
    other = replace(rows[0], routed_experts=rows[0].routed_experts[:, :1])
    with pytest.raises(InvalidInputError, match="routed_experts of row 1 must have 2 layers with 2 of 8 experts"):
        trainer.step([rows[0], other])
    strange = replace(rows[0], routed_experts=np.full_like(rows[0].routed_experts, 8))
    with pytest.raises(InvalidInputError, match="with 2 experts up to 8: another model sampled it"):
        trainer.step([strange])
    with pytest.raises(InvalidInputError, match=r"reference must have the experts of the model .* num_experts 4 for 8"):
        make_trainer(
            tiny_model("qwen3_moe"),
            routing_replay=True,
            kl_weight=0.1,
            reference=tiny_model("qwen3_moe", num_experts=4),
        )


def test_a_model_with_adapters_replays_the_experts_of_its_base(rows):
    """Its adapters are not zero, so its routers choose other experts than the engine's, which had none."""
    model = with_lora(tiny_model("qwen3_moe"), target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(model, routing_replay=True, gradient_checkpointing=True)
    stats = trainer.step(rows)
    assert 0 < stats.routing.different_share < 1
    assert stats.routing.live_share == 0
