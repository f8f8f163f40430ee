"""A patch of vLLM: the logprobs of a step leave the engine's process as three arrays, not as three for each sequence.

    vLLM     a: [[-0.1]]  b: [[-0.2]]  c: [[-0.3]]      ids and ranks likewise: nine arrays of one number
    here     a: [[-0.1] [-0.2] [-0.3]], starts 0 1 2 3   three arrays; b and c get theirs back in this process

vLLM encodes and decodes each array in Python. With 256 sequences that took 3 ms of a step in either process, which is
half of a step of a small model on a GPU.

For vLLM >= 0.32, < 0.34, whose scheduler makes the outputs of a step (`Scheduler.update_from_output`); not needed once
`test_vllm_still_sends_the_logprobs_of_each_sequence_by_themselves` fails.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.outputs import LogprobsLists

SCHEDULER = f"{__name__}.make_scheduler"
"""The name by which the engine's process finds its scheduler."""


def make_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """Make vLLM's own scheduler, but join the logprobs of its steps; called in the engine's process."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_JoiningAsyncScheduler if is_async else _JoiningScheduler)(vllm_config=vllm_config, **options)


def split_steps(llm: AsyncLLM) -> None:
    """Give each sequence its logprobs back, in the outputs that this process receives."""
    receive = llm.engine_core.get_output_async

    async def receive_and_split() -> EngineCoreOutputs:
        outputs = await receive()
        split_logprobs(outputs)
        return outputs

    llm.engine_core.get_output_async = receive_and_split


def join_logprobs(outputs: EngineCoreOutputs) -> None:
    """Put the logprobs of all outputs of a step into the first that has any; `starts` has one more than outputs."""
    having = [output for output in outputs.outputs if output.new_logprobs is not None]
    if len(having) < 2 or len({output.new_logprobs.logprobs.shape[1] for output in having}) > 1:
        return
    numbers = [0 if output.new_logprobs is None else len(output.new_logprobs.logprobs) for output in outputs.outputs]
    ids, logprobs, ranks = zip(*(output.new_logprobs[:3] for output in having), strict=True)
    for output in having:
        output.new_logprobs = None
    having[0].new_logprobs = LogprobsLists(
        np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks), [0, *accumulate(numbers)]
    )


def split_logprobs(outputs: EngineCoreOutputs) -> None:
    """Undo `join_logprobs`."""
    joined = next((output.new_logprobs for output in outputs.outputs if output.new_logprobs is not None), None)
    if joined is None or joined.cu_num_generated_tokens is None:
        return
    ids, logprobs, ranks, starts = joined
    for output, start, stop in zip(outputs.outputs, starts[:-1], starts[1:], strict=True):
        has_any = stop > start
        output.new_logprobs = (
            LogprobsLists(ids[start:stop], logprobs[start:stop], ranks[start:stop]) if has_any else None
        )


class _JoiningScheduler(Scheduler):  # type: ignore[misc]  # vLLM may not be installed where types are checked
    def update_from_output(self, *arguments: Any, **options: Any) -> dict[int, EngineCoreOutputs]:
        return _join_all(super().update_from_output(*arguments, **options))


class _JoiningAsyncScheduler(AsyncScheduler):  # type: ignore[misc]
    def update_from_output(self, *arguments: Any, **options: Any) -> dict[int, EngineCoreOutputs]:
        return _join_all(super().update_from_output(*arguments, **options))


def _join_all(outputs_by_client: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
    for outputs in outputs_by_client.values():
        join_logprobs(outputs)
    return outputs_by_client
