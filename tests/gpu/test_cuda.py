"""The same promises on a GPU: what the embedded engine samples there, the trainer scores alike."""

import asyncio
import copy

import numpy as np
import pytest
import torch

from support.models import random_qwen3
from unbroken.engines.transformers import TransformersEngine
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.training.config import TrainerConfig
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams
from unbroken.weights.sources import TensorSource

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NUM_REQUESTS = 32


def make_model(dtype):
    model = random_qwen3(
        vocab_size=32_000,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=1024,
    )
    return model.to("cuda", dtype)


def ask(number, **params):
    prompt_ids = np.random.default_rng(number).integers(0, 32_000, 20 + 7 * number)
    return SampleRequest(
        request_id=str(number), prompt_ids=prompt_ids, params=SamplingParams(seed=number, **params), n=2
    )


def rows_of(requests, results):
    rows = []
    for request, result in zip(requests, results, strict=True):
        result.check_answers(request)
        for sequence in result.sequences:
            tree = TokenTree()
            tree.add_sampled(sequence, parent=tree.add_given(request.prompt_ids, Origin.PROMPT, parent=None))
            rows += export_samples(tree, advantage=1.0)
    return rows


async def sample_all(engine, requests):
    return await asyncio.gather(*(engine.sample(request) for request in requests))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_i4_engine_and_trainer_agree_in_float32(temperature):
    model = make_model(torch.float32)
    engine = TransformersEngine(copy.deepcopy(model))
    requests = [ask(k, max_tokens=64, temperature=temperature) for k in range(NUM_REQUESTS)]
    rows = rows_of(requests, await sample_all(engine, requests))
    await engine.close()
    found = mismatch_of_rows(rows, Trainer(model, TrainerConfig()).logprobs(rows))
    print(f"float32, temperature {temperature}: {found}")
    assert found.num_tokens == NUM_REQUESTS * 2 * 64
    assert found.max_abs < 1e-4


async def test_a_bfloat16_engine_stays_within_its_rounding_of_a_float32_trainer():
    model = make_model(torch.float32)
    engine = TransformersEngine(make_model(torch.bfloat16))
    requests = [ask(k, max_tokens=64) for k in range(NUM_REQUESTS)]
    rows = rows_of(requests, await sample_all(engine, requests))
    await engine.close()
    found = mismatch_of_rows(rows, Trainer(model, TrainerConfig()).logprobs(rows))
    print(f"bfloat16: {found}")
    assert found.k3 < 1e-2
    assert found.max_abs > 1e-4, "float32 all along would make this test meaningless"


async def test_i6_weights_that_come_in_mid_sequence_are_used_from_there_on():
    model = make_model(torch.float32)
    engine = TransformersEngine(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    request = ask(1, max_tokens=400)
    running = asyncio.create_task(engine.sample(request))
    while engine.stats.num_sampled < 20:  # noqa: ASYNC110 (an engine has no event for it)
        await asyncio.sleep(0.005)
    await engine.update_weights(TensorSource(model.named_parameters()), policy_version=3)
    (row, _) = rows_of([request], [await running])
    await engine.close()
    assert set(row.policy_versions[row.sampled_mask].tolist()) == {0, 3}
    scored = Trainer(model, TrainerConfig(), policy_version=3).logprobs([row])[0]
    new = row.policy_versions == 3
    old = row.policy_versions == 0
    assert np.abs(scored[new] - row.rollout_logprobs[new]).max() < 1e-4
    assert np.abs(scored[old] - row.rollout_logprobs[old]).max() > 1e-4


async def test_a_step_on_a_gpu_raises_what_was_rewarded():
    model = make_model(torch.float32)
    engine = TransformersEngine(copy.deepcopy(model))
    requests = [ask(k, max_tokens=16) for k in range(8)]
    rows = rows_of(requests, await sample_all(engine, requests))
    await engine.close()
    trainer = Trainer(model, TrainerConfig())
    stats = trainer.step(rows)
    assert stats.mismatch.max_abs < 1e-4
    after = np.concatenate(trainer.logprobs(rows))
    before = np.concatenate([row.rollout_logprobs for row in rows])
    mask = np.concatenate([row.sampled_mask for row in rows])
    assert after[mask].mean() > before[mask].mean()
