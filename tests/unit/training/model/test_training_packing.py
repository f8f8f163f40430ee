"""Rows that share a lane train as rows that are padded; models that would mix them up are found out and padded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from support.gradients import SUBTRACT_GRADIENT, step_gradient
from support.models import tiny_qwen3
from support.named_models import SIZES, build_named
from support.rows import random_rows
from unbroken.errors import InvalidInputError
from unbroken.training.config import OldLogprobs, Packing, TrainerConfig
from unbroken.training.model.lanes import RowLayout
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.probes import find_packing_obstacle
from unbroken.training.trainer import Trainer

WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PACKABLE = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen2, one layer with a window": ("Qwen2Config", {"use_sliding_window": True, **WINDOW}),
    "mistral, all layers with a window": ("MistralConfig", {"sliding_window": 4}),
    "gemma3, windows and two rotary bases": ("Gemma3TextConfig", WINDOW),
    "gpt2, learned positions": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
# With SDPA it has no soft caps up to transformers 5.19, and cannot be loaded with 5.23.
GEMMA2 = ("Gemma2Config", WINDOW)
GPT_OSS = ("GptOssConfig", {**WINDOW, **EXPERTS})
NOT_PACKABLE = {
    "mamba2": ("Mamba2Config", {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 8, "chunk_size": 8}),
    "bloom, no positions": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "qwen3-next, linear attention": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
        },
    ),
    "jamba, state space beside attention": ("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1}),
}


@pytest.fixture(scope="module")
def rows():
    """Of up to 20 ids, five windows long."""
    return random_rows(np.random.default_rng(0), 9)


def update(model, rows, packing: Packing, **others):
    """A step's statistics and its gradient, read off the update that it made."""
    config = TrainerConfig(optimizer=SUBTRACT_GRADIENT, packing=packing, tokens_per_micro_batch=60, **others)
    return step_gradient(Trainer(model, config), rows)


@pytest.mark.parametrize("packing", [Packing.AUTO, Packing.ONE_LANE])
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        *(pytest.param(architecture, "sdpa", id=name) for name, architecture in PACKABLE.items()),
        pytest.param(PACKABLE["qwen3"], "eager", id="qwen3, eager"),
        pytest.param(GEMMA2, "eager", id="gemma2, windows and soft caps, eager"),
    ],
)
def test_packed_rows_have_the_loss_and_the_gradient_of_padded_ones(rows, architecture, attention, packing):
    """In float32: the gradient within 1e-5 of its largest entry, and the loss within 1e-5 of itself."""
    padded, padded_gradient = update(build_named(*architecture, attention), rows, Packing.NEVER)
    packed, packed_gradient = update(build_named(*architecture, attention), rows, packing)
    assert packed.loss == pytest.approx(padded.loss, rel=1e-5, abs=1e-6)
    assert packed.mismatch.k3 == pytest.approx(padded.mismatch.k3, rel=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in padded_gradient.values())
    for name, gradient in padded_gradient.items():
        assert float((packed_gradient[name] - gradient).abs().max()) / largest < 1e-5, name
    assert packed.padding_share < padded.padding_share
    assert packing is Packing.AUTO or packed.padding_share == 0


def test_packed_logprobs_come_back_in_the_order_of_the_rows_and_are_those_of_padded_ones(rows):
    found = {
        packing: Trainer(tiny_qwen3(), TrainerConfig(packing=packing, tokens_per_micro_batch=50)).logprobs(rows)
        for packing in Packing
    }
    for one, other, padded in zip(*(found[packing] for packing in Packing), strict=True):
        np.testing.assert_allclose(one, padded, atol=1e-5)
        np.testing.assert_allclose(other, padded, atol=1e-5)


def test_packing_leaves_the_ratio_to_the_trainers_own_logprobs_at_one(rows):
    stats, _ = update(tiny_qwen3(), rows, Packing.ONE_LANE, old_logprobs=OldLogprobs.RECOMPUTE)
    assert stats.mean_ratio == pytest.approx(1, abs=1e-6)
    assert stats.padding_share == 0


@pytest.mark.parametrize("architecture", NOT_PACKABLE)
def test_a_model_that_would_mix_rows_up_is_padded(architecture):
    model = build_named(*NOT_PACKABLE[architecture], attention="eager")
    assert PolicyLogprobs(model, chunk_size=8).layout is RowLayout.PADDED
    with pytest.raises(InvalidInputError, match=r"cannot be packed: .* must be auto or never"):
        PolicyLogprobs(model, chunk_size=8, packing=Packing.ONE_LANE)


def test_attention_sinks_train_packed_as_padded_or_not_packed(rows):
    """Up to transformers 5.19 gpt-oss takes positions and makes no masks of them: its rows would see each other."""
    padded, padded_gradient = update(build_named(*GPT_OSS, "eager"), rows, Packing.NEVER)
    chosen, gradient = update(build_named(*GPT_OSS, "eager"), rows, Packing.AUTO)
    assert chosen.loss == pytest.approx(padded.loss, rel=1e-5)
    for name in gradient:
        torch.testing.assert_close(gradient[name], padded_gradient[name], atol=1e-5, rtol=1e-4)


class NoBorders(transformers.LlamaForCausalLM):
    """Takes positions and attends across them: what a probe must find out."""

    def get_decoder(self):
        return self.model

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(self._whole_mask, with_kwargs=True)

    @staticmethod
    def _whole_mask(_module, args, kwargs):
        num_lanes, length = kwargs["input_ids"].shape
        mask = torch.full((length, length), -math.inf).triu(1).expand(num_lanes, 1, length, length)
        return args, {**kwargs, "attention_mask": mask}


@pytest.mark.parametrize("layout", [RowLayout.LANES, RowLayout.ONE_LANE])
def test_attention_across_rows_is_found_out(layout):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NoBorders(transformers.LlamaConfig(**SIZES)).eval()
    assert "off by" in str(find_packing_obstacle(model, layout))
    assert PolicyLogprobs(model, chunk_size=8).layout is RowLayout.PADDED


def test_a_model_that_takes_the_borders_of_the_first_lane_for_all_is_found_out():
    model = tiny_qwen3()

    def first_lanes(_module, args, kwargs):
        positions = kwargs.get("position_ids")
        return args, kwargs if positions is None else {**kwargs, "position_ids": positions[:1].expand_as(positions)}

    model.model.register_forward_pre_hook(first_lanes, with_kwargs=True)
    assert "off by" in str(find_packing_obstacle(model, RowLayout.LANES))
    assert find_packing_obstacle(model, RowLayout.ONE_LANE) is None


def test_a_leak_below_the_rounding_that_is_allowed_is_found_out():
    """Less than a thousandth of all states before, in the lane: only a change of the row before shows that."""
    model = tiny_qwen3()
    model.model.norm.register_forward_hook(lambda _m, _args, out: out + 6e-4 * out.cumsum(1) / len(out[0]))
    assert "with the row before it" in str(find_packing_obstacle(model, RowLayout.LANES))


def test_chunked_attention_is_not_packed_by_rule():
    """Its chunks are thousands of ids long, so a probe would not see that they count from the lane's start."""
    model = tiny_qwen3()
    model.config.attention_chunk_size = 8192
    assert find_packing_obstacle(model, RowLayout.LANES) == "its attention is in chunks"


@pytest.mark.parametrize(
    ("packing", "attention", "layout"),
    [
        (Packing.AUTO, "sdpa", RowLayout.LANES),
        (Packing.ONE_LANE, "sdpa", RowLayout.ONE_LANE),
        (Packing.NEVER, "sdpa", RowLayout.PADDED),
    ],
)
def test_the_layout_is_what_was_asked_for(packing, attention, layout):
    model = build_named("Qwen3Config", {}, attention)
    assert PolicyLogprobs(model, chunk_size=8, packing=packing).layout is layout
