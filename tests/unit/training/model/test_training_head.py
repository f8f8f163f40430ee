"""The head with rounded factors: the same function as the exact one, with a backward pass of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.adapted import untied_qwen3
from support.largest_tensor import LargestTensor
from support.models import tiny_qwen3
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.scores import (
    Entropy,
    LogitScaling,
    RoundedHead,
    TokenScores,
    chunked_scores,
    is_plain_matrix,
    rounded_scores,
)

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 11, 8, 50
SCALINGS = {
    "none": LogitScaling(),
    "multiplied": LogitScaling(factor=0.3),
    "soft-capped": LogitScaling(factor=2.0, softcap=1.5),
}


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator, dtype=dtype).requires_grad_()
    weight_VD = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=dtype).requires_grad_()
    return hidden_ND, weight_VD, torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)


def head(**changes) -> RoundedHead:
    values = {"scaling": LogitScaling(), "temperature": 1.0, "chunk_size": 4, "entropy": Entropy.NONE}
    return RoundedHead(**{**values, "dtype": torch.float64, **changes})


def naive_scores(hidden_ND, weight_VD, targets_N, how: RoundedHead) -> TokenScores:
    logprobs_NV = (how.scaling.apply(hidden_ND @ weight_VD.T) / how.temperature).log_softmax(-1)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    return TokenScores(logprobs_N, entropies_N, 1 + (logprobs_NV > logprobs_N[:, None]).sum(-1))


def loss_of(scores: TokenScores, entropy: Entropy) -> torch.Tensor:
    factors_N = torch.linspace(-1, 1, NUM_TOKENS, dtype=scores.logprobs_N.dtype)
    loss = (scores.logprobs_N * factors_N).sum()
    return loss + (scores.entropies_N * factors_N.flip(0) ** 2).sum() if entropy is Entropy.TRAINED else loss


@pytest.mark.parametrize("entropy", Entropy)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_values_and_gradients_are_autograds_in_float64(entropy, temperature, scaling):
    inputs = make_inputs()
    how = head(scaling=SCALINGS[scaling], temperature=temperature, entropy=entropy)
    found, expected = rounded_scores(*inputs, how), naive_scores(*inputs, how)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, atol=1e-13, rtol=0)
    if entropy is Entropy.NONE:
        assert found.entropies_N is None
    else:
        torch.testing.assert_close(found.entropies_N, expected.entropies_N, atol=1e-13, rtol=0)
    assert (found.ranks_N is None) == (entropy is not Entropy.RANKED)
    if found.ranks_N is not None:
        assert torch.equal(found.ranks_N, expected.ranks_N)
    ours = torch.autograd.grad(loss_of(found, entropy), inputs[:2])
    theirs = torch.autograd.grad(loss_of(expected, entropy), inputs[:2])
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-13, rtol=0)


def test_a_measured_entropy_has_no_gradient():
    scores = rounded_scores(*make_inputs(), head(entropy=Entropy.MEASURED))
    assert scores.entropies_N is not None
    assert not scores.entropies_N.requires_grad


def test_no_tokens_give_gradients_of_zero():
    hidden_ND, weight_VD, targets_N = make_inputs()
    rounded_scores(hidden_ND[:0], weight_VD, targets_N[:0], head()).logprobs_N.sum().backward()
    assert weight_VD.grad is not None
    assert not weight_VD.grad.any()


def test_a_frozen_matrix_gets_no_gradient():
    hidden_ND, weight_VD, targets_N = make_inputs()
    rounded_scores(hidden_ND, weight_VD.requires_grad_(False), targets_N, head()).logprobs_N.sum().backward()
    assert hidden_ND.grad is not None
    assert weight_VD.grad is None


def test_only_factors_are_rounded_and_neither_logits_nor_sums():
    hidden_ND, weight_VD, targets_N = make_inputs(torch.float32)
    how = head(dtype=torch.bfloat16)
    found = rounded_scores(hidden_ND, weight_VD, targets_N, how).logprobs_N
    expected = naive_scores(hidden_ND.bfloat16().double(), weight_VD.bfloat16().double(), targets_N, how).logprobs_N
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_an_id_that_is_impossible_does_not_spoil_the_entropy_of_the_others():
    hidden_ND, weight_VD, targets_N = make_inputs()
    with torch.no_grad():
        weight_VD[-1] = 1e3 * hidden_ND[0] / hidden_ND[0].norm() ** 2
    targets_N[targets_N == VOCAB_SIZE - 1] = 0
    scores = rounded_scores(hidden_ND, weight_VD, targets_N, head(entropy=Entropy.TRAINED))
    loss_of(scores, Entropy.TRAINED).backward()
    assert hidden_ND.grad is not None
    assert hidden_ND.grad.isfinite().all()


def test_the_logits_of_all_tokens_never_exist_at_once_not_in_backward_either():
    num_tokens, chunk_size = 96, 8
    hidden_ND = torch.randn(num_tokens, 4, requires_grad=True)
    weight_VD = torch.randn(500, 4, requires_grad=True)
    targets_N = torch.randint(0, 500, (num_tokens,))
    with LargestTensor() as largest:
        rounded_scores(hidden_ND, weight_VD, targets_N, head(dtype=torch.float32, chunk_size=chunk_size))
        rounded_scores(
            hidden_ND, weight_VD, targets_N, head(dtype=torch.float32, chunk_size=chunk_size)
        ).logprobs_N.sum().backward()
    assert largest.numel == chunk_size * 500


def test_only_a_plain_matrix_without_bias_is_computed_so():
    assert is_plain_matrix(nn.Linear(2, 3, bias=False))
    assert not is_plain_matrix(nn.Linear(2, 3))
    assert not is_plain_matrix(nn.Sequential(nn.Linear(2, 3, bias=False)))


class OnTensorCores(PolicyLogprobs):
    """A policy that rounds the factors of its logits on a CPU too."""

    @staticmethod
    def _rounds_products(device: torch.device) -> bool:
        return True


@pytest.mark.parametrize("make_model", [tiny_qwen3, untied_qwen3])
def test_a_policy_on_tensor_cores_is_close_to_the_exact_one_in_value_and_gradient(make_model):
    ids_BT = torch.arange(24).reshape(2, 12)
    mask_BT = torch.arange(12).expand(2, -1) > 3
    found = []
    for kind in (PolicyLogprobs, OnTensorCores):
        model = make_model()
        scores = kind(model, chunk_size=4)(ids_BT, mask_BT, 1.0)
        scores.logprobs_N.mean().backward()
        found.append((scores.logprobs_N, model.get_output_embeddings().weight.grad))
    (exact_N, exact_VD), (rounded_N, rounded_VD) = found
    assert 0 < (exact_N - rounded_N).abs().max() < 0.02
    assert (exact_VD - rounded_VD).norm() < 0.02 * exact_VD.norm()


def test_several_targets_of_a_token_have_logprobs_and_gradients_of_their_own():
    """[N, K] in both ways to compute a head."""
    hidden_ND, weight_VD, _ = make_inputs()
    targets_NK = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS, 3), generator=torch.Generator().manual_seed(1))
    factors_NK = torch.randn(NUM_TOKENS, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected_NK = (hidden_ND @ weight_VD.T).log_softmax(-1).gather(-1, targets_NK)
    gradients = torch.autograd.grad((expected_NK * factors_NK).sum(), (hidden_ND, weight_VD))
    found = {
        "rounded": rounded_scores(hidden_ND, weight_VD, targets_NK, head()),
        "chunked": chunked_scores(hidden_ND, targets_NK, lambda h: h @ weight_VD.T, temperature=1.0, chunk_size=4),
    }
    for scores in found.values():
        torch.testing.assert_close(scores.logprobs_N, expected_NK)
        own = torch.autograd.grad((scores.logprobs_N * factors_NK).sum(), (hidden_ND, weight_VD))
        torch.testing.assert_close(own, gradients)
