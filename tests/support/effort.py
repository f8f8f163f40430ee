"""How many random cases the property tests try: `TEST_EFFORT=10`, as in `make fuzz`, is ten times as many."""

from __future__ import annotations

import os

EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
FUZZ_EFFORT = 10
"""That of `make fuzz`."""


def num_cases(usual: int, *, in_fuzz: int | None = None) -> int:
    """How many cases to try where `make test` tries `usual`, and `make fuzz` `in_fuzz` or ten times as many."""
    if in_fuzz is None or EFFORT == 1:
        return usual * EFFORT
    return in_fuzz * EFFORT // FUZZ_EFFORT
