"""What only a GPU does in a step: logits on tensor cores, norms in one kernel, attention by rows, passes by memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from support.models import random_qwen3
from support.rows import random_rows
from unbroken.training.config import Packing, TrainerConfig
from unbroken.training.model.backbone import compute_norm
from unbroken.training.model.lanes import MAX_PASS_IDS, MIN_PASS_IDS, RowLayout
from unbroken.training.model.scores import Entropy, LogitScaling, RoundedHead, rounded_scores
from unbroken.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make_model():
    return random_qwen3(
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )


def make_trainer(packing: Packing, *, pass_size: int | None = 512) -> Trainer:
    config = TrainerConfig(packing=packing, tokens_per_micro_batch=pass_size)
    return Trainer(make_model(), config, accelerator=Accelerator(mixed_precision="bf16"))


def test_logits_are_sums_of_rounded_factors_and_not_rounded_themselves():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_ND = torch.randn(64, 512, device="cuda", generator=generator).requires_grad_()
    weight_VD = torch.randn(1000, 512, device="cuda", generator=generator).requires_grad_()
    targets_N = torch.randint(0, 1000, (64,), device="cuda", generator=generator)
    head = RoundedHead(
        scaling=LogitScaling(), temperature=1.0, chunk_size=16, entropy=Entropy.NONE, dtype=torch.bfloat16
    )
    logprobs_N = rounded_scores(hidden_ND, weight_VD, targets_N, head).logprobs_N
    exact_NV = hidden_ND.bfloat16().double() @ weight_VD.bfloat16().double().T
    exact_N = exact_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
    assert (logprobs_N - exact_N).abs().max() < 1e-4 * exact_NV.abs().max()
    ours = torch.autograd.grad(logprobs_N.sum(), (hidden_ND, weight_VD))
    theirs = torch.autograd.grad(exact_N.sum(), (hidden_ND, weight_VD))
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).norm() < 0.01 * other.norm()


def test_a_norm_in_one_kernel_is_the_models_own():
    norm = make_model().model.norm.cuda()
    hidden = 3 * torch.randn(100, 256, device="cuda")
    torch.testing.assert_close(compute_norm(norm, hidden), type(norm).forward(norm, hidden), atol=1e-5, rtol=1e-5)


def test_rows_are_attended_by_their_borders_and_score_as_when_padded():
    rows = random_rows(np.random.default_rng(0), 24, longest=100)
    packed, padded = make_trainer(Packing.ONE_LANE), make_trainer(Packing.NEVER)
    layouts = [trainer.backend.policy.layout for trainer in (packed, padded)]
    assert layouts == [RowLayout.BY_ROWS, RowLayout.PADDED]
    found, expected = packed.logprobs(rows), padded.logprobs(rows)
    differences = np.concatenate([own - other for own, other in zip(found, expected, strict=True)])
    differences = differences[np.isfinite(differences)]
    assert np.abs(differences).max() < 0.2  # bfloat16
    assert np.square(differences).mean() < 1e-3
    steps = [trainer.step(rows) for trainer in (packed, padded)]
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=0.05)


def test_the_size_of_a_pass_is_measured_and_leaves_no_gradients():
    trainer = make_trainer(Packing.AUTO, pass_size=None)
    policy = trainer.backend.policy
    trainer.backend.measure()
    found = trainer.backend.passes.memory
    assert MIN_PASS_IDS <= found.num_ids <= MAX_PASS_IDS
    assert found.bytes_per_id > 0
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_adapters_on_a_base_in_bfloat16_score_as_on_the_same_weights_in_float32():
    def make(dtype):
        base = make_model().bfloat16()
        torch.manual_seed(1)
        model = get_peft_model(base.to(dtype), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(len(name)))
        return Trainer(model, TrainerConfig(), accelerator=Accelerator(mixed_precision="bf16"))

    rows = random_rows(np.random.default_rng(0), 24, longest=100)
    rounded, exact = make(torch.bfloat16), make(torch.float32)
    for own, other in zip(rounded.logprobs(rows), exact.logprobs(rows), strict=True):
        np.testing.assert_array_equal(own, other)
    steps = [trainer.step(rows) for trainer in (rounded, exact)]
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=0.01)
