"""VLLM's scheduler with our changes: logprobs of a step travel together, prompts are held, slots are found fast."""

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
        lists = own.new_logprobs.to_lists() if hasattr(own.new_logprobs, "to_lists") else own.new_logprobs
        for array, given in zip((lists or ())[:3], (other.new_logprobs or ())[:3], strict=True):
            assert array.dtype == given.dtype
            np.testing.assert_array_equal(array, given)


@pytest.mark.parametrize("numbers", [[1] * 300, [1, None, 1], [None, 2, 1, None, 3], [1], [None], [], [None, 1]])
@pytest.mark.parametrize("width", [1, 6])
def test_each_sequence_gets_its_logprobs_back(numbers, width):
    from support.vllm_steps import count_arrays, deal_out, make_logprobs, make_step, send
    from unbroken.engines.vllm.scheduler import StepLogprobs, split_logprobs

    expected = make_step(numbers, width=width)
    of_step = StepLogprobs(make_logprobs(numbers, width=width))
    outputs = deal_out(of_step, numbers)
    of_step.join(outputs)
    assert count_arrays(outputs) <= 3
    received = send(outputs)
    split_logprobs(received)
    assert_equal(received, expected)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("is_flat", [True, False])
async def test_an_answer_has_the_logprobs_that_it_has_without_our_changes(width, is_flat):
    from types import SimpleNamespace

    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    from support.vllm_steps import deal_out, make_logprobs, make_step, send
    from unbroken.engines.vllm.scheduler import StepLogprobs, split_steps

    steps = [[1, 1, 2], [1, 2, 1], [3, 1, 1]]

    def open_llm(receive):
        return SimpleNamespace(
            output_processor=OutputProcessor(None, log_stats=False),
            engine_core=SimpleNamespace(get_output_async=receive),
        )

    def make_joined(numbers):
        of_step = StepLogprobs(make_logprobs(numbers, width=width))
        outputs = deal_out(of_step, numbers)
        of_step.join(outputs)
        return send(outputs)

    async def answer(make, change):
        waiting = list(map(make, steps))
        for output in waiting[-1].outputs:
            output.finish_reason = FinishReason.LENGTH

        async def receive():
            return waiting.pop(0)

        llm = open_llm(receive)
        change(llm)
        queues = []
        for number in range(3):
            params = SamplingParams(
                logprobs=width - 1, flat_logprobs=is_flat, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            request = EngineCoreRequest(
                request_id=str(number),
                external_req_id=str(number),
                prompt_token_ids=[1],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            queues.append(RequestOutputCollector(params.output_kind, request.request_id))
            llm.output_processor.add_request(request, None, None, 0, queues[-1])
        for _ in steps:
            outputs = await llm.engine_core.get_output_async()
            llm.output_processor.process_outputs(outputs.outputs)
        return [(await queue.get()).outputs[0] for queue in queues]

    theirs = await answer(lambda numbers: make_step(numbers, width=width), lambda llm: None)
    ours = await answer(make_joined, split_steps)
    assert [len(each.logprobs) for each in theirs] == [5, 4, 4]
    assert [each.logprobs for each in ours] == [each.logprobs for each in theirs]
    assert [each.cumulative_logprob for each in ours] == [each.cumulative_logprob for each in theirs]


def test_what_was_not_joined_is_left_as_it_is():
    from support.vllm_steps import make_step, send
    from unbroken.engines.vllm.scheduler import split_logprobs

    received = send(make_step([1, 1, None]))
    split_logprobs(received)
    assert_equal(received, make_step([1, 1, None]))


def test_places_are_those_that_vllm_finds_where_sequences_got_several_ids():
    """As with speculative decoding, where the arrays have room for ids that were not accepted."""
    from support.vllm_steps import make_logprobs
    from unbroken.engines.vllm.scheduler import StepLogprobs

    logprobs = make_logprobs([3, 1, 2], starts=[0, 3, 4, 6])
    for index, number in enumerate((2, 1, 1)):
        places = StepLogprobs(logprobs).slice_request(index, number)
        for array, expected in zip(logprobs[:3], logprobs.slice_request(index, number)[:3], strict=True):
            np.testing.assert_array_equal(array[list(places)], expected)


def test_vllm_still_sends_the_logprobs_of_each_sequence_by_themselves():
    """If this fails, its joining of logprobs is no longer needed."""
    from support.vllm_steps import count_arrays, make_step, send

    assert count_arrays(send(make_step([1, 1, 1]))) == 9


def test_the_engine_starts_with_the_joining_scheduler_unless_another_is_given(tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from unbroken.engines.vllm.scheduler import SCHEDULER
    from unbroken.engines.vllm.startup import require_exactness

    args = require_exactness(AsyncEngineArgs(model=str(tmp_path)), num_adapters=0)
    assert args.scheduler_cls == SCHEDULER
    args = require_exactness(AsyncEngineArgs(model=str(tmp_path), scheduler_cls="mine.Scheduler"), num_adapters=0)
    assert args.scheduler_cls == "mine.Scheduler"


def write_config(folder, **fields) -> None:
    from transformers import Qwen2Config

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    Qwen2Config(**{**sizes, **fields}).save_pretrained(folder)


def graphs_of(folder, *options: str) -> tuple[object, int | None]:
    from unbroken.engines.vllm import startup

    args = startup.parse_engine_args(["--model", str(folder), *options])
    chosen = startup.use_whole_graphs(args).compilation_config
    assert args.compilation_config.cudagraph_mode is None or options  # those given stay as they are
    return chosen.cudagraph_mode, chosen.max_cudagraph_capture_size


def be_on_hopper(monkeypatch) -> None:
    from unbroken.engines.vllm import startup

    on_hopper = staticmethod(lambda family: family == 90)
    monkeypatch.setattr(type(startup.current_platform), "is_device_capability_family", on_hopper)


def test_mixed_steps_are_whole_graphs_on_hopper_unless_the_options_have_graphs_of_their_own(monkeypatch, tmp_path):
    from vllm.config import CUDAGraphMode

    write_config(tmp_path, head_dim=128)

    assert graphs_of(tmp_path) == (None, None)  # no GPU here
    be_on_hopper(monkeypatch)
    assert graphs_of(tmp_path) == (CUDAGraphMode.FULL, 1024)
    piecewise = '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'
    assert graphs_of(tmp_path, "--compilation-config", piecewise) == (CUDAGraphMode.FULL_AND_PIECEWISE, None)
    assert graphs_of(tmp_path, "--max-cudagraph-capture-size", "64") == (None, None)
    assert graphs_of(tmp_path, "--enforce-eager") == (None, None)


@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 64},
        {"head_dim": 256},
        {"head_dim": 128, "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0},
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": None},
    ],
)
def test_layouts_that_were_wrong_or_not_measured_have_vllms_own_graphs(monkeypatch, tmp_path, config):
    """Heads of 64 in whole graphs sampled garbage from real weights (docs/lab-notes/engines.md)."""
    write_config(tmp_path, **config)
    be_on_hopper(monkeypatch)
    assert graphs_of(tmp_path) == (None, None)


def test_quantised_keys_have_vllms_own_graphs(monkeypatch, tmp_path):
    write_config(tmp_path, head_dim=128)
    be_on_hopper(monkeypatch)
    assert graphs_of(tmp_path, "--kv-cache-dtype", "fp8") == (None, None)


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_slots_found_fast_are_those_that_vllm_finds(block_size, lag):
    """`lag`: how many ids are scheduled whose values are not known yet, as with asynchronous scheduling."""
    from support.vllm_steps import make_kv_manager, run_sequences
    from unbroken.engines.vllm.scheduler import find_slots_fast

    plain, fast = (make_kv_manager(block_size=block_size) for _ in range(2))
    find_slots_fast(fast)
    assert "allocate_slots" in vars(fast)
    assert run_sequences(fast, lag=lag) == run_sequences(plain, lag=lag)


def test_where_blocks_may_be_given_back_vllm_is_asked():
    from support.vllm_steps import make_kv_manager
    from unbroken.engines.vllm.scheduler import find_slots_fast

    manager = make_kv_manager(block_size=4, sliding_window=8)
    find_slots_fast(manager)
    assert "allocate_slots" not in vars(manager)


def test_vllm_asks_for_the_slots_of_running_sequences_as_expected():
    import inspect

    from vllm.v1.core.sched.scheduler import Scheduler

    asked = "allocate_slots(\n                        request,\n                        num_new_tokens,\n"
    asked += "                        num_lookahead_tokens=self.num_lookahead_tokens,\n                    )"
    assert asked in inspect.getsource(Scheduler.schedule)
