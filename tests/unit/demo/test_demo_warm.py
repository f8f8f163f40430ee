"""The demo's warm model: the package's by default, made here otherwise."""

from __future__ import annotations

import io
import random
from contextlib import redirect_stdout
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.lookup import LookupTask
from unbroken.demo.model import Teacher, build_model, warm_up
from unbroken.demo.warm import write_warm_model


class Interrupting(io.StringIO):
    def write(self, text: str) -> int:
        raise InterruptedError(text)


def read(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_seed_0_gives_the_model_of_the_package_and_a_warm_up_makes_the_same_files(tmp_path):
    write_warm_model(tmp_path / "copied", WarmUpConfig(), seed=0)
    write_warm_model(tmp_path / "made", WarmUpConfig(max_drill_steps=1, num_demo_steps=1), seed=0)
    copied, made = read(tmp_path / "copied"), read(tmp_path / "made")
    packaged = {each.name: each.read_bytes() for each in files("unbroken.demo").joinpath("words").iterdir()}
    assert copied.items() >= packaged.items()
    assert made.keys() == copied.keys()
    assert {name for name in made if made[name] != copied[name]} == {"model.safetensors"}


@pytest.mark.parametrize("changed", [{"seed": 1}, {"num_heads": 2}])
def test_another_seed_or_width_is_warmed_up(tmp_path, changed):
    with redirect_stdout(Interrupting()), pytest.raises(InterruptedError, match="warm-up:"):
        write_warm_model(tmp_path / "model", WarmUpConfig(), **{"seed": 0, **changed})


@pytest.mark.nightly
def test_the_package_has_what_a_warm_up_makes(tokenizer):
    made = build_model(tokenizer, seed=0)
    warm_up(made, tokenizer, WarmUpConfig(), seed=0)
    packaged = AutoModelForCausalLM.from_pretrained(str(files("unbroken.demo").joinpath("words")), dtype=torch.float32)
    # Equal where the package's was made; other processors round otherwise, and a thousand steps make more of that.
    assert measure_loss(packaged, tokenizer) == pytest.approx(measure_loss(made, tokenizer), rel=0.1)


@torch.no_grad()
def measure_loss(model: Any, tokenizer: Any) -> float:
    """The mean cross-entropy of the targets of 64 demonstrations."""
    rng, teacher, losses = random.Random(1), Teacher(tokenizer), []
    for _ in range(64):
        pieces = teacher.demonstrate(LookupTask.draw(rng), rng)
        encoded = [tokenizer(piece.text, add_special_tokens=False)["input_ids"] for piece in pieces]
        ids = [each for part in encoded for each in part]
        labels = [
            each if piece.is_target else -100 for piece, part in zip(pieces, encoded, strict=True) for each in part
        ]
        losses.append(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.item())
    return sum(losses) / len(losses)
