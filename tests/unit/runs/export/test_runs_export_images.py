"""A model that takes images comes out with its processor, and computes the trainer's logprobs on rows with images."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from PIL import Image

from support.image_rows import Vision, random_image_rows
from support.vision import FAMILIES
from unbroken.runs.export.checkpoint import export_checkpoint
from unbroken.runs.export.files import ModelInfo, add_files
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.model.pretrained import ModelForm
from unbroken.training.trainer import Trainer

pytest.importorskip("torchvision", reason="needs torchvision")
CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
PICTURES = [Image.new("RGB", (56, 84), color) for color in ("red", "blue")]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_model_computes_the_trainers_logprobs_on_images(tmp_path, family):
    vision = Vision.make(tmp_path / "model", family)
    rows = random_image_rows(vision, np.random.default_rng(1), 4, PICTURES)
    assert any(row.images for row in rows)
    trainer = Trainer(vision.model(), CONFIG, images=vision.images)
    untrained = trainer.logprobs(rows)
    trainer.step(rows)
    info = ModelInfo(step=1, source=str(vision.folder))
    trainer.save_pretrained(tmp_path / "final", add_files=partial(add_files, info=info))
    trainer.save(tmp_path / "checkpoint", extra={"num_steps": 1})
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported", form=ModelForm())
    for folder in (tmp_path / "final", tmp_path / "exported"):
        loaded = Vision.load(folder, family)
        again = Trainer(loaded.model(), CONFIG, images=loaded.images).logprobs(rows)
        for theirs, ours, first in zip(again, trainer.logprobs(rows), untrained, strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-5, rtol=0)
            assert np.nanmax(np.abs(ours - first)) > 1e-4
        for name in ("preprocessor_config.json", "tokenizer.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (vision.folder / name).read_bytes()
