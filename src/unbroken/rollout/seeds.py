"""Seeds of parts, so that no two of them draw the same random numbers."""

from __future__ import annotations

import numpy as np


def derive_seed(seed: int | None, *place: int) -> int | None:
    """Derive the seed of a part (a sibling, a turn) from that of the whole; None stays None."""
    return None if seed is None else int(np.random.SeedSequence([seed, *place]).generate_state(1)[0])


def derive_problem_seed(seed: int, split: str, number: int) -> int:
    """Derive the seed of problem `number` of a split (`train`, `evaluation`, ...) of a run, from 0 to 2^31 - 1."""
    return int(np.random.SeedSequence([seed, number, *split.encode()]).generate_state(1)[0]) >> 1
