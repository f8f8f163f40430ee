"""Every reader of what somebody else wrote against every hostile file: a clear error, soon, in little memory.

The tables are `READERS` in `support/attacked_readers.py` and `list_attacks` in `support/attacks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import attacked_readers
from support.attacks import Outcome, attack
from unbroken.limited_process import LimitedProcess, ProcessLimits

LONGEST_S, MOST_BYTES, LONGEST_ERROR = 5.0, 600 << 20, 3000


@pytest.fixture(scope="module")
def attacked() -> Iterator[LimitedProcess[tuple[str, bool, Outcome] | None]]:
    """A process that a reader which hangs, or takes all memory, cannot keep."""
    limits = ProcessLimits(timeout_s=60.0, memory_bytes=8 << 30)
    process = LimitedProcess(attack, limits, name="a reader", preload=[attacked_readers.__name__])
    yield process
    process.close()


@pytest.mark.parametrize("name", attacked_readers.READERS)
def test_a_hostile_file_is_refused_by_name_soon_and_in_little_memory(
    attacked: LimitedProcess[tuple[str, bool, Outcome] | None], tmp_path: Path, name: str
) -> None:
    reader, wrong = attacked_readers.READERS[name], []
    num_refused = number = 0
    place = str(tmp_path / "place")
    while (found := attacked.call(attacked_readers.__name__, name, place, number)) is not None:
        title, must_refuse, outcome = found
        names = reader.says or "place"
        problems = [
            outcome.crash,
            "" if outcome.seconds < LONGEST_S else f"took {outcome.seconds:.1f} s",
            "" if outcome.num_bytes < MOST_BYTES else f"took {outcome.num_bytes >> 20} MiB",
            f"{outcome.num_left_open} files left open" if outcome.num_left_open > 0 else "",
            "not refused" if must_refuse and not reader.is_lenient and not outcome.error else "",
            "refused" if number == 0 and outcome.error else "",
            f"does not name {names}" if outcome.error and names not in outcome.error else "",
            "a long error" if len(outcome.error) > LONGEST_ERROR else "",
        ]
        num_refused += bool(outcome.error)
        number += 1
        wrong += [f"{title}: {problem}: {outcome.error[:300]}" for problem in problems if problem]
    assert not wrong, "\n".join(wrong)
    assert number > 8, "a reader has attacks"
    assert reader.is_lenient or num_refused > 6
