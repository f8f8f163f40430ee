"""Any mix of rows with and without images, in any split into passes: a row's logprobs are its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.image_rows import Vision, random_image_row
from support.vision import FAMILIES, picture
from unbroken.training.config import TrainerConfig
from unbroken.training.trainer import Trainer

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

PICTURES = [picture(56, 56), picture(28, 84, seed=1), picture(112, 56, seed=2), picture(28, 28, seed=3)]
BUDGETS = (1, 40, 90, 200, 10_000)
"""Ids in one pass: a row, a few, all."""


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request, tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def trainers(vision) -> dict[int, Trainer]:
    """By budget; they share a model, which nobody trains."""
    model = vision.model()
    return {
        budget: Trainer(model, TrainerConfig(tokens_per_micro_batch=budget), images=vision.images) for budget in BUDGETS
    }


@settings(max_examples=num_cases(10, in_fuzz=200), derandomize=True)
@given(
    nums_images=st.lists(st.integers(0, 3), min_size=2, max_size=6),
    budget=st.sampled_from(BUDGETS),
    seed=st.integers(0, 2**32 - 1),
)
def test_for_any_mix_and_any_split_logprobs_are_those_of_the_row_alone(vision, trainers, nums_images, budget, seed):
    rng = np.random.default_rng(seed)
    rows = [random_image_row(vision, rng, PICTURES, num_images) for num_images in nums_images]
    for row, together in zip(rows, trainers[budget].logprobs(rows), strict=True):
        (alone,) = trainers[1].logprobs([row])
        np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
