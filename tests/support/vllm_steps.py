"""What vLLM's engine sends of one step: outputs of sequences, with logprobs."""

from __future__ import annotations

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


def make_step(numbers: list[int | None], *, width: int = 2) -> EngineCoreOutputs:
    """A step in which each sequence got so many ids; None has no logprobs."""
    total = sum(number or 0 for number in numbers)
    rng = np.random.default_rng(0)
    all_of_step = LogprobsLists(
        rng.integers(100, size=(total, width)).astype(np.int32),
        rng.normal(size=(total, width)).astype(np.float32),
        rng.integers(9, size=total).astype(np.int32),
    )
    outputs, start = [], 0
    for index, number in enumerate(numbers):
        own = None if number is None else all_of_step.slice_request(start, number)
        outputs.append(EngineCoreOutput(request_id=str(index), new_token_ids=[1] * (number or 1), new_logprobs=own))
        start += number or 0
    return EngineCoreOutputs(outputs=outputs)


def send(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """The outputs as they arrive in the other process."""
    return MsgpackDecoder(EngineCoreOutputs).decode([bytes(buf) for buf in MsgpackEncoder().encode(outputs)])


def count_arrays(outputs: EngineCoreOutputs) -> int:
    return 3 * sum(output.new_logprobs is not None for output in outputs.outputs)
