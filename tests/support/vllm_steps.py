"""What vLLM's engine sends of one step: outputs of sequences, with logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


def make_logprobs(numbers: list[int | None], *, width: int = 2, starts: list[int] | None = None) -> LogprobsLists:
    """The logprobs of a step in which each sequence got so many ids."""
    total = sum(number or 0 for number in numbers)
    rng = np.random.default_rng(0)
    return LogprobsLists(
        rng.integers(100, size=(total, width)).astype(np.int32),
        rng.normal(size=(total, width)).astype(np.float32),
        rng.integers(9, size=total).astype(np.int32),
        starts,
    )


def deal_out(logprobs: Any, numbers: list[int | None]) -> EngineCoreOutputs:
    """What vLLM's scheduler makes of a step's logprobs; a sequence with None asked for none."""
    outputs, start = [], 0
    for index, number in enumerate(numbers):
        own = None if number is None else logprobs.slice_request(start, number)
        outputs.append(EngineCoreOutput(request_id=str(index), new_token_ids=[1] * (number or 1), new_logprobs=own))
        start += number or 0
    return EngineCoreOutputs(outputs=outputs)


def make_step(numbers: list[int | None], *, width: int = 2) -> EngineCoreOutputs:
    """A step as vLLM makes it."""
    return deal_out(make_logprobs(numbers, width=width), numbers)


def send(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """The outputs as they arrive in the other process."""
    return MsgpackDecoder(EngineCoreOutputs).decode([bytes(buf) for buf in MsgpackEncoder().encode(outputs)])


def count_arrays(outputs: EngineCoreOutputs) -> int:
    return 3 * sum(output.new_logprobs is not None for output in outputs.outputs)
