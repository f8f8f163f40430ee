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


def make_kv_manager(*, block_size: int, sliding_window: int | None = None) -> Any:
    """VLLM's manager of KV for a model with one kind of attention, with 64 blocks."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    init_none_hash(sha256)
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = SlidingWindowSpec(**sizes, sliding_window=sliding_window) if sliding_window else FullAttentionSpec(**sizes)
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=512, scheduler_block_size=block_size, hash_block_size=block_size)


def run_sequences(manager: Any, *, lag: int) -> list[Any]:
    """Run a few sequences side by side, and two that begin as the first has; returns all that the manager decided."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    kind = manager.coordinator.single_type_managers[0]
    hasher = get_request_block_hasher(kind.block_size, sha256)
    rng = np.random.default_rng(0)
    seen: list[Any] = []
    waiting = [(f"{number}", [int(each) for each in range(5 + 3 * (number % 3))]) for number in range(5)]
    running: list[Any] = []
    for step in range(60):
        if step % 4 == 0 and waiting:
            name, prompt = waiting.pop(0)
            request = Request(name, prompt, SamplingParams(max_tokens=99), None, block_hasher=hasher)
            found = manager.get_computed_blocks(request)
            cached = found[1]
            seen.append((name, cached))
            slots = manager.allocate_slots(request, len(prompt) - cached, cached, found[0])
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = len(prompt)
            running.append((request, 9 + 7 * int(name)))
            seen.append(slots.get_block_ids())
        for request, length in list(running):
            if request.num_output_tokens and request.num_computed_tokens < request.num_tokens + lag:
                slots = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
                seen.append((request.request_id, slots.get_block_ids(allow_none=True)))
                request.num_computed_tokens += 1
            if request.num_tokens <= request.num_computed_tokens:
                request.append_output_token_ids(int(rng.integers(9)))
                if lag:
                    manager.cache_blocks(request, min(request.num_tokens - 1, request.num_computed_tokens))
            seen.append((manager.get_block_ids(request.request_id), kind.num_cached_block.get(request.request_id)))
            if request.num_output_tokens >= length:
                manager.free(request)
                running.remove((request, length))
        seen.append(manager.block_pool.get_num_free_blocks())
    assert not waiting
    return seen
