"""Models whose rows cannot share ids are found out or refused by rule, and their rows are computed whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.image_rows import Vision
from support.models import tiny_qwen3
from support.named_models import build_named
from support.prefixes import branching_rows
from unbroken.errors import InvalidInputError
from unbroken.training.config import SharedPrefixes, TrainerConfig
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.probes import find_tree_obstacle
from unbroken.training.model.tree_attention import MaskKind
from unbroken.training.trainer import Trainer

WINDOW = {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}
REFUSED = {
    "a window in one layer": ("Qwen2Config", {"use_sliding_window": True, **WINDOW}, "layers of sliding_attention"),
    "a window in all layers": ("MistralConfig", {"sliding_window": 4096}, "a window of 4096 tokens"),
    "windows and two rotary bases": ("Gemma3TextConfig", WINDOW, "layers of sliding_attention"),
    "state space": (
        "Mamba2Config",
        {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 8, "chunk_size": 8},
        "takes no position_ids",
    ),
    "ALiBi": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "takes no position_ids"),
    "state space beside attention": (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1},
        "layers of |fails with|off by",
    ),
}
ALLOWED = {
    "llama": ("LlamaConfig", {}),
    "qwen2 without its window": ("Qwen2Config", {"sliding_window": 4096}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "experts": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}


def policy_of(model, shared_prefixes=SharedPrefixes.AUTO) -> PolicyLogprobs:
    return PolicyLogprobs(model, chunk_size=8, shared_prefixes=shared_prefixes)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_a_tree_would_change_computes_whole_rows(kind):
    name, changes, reason = REFUSED[kind]
    attention = "sdpa" if name in ("Qwen2Config", "MistralConfig", "Gemma3TextConfig") else "eager"
    policy = policy_of(build_named(name, changes, attention))
    policy.allow_trees()
    assert policy.tree_mask is None
    rows = [each.token_ids for each in branching_rows(np.random.default_rng(0), 6)]
    assert not any(planned.is_tree for planned in policy.plan_rows(rows, 100))
    with pytest.raises(InvalidInputError, match=rf"cannot have shared prefixes: .*({reason}).* must be auto or never"):
        policy_of(build_named(name, changes, attention), SharedPrefixes.ALWAYS).allow_trees()


@pytest.mark.parametrize("kind", ALLOWED)
def test_a_model_with_full_attention_shares(kind):
    policy = policy_of(build_named(*ALLOWED[kind]), SharedPrefixes.ALWAYS)
    policy.allow_trees()
    assert policy.tree_mask is MaskKind.BOOLEAN
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_attention_sinks_are_found_right_or_refused():
    """gpt-oss without windows: its attention adds the mask to the scores, and the sinks after it."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    policy = policy_of(build_named("GptOssConfig", experts, "eager"))
    policy.allow_trees()
    assert policy.tree_mask in (MaskKind.ADDED, None)


def test_a_window_that_only_the_config_would_show_is_refused_by_rule():
    """A few ids do not reach its end."""
    model = tiny_qwen3()
    model.config.layer_types = None
    model.config.sliding_window = 8192
    assert find_tree_obstacle(model) == "its attention has a window of 8192 tokens"


def test_chunks_are_refused_by_rule():
    model = tiny_qwen3()
    model.config.attention_chunk_size = 8192
    assert find_tree_obstacle(model) == "its attention is in chunks"


def test_attention_that_takes_no_mask_is_refused_by_rule():
    model = tiny_qwen3()
    model.config._attn_implementation = "flash_attention_2"
    assert find_tree_obstacle(model) == "its attention flash_attention_2 on cpu takes no mask of a tree"


def refuse(model) -> str:
    with pytest.raises(InvalidInputError) as refused:
        policy_of(model, SharedPrefixes.ALWAYS).allow_trees()
    return str(refused.value)


def test_a_model_that_drops_the_mask_is_found_out():
    model = tiny_qwen3()
    model.model.register_forward_pre_hook(
        lambda _m, args, given: (args, {**given, "attention_mask": None}), with_kwargs=True
    )
    assert "its logprobs are off by" in refuse(model)


def test_a_model_that_drops_the_mask_without_gradient_is_found_out():
    """Old and reference logprobs come from such passes."""
    model = tiny_qwen3()

    def drop(_module, args, given):
        return args, given if torch.is_grad_enabled() else {**given, "attention_mask": None}

    model.model.register_forward_pre_hook(drop, with_kwargs=True)
    assert "its logprobs are off by" in refuse(model)


def test_a_leak_below_the_rounding_that_is_allowed_is_found_out():
    """A hundred-thousandth of all states before, in the lane: only a change of another branch shows that."""
    model = tiny_qwen3()
    model.model.norm.register_forward_hook(
        lambda _m, _args, out: out + 1e-3 * out.cumsum(1) / out.shape[1] if out.shape[0] == 1 else out
    )
    assert "with another branch of its tree" in refuse(model)


def test_a_gradient_that_differs_is_found_out():
    model = tiny_qwen3()

    def detach_trees(_module, _args, kwargs, output):
        if kwargs.get("attention_mask") is not None:
            output.last_hidden_state = output.last_hidden_state.detach()
        return output

    model.model.register_forward_hook(detach_trees, with_kwargs=True)
    assert "its gradient is off by" in refuse(model)


def test_a_model_that_raises_for_a_mask_is_refused_and_says_why(caplog):
    model = tiny_qwen3()

    def fail(_module, _args, given):
        if given.get("attention_mask") is not None:
            raise TypeError("no masks here")

    model.model.register_forward_pre_hook(fail, with_kwargs=True)
    assert "it fails with TypeError: no masks here" in refuse(model)
    trainer = Trainer(model, TrainerConfig())
    with caplog.at_level("INFO"):
        stats = trainer.step(branching_rows(np.random.default_rng(0), 6))
    assert stats.shared_share == 0
    assert "rows of Qwen3ForCausalLM do not share prefixes: it fails with TypeError: no masks here" in caplog.text


def test_recorded_experts_are_replayed_on_whole_rows():
    """Rows have their own, also for ids that are equal."""
    name, changes = ALLOWED["experts"]
    policy = Trainer(build_named(name, changes), TrainerConfig(routing_replay=True)).backend.policy
    policy.allow_trees()
    assert policy.tree_mask is None
    with pytest.raises(InvalidInputError, match="cannot have shared prefixes: recorded experts are replayed"):
        Trainer(build_named(name, changes), TrainerConfig(routing_replay=True, shared_prefixes=SharedPrefixes.ALWAYS))


def test_auto_leaves_rows_alone_where_flex_attention_would_compute_them(monkeypatch, caplog):
    monkeypatch.setattr("unbroken.training.model.logprobs.choose_mask", lambda model: MaskKind.BLOCKS)
    policy = policy_of(tiny_qwen3(), SharedPrefixes.AUTO)
    with caplog.at_level("INFO"):
        policy.allow_trees()
    assert policy.tree_mask is None
    assert "FlexAttention was not measured against rows yet" in caplog.text


def test_a_frozen_reference_needs_no_gradient():
    policy = policy_of(tiny_qwen3().requires_grad_(False), SharedPrefixes.ALWAYS)
    policy.allow_trees()
    assert policy.tree_mask is MaskKind.BOOLEAN


def test_a_model_that_takes_images_computes_whole_rows(tmp_path):
    pytest.importorskip("torchvision", reason="the image processors of transformers need it")
    vision = Vision.make(tmp_path, "qwen2_5_vl")
    policy = Trainer(vision.model(), TrainerConfig(), images=vision.images).backend.policy
    policy.allow_trees()
    assert policy.tree_mask is None
    with pytest.raises(InvalidInputError, match=r"cannot have shared prefixes: it takes images\."):
        Trainer(vision.model(), TrainerConfig(shared_prefixes=SharedPrefixes.ALWAYS), images=vision.images)
