"""VLLM's scheduler with two changes, for vLLM >= 0.32, < 0.34. Each step of a small model is limited by its Python.

The logprobs of a step leave the engine's process as three arrays, not as three for each sequence.

    vLLM     a: [[-0.1]]  b: [[-0.2]]  c: [[-0.3]]      ids and ranks likewise: nine arrays of one number
    here     a: [[-0.1] [-0.2] [-0.3]], starts 0 1 2 3   three arrays; b and c get theirs back in this process

vLLM encodes and decodes each array in Python. With 256 sequences that took 3 ms of a step in either process, which is
half of a step of a small model on a GPU, and 0.4 ms more to cut them. So its scheduler deals out places in the arrays
of the step, which are then taken from them all at once (0.16 ms). Where they are of sampled ids alone, this process
makes lists of the step's arrays, and a sequence takes its numbers from them (`_StepPlaces`): vLLM makes three lists and
an iterator of each id's. Not needed once
`test_vllm_still_sends_the_logprobs_of_each_sequence_by_themselves` fails.

A sequence that gets one id more, within the block of KV that it has, gets no slots (`find_slots_fast`): 4 of the 9
microseconds of each sequence in `Scheduler.schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

SCHEDULER = f"{__name__}.make_scheduler"
"""The name by which the engine's process finds its scheduler."""


def make_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """Make vLLM's own scheduler, but join the logprobs of its steps; called in the engine's process."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_JoiningAsyncScheduler if is_async else _JoiningScheduler)(vllm_config=vllm_config, **options)


def split_steps(llm: AsyncLLM) -> None:
    """Give each sequence its logprobs back, in the outputs that this process receives."""
    receive, add = llm.engine_core.get_output_async, llm.output_processor.add_request

    async def receive_and_split() -> EngineCoreOutputs:
        outputs = await receive()
        split_logprobs(outputs)
        return outputs

    def add_request(request: Any, *arguments: Any, **options: Any) -> None:
        add(request, *arguments, **options)
        state = llm.output_processor.request_states[request.request_id]
        if type(state.logprobs_processor) is LogprobsProcessor:
            state.logprobs_processor.__class__ = _SequenceLogprobs

    llm.engine_core.get_output_async = receive_and_split
    llm.output_processor.add_request = add_request


class _StepPlaces(NamedTuple):
    """The logprobs of one sequence in a step that gives nothing but those of the sampled ids: from `start` to `stop`
    in the step's lists.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    start: int
    stop: int

    def to_lists(self) -> LogprobsLists:
        """The logprobs as vLLM has them."""
        part = slice(self.start, self.stop)
        ids, logprobs = np.array(self.token_ids[part], np.int32), np.array(self.logprobs[part], np.float32)
        return LogprobsLists(ids[:, None], logprobs[:, None], np.array(self.ranks[part], np.int32))


class _SequenceLogprobs(LogprobsProcessor):  # type: ignore[misc]  # vLLM may not be installed where types are checked
    """VLLM's own lists of a sequence's logprobs, filled from `_StepPlaces`."""

    def _update_sample_logprobs(self, logprobs: LogprobsLists | _StepPlaces) -> None:
        flat = self.logprobs
        if not isinstance(logprobs, _StepPlaces):
            super()._update_sample_logprobs(logprobs)
            return
        if type(flat) is not FlatLogprobs or self.tokenizer is not None:
            super()._update_sample_logprobs(logprobs.to_lists())
            return
        for place in range(logprobs.start, logprobs.stop):
            number, logprob = len(flat.logprobs), logprobs.logprobs[place]
            self.cumulative_logprob += logprob
            flat.start_indices.append(number)
            flat.token_ids.append(logprobs.token_ids[place])
            flat.logprobs.append(logprob)
            flat.ranks.append(logprobs.ranks[place])
            flat.decoded_tokens.append(None)
            flat.end_indices.append(number + 1)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Stands for the logprobs of a step while vLLM's scheduler deals them out, in the engine's process."""

    logprobs: LogprobsLists

    def slice_request(self, index: int, num_positions: int) -> range:
        """The places of one sequence, as `LogprobsLists.slice_request` finds them."""
        starts = self.logprobs.cu_num_generated_tokens
        start = index if starts is None else starts[index]
        return range(start, start + num_positions)

    def join(self, outputs: EngineCoreOutputs) -> None:
        """Put the logprobs at the places of all outputs into the first that has any; `starts` has one more."""
        places: list[int] = []
        starts = [0]
        first = None
        for output in outputs.outputs:
            if output.new_logprobs is not None:
                first = first or output
                places += output.new_logprobs
                output.new_logprobs = None
            starts.append(len(places))
        if first is not None:
            chosen = np.array(places)
            ids, logprobs, ranks = (array[chosen] for array in self.logprobs[:3])
            first.new_logprobs = LogprobsLists(ids, logprobs, ranks, starts)


def split_logprobs(outputs: EngineCoreOutputs) -> None:
    """Undo `StepLogprobs.join`."""
    joined = next((output.new_logprobs for output in outputs.outputs if output.new_logprobs is not None), None)
    if joined is None or joined.cu_num_generated_tokens is None:
        return
    ids, logprobs, ranks, starts = joined
    parts = zip(outputs.outputs, starts[:-1], starts[1:], strict=True)
    if ids.shape[1] == 1:
        of_step = ids[:, 0].tolist(), logprobs[:, 0].tolist(), ranks.tolist()
        for output, start, stop in parts:
            output.new_logprobs = _StepPlaces(*of_step, start, stop) if stop > start else None
        return
    for output, start, stop in parts:
        has_any = stop > start
        output.new_logprobs = (
            LogprobsLists(ids[start:stop], logprobs[start:stop], ranks[start:stop]) if has_any else None
        )


def find_slots_fast(manager: KVCacheManager) -> None:
    """Let a manager of KV say at once that a sequence needs no new slots where that is so.

    In the first and the last place of a block vLLM is asked: a block is added or gets its hash. With other attention
    than to all ids before, or other than one kind of it, blocks may also be given back: vLLM is asked always.
    """
    ask = manager.allocate_slots
    coordinator = manager.coordinator
    kind = coordinator.single_type_managers[0]
    if not (type(coordinator) is UnitaryKVCacheCoordinator and type(kind) is FullAttentionManager):
        return
    if kind.dcp_world_size > 1 or coordinator.pcp_world_size > 1:
        return
    size, blocks = kind.block_size, kind.req_to_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *arguments: Any, **options: Any) -> Any:
        if num_new_tokens == 1 and not arguments and options == _NO_LOOKAHEAD:
            place: int = request.num_computed_tokens
            if 0 < place % size < size - 1 and place < size * len(blocks[request.request_id]):
                return manager.empty_kv_cache_blocks
        return ask(request, num_new_tokens, *arguments, **options)

    manager.allocate_slots = allocate_slots


_NO_LOOKAHEAD = {"num_lookahead_tokens": 0}
"""The options with which running sequences get slots, without speculative decoding."""


class _JoiningScheduler(Scheduler):  # type: ignore[misc]  # vLLM may not be installed where types are checked
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        find_slots_fast(self.kv_cache_manager)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        if model_runner_output.logprobs is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[no-any-return]
        of_step = model_runner_output.logprobs = StepLogprobs(model_runner_output.logprobs)
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in outputs_by_client.values():
            of_step.join(outputs)
        return outputs_by_client  # type: ignore[no-any-return]


class _JoiningAsyncScheduler(_JoiningScheduler, AsyncScheduler):  # type: ignore[misc]
    pass
