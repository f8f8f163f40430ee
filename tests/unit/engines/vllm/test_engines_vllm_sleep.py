"""vLLM that sleeps: what goes wrong in a wake ends the engine. The contract's tests have the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unbroken.errors import EngineError, SamplingError
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_engine_that_failed_to_wake_answers_nothing_more_and_can_be_closed(tmp_path: Path) -> None:
    from support.vllm_engines import save_model, start_engine, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model(tied=False))
    # A weight that the checkpoint lists and vLLM's model does not have: the load fails in its middle.
    checkpoint = load_file(tmp_path / "model.safetensors") | {"model.layers.1.more.weight": torch.zeros(3)}
    save_file(checkpoint, tmp_path / "model.safetensors")
    engine = await start_engine(tmp_path, "--load-format", "dummy")
    await engine.sleep()
    for weights in ([], [*checkpoint.items(), ("more", torch.zeros(1))]):
        with pytest.raises(SamplingError):
            await engine.update_weights(TensorSource(weights), policy_version=1)
    await engine.check_health()
    with pytest.raises(EngineError, match="the update to policy version 1 ended half-way"):
        await engine.update_weights(TensorSource(checkpoint.items()), policy_version=1)
    request = SampleRequest(request_id="a", prompt_ids=token_ids([1, 2]), params=SamplingParams(max_tokens=2))
    for call in (
        engine.check_health(),
        engine.sample(request),
        engine.update_weights(TensorSource([]), policy_version=2),
    ):
        with pytest.raises(EngineError, match="neither the old nor the new ones"):
            await call
    assert engine.policy_version == 0
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.check_health()
