"""Attention by the borders of rows: a lane gives what each row gives alone, and the model stays usable as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from support.models import tiny_qwen3
from unbroken.training.config import Packing
from unbroken.training.model.backbone import compute_norm, enable_checkpointing, fuse_norms
from unbroken.training.model.lanes import RowLayout
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.probes import is_exact_by_rows
from unbroken.training.model.varlen import IMPLEMENTATION, RowBorders, attention_by_rows

LENGTHS = (5, 9, 3, 1)
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.2,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip


def window_model():
    config = transformers.Gemma3TextConfig(
        **SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config)


def by_rows(model) -> PolicyLogprobs:
    policy = PolicyLogprobs(model, chunk_size=4)
    assert policy.layout is RowLayout.LANES
    with attention_by_rows(policy.causal) as keep:
        keep()
    policy.layout = RowLayout.BY_ROWS
    return policy


def lane() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions_BT = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ids_BT = torch.arange(positions_BT.numel()).remainder(60)[None] + 1
    return ids_BT, positions_BT > 0, positions_BT


def alone(policy: PolicyLogprobs) -> torch.Tensor:
    ids_BT, mask_BT, _ = lane()
    parts = [torch.split(tensor, LENGTHS, dim=1) for tensor in (ids_BT, mask_BT)]
    return torch.cat([policy(ids, mask, 1.0).logprobs_N for ids, mask in zip(*parts, strict=True) if ids.shape[1] > 1])


@pytest.mark.parametrize("make_model", [tiny_qwen3, window_model])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_lane_has_the_logprobs_and_gradients_of_its_rows_alone(make_model, checkpointing):
    results = []
    for run in ("alone", "lane"):
        policy = by_rows(make_model())
        if checkpointing:
            enable_checkpointing(policy.model)
        ids_BT, mask_BT, positions_BT = lane()
        logprobs_N = alone(policy) if run == "alone" else policy(ids_BT, mask_BT, 1.0, None, positions_BT).logprobs_N
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
        results.append((logprobs_N, {name: p.grad for name, p in policy.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-6, rtol=0)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, atol=1e-5, rtol=0, msg=name)


def test_borders_are_found_where_positions_begin():
    borders = RowBorders.of(torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert borders.starts_R.tolist() == [0, 3, 5, 6]
    assert borders.starts_R.dtype == torch.int32
    assert borders.longest == 3


def test_lanes_with_a_mask_and_padded_rows_are_what_they_were():
    model = tiny_qwen3()
    before = PolicyLogprobs(copy.deepcopy(model), chunk_size=4)
    after = by_rows(model)
    ids_BT, mask_BT, positions_BT = (tensor.repeat(2, 1) for tensor in lane())
    for positions in (positions_BT, None):
        found = after(ids_BT, mask_BT, 1.0, None, positions).logprobs_N
        torch.testing.assert_close(found, before(ids_BT, mask_BT, 1.0, None, positions).logprobs_N, atol=0, rtol=0)


def test_a_copy_of_the_model_generates_as_before():
    model = tiny_qwen3().eval()
    prompts_BT = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    options = {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(prompts_BT, **options)
    copied = copy.deepcopy(by_rows(model).model).eval()
    assert copied.generate(prompts_BT, **options).tolist() == expected.tolist()


def test_the_probe_accepts_a_model_that_hands_the_borders_to_its_attention():
    policy = by_rows(tiny_qwen3())
    assert is_exact_by_rows(policy, policy.vocab_size, torch.device("cpu"))


def test_the_probe_refuses_a_model_that_loses_the_borders_and_restores_its_attention():
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=4)
    for layer in policy.causal.model.layers:
        own = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, own=own, cu_seq_lens_q=None, **k: own(*a, **k)
    with attention_by_rows(policy.causal):
        policy.layout = RowLayout.BY_ROWS
        assert not is_exact_by_rows(policy, policy.vocab_size, torch.device("cpu"))
    assert policy.causal.config._attn_implementation == "sdpa" != IMPLEMENTATION


def test_packing_by_name_uses_the_borders_too():
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=4, packing=Packing.ONE_LANE)
    assert policy.plan([5, 4, 3], 100) == [[[0, 1, 2]]]


def test_the_norm_in_one_kernel_is_the_models_own():
    model = tiny_qwen3()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    with torch.no_grad():
        for norm in norms:
            norm.weight.normal_()
    assert fuse_norms(model) == len(norms) > 0
    for norm in norms:
        hidden = 5 * torch.randn(7, len(norm.weight))
        torch.testing.assert_close(compute_norm(norm, hidden), type(norm).forward(norm, hidden), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(norm(hidden), type(norm).forward(norm, hidden), atol=0, rtol=0)


def test_a_norm_that_adds_one_to_its_weight_is_left_alone():
    assert fuse_norms(window_model()) == 0
