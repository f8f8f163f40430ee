"""Experts in vLLM's outputs, which only its engine on a GPU can record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unbroken.errors import EngineError, InvariantError
from unbroken.types import SampleRequest, SamplingParams

EXPERTS = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)


def convert(experts: Any, *, asks: bool = True, finish_reason: str = "length") -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    from unbroken.engines.vllm.conversion import convert_result

    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[4, 5],
        cumulative_logprob=None,
        logprobs=FlatLogprobs(),
        finish_reason=finish_reason,
        routed_experts=experts,
    )
    completion.weight_versions = [SimpleNamespace(start=0, end=2, version="3")]
    output = RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )
    request = SampleRequest(
        request_id="a", prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=2, return_routed_experts=asks)
    )
    (sequence,) = convert_result(output, request).sequences
    return sequence


class FlatLogprobs:
    start_indices = (0, 1)
    token_ids = (4, 5)
    logprobs = (-1.0, -2.0)

    def __len__(self) -> int:
        return 2


def test_experts_are_those_of_prompt_and_completion_but_the_last_id():
    np.testing.assert_array_equal(convert(EXPERTS).routed_experts, EXPERTS)
    assert convert(EXPERTS, asks=False).routed_experts is None
    assert convert(None, finish_reason="abort").routed_experts is None


def test_missing_experts_are_a_failure_of_the_engine_and_too_few_of_ours_or_theirs():
    with pytest.raises(EngineError, match="vLLM returned no routed_experts for 'a'"):
        convert(None)
    with pytest.raises(InvariantError, match="has 3 entries for 3 prompt_ids and 2 completion_ids"):
        convert(EXPERTS[:3])
