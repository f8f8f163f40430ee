"""A trained model in a folder: transformers and PEFT load it and compute the trainer's logprobs, by every form."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, GenerationConfig

from support.adapted import untied_qwen3, with_lora
from support.architectures import ARCHITECTURES, tiny_model
from support.models import tiny_qwen3
from support.rows import random_rows
from unbroken.errors import ExportError, InvalidInputError
from unbroken.training.config import OptimizerConfig, Packing, TrainerConfig
from unbroken.training.model.pretrained import ModelForm
from unbroken.training.trainer import Trainer

CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), packing=Packing.NEVER)
ROWS = random_rows(np.random.default_rng(0), 4)
ADAPTED = {
    "linear": lambda: (with_lora(tiny_qwen3()), tiny_qwen3()),
    "another-name": lambda: (with_lora(tiny_qwen3(), adapter_name="pirate"), tiny_qwen3()),
    "dora": lambda: (with_lora(tiny_qwen3(), use_dora=True), tiny_qwen3()),
    "embeddings": lambda: (with_lora(untied_qwen3(), target_modules=["embed_tokens", "q_proj"]), untied_qwen3()),
    "whole-head": lambda: (with_lora(untied_qwen3(), modules_to_save=["lm_head"]), untied_qwen3()),
}


def trained(model: Any) -> Trainer:
    trainer = Trainer(model, CONFIG)
    trainer.step(ROWS)
    return trainer


def assert_same_logprobs(trainer: Trainer, model: Any, *, atol: float = 1e-5) -> None:
    """The trainer's logprobs are those of the loaded model's own forward pass."""
    model.eval()
    for row, ours in zip(ROWS, trainer.logprobs(ROWS), strict=True):
        ids = torch.tensor(row.token_ids.tolist())[None]
        with torch.no_grad():
            logits_TV = model(ids).logits[0].float() / row.temperature
        theirs = torch.log_softmax(logits_TV, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
        at = np.flatnonzero(~np.isnan(ours))
        np.testing.assert_allclose(theirs[at - 1], ours[at], atol=atol, rtol=0)


def names_in(path: Any) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


def tensors_in(folder: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_what_was_trained(tmp_path, architecture):
    trainer = trained(tiny_model(architecture))
    trainer.save_pretrained(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert type(loaded) is type(tiny_model(architecture))
    assert loaded.dtype is torch.float32
    assert_same_logprobs(trainer, loaded)
    with pytest.raises(AssertionError):
        assert_same_logprobs(trainer, tiny_model(architecture))
    own = tmp_path / "own"
    tiny_model(architecture).save_pretrained(own)
    assert names_in(tmp_path / "final/model.safetensors") == names_in(own / "model.safetensors")
    assert json.loads((tmp_path / "final/config.json").read_text()) == json.loads((own / "config.json").read_text())


def test_a_large_model_is_written_in_shards(tmp_path):
    trainer = trained(tiny_qwen3())
    trainer.save_pretrained(tmp_path / "final", form=ModelForm(max_shard_bytes=20_000))
    assert len(list((tmp_path / "final").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "final/model.safetensors.index.json").exists()
    assert_same_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "final"))


def test_another_type_is_in_the_files_and_in_the_config(tmp_path):
    trainer = trained(tiny_qwen3())
    trainer.save_pretrained(tmp_path / "final", form=ModelForm(dtype=torch.bfloat16))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "final/config.json").read_text())["dtype"] == "bfloat16"
    assert_same_logprobs(trainer, loaded.float(), atol=0.2)
    assert {weight.dtype for _, weight in trainer.named_weights()} == {torch.float32}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_model_comes_out_in_the_type_of_its_own_files_unless_another_is_asked_for(tmp_path, architecture):
    """Experts, which are one tensor in memory and many in files, may be in several of them."""
    tiny_model(architecture).bfloat16().save_pretrained(tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    model.model.layers[0].register_buffer("bias_of_router", torch.tensor([1 / 3]))
    trainer = trained(model)
    trainer.save_pretrained(tmp_path / "final", form=ModelForm(max_shard_bytes=20_000))
    own, final = tensors_in(tmp_path / "own"), tensors_in(tmp_path / "final")
    assert final.pop("model.layers.0.bias_of_router").dtype is torch.float32
    assert {name: tensor.dtype for name, tensor in final.items()} == {
        name: tensor.dtype for name, tensor in own.items()
    }
    assert {tensor.dtype for tensor in final.values()} == {torch.bfloat16}
    files = list((tmp_path / "final").glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in files)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "final")]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.dtype is torch.bfloat16
    assert_same_logprobs(trainer, loaded.float(), atol=0.2)
    trainer.save_pretrained(tmp_path / "exact", form=ModelForm(dtype=torch.float32))
    assert_same_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype="auto"))


def test_merged_adapters_have_the_type_of_the_base_s_files_and_adapters_alone_that_of_training(tmp_path):
    tiny_qwen3().bfloat16().save_pretrained(tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    trainer = trained(with_lora(model))
    trainer.save_pretrained(tmp_path / "merged", form=ModelForm(merged=True))
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "merged").values()} == {torch.bfloat16}
    assert tensors_in(tmp_path / "merged").keys() == tensors_in(tmp_path / "own").keys()
    assert_same_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float(), atol=0.2)
    trainer.save_pretrained(tmp_path / "alone")
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "alone").values()} == {torch.float32}


def test_what_transformers_loads_in_float32_keeps_its_type_where_none_is_asked_for(tmp_path):
    tiny_qwen3().bfloat16().save_pretrained(tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    model._keep_in_fp32_modules_strict = {"q_norm"}
    trained(model).save_pretrained(tmp_path / "final")
    for name, tensor in tensors_in(tmp_path / "final").items():
        assert tensor.dtype is (torch.float32 if "q_norm" in name else torch.bfloat16), name


def test_buffers_that_belong_to_the_model_are_written(tmp_path):
    model = tiny_qwen3()
    model.model.layers[0].register_buffer("bias_of_router", torch.arange(3.0))
    model.model.layers[0].register_buffer("scratch", torch.arange(3.0), persistent=False)
    trained(model).save_pretrained(tmp_path / "final")
    names = names_in(tmp_path / "final/model.safetensors")
    assert "model.layers.0.bias_of_router" in names
    assert "model.layers.0.scratch" not in names


def test_layers_that_accelerate_checkpoints_keep_their_names(tmp_path):
    model = tiny_qwen3()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    trainer = Trainer(model, CONFIG)
    trainer.save_pretrained(tmp_path / "final")
    assert_same_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "final"))


def test_a_generation_config_that_transformers_would_not_save_is_kept(tmp_path):
    model = tiny_qwen3()
    model.generation_config = GenerationConfig(eos_token_id=[3, 4])
    model.generation_config.temperature = 0.6
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "theirs")
    trained(model).save_pretrained(tmp_path / "final")
    written = json.loads((tmp_path / "final/generation_config.json").read_text())
    assert (written["eos_token_id"], written["temperature"]) == ([3, 4], 0.6)
    assert model.generation_config.temperature == 0.6


def test_a_model_without_a_generation_config_gets_an_empty_one(tmp_path):
    model = tiny_qwen3()
    model.generation_config = None
    trained(model).save_pretrained(tmp_path / "final")
    assert set(json.loads((tmp_path / "final/generation_config.json").read_text())) <= {
        "transformers_version",
        "_from_model_config",
    }
    assert model.generation_config is None


@pytest.mark.parametrize("kind", ADAPTED)
def test_peft_loads_the_adapters_alone(tmp_path, kind):
    model, base = ADAPTED[kind]()
    trainer = trained(model)
    trainer.save_pretrained(tmp_path / "final")
    assert {path.name for path in (tmp_path / "final").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert_same_logprobs(trainer, PeftModel.from_pretrained(base, tmp_path / "final"))


@pytest.mark.parametrize("kind", ADAPTED)
def test_merged_adapters_are_a_whole_model(tmp_path, kind):
    trainer = trained(ADAPTED[kind]()[0])
    trainer.save_pretrained(tmp_path / "final", form=ModelForm(merged=True))
    assert not (tmp_path / "final/adapter_config.json").exists()
    assert_same_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "final"))
    trainer.step(ROWS)  # what trains is untouched


def test_a_file_must_be_allowed_to_hold_something():
    with pytest.raises(InvalidInputError, match="max_shard_bytes must be >= 1, got 0"):
        ModelForm(max_shard_bytes=0)


def test_forms_that_would_lose_something_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidInputError, match="merged must be False for a Qwen3ForCausalLM, which has no adapters"):
        trained(tiny_qwen3()).save_pretrained(tmp_path / "final", form=ModelForm(merged=True))
    model = with_lora(tiny_qwen3())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    trainer = trained(model)
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight must not be trained if adapters alone are"):
        trainer.save_pretrained(tmp_path / "final")
    trainer.save_pretrained(tmp_path / "final", form=ModelForm(merged=True))
    assert_same_logprobs(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "final"))


def test_a_folder_is_replaced_whole_or_stays_as_it_was(tmp_path):
    trainer = trained(tiny_qwen3())
    folder = tmp_path / "final"
    trainer.save_pretrained(folder, add_files=lambda part: (part / "more.txt").write_text("first") and None)
    before = (folder / "model.safetensors").read_bytes()
    trainer.step(ROWS)

    def fail(part: Any) -> None:
        assert (part / "model.safetensors").exists()
        raise OSError(28, "No space left on device")

    with pytest.raises(ExportError, match=r"the model cannot be written to .*final: \[Errno 28\] No space left"):
        trainer.save_pretrained(folder, add_files=fail)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    trainer.save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() != before
    assert not (folder / "more.txt").exists()
