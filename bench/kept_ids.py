"""Bytes of kept ids for each sampled id, and what the mask costs the head: some minutes on a CPU.

The distributions are synthetic: power laws of the rank, whose exponent differs between positions, over 151,936 ids.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from unbroken.engines.transformers.sampling import PARAMS_DTYPE, compute_logprobs, find_kept, pack_params
from unbroken.training.model.scores import KeptTokens, chunked_scores
from unbroken.types import KeptIds, SamplingParams, token_ids

VOCAB_SIZE, NUM_POSITIONS, WIDTH, CHUNK = 151_936, 256, 64, 128
CUTS = (
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.95),
    SamplingParams(top_k=20, top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(top_p=0.9),
)


def make_logits() -> torch.Tensor:
    """Make [N, V] of them."""
    torch.manual_seed(0)
    exponents = np.random.default_rng(0).gamma(4.0, 0.9, NUM_POSITIONS) + 0.9
    ranks = torch.stack([torch.randperm(VOCAB_SIZE) for _ in range(NUM_POSITIONS)]) + 1
    return -torch.from_numpy(exponents).float()[:, None] * ranks.log()


def find_sets(logits: torch.Tensor, params: SamplingParams) -> KeptIds:
    """What these parameters keep at each position."""
    packed = np.array([pack_params(params)] * len(logits), dtype=PARAMS_DTYPE)
    return KeptIds.of(find_kept(compute_logprobs(logits, packed, lambda _: (token_ids([]), token_ids([])))))


def time_head(kept: KeptIds | None, targets: torch.Tensor) -> float:
    """Seconds of a forward and a backward pass of the head, the better of two."""
    weight = torch.randn(VOCAB_SIZE, WIDTH, requires_grad=True)
    hidden = torch.randn(NUM_POSITIONS, WIDTH, requires_grad=True)
    tokens = None if kept is None else KeptTokens.of(kept, torch.device("cpu"))
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        scores = chunked_scores(
            hidden, targets, lambda part: part @ weight.T, temperature=1.0, chunk_size=CHUNK, kept=tokens
        )
        torch.autograd.backward(scores.logprobs_N.sum())
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Print both."""
    logits = make_logits()
    logprobs = logits.log_softmax(-1)
    print(f"mean entropy {-(logprobs.exp() * logprobs).sum(-1).mean():.2f} nats")
    sets = [find_sets(logits, params) for params in CUTS]
    for params, kept in zip(CUTS, sets, strict=True):
        sizes = kept.sizes
        num_bytes = (kept.token_ids.nbytes + kept.offsets.nbytes) / len(kept)
        print(f"{params.truncations}: {sizes.mean():.1f} ids a position, median {np.median(sizes):.0f}, most ", end="")
        print(f"{sizes.max()}; {num_bytes:.0f} bytes a sampled id")
    targets = logits.argmax(-1)
    print(f"head, whole: {time_head(None, targets):.2f} s; kept: {time_head(sets[-1], targets):.2f} s")


if __name__ == "__main__":
    main()
