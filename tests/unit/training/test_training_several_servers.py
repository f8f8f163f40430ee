"""Two servers, of which one goes away in mid run and comes back with its first weights."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

from support.loops import EachStep
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.servers import listening, make_app, server_tokenizer
from support.steps import train
from unbroken.client import AsyncClient
from unbroken.engines import http
from unbroken.engines.http import HttpEngine
from unbroken.engines.transformers import TransformersEngine
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.disk import DiskPublisher

NUM_STEPS = 6
GONE, BACK = 2, 4
"""The steps before which the second server goes away, and is there again."""


def model():
    return tiny_qwen3(vocab_size=len(server_tokenizer()))


async def test_i6_a_run_goes_on_with_the_other_server_and_with_both_once_the_second_has_the_weights(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(http, "_AVOID_S", 0.0)
    weights = tmp_path / "weights"
    async with AsyncExitStack() as stack, AsyncExitStack() as second:

        async def serve(own: AsyncExitStack, port: int = 0) -> tuple[TransformersEngine, str]:
            engine = TransformersEngine(model())
            own.push_async_callback(engine.close)
            return engine, await own.enter_async_context(listening(make_app(engine, weights_dir=weights), port=port))

        _, first_url = await serve(stack)
        _, url = await serve(second)
        engine = await HttpEngine.connect([first_url, url], max_retries=0)
        stack.push_async_callback(engine.close)
        clients = [await stack.enter_async_context(AsyncClient(each, max_retries=0)) for each in (first_url, url)]

        async def sample(step: int):
            if step == GONE:
                await second.aclose()
            if step == BACK:
                await serve(second, int(url.rpartition(":")[2]))
            requests = [
                SampleRequest(
                    request_id=f"{step}-{k}/0",
                    prompt_ids=token_ids([1, 2]),
                    params=SamplingParams(max_tokens=3, seed=k),
                )
                for k in range(8)
            ]
            results = await asyncio.gather(*map(engine.sample, requests))
            sequences = [result.sequences[0] for result in results]
            return group(*[trajectory(float(k), prompt=(1, 2), completion=s) for k, s in enumerate(sequences)])

        with MetricsWriter(tmp_path) as metrics:
            await train(
                EachStep(sample),
                trainer=Trainer(model(), TrainerConfig()),
                publisher=DiskPublisher(clients, weights),
                metrics=metrics,
                config=LoopConfig(num_steps=NUM_STEPS),
                engine=engine,
            )
        assert [await client.policy_version() for client in clients] == [NUM_STEPS, NUM_STEPS]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights/num_missed"] for line in lines] == [0, 0, 1, 1, 0, 0]
    assert [line["outages/num_losses"] for line in lines] == [0] * NUM_STEPS
    assert all(line["staleness/max"] == 0 and line["train/num_rows"] == 8 for line in lines)
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
