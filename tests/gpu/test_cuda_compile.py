"""Compiled layers on a GPU: logprobs and gradients are those of the layers as they are, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters

from support.gradients import SUBTRACT_GRADIENT
from support.models import wide_qwen3
from support.prefixes import branching_rows
from unbroken.training.config import Packing, SharedPrefixes, TrainerConfig
from unbroken.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYOUTS = {
    "padded": {"packing": Packing.NEVER},
    "in lanes or by rows": {"packing": Packing.ONE_LANE},
    "trees": {"shared_prefixes": SharedPrefixes.ALWAYS},
    "checkpointed": {"packing": Packing.NEVER, "gradient_checkpointing": True},
}


def train(rows, precision, **options):
    """The logprobs of all rows, and the gradient of a step."""
    AcceleratorState._reset_state()
    config = {"shared_prefixes": SharedPrefixes.NEVER, **options}
    trainer = Trainer(
        wide_qwen3(12),
        TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=4096, logprob_chunk_size=64, **config),
        accelerator=Accelerator(mixed_precision=precision),
    )
    logprobs = np.concatenate(trainer.logprobs(rows))
    before = {name: weight.detach().clone() for name, weight in trainer.named_weights()}
    trainer.step(rows)
    gradient = torch.cat([(before[name] - weight).flatten().double() for name, weight in trainer.named_weights()])
    return logprobs, gradient


def distance(values, expected):
    """Relative to the norm of what is expected, where there is something."""
    values, expected = (torch.as_tensor(each).double() for each in (values, expected))
    known = torch.isfinite(expected)
    return float((values - expected)[known].norm() / expected[known].norm())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_compiled_layers_are_as_close_to_float32_as_they_are_without(precision, layout):
    rows = branching_rows(np.random.default_rng(0), 8, longest=700)
    exact = train(rows, "no", **LAYOUTS[layout])
    plain = train(rows, precision, **LAYOUTS[layout])
    counters.clear()
    compiled = train(rows, precision, compile=True, **LAYOUTS[layout])
    for of_plain, of_compiled, expected in zip(plain, compiled, exact, strict=True):
        assert distance(of_compiled, expected) < 1e-5 + 1.5 * distance(of_plain, expected)
    # Alone, each of the twelve layers would have at least two: with gradients and without.
    assert 1 <= counters["stats"]["unique_graphs"] < 24, "twelve layers share what is compiled for the first"
