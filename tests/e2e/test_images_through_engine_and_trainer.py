"""The embedded engine samples after images in prompt and tool reply; the trainer scores the same ids alike."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from support.image_rows import Vision
from support.vision import FAMILIES, PAD, picture
from unbroken.engines.transformers import TransformersEngine
from unbroken.images.decoding import encode_picture
from unbroken.images.placeholders import expand_placeholders
from unbroken.ledger.export import export_samples
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.training.config import TrainerConfig
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
TURNS = (f"<|im_start|>user\n{IMAGE}and{IMAGE}\n", f"\n<tool_response>{IMAGE}</tool_response>\n", "\nmore\n")
NUM_IMAGES = (2, 1, 0)


async def roll_out(engine: TransformersEngine, vision: Vision, seed: int) -> TokenTree:
    """Three turns; the images differ in size and from rollout to rollout."""
    tree = TokenTree()
    end: Position | None = None
    for turn, (text, num_images) in enumerate(zip(TURNS, NUM_IMAGES, strict=True)):
        pictures = [picture(28 + 28 * (seed % 3), 56 + 28 * k, seed=10 * seed + turn + k) for k in range(num_images)]
        given, spans = expand_placeholders(
            token_ids(vision.encode(text)), [encode_picture(one) for one in pictures], vision.images
        )
        end = tree.add_given(given, Origin.PROMPT if end is None else Origin.BRIDGE, parent=end, images=spans)
        request = SampleRequest(
            request_id=f"{seed}-{turn}",
            prompt_ids=tree.token_ids(end),
            images=tree.images(end),
            params=SamplingParams(max_tokens=8, seed=seed),
        )
        result = await engine.sample(request)
        result.check_answers(request)
        end = tree.add_sampled(result.sequences[0], parent=end)
    return tree


@pytest.mark.parametrize("family", FAMILIES)
async def test_i4_engine_and_trainer_agree_on_rollouts_with_images(tmp_path, family):
    vision = Vision.make(tmp_path, family)
    engine = TransformersEngine(vision.model(), image_processor=vision.images)
    try:
        trees = await asyncio.gather(*(roll_out(engine, vision, seed) for seed in range(6)))
    finally:
        await engine.close()
    rows = [row for tree in trees for row in export_samples(tree, advantage=1.0)]
    assert [len(row.images) for row in rows] == [3] * 6
    trainer = Trainer(vision.model(), TrainerConfig(tokens_per_micro_batch=150), images=vision.images)
    found = mismatch_of_rows(rows, trainer.logprobs(rows))
    print(f"{family}: {found}")
    assert found.num_tokens == sum(np.count_nonzero(row.sampled_mask) for row in rows)
    assert found.max_abs < 1e-4
