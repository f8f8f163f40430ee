"""A stock `vllm serve` gets new weights over its own wire. Its NCCL engine has gloo here: vLLM has no other on CPUs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from support.forks import ForkedPython
from unbroken.client import AsyncClient
from unbroken.engines.http import HttpEngine
from unbroken.errors import EngineError, InvalidInputError
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.broadcast import BroadcastPublisher

PROMPT_IDS = token_ids([1, 2, 3, 4, 5])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.vllm_engines import save_model, tiny_vllm_model

    folder = tmp_path_factory.mktemp("stock")
    save_model(folder / "model", tiny_vllm_model(0, tied=False))
    from support.processes import free_port

    url = f"http://127.0.0.1:{(port := free_port())}"
    options = [
        "--model", str(folder / "model"), "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "8",
        "--weight-transfer-config", json.dumps({"backend": "gloo"}),
        "--worker-extension-cls", "support.gloo_transfer.Extension",
    ]  # fmt: skip
    process = ForkedPython(
        "vllm.entrypoints.openai.api_server",
        *options,
        output=folder / "log",
        environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        until = time.monotonic() + 240
        while not _is_healthy(url):
            assert process.poll() is None, (folder / "log").read_text()[-6000:]
            assert time.monotonic() < until, (folder / "log").read_text()[-6000:]
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def greedy(engine: HttpEngine, name: str) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    return (await engine.sample(SampleRequest(request_id=name, prompt_ids=PROMPT_IDS, params=params))).sequences[0]


def greedy_of(model: Any) -> list[int]:
    prompt = model.dummy_inputs["input_ids"].new_tensor([PROMPT_IDS.tolist()])
    ids = model.generate(prompt, do_sample=False, max_new_tokens=20, min_new_tokens=20)
    found: list[int] = ids[0, len(PROMPT_IDS) :].tolist()
    return found


async def test_i6_a_stock_server_samples_with_what_was_published_and_says_so(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    from support.vllm_engines import VOCAB_SIZE, tiny_vllm_model

    engine = await HttpEngine.connect([server], vocab_size=VOCAB_SIZE)
    old = await greedy(engine, "a")
    async with AsyncClient(server, max_retries=0) as client:
        publisher = BroadcastPublisher([client], bucket_bytes=5000, timeout_s=60.0)
        assert await publisher.dtype() == "float32"
        for version, seed in ((7, 1), (8, 2)):
            new = tiny_vllm_model(seed, tied=False)
            update = await publisher.publish(new.named_parameters(), policy_version=version)
            assert update.missed_by == ()
            engine.require_version(version)
            sequence = await greedy(engine, f"b{version}")
            assert sequence.completion_ids.tolist() == greedy_of(new) != old.completion_ids.tolist()
            assert set(sequence.policy_versions.tolist()) == {version}
        assert "stock vLLM has no digest of its weights" in caplog.text
        scores = (await engine.score(PROMPT_IDS)).logprobs
        adapter = [("model.layers.0.self_attn.q_proj.lora_A.weight", new.lm_head.weight[:4])]
        with pytest.raises(InvalidInputError, match=r"trainer\.lora_updates must be merged, .*with stock vLLM"):
            await publisher.publish(adapter, policy_version=9)
        with pytest.raises(EngineError, match="not taken by 1 of 1 servers"):
            await publisher.publish([("model.oops", new.lm_head.weight)], policy_version=9)
        await publisher.publish(new.named_parameters(), policy_version=10)  # and the next update works
        np.testing.assert_array_equal((await engine.score(PROMPT_IDS)).logprobs, scores)
        publisher.close()
    await engine.close()
