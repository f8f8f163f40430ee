"""The names of weights: those of a checkpoint, and those that the same model has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.adapted import with_lora
from support.models import tiny_qwen3
from support.vision import FAMILIES, Family, save_vision_model
from support.vision_engines import load_vision_model
from unbroken.engines.vllm.weights.checkpoint import WeightShapes
from unbroken.errors import SamplingError
from unbroken.training.config import TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.transfer.files import write_tensors


def write(shapes: WeightShapes, folder: Path, weights: Any) -> None:
    list(write_tensors(folder, shapes.checked(weights)))


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
