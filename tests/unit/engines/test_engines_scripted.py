"""The fake: what it says, and what it refuses to be sent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import EchoError, EngineError, InvariantError
from unbroken.types import FinishReason, SampledSequence, SampleRequest, SamplingParams, token_ids
from unbroken.weights.sources import TensorSource


def ask(request_id: str, prompt_ids: list[int], n: int = 1, **params: Any) -> SampleRequest:
    return SampleRequest(request_id=request_id, prompt_ids=token_ids(prompt_ids), n=n, params=SamplingParams(**params))


async def say(engine: ScriptedEngine, request: SampleRequest) -> SampledSequence:
    return (await engine.sample(request)).sequences[0]


async def test_it_says_its_lines_in_order() -> None:
    engine = ScriptedEngine([[5, 6, 2], [7, 2]])
    assert (await say(engine, ask("a", [1]))).completion_ids.tolist() == [5, 6, 2]
    assert (await say(engine, ask("b", [1]))).completion_ids.tolist() == [7, 2]
    assert [request.request_id for request in engine.requests] == ["a", "b"]
    with pytest.raises(EngineError, match="2 replies"):
        await say(engine, ask("c", [1]))


async def test_a_function_answers_by_the_prompt() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [len(prompt_ids), 2])
    assert (await say(engine, ask("a", [1, 1, 1]))).completion_ids.tolist() == [3, 2]


async def test_a_reply_brings_its_logprobs_and_its_ending() -> None:
    reply = ScriptedReply(
        completion_ids=token_ids([5, 6]),
        rollout_logprobs=np.array([-1.0, -2.0], dtype=np.float32),
        finish_reason=FinishReason.LENGTH,
    )
    sequence = await say(ScriptedEngine([reply]), ask("a", [1]))
    assert sequence.rollout_logprobs.tolist() == [-1.0, -2.0]
    assert sequence.finish_reason is FinishReason.LENGTH


def test_a_reply_with_too_few_logprobs_is_refused() -> None:
    with pytest.raises(InvariantError, match="1 entries for 2"):
        ScriptedReply(completion_ids=token_ids([5, 6]), rollout_logprobs=np.zeros(1, dtype=np.float32))


@pytest.mark.parametrize(
    ("params", "expected", "finish_reason"),
    [
        ({"stop_token_ids": (6,)}, [5, 6], FinishReason.STOP),
        ({"max_tokens": 1}, [5], FinishReason.LENGTH),
        ({}, [5, 6, 7], FinishReason.STOP),
    ],
)
async def test_a_reply_is_cut_where_a_real_one_would_be(
    params: dict[str, Any], expected: list[int], finish_reason: FinishReason
) -> None:
    sequence = await say(ScriptedEngine([[5, 6, 7]]), ask("a", [1], **params))
    assert sequence.completion_ids.tolist() == expected
    assert sequence.finish_reason is finish_reason


async def test_i1_a_prompt_that_extends_its_conversation_is_answered() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [5, 2])
    await engine.sample(ask("t/0", [1, 3]))
    await engine.sample(ask("other/0", [9]))
    await engine.sample(ask("t/1", [1, 3, 5, 2, 8]))
    assert engine.forks == []


@pytest.mark.parametrize("prompt_ids", [[1, 3, 5, 8, 8], [1, 3, 5], [1, 4, 5, 2, 8], [8]])
async def test_i1_a_prompt_that_rewrites_its_conversation_is_refused(prompt_ids: list[int]) -> None:
    engine = ScriptedEngine(lambda prompt_ids: [5, 2])
    await engine.sample(ask("t/0", [1, 3]))
    with pytest.raises(InvariantError, match="I1"):
        await engine.sample(ask("t/1", prompt_ids))


async def test_i1_a_meant_fork_is_answered_and_listed() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [5, 2], allow_forks=True)
    await engine.sample(ask("t/0", [1, 3]))
    await engine.sample(ask("t/1", [1, 4]))
    await engine.sample(ask("t/2", [1, 4, 5, 2]))
    assert engine.forks == ["t/1"]


async def test_i1_any_of_n_completions_may_be_continued() -> None:
    engine = ScriptedEngine([[5, 2], [6, 2], [7, 2]])
    await engine.sample(ask("t/0", [1], n=2))
    await engine.sample(ask("t/1", [1, 6, 2, 8]))
    assert len(engine.requests) == 2


async def test_i1_an_aborted_completion_is_not_continued() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [5, 2])
    await engine.pause()
    running = asyncio.create_task(engine.sample(ask("t/0", [1])))
    await asyncio.sleep(0.01)
    await engine.abort("t/0")
    await running
    await engine.resume()
    await engine.sample(ask("t/1", [1]))
    assert engine.forks == []


async def test_i1_request_ids_without_a_slash_are_not_compared() -> None:
    engine = ScriptedEngine(lambda prompt_ids: [5, 2])
    for _ in range(2):
        await engine.sample(ask("same", [1]))
    assert engine.forks == []


async def test_i3_a_lie_about_the_prompt_is_caught_by_the_echo_check() -> None:
    engine = ScriptedEngine([[5, 2]], echo=lambda prompt_ids: prompt_ids[:-1])
    request = ask("a", [1, 3])
    result = await engine.sample(request)
    with pytest.raises(EchoError, match="first at position 1"):
        result.check_answers(request)


async def test_new_weights_are_noted_by_name() -> None:
    engine = ScriptedEngine([])
    await engine.update_weights(TensorSource([("a.weight", None), ("b.weight", None)]), policy_version=1)  # type: ignore[list-item]
    assert engine.loaded_names == ["a.weight", "b.weight"]


def test_it_needs_no_torch() -> None:
    code = "import sys, unbroken.engines.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
