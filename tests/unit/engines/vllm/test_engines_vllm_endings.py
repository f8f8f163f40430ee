"""Engines that come to an end: by a dead process, by an update that fails. Each test starts its own."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.waits import wait_until
from unbroken.errors import EngineError, IncompleteWeightsError
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_IDS = token_ids([1, 2, 3, 4, 5])


async def start(folder: Path, *options: str) -> Any:
    from support.vllm_engines import start_engine

    return await start_engine(folder, *options)


def ask(request_id: str) -> SampleRequest:
    return SampleRequest(request_id=request_id, prompt_ids=PROMPT_IDS, n=2, params=SamplingParams(max_tokens=250))


async def exhaust(stream: Any) -> None:
    async for _ in stream:
        pass


async def wait_for_ids(engine: Any, number: int) -> None:
    until = engine.num_sampled + number
    await wait_until(lambda: engine.num_sampled >= until)


def find_threads_that_take(number: int, process: int) -> Iterator[int]:
    """Threads of a process that do not block a signal; Linux says so."""
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        blocked = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk:"))
        if not int(blocked.split()[1], 16) >> (number - 1) & 1:
            yield int(status.parent.name)


async def test_all_that_waits_for_an_engine_whose_process_dies_ends_with_an_error(tmp_path: Path) -> None:
    from support.vllm_engines import save_model, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model(tied=False))
    already = set(multiprocessing.active_children())
    engine = await start(tmp_path)
    (core,) = set(multiprocessing.active_children()) - already
    model = tiny_vllm_model(1, tied=False)
    await engine.update_weights(TensorSource(model.named_parameters()), policy_version=1)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT_IDS.tolist()])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(PROMPT_IDS[1:, None].tolist()))[:, 0]
    untied = (await engine.score(PROMPT_IDS)).logprobs
    np.testing.assert_allclose(untied, expected.numpy(), atol=1e-5)

    calls = [asyncio.create_task(engine.sample(ask(str(k)))) for k in range(5)]
    stream = engine.stream(ask("streamed"))
    await anext(stream)
    await wait_for_ids(engine, 20)
    os.kill(core.pid, signal.SIGSTOP)
    waiting = [engine.pause(), engine.score(PROMPT_IDS), engine.reset_prefix_cache()]
    calls += [asyncio.create_task(call) for call in waiting]
    await asyncio.sleep(0.1)
    os.kill(core.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineError, match="dead"):
            await exhaust(stream)  # what had come before is still given out
    assert [type(answer) for answer in answers] == [EngineError] * 8
    with pytest.raises(EngineError, match="dead"):
        await engine.check_health()
    with pytest.raises(EngineError, match="dead"):
        await engine.sample(ask("late"))
    await asyncio.wait_for(engine.close(), 60)
    assert set(multiprocessing.active_children()) == already


async def test_an_engine_whose_update_ended_half_way_answers_nothing_more(tmp_path: Path) -> None:
    from support.vllm_engines import save_model, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model(tied=False))
    # A weight that the checkpoint lists and vLLM's model does not have: the update fails in its middle.
    checkpoint = load_file(tmp_path / "model.safetensors") | {"model.layers.1.more.weight": torch.zeros(3)}
    save_file(checkpoint, tmp_path / "model.safetensors")
    engine = await start(tmp_path, "--load-format", "dummy")
    running = [asyncio.create_task(engine.sample(ask("a"))), asyncio.create_task(engine.score(PROMPT_IDS))]
    stuck = engine.stream(ask("b"))
    await anext(stuck)
    with pytest.raises(EngineError, match="the update to policy version 1 ended half-way"):
        await engine.update_weights(TensorSource(checkpoint.items()), policy_version=1)
    assert engine.policy_version == 0
    assert type((await asyncio.gather(*running, return_exceptions=True))[0]) is IncompleteWeightsError
    for call in (engine.check_health(), engine.sample(ask("c")), engine.resume(), exhaust(stuck)):
        with pytest.raises(EngineError, match="neither the old nor the new ones"):
            await call
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.check_health()


async def test_an_engine_that_does_not_notice_that_it_is_to_end_is_woken(tmp_path: Path) -> None:
    """As if the signal came just before its main thread began to wait: it is given to another thread."""
    from support.vllm_engines import save_model, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model())
    already = set(multiprocessing.active_children())
    engine = await start(tmp_path)
    (core,) = set(multiprocessing.active_children()) - already
    shut_down = engine._llm.shutdown
    was_noticed = []

    def shut_down_unnoticed(timeout_s: float) -> None:
        thread = next(thread for thread in find_threads_that_take(signal.SIGTERM, core.pid) if thread != core.pid)
        assert ctypes.CDLL(None).tgkill(core.pid, thread, signal.SIGTERM) == 0
        core.join(0.5)
        was_noticed.append(not core.is_alive())
        core.join(timeout_s)
        shut_down(timeout_s)

    engine._llm.shutdown = shut_down_unnoticed
    await asyncio.wait_for(engine.close(), 60)
    assert was_noticed == [False]
    assert set(multiprocessing.active_children()) == already
