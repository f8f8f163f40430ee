"""The names of weights: those of a checkpoint, and those that the same model has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.adapted import with_lora
from support.architectures import tiny_model
from support.models import tiny_qwen3
from support.vision import FAMILIES, Family, save_vision_model
from support.vision_engines import load_vision_model
from unbroken.engines.vllm.workers import _name
from unbroken.errors import SamplingError
from unbroken.training.config import TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.weights.checkpoint import ExpertNames, WeightShapes
from unbroken.weights.files import write_tensors
from unbroken.weights.sources import WeightStream


def write(shapes: WeightShapes, folder: Path, weights: Any) -> None:
    """Write weights as a worker loads them: joined experts one by one."""
    stream = WeightStream.of(weights)
    names, _ = shapes.match(stream.list_shapes())
    split = (part for own, tensor in stream if own in names for part in _name(tensor, names[own]))
    list(write_tensors(folder, split))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_under_the_names_of_a_model_in_memory_are_written_under_those_of_its_checkpoint(
    family: Family, tmp_path: Path
) -> None:
    model = load_vision_model(save_vision_model(tmp_path / "model", family))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    given = dict(model.named_parameters())
    assert not given.keys() & saved.keys()
    shapes = WeightShapes.of_checkpoint(tmp_path / "model", tied=family == "qwen2_5_vl")
    (tmp_path / "new").mkdir()
    write(shapes, tmp_path / "new", given.items())
    (file,) = (tmp_path / "new").glob("*.safetensors")
    written = load_file(file)
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)


def test_a_trainer_of_adapters_gives_each_weight_of_the_base_once(tmp_path: Path) -> None:
    tiny_qwen3().save_pretrained(tmp_path / "base")
    shapes = WeightShapes.of_checkpoint(tmp_path / "base", tied=True)
    (tmp_path / "new").mkdir()
    write(shapes, tmp_path / "new", Trainer(with_lora(tiny_qwen3()), TrainerConfig()).named_weights())
    assert WeightShapes.of_checkpoint(tmp_path / "new", tied=True) == shapes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a.model.w": 1, "model.a.w": 2}, "weight 'model.a.w' came twice"),
        ({"a.w": 1, "model.b.w": 2}, "no weight named 'model.b.w'"),
    ],
)
def test_a_name_that_is_no_weights_is_refused(given: dict[str, int], message: str, tmp_path: Path) -> None:
    shapes = WeightShapes(shapes={"model.a.w": (1,), "b.w.model.w": (1,)})
    weights: Any = {name: torch.full((1,), value) for name, value in given.items()}
    with pytest.raises(SamplingError, match=message):
        write(shapes, tmp_path, weights.items())


def test_names_that_differ_by_wrappers_only_are_told_apart_by_the_whole_name(tmp_path: Path) -> None:
    shapes = WeightShapes(shapes={"model.w": (1,), "vision_model.w": (2,)})
    write(shapes, tmp_path, {"model.w": torch.zeros(1), "vision_model.w": torch.zeros(2)}.items())
    with pytest.raises(SamplingError, match=r"no weight named 'language_model\.w'"):
        write(shapes, tmp_path, {"language_model.w": torch.zeros(1)}.items())


def test_weights_of_all_experts_are_written_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "new").mkdir()
    write(WeightShapes.of_checkpoint(tmp_path / "model", tied=False), tmp_path / "new", model.named_parameters())
    (file,) = (tmp_path / "new").glob("*.safetensors")
    written = load_file(file)
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in saved)
    without = [(name, tensor) for name, tensor in model.named_parameters() if "1.mlp.experts.gate_up" not in name]
    with pytest.raises(SamplingError, match=r"16 of \d+ are missing, first 'model.layers.1.mlp.experts.0.gate_proj"):
        write(WeightShapes.of_checkpoint(tmp_path / "model", tied=False), tmp_path / "new", without)


def test_shared_files_and_broadcasts_may_join_experts_too_and_nothing_but_them(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    shapes = WeightShapes.of_checkpoint(tmp_path, tied=False)
    given = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names, _ = shapes.match(given)
    joined = "model.layers.1.mlp.experts.gate_up_proj"
    parts = dict(ExpertNames.of_pattern(names[joined]).split(model.get_parameter(joined)))
    assert {name: tuple(part.shape) for name, part in parts.items()}.items() <= dict(shapes.shapes).items()
    assert shapes.match(shapes.shapes)[0] == {name: name for name in shapes.shapes}
    with pytest.raises(SamplingError, match=r"16 of \d+ are missing, first 'model.layers.1.mlp.experts.0.gate_proj"):
        shapes.match({name: shape for name, shape in given.items() if name != joined})
    with pytest.raises(SamplingError, match=r"8 of .* are missing, first 'model.layers.1.mlp.experts.4.gate_proj"):
        shapes.match({**given, joined: (4, 32, 32)})
    with pytest.raises(SamplingError, match=r"experts.0.gate_proj.weight' must have shape \(16, 32\), got \(8, 32\)"):
        shapes.match({**given, joined: (8, 16, 32)})
    with pytest.raises(SamplingError, match=r"experts.3.gate_proj\.weight' came twice"):
        shapes.match({**given, "model.layers.1.mlp.experts.3.gate_proj.weight": (16, 32)})
