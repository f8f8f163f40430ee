"""Compiled layers: logprobs and gradients are those of the layers as they are, and all layers share what is compiled.

The layers are traced, and one test differentiates what was traced; a compiler would take a minute (`tests/gpu`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from support.adapted import with_lora
from support.gradients import SUBTRACT_GRADIENT, flatten, step_gradient
from support.models import random_qwen3, tiny_qwen3
from support.prefixes import branching_rows
from unbroken.errors import InvalidInputError
from unbroken.training.config import Packing, Reference, SharedPrefixes, TrainerConfig
from unbroken.training.model import compilation
from unbroken.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own


@pytest.fixture(autouse=True)
def _traced(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def deep_qwen3():
    """More layers than torch compiles a function again for by default, which is eight times."""
    return random_qwen3(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=256,
        initializer_range=0.3,
    )


def train(model, samples, *, reference=None, **changes):
    """The logprobs of all rows, and the gradient of a step."""
    config = {"shared_prefixes": SharedPrefixes.NEVER, "tokens_per_micro_batch": 400, **changes}
    trainer = Trainer(model, TrainerConfig(optimizer=SUBTRACT_GRADIENT, **config), reference=reference)
    logprobs = np.concatenate(trainer.logprobs(samples))
    return logprobs, flatten(step_gradient(trainer, samples)[1])


@pytest.mark.parametrize(
    ("backend", "make_model", "config"),
    [
        pytest.param("aot_eager", deep_qwen3, {"packing": Packing.NEVER}, id="padded"),
        pytest.param(
            "eager",
            lambda: with_lora(deep_qwen3()),
            {"shared_prefixes": SharedPrefixes.ALWAYS, "reference": Reference.BASE, "kl_weight": 0.1},
            id="trees, and adapters whose base is the reference",
        ),
        pytest.param("eager", deep_qwen3, {"packing": Packing.ONE_LANE}, id="packed", marks=pytest.mark.nightly),
        pytest.param(
            "eager", deep_qwen3, {"gradient_checkpointing": True}, id="checkpointed", marks=pytest.mark.nightly
        ),
    ],
)
def test_compiled_layers_train_as_they_are(backend, make_model, config, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", backend)
    samples = branching_rows(np.random.default_rng(0), 6)
    logprobs, gradient = train(make_model(), samples, **config)
    compiled, again = train(make_model(), samples, compile=True, **config)
    np.testing.assert_allclose(compiled, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)
    assert 1 <= counters["stats"]["unique_graphs"] <= 9, "nine layers share what is traced for the first"


def test_a_compiler_that_changes_the_logprobs_is_refused(monkeypatch):
    def wrong(graph, _inputs):
        return lambda *inputs: [2 * each for each in graph(*inputs)]

    monkeypatch.setattr(compilation, "BACKEND", wrong)
    with pytest.raises(InvalidInputError, match=r"Qwen3ForCausalLM gives other logprobs once it is compiled, by .* of"):
        Trainer(tiny_qwen3(), TrainerConfig(compile=True))


def test_a_compiler_that_fails_is_named(monkeypatch):
    def broken(_graph, _inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compilation, "BACKEND", broken)
    with pytest.raises(InvalidInputError, match=r"cannot be compiled, .*\n.*no compiler here. Set .*compile to False"):
        Trainer(tiny_qwen3(), TrainerConfig(compile=True))


def test_a_model_that_does_not_name_its_blocks_is_refused(monkeypatch):
    model = tiny_qwen3()
    monkeypatch.setattr(model, "_no_split_modules", None)
    with pytest.raises(InvalidInputError, match="must name its blocks"):
        Trainer(model, TrainerConfig(compile=True))


def test_replayed_routing_is_refused():
    with pytest.raises(InvalidInputError, match=r"compile must be False with routing_replay or .*, got True"):
        TrainerConfig(compile=True, routing_replay=True)
