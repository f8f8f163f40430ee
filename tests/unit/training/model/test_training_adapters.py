"""LoRA: adapters train alone, against the base below them, and leave merged without being touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.adapted import untied_qwen3, with_lora
from support.models import tiny_qwen3
from support.publishing import mismatch
from support.rows import random_rows
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.training.config import OptimizerConfig, Reference, TrainerConfig
from unbroken.training.model.adapters import checksum_of_frozen
from unbroken.training.trainer import Trainer
from unbroken.weights.base import InProcessPublisher

CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), tokens_per_micro_batch=40)
HELD = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), tokens_per_micro_batch=40, kl_weight=0.1)
KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "linear": lambda: (with_lora(tiny_qwen3()), tiny_qwen3()),
    "rank-stabilised": lambda: (with_lora(tiny_qwen3(), use_rslora=True), tiny_qwen3()),
    "dora": lambda: (with_lora(tiny_qwen3(), use_dora=True), tiny_qwen3()),
    "embeddings": lambda: (
        with_lora(untied_qwen3(), target_modules=["embed_tokens", "lm_head", "q_proj"]),
        untied_qwen3(),
    ),
    "whole-head": lambda: (with_lora(untied_qwen3(), modules_to_save=["lm_head"]), untied_qwen3()),
    "biases": lambda: (with_lora(tiny_qwen3(), bias="all"), tiny_qwen3()),
}
"""A model with adapters, and a copy of its base."""


@pytest.fixture
def rows():
    return random_rows(np.random.default_rng(0), 6)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_published_samples_as_what_was_trained(rows, kind):
    model, base = KINDS[kind]()
    trainer = Trainer(model, CONFIG)
    for _ in range(2):
        trainer.step(rows)
    engine = TransformersEngine(base)
    assert await mismatch(trainer, engine) > 1e-2
    await InProcessPublisher(engine).publish(trainer.named_weights(), policy_version=1)
    assert await mismatch(trainer, engine) < 5e-6
    await engine.close()


def test_the_names_are_those_of_the_base():
    names = [name for name, _ in Trainer(with_lora(tiny_qwen3()), CONFIG).named_weights()]
    assert names == [name for name, _ in tiny_qwen3().named_parameters()]


def test_publishing_changes_no_bit_of_what_trains(rows):
    trainer, model = make(with_lora(tiny_qwen3()))
    trainer.step(rows)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    published = dict(trainer.named_weights())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    name = "model.layers.0.self_attn.q_proj"
    parts = [
        before[f"base_model.model.{name}.{part}.weight"] for part in ("base_layer", "lora_A.default", "lora_B.default")
    ]
    torch.testing.assert_close(published[f"{name}.weight"], parts[0] + 2 * parts[2] @ parts[1])


def test_only_adapters_move_and_the_optimizer_has_no_others(rows):
    trainer, model = make(with_lora(tiny_qwen3()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.step(rows)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    assert len(trainer.backend.optimizer.param_groups[0]["params"]) == 2 * 4 * 2


@pytest.mark.parametrize("kind", ["linear", "dora", "embeddings", "whole-head"])
def test_the_base_below_the_adapter_is_a_reference_like_a_copy_of_it(rows, kind):
    (model, _), (other, base) = KINDS[kind](), KINDS[kind]()
    below = Trainer(model, HELD, reference=Reference.BASE)
    beside = Trainer(other, HELD, reference=base)
    for _ in range(3):
        ours, theirs = below.step(rows), beside.step(rows)
        assert ours.reference_k3 == pytest.approx(theirs.reference_k3, rel=1e-6)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert ours.reference_k3 > 1e-3
    for (_, ours), (_, theirs) in zip(below.named_weights(), beside.named_weights(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


def test_adapters_train_on_a_base_in_half_precision(rows):
    trainer, model = make(with_lora(tiny_qwen3().bfloat16()))
    trainer.step(rows)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}
    assert {tensor.dtype for _, tensor in trainer.named_weights()} == {torch.bfloat16}


def test_a_checkpoint_holds_the_adapters_and_goes_on_bit_for_bit(rows, tmp_path):
    trainer, _ = make(with_lora(tiny_qwen3(), modules_to_save=["norm"]))
    trainer.step(rows)
    trainer.save(tmp_path / "state")
    resumed, _ = make(with_lora(tiny_qwen3(), modules_to_save=["norm"], seed=1))
    resumed.load(tmp_path / "state")
    for each in (trainer, resumed):
        each.step(rows)
    for (name, ours), (_, theirs) in zip(trainer.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "state" / "weights").rglob("*.safetensors"))
    assert num_bytes < 4 * sum(parameter.numel() for parameter in tiny_qwen3().parameters()) / 2


def test_a_checkpoint_of_adapters_on_another_base_is_refused(rows, tmp_path):
    make(with_lora(tiny_qwen3()))[0].save(tmp_path / "state")
    other = tiny_qwen3()
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    with pytest.raises(CheckpointError, match="is of a model whose frozen weights have the checksum"):
        make(with_lora(other))[0].load(tmp_path / "state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_a_base_sees_a_bit_and_rows_and_columns_that_change_places(dtype):
    def change(weight, kind):
        if kind == "bit":
            weight.view(torch.int16)[3, 5] ^= 1
        elif kind == "rows":
            weight[[1, 2]] = weight[[2, 1]]
        elif kind == "columns":
            weight[:, [1, 2]] = weight[:, [2, 1]]

    found = set()
    for kind in ("none", "bit", "rows", "columns"):
        model = with_lora(tiny_qwen3().to(dtype))
        change(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.data, kind)
        found.add(checksum_of_frozen(model))
    assert len(found) == 4


def test_a_checkpoint_of_a_base_in_another_type_says_which_setting_continues_it(tmp_path):
    make(with_lora(tiny_qwen3()))[0].save(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"in float32, and this one is in bfloat16: set model_settings.dtype to"):
        make(with_lora(tiny_qwen3().bfloat16()))[0].load(tmp_path / "state")


@pytest.mark.parametrize(
    ("make_model", "why"),
    [
        (
            lambda: with_lora(tiny_qwen3(), lora_dropout=0.1),
            r"adapter 'default' must have LoraConfig.lora_dropout 0, got 0\.1",
        ),
        (
            lambda: with_lora(tiny_qwen3(), trainable_token_indices=[3]),
            "must not have LoraConfig.trainable_token_indices",
        ),
        (
            lambda: with_lora(tiny_qwen3(), target_modules=["embed_tokens"]),
            "must leave the tied embeddings of Qwen3ForCausalLM alone",
        ),
        (
            lambda: with_lora(tiny_qwen3(), modules_to_save=["lm_head"]),
            "must leave the tied embeddings of Qwen3ForCausalLM alone",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # PEFT warns of some of these as well
def test_adapters_that_cannot_be_published_as_trained_are_refused(make_model, why):
    with pytest.raises(InvalidInputError, match=why):
        Trainer(make_model(), CONFIG)


def test_another_kind_of_adapter_is_refused():
    from peft import IA3Config, get_peft_model

    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(InvalidInputError, match="adapter 'default' must be a LoRA, got IA3"):
        Trainer(get_peft_model(tiny_qwen3(), config), CONFIG)


def test_adapters_that_transformers_holds_are_refused():
    from peft import LoraConfig

    model = tiny_qwen3()
    try:
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    except ValueError as error:  # transformers 5.24 asks for peft 0.22, and our own adapters do not go through it
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))
    with pytest.raises(InvalidInputError, match=r"has adapters from add_adapter"):
        Trainer(model, CONFIG)


def test_the_base_is_no_reference_where_it_moves_or_is_no_base():
    with pytest.raises(InvalidInputError, match=r"reference must be a model for a Qwen3ForCausalLM: Reference\.BASE"):
        Trainer(tiny_qwen3(), HELD, reference=Reference.BASE)
    thawed = with_lora(tiny_qwen3())
    thawed.base_model.model.model.norm.requires_grad_(True)
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight must not be trained with Reference\.BASE"):
        Trainer(thawed, HELD, reference=Reference.BASE)
    with pytest.raises(InvalidInputError, match="exactly if"):
        Trainer(with_lora(tiny_qwen3()), CONFIG, reference=Reference.BASE)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_the_base_is_no_reference_where_making_the_adapter_changed_it(start):
    model = with_lora(tiny_qwen3(), init_lora_weights=start)
    with pytest.raises(InvalidInputError, match=f"init_lora_weights '{start}' changes its weights"):
        Trainer(model, HELD, reference=Reference.BASE)


def test_a_model_that_trains_nothing_is_refused():
    with pytest.raises(InvalidInputError, match="must have a parameter that trains"):
        Trainer(tiny_qwen3().requires_grad_(False), CONFIG)


def make(model: Any) -> tuple[Trainer, Any]:
    return Trainer(model, CONFIG), model
