"""The logprobs of a step travel together, and each sequence gets its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs


def assert_equal(found: EngineCoreOutputs, expected: EngineCoreOutputs) -> None:
    for own, other in zip(found.outputs, expected.outputs, strict=True):
        assert (own.request_id, own.new_token_ids) == (other.request_id, other.new_token_ids)
        assert (own.new_logprobs is None) == (other.new_logprobs is None)
        for array, given in zip((own.new_logprobs or ())[:3], (other.new_logprobs or ())[:3], strict=True):
            assert array.dtype == given.dtype
            np.testing.assert_array_equal(array, given)


@pytest.mark.parametrize("numbers", [[1] * 300, [1, None, 1], [None, 2, 1, None, 3], [1], [None], [], [None, 1]])
@pytest.mark.parametrize("width", [1, 6])
def test_each_sequence_gets_its_logprobs_back(numbers, width):
    from support.vllm_steps import count_arrays, make_step, send
    from unbroken.engines.vllm.step_logprobs import join_logprobs, split_logprobs

    expected = make_step(numbers, width=width)
    outputs = make_step(numbers, width=width)
    join_logprobs(outputs)
    assert count_arrays(outputs) <= 3
    received = send(outputs)
    split_logprobs(received)
    assert_equal(received, expected)


def test_what_was_not_joined_is_left_as_it_is():
    from support.vllm_steps import make_step, send
    from unbroken.engines.vllm.step_logprobs import split_logprobs

    received = send(make_step([1, 1, None]))
    split_logprobs(received)
    assert_equal(received, make_step([1, 1, None]))


def test_logprobs_of_different_numbers_of_ids_are_not_joined():
    from support.vllm_steps import count_arrays, make_step
    from unbroken.engines.vllm.step_logprobs import join_logprobs

    outputs = make_step([1, 1])
    outputs.outputs[1].new_logprobs = make_step([1], width=5).outputs[0].new_logprobs
    join_logprobs(outputs)
    assert count_arrays(outputs) == 6


def test_vllm_still_sends_the_logprobs_of_each_sequence_by_themselves():
    """If this fails, `step_logprobs` is no longer needed."""
    from support.vllm_steps import count_arrays, make_step, send

    assert count_arrays(send(make_step([1, 1, 1]))) == 9


def test_the_engine_starts_with_the_joining_scheduler_unless_another_is_given(tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from unbroken.engines.vllm.starting import require_exactness
    from unbroken.engines.vllm.step_logprobs import SCHEDULER

    args = require_exactness(AsyncEngineArgs(model=str(tmp_path)), num_adapters=0)
    assert args.scheduler_cls == SCHEDULER
    args = require_exactness(AsyncEngineArgs(model=str(tmp_path), scheduler_cls="mine.Scheduler"), num_adapters=0)
    assert args.scheduler_cls == "mine.Scheduler"
