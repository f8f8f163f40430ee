"""A mixture of experts on real vLLM: new weights, joined as transformers has them in memory, are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from unbroken.errors import SamplingError
from unbroken.types import SampleRequest, SamplingParams
from unbroken.weights.files import FileSource, write_tensors
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")


def make_model(seed: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


async def check_logprobs(engine: Any, model: Any) -> None:
    """The engine's logprobs are those of the model."""
    request = SampleRequest(request_id="a", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=24, seed=1))
    (sequence,) = (await engine.sample(request)).sequences
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, sequence.completion_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, 2:-1].float(), -1)
    expected = logprobs.gather(1, ids[0, 3:, None])[:, 0].numpy()
    np.testing.assert_allclose(sequence.rollout_logprobs, expected, atol=1e-5)


async def test_experts_are_updated_through_memory_and_files_and_are_not_recorded_on_a_cpu(tmp_path: Path) -> None:
    from support.vllm_engines import save_model, start_engine

    save_model(tmp_path / "model", make_model(0))
    engine = await start_engine(tmp_path / "model")
    try:
        await check_logprobs(engine, make_model(0))
        await engine.update_weights(TensorSource(make_model(1).named_parameters()), policy_version=1)
        await check_logprobs(engine, make_model(1))
        (tmp_path / "new").mkdir()
        list(write_tensors(tmp_path / "new", make_model(2).named_parameters()))
        await engine.update_weights(FileSource(tmp_path / "new"), policy_version=2)
        await check_logprobs(engine, make_model(2))
        asking = SamplingParams(return_routed_experts=True)
        with pytest.raises(SamplingError, match="started without --enable-return-routed-experts"):
            await engine.sample(SampleRequest(request_id="b", prompt_ids=[5], params=asking))
    finally:
        await engine.close()
