"""Exact numerics with vLLM on a Hopper GPU: engine and trainer have the same bits, with and without graphs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from support.hopper_numerics import FAMILIES, check_equal, compare_gradients, make_case, sample_and_train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.mark.parametrize("option", ["", "--enforce-eager", "--tensor-parallel-size=2"])
@pytest.mark.parametrize("case", [*FAMILIES, "lora", "vision"])
async def test_all_logprobs_are_vllms_to_the_bit_at_every_step(case, option, tmp_path: Path):
    """Adapters are merged in the sampler; of a model that takes images these are rows of text."""
    if torch.cuda.device_count() == 1 and option.endswith("2"):
        pytest.skip("needs two GPUs")
    check_equal(await sample_and_train(make_case(case, tmp_path, option), tmp_path, *option.split()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_same_layers_in_float32(family):
    for name, cosine in compare_gradients(family).items():
        assert cosine > 0.99, name
