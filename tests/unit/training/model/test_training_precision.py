"""bfloat16 by autocast, and gradient checkpointing: what they change, and what they must not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.adapted import with_lora
from support.gradients import SUBTRACT_GRADIENT, flatten, step_gradient
from support.models import tiny_qwen3
from support.rows import random_pairs, random_rows
from unbroken.errors import InvalidInputError
from unbroken.training.config import OldLogprobs, Packing, Reference, SharedPrefixes, TrainerConfig
from unbroken.training.loss_config import DpoConfig
from unbroken.training.model import adapters, compilation
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.trainer import Trainer


@pytest.fixture
def rows():
    return random_rows(np.random.default_rng(0), 6)


def update(samples, *, accelerator=None, reference=None, objective=None, **config):
    """A step's statistics and its gradient, read off the update that it made."""
    trainer = Trainer(
        tiny_qwen3(),
        TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=40, **config),
        objective=objective,
        accelerator=accelerator,
        reference=reference,
    )
    stats, gradient = step_gradient(trainer, samples)
    return stats, flatten(gradient), trainer


def test_bfloat16_has_the_loss_and_gradient_of_float32_up_to_its_rounding(rows, request):
    exact, exact_gradient, _ = update(rows)
    rounded, gradient, trainer = update(rows, accelerator=request.getfixturevalue("bfloat16"))
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.loss != exact.loss
    assert torch.cosine_similarity(gradient, exact_gradient, dim=0) > 0.99
    assert {weight.dtype for _, weight in trainer.named_weights()} == {torch.float32}


def test_with_bfloat16_layers_compute_in_it_and_logits_and_logprobs_are_float32(rows, bfloat16):
    model, seen = tiny_qwen3(), {}
    trainer = Trainer(model, TrainerConfig(), accelerator=bfloat16)
    for name, module in (("layer", model.model.layers[0].self_attn.q_proj), ("head", model.lm_head)):
        module.register_forward_hook(lambda _m, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    logprobs = trainer.logprobs(rows)
    assert seen["layer"][1] == torch.bfloat16
    assert seen["head"] == (torch.float32, torch.float32)
    assert all(each.dtype == np.float32 for each in logprobs)
    assert (
        trainer.backend._wrapped(torch.tensor([[1, 2]]), torch.tensor([[False, True]]), 1.0).logprobs_N.dtype
        == torch.float32
    )


def test_with_bfloat16_the_trainers_own_old_logprobs_still_give_ratio_one(rows, bfloat16):
    stats, _, _ = update(rows, accelerator=bfloat16, old_logprobs=OldLogprobs.RECOMPUTE)
    assert stats.mean_ratio == pytest.approx(1, abs=1e-6)


def test_with_bfloat16_a_reference_is_computed_as_the_policy_is(bfloat16):
    """An equal one gives exact zeros: in float32 its rounding would be a margin of its own."""
    pairs = random_pairs(np.random.default_rng(1), 1)
    dpo = {"objective": OnlineDpo(), "dpo": DpoConfig(beta=1.0)}
    stats, _, _ = update(pairs, accelerator=bfloat16, reference=tiny_qwen3(), **dpo)
    assert stats.objective.margin == pytest.approx(0, abs=1e-6)
    assert stats.loss == pytest.approx(math.log(2), abs=1e-6)


def num_kept(samples, **config) -> int:
    """Numbers that autograd keeps between forward and backward pass."""
    count = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        update(samples, **config)
    return count


def test_gradient_checkpointing_keeps_less_and_gives_the_same_gradient(rows):
    plain, gradient, _ = update(rows)
    checkpointed, again, _ = update(rows, gradient_checkpointing=True)
    assert checkpointed.loss == plain.loss
    torch.testing.assert_close(again, gradient, atol=1e-7, rtol=1e-6)
    assert num_kept(rows, gradient_checkpointing=True) < 0.7 * num_kept(rows)


def test_gradient_checkpointing_in_bfloat16_computes_again_what_it_computed(rows, bfloat16):
    plain, gradient, _ = update(rows, accelerator=bfloat16)
    checkpointed, again, _ = update(rows, accelerator=bfloat16, gradient_checkpointing=True)
    assert checkpointed.loss == plain.loss
    torch.testing.assert_close(again, gradient, atol=1e-6, rtol=1e-4)


def test_a_model_that_cannot_be_checkpointed_is_refused():
    model = tiny_qwen3()
    model.supports_gradient_checkpointing = False
    with pytest.raises(InvalidInputError, match=r"must support TrainerConfig\.gradient_checkpointing"):
        Trainer(model, TrainerConfig(gradient_checkpointing=True))


def test_weights_in_bfloat16_are_refused_and_pointed_to_autocast():
    with pytest.raises(InvalidInputError, match=r"to compute in bfloat16, give the trainer Accelerator\(mixed_prec"):
        Trainer(tiny_qwen3().bfloat16(), TrainerConfig())


def adapted(dtype=torch.float32, **lora):
    """A model of weights that bfloat16 has exactly, as most models on the hub are, in this type."""
    return with_lora(tiny_qwen3().bfloat16().to(dtype), **({"target_modules": "all-linear"} | lora))


def train_adapted(model, samples, accelerator, **config):
    """Logprobs and the gradient of a step."""
    trainer = Trainer(
        model, TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=40, **config), accelerator=accelerator
    )
    logprobs = np.concatenate(trainer.logprobs(samples))
    return logprobs, flatten(step_gradient(trainer, samples)[1])


def test_a_base_in_bfloat16_gives_the_very_logprobs_of_the_same_weights_in_float32(rows, bfloat16):
    found = train_adapted(adapted(torch.bfloat16), rows, bfloat16)
    expected = train_adapted(adapted(), rows, bfloat16)
    np.testing.assert_array_equal(found[0], expected[0])


def use_pefts_own_code(monkeypatch):
    monkeypatch.setattr(adapters, "_is_plain", lambda *_: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_that_compute_in_bfloat16_are_as_close_to_float32_as_pefts(rows, bfloat16, dtype, monkeypatch):
    exact = train_adapted(adapted(), rows, None)
    fused = train_adapted(adapted(dtype), rows, bfloat16)
    use_pefts_own_code(monkeypatch)
    pefts = train_adapted(adapted(dtype), rows, bfloat16)
    assert not np.array_equal(fused[0], pefts[0], equal_nan=True)
    errors = [np.nanmean(np.square(found[0] - exact[0])) for found in (fused, pefts)]
    assert errors[0] < 1.1 * errors[1]
    assert torch.cosine_similarity(fused[1], exact[1], dim=0) > 0.99
    assert (fused[1] - exact[1]).norm() < 1.1 * (pefts[1] - exact[1]).norm()


def test_other_adapters_are_left_to_peft(rows, bfloat16, monkeypatch):
    lora = {"use_dora": True}
    found = train_adapted(adapted(**lora), rows, bfloat16)
    use_pefts_own_code(monkeypatch)
    for own, other in zip(found, train_adapted(adapted(**lora), rows, bfloat16), strict=True):
        np.testing.assert_array_equal(own, other)


def test_without_autocast_adapters_are_computed_by_peft_bit_for_bit(rows, monkeypatch):
    found = train_adapted(adapted(), rows, None)
    use_pefts_own_code(monkeypatch)
    for own, other in zip(found, train_adapted(adapted(), rows, None), strict=True):
        np.testing.assert_array_equal(own, other)


def test_an_input_is_rounded_once_for_all_layers_that_get_it(rows, bfloat16, monkeypatch):
    rounded, layers, model = [], [], adapted(torch.bfloat16)
    own = adapters._RoundedInputs.round

    def count(self, x, dtype):
        result = own(self, x, dtype)
        layers.append(x)
        rounded.append(result)
        return result

    monkeypatch.setattr(adapters._RoundedInputs, "round", count)
    trainer = Trainer(model, TrainerConfig(tokens_per_micro_batch=400, packing=Packing.NEVER), accelerator=bfloat16)
    rounded.clear(), layers.clear()
    trainer.logprobs(rows)
    num_rounded = len({id(each) for each in rounded})
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert num_rounded == 4 * model.config.num_hidden_layers  # attention, its output, MLP, its product


@pytest.mark.nightly  # 17 CPU seconds, also with few adapters; in float32 test_training_compiling.py has them
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
def test_compiled_layers_with_adapters_compute_in_bfloat16_as_they_do_alone(rows, bfloat16, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    options = {"packing": Packing.NEVER, "shared_prefixes": SharedPrefixes.NEVER}
    expected = train_adapted(adapted(torch.bfloat16), rows, bfloat16, **options)
    found = train_adapted(adapted(torch.bfloat16), rows, bfloat16, compile=True, **options)
    np.testing.assert_allclose(found[0], expected[0], atol=0.05)
    assert torch.cosine_similarity(found[1], expected[1], dim=0) > 0.99


def test_adapters_checkpointed_in_bfloat16_compute_again_what_they_computed(rows, bfloat16):
    plain = train_adapted(adapted(torch.bfloat16), rows, bfloat16)
    again = train_adapted(adapted(torch.bfloat16), rows, bfloat16, gradient_checkpointing=True)
    for own, other in zip(plain, again, strict=True):
        np.testing.assert_array_equal(own, other)


def test_below_fused_adapters_the_base_is_the_reference(rows, bfloat16):
    model = adapted(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    trainer = Trainer(model, TrainerConfig(kl_weight=0.1), accelerator=bfloat16, reference=Reference.BASE)
    stats = trainer.step(rows)
    assert stats.reference_k3 == pytest.approx(0, abs=1e-6)
