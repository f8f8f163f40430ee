"""How many ids go through the model at a time: as many as keep an H200 busy, or as few as memory allows.

    a pass of 1,024 ids needs 3 GiB, one of 2,048 needs 4.4: 1.4 MiB an id    40 GiB free: 12,288 ids
                                                                               8 GiB free:  3,072 ids

Sizes are halved, so that small differences in free memory change nothing, and a run that is continued makes the same
passes.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

MAX_PASS_IDS = 12_288
"""More is not faster: of a 0.6B model, the CPU launches the kernels of a pass in the time that the GPU needs for 8,000
to 10,000 ids (docs/lab-notes/training-speed.md), and larger models need fewer."""
MAX_COMPILED_PASS_IDS = 24_576
"""Compiled layers are done in two thirds of the time, but launched no faster: of this many ids a step took 3.56 s on an
H200, of 12,288 3.90 s (docs/lab-notes/training-speed.md)."""
MIN_PASS_IDS = 768
_USABLE_SHARE = 0.8
"""Of what is free; the rest is for what differs between passes, and for gaps between allocations."""
_PROBE_IDS = (1_024, 2_048)
_ROW_IDS = 256
_LOGIT_COPIES = 5
"""Of a chunk of logits that are in memory at the same time, at most."""


def choose_pass_size(*, bytes_per_id: float, free_bytes: float, max_ids: int = MAX_PASS_IDS) -> int:
    """The largest size that fits, or `MIN_PASS_IDS`, which is tried even if it does not fit."""
    size = max_ids
    while size > MIN_PASS_IDS and size * bytes_per_id > _USABLE_SHARE * free_bytes:
        size //= 2
    return size


def measure_pass_size(policy: Any, accelerator: Any, *, chunk_size: int, max_ids: int = MAX_PASS_IDS) -> int:
    """Measure passes of the trained `PolicyLogprobs` on the GPU, and choose the size. All processes call it.

    Gradients are dropped: call it where there are none.
    """
    peaks = [_measure_pass(policy, accelerator, num_ids) for num_ids in _PROBE_IDS]
    bytes_per_id = max((peaks[1] - peaks[0]) / (_PROBE_IDS[1] - _PROBE_IDS[0]), 1.0)
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(accelerator.device)
    for_logits = _LOGIT_COPIES * chunk_size * policy.vocab_size * 4
    # Gradients, and AdamW's two averages, which the first update makes.
    for_update = 3 * sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    left = max(free_bytes - for_logits - for_update, 0)
    return choose_pass_size(bytes_per_id=bytes_per_id, free_bytes=left, max_ids=max_ids)


def _measure_pass(policy: Any, accelerator: Any, num_ids: int) -> int:
    """Most bytes that a forward and a backward pass add, whatever the number of its loss tokens."""
    device = accelerator.device
    token_ids_BT = torch.zeros(num_ids // _ROW_IDS, _ROW_IDS, dtype=torch.int64, device=device)
    mask_BT = torch.zeros_like(token_ids_BT, dtype=torch.bool)
    mask_BT[0, 1:] = True
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with accelerator.autocast():
        scores = policy(token_ids_BT, mask_BT, 1.0)
    (scores.logprobs_N.sum() * 0.0).backward()
    policy.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
