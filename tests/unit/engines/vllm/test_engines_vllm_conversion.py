"""What vLLM joins of several steps, because its reader was slow, is what each step had."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from unbroken.types import SampleChunk, SampleRequest, SamplingParams

TOPS = ([7, 3, 9, 4], [-0.2, -2.0, -3.0, -np.inf])
"""Ids and logprobs, most likely first, the same at each position; three were kept."""


def make_output(sampled: int) -> Any:
    """Of one step."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    ids, logprobs = TOPS
    flat = FlatLogprobs()
    own = logprobs[ids.index(sampled)]
    flat.append_fast([sampled, *ids], [own, *logprobs], itertools.chain([1], range(1, 5)), itertools.repeat(None))
    completion = CompletionOutput(index=0, text="", token_ids=[sampled], cumulative_logprob=own, logprobs=flat)
    return RequestOutput(
        request_id="a", prompt=None, prompt_token_ids=[1, 2], prompt_logprobs=None, outputs=[completion], finished=False
    )


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_chunk_of_several_steps_has_the_logprobs_and_kept_ids_of_each(number: int) -> None:
    from unbroken.engines.vllm.conversion import convert_chunk

    params = SamplingParams(max_tokens=9, top_k=3, return_kept_ids=True, num_top_logprobs=number)
    request = SampleRequest(request_id="a", prompt_ids=[1, 2], params=params)

    def convert(output: Any) -> SampleChunk:
        return convert_chunk(output, output.outputs[0], request, vocab_size=20)

    outputs = [make_output(sampled) for sampled in (3, 7, 9, 7)]
    joined = copy.deepcopy(outputs[0])
    for each in outputs[1:]:
        joined.add(copy.deepcopy(each), aggregate=True)
    found, expected = convert(joined), [convert(each) for each in outputs]
    assert found.completion_ids.tolist() == [3, 7, 9, 7]
    assert found.rollout_logprobs.tolist() == [one for each in expected for one in each.rollout_logprobs.tolist()]
    assert found.kept_ids is not None
    assert found.kept_ids.to_lists() == [[3, 7, 9]] * 4
    if number:
        assert found.top_logprobs is not None
        assert found.top_logprobs.token_ids.tolist() == [TOPS[0][:number]] * 4
        np.testing.assert_array_equal(found.top_logprobs.logprobs, np.float32([TOPS[1][:number]] * 4))


def test_before_min_tokens_vllm_forbids_the_stop_ids_of_the_request_alone() -> None:
    """VLLM itself adds its model's ends of text: once it does not, our own class of parameters is not needed."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    from unbroken.engines.vllm.conversion import make_sampling_params

    params = SamplingParams(max_tokens=3, min_tokens=9, stop_token_ids=(7,), bad_words_ids=((4,), (5, 6)))
    request = SampleRequest(request_id="a", prompt_ids=[1, 2], params=params)
    ours = make_sampling_params(request, RequestOutputKind.FINAL_ONLY, num_logprobs=0).clone()
    plain = VllmSamplingParams(min_tokens=1, stop_token_ids=[7], ignore_eos=True)
    for each in (ours, plain):
        each.update_from_generation_config({"eos_token_id": [2, 3]}, 2)
    assert ours.all_stop_token_ids == {7}
    assert plain.all_stop_token_ids == {2, 3, 7}
    assert ours.min_tokens == 3
    assert ours.bad_words_token_ids == [[4], [5, 6]]
