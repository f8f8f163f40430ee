"""Images on a GPU: logprobs like those of the CPU, and a step that moves both towers."""

import numpy as np
import pytest
import torch

from support.image_rows import Vision, random_image_rows
from support.vision import FAMILIES, picture
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.model.images import RowImages
from unbroken.training.model.lanes import lay_out
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.trainer import Trainer

pytest.importorskip("torchvision", reason="the image processors of transformers need it")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PICTURES = [picture(56, 56), picture(28, 84, seed=1), picture(112, 56, seed=2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_are_scored_as_on_the_cpu_and_trained(tmp_path, family):
    vision = Vision.make(tmp_path, family)
    rows = random_image_rows(vision, np.random.default_rng(0), 16, PICTURES)
    expected = logprobs_on_the_cpu(vision, rows)
    trainer = Trainer(
        vision.model(), TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3)), images=vision.images
    )
    before = {name: weight.cpu().clone() for name, weight in trainer.named_weights()}
    # cuDNN rounds the patches' convolution to TF32 unless that is switched off.
    with torch.backends.cudnn.flags(allow_tf32=False):
        scored = trainer.logprobs(rows)
    found = np.concatenate([of[row.sampled_mask] for of, row in zip(scored, rows, strict=True)])
    assert np.abs(found - expected).max() < 1e-4
    trainer.step(rows)
    for tower in ("vis", "language_model"):
        assert any(not torch.equal(weight.cpu(), before[n]) for n, weight in trainer.named_weights() if tower in n)


def logprobs_on_the_cpu(vision, rows):
    images = RowImages(vision.images, max_bytes=0)
    policy = PolicyLogprobs(vision.model(), chunk_size=1024, images=images)
    fed = lay_out([[(row, row.sampled_mask)] for row in rows], torch.device("cpu"))
    pixels = images.inputs([row.images for row in rows], fed.token_ids_BT.shape, torch.device("cpu"))
    with torch.no_grad():
        return policy(fed.token_ids_BT, fed.mask_BT, 1.0, pixels).logprobs_N.numpy()
