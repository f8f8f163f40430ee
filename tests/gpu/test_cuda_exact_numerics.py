"""Exact numerics with vLLM on a Hopper GPU: engine and trainer have the same bits, with and without graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.hopper_numerics import FAMILIES, check_equal, compare_gradients, make_case, sample_and_train

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("options", [[], ["--enforce-eager"]], ids=["graphs", "eager"])
@pytest.mark.parametrize("case", [*FAMILIES, "lora", "vision"])
async def test_all_logprobs_are_vllms_to_the_bit_at_every_step(case, options, tmp_path: Path):
    """Adapters are merged in the sampler; of a model that takes images these are rows of text."""
    check_equal(await sample_and_train(make_case(case, tmp_path), tmp_path, *options))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", [*FAMILIES, "lora", "vision"])
async def test_so_are_those_of_two_processes_of_vllm(case, tmp_path: Path):
    trainer = make_case(case, tmp_path, degree=2)
    check_equal(await sample_and_train(trainer, tmp_path, "--tensor-parallel-size=2"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_same_layers_in_float32(family):
    for name, cosine in compare_gradients(family).items():
        assert cosine > 0.99, name
