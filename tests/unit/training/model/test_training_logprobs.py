"""Chunked logprobs: equal to the naive way, for each architecture's own logits, and without its memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Model,
)

from support.adapted import untied_qwen3, with_lora
from support.largest_tensor import LargestTensor
from support.models import tiny_qwen3
from unbroken.errors import InvalidInputError
from unbroken.training.model.backbone import enable_checkpointing
from unbroken.training.model.logprobs import Entropy, PolicyLogprobs, chunked_scores

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES = {
    "qwen3, tied": tiny_qwen3,
    "llama, untied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "gemma2, soft-capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1.5)),
    "cohere, multiplied": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "gpt2, no dropout": lambda: gpt2(dropout=0.0),
}


def gpt2(*, dropout: float) -> Any:
    drops = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, **drops)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config)


def naive_logprobs(model: Any, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_BTV = model(input_ids=token_ids_BT, use_cache=False).logits.float() / temperature
    logprobs_BTV = logits_BTV[:, :-1].log_softmax(-1)
    return logprobs_BTV.gather(-1, token_ids_BT[:, 1:, None])[..., 0][mask_BT[:, 1:]]


def gradients(model: Any, logprobs_N: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def example(num_rows: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.rand(num_rows, length, generator=generator) < 0.5
    mask_BT[:, 0] = False
    return torch.randint(0, 64, (num_rows, length), generator=generator), mask_BT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_equal_the_naive_ones_in_value_and_gradient(architecture, temperature):
    torch.manual_seed(0)
    model = ARCHITECTURES[architecture]()
    token_ids_BT, mask_BT = example()
    policy = PolicyLogprobs(model, chunk_size=4)
    chunked_N = policy(token_ids_BT, mask_BT, temperature).logprobs_N
    chunked_gradients = gradients(model, chunked_N)
    naive_N = naive_logprobs(model, token_ids_BT, mask_BT, temperature)
    naive_gradients = gradients(model, naive_N)
    torch.testing.assert_close(chunked_N, naive_N, atol=1e-6, rtol=1e-6)
    for name, gradient in naive_gradients.items():
        torch.testing.assert_close(chunked_gradients[name], gradient, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 1000])
def test_the_chunk_size_changes_nothing(chunk_size):
    token_ids_BT, mask_BT = example()
    whole = PolicyLogprobs(tiny_qwen3(), chunk_size=10_000)(token_ids_BT, mask_BT, 1.0).logprobs_N
    chunked = PolicyLogprobs(tiny_qwen3(), chunk_size=chunk_size)(token_ids_BT, mask_BT, 1.0).logprobs_N
    torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=0)


def test_the_logits_of_all_tokens_never_exist_at_once_not_in_backward_either():
    num_tokens, hidden_size, vocab_size, chunk_size = 96, 4, 500, 8
    head = torch.nn.Linear(hidden_size, vocab_size)
    hidden_ND = torch.randn(num_tokens, hidden_size, requires_grad=True)
    targets_N = torch.randint(0, vocab_size, (num_tokens,))
    with LargestTensor() as chunked:
        chunked_scores(hidden_ND, targets_N, head, temperature=1.0, chunk_size=chunk_size).logprobs_N.sum().backward()
    with LargestTensor() as naive:
        head(hidden_ND).log_softmax(-1).gather(-1, targets_N[:, None]).sum().backward()
    assert chunked.numel == chunk_size * vocab_size
    assert naive.numel == num_tokens * vocab_size


def test_the_logits_are_not_kept_for_the_backward_pass():
    num_tokens, hidden_size, vocab_size = 96, 4, 500
    head = torch.nn.Linear(hidden_size, vocab_size)
    hidden_ND = torch.randn(num_tokens, hidden_size, requires_grad=True)
    targets_N = torch.randint(0, vocab_size, (num_tokens,))
    num_kept = [0, 0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: add_numel(num_kept, 0, t), lambda t: t):
        chunked_scores(hidden_ND, targets_N, head, temperature=1.0, chunk_size=8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: add_numel(num_kept, 1, t), lambda t: t):
        head(hidden_ND).log_softmax(-1).gather(-1, targets_N[:, None])
    assert num_kept[0] < vocab_size
    assert num_kept[1] >= num_tokens * vocab_size


def add_numel(counts: list[int], index: int, tensor: torch.Tensor) -> torch.Tensor:
    counts[index] += tensor.numel()
    return tensor


def test_only_the_picked_tokens_are_projected():
    rows_projected = []
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=100)
    policy.model.get_output_embeddings().register_forward_hook(
        lambda _m, args, _out: rows_projected.append(len(args[0]))
    )
    token_ids_BT, mask_BT = example()
    with torch.no_grad():
        policy(token_ids_BT, mask_BT, 1.0)
    assert rows_projected == [int(mask_BT.sum())]


def test_no_picked_token_gives_an_empty_result_with_gradients_of_zero():
    """A process without rows goes through the motions with one that wraps the model."""
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=4)
    logprobs_N = policy(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.bool), 1.0).logprobs_N
    logprobs_N.sum().backward()
    assert logprobs_N.shape == (0,)
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_gradient_checkpointing_in_the_model_gives_the_same_gradients():
    token_ids_BT, mask_BT = example()
    plain, checkpointed = tiny_qwen3(), tiny_qwen3()
    enable_checkpointing(checkpointed)
    expected = gradients(plain, PolicyLogprobs(plain, chunk_size=4)(token_ids_BT, mask_BT, 1.0).logprobs_N)
    found = gradients(checkpointed, PolicyLogprobs(checkpointed, chunk_size=4)(token_ids_BT, mask_BT, 1.0).logprobs_N)
    assert checkpointed.model.layers[0].gradient_checkpointing
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_dropout_is_switched_off_and_said(caplog):
    ids, mask = torch.randint(0, 64, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[:, 0] = False
    models = gpt2(dropout=0.5), gpt2(dropout=0.0)
    models[0].load_state_dict(models[1].state_dict())
    with_dropout = PolicyLogprobs(models[0], chunk_size=4)
    assert "dropout of GPT2LMHeadModel is off" in caplog.text
    caplog.clear()
    without = PolicyLogprobs(models[1], chunk_size=4)
    assert caplog.text == ""
    found, expected = (policy(ids, mask, 1.0).logprobs_N for policy in (with_dropout, without))
    assert torch.equal(found, expected)


class TwiceTheLogits(LlamaForCausalLM):
    """An architecture with a rule of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out


def test_a_model_whose_logits_are_made_in_an_unknown_way_is_refused():
    with pytest.raises(InvalidInputError, match="TwiceTheLogits's logits are not its output embeddings"):
        PolicyLogprobs(TwiceTheLogits(LlamaConfig(**SMALL)), chunk_size=4)


def test_a_model_without_output_embeddings_is_refused():
    with pytest.raises(
        InvalidInputError, match="Qwen3Model has no output embeddings: a causal language model is needed"
    ):
        PolicyLogprobs(Qwen3Model(tiny_qwen3().config), chunk_size=4)


def test_logits_are_float32_where_fsdp2_has_rounded_the_output_embeddings():
    """It gathers float32 parameters in the precision of the layers."""
    model = tiny_qwen3()
    policy = PolicyLogprobs(model, chunk_size=4)
    hidden = torch.randn(3, 32).bfloat16()
    rounded = model.lm_head.weight.detach().bfloat16()
    model.lm_head.weight = torch.nn.Parameter(rounded)
    logits = policy._logits(hidden, policy._head_weight())
    torch.testing.assert_close(logits, hidden.float() @ rounded.float().T)
    assert not torch.equal(logits, logits.bfloat16().float())


def test_so_are_those_of_output_embeddings_with_an_adapter():
    model = with_lora(untied_qwen3(), target_modules=["lm_head"])
    policy = PolicyLogprobs(model, chunk_size=4)
    hidden = torch.randn(3, 32).bfloat16()
    head = model.get_output_embeddings().bfloat16()
    logits = policy._logits(hidden, policy._head_weight())
    torch.testing.assert_close(logits, head.float()(hidden.float()))
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("entropy", [Entropy.MEASURED, Entropy.TRAINED])
def test_the_entropy_is_that_of_the_softmax_also_with_impossible_ids(entropy):
    """Three ids with the logits 0, log 3 and -inf, at the temperature 1: probabilities 1/4, 3/4 and 0."""
    head = torch.tensor([[0.0, math.log(3), -math.inf]], requires_grad=True)
    hidden_ND = torch.ones(5, 1)
    scores = chunked_scores(
        hidden_ND,
        torch.ones(5, dtype=torch.long),
        lambda h: h @ head.clamp(min=-1e30),
        temperature=1.0,
        chunk_size=2,
        entropy=entropy,
    )
    expected = -(math.log(1 / 4) / 4 + 3 / 4 * math.log(3 / 4))
    assert scores.entropies_N.tolist() == pytest.approx([expected] * 5, rel=1e-6)
    assert scores.entropies_N.requires_grad == (entropy is Entropy.TRAINED)
    (scores.logprobs_N.sum() + scores.entropies_N.sum()).backward()
    assert torch.isfinite(head.grad).all()


def test_the_gradient_of_the_entropy_is_that_of_one_softmax():
    logits = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    (wanted,) = torch.autograd.grad(expected, logits)
    found = chunked_scores(
        logits, torch.zeros(7, dtype=torch.long), lambda h: h, temperature=1.0, chunk_size=3, entropy=Entropy.TRAINED
    ).entropies_N
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
