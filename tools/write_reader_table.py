"""Write the table of call readers at the end of docs/templates.md; run it by `make templates`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.field_readers import DIALECTS, NOT_RUN, SGLANG, compare, quiet  # noqa: E402

PAGE = ROOT / "docs" / "templates.md"
TITLE = "\n## Other readers of calls\n"
TEXT = """
What other libraries read as calls, and what we make of it. Each format has about 40 spellings: as its models write it,
and with what they slip into (text around a call, no end mark, arguments as text, null or missing, Python in JSON, two
calls, reasoning that is not closed). A row is one reader over the spellings of one format: in how many of them it reads
calls, and in how many of these we read the same calls, as many other calls (mostly with another type of a value that
the tool's schema does not have), or failed calls, which are counted by their status. There is no spelling in which it
reads a call that we neither read nor count: `tests/e2e/test_field_readers.py`, in `make clients`, checks that, and
these rows. vLLM is the version that `make setup` installs, SGLang that of `make clients`.

| format | reader | reads calls in | we read the same | other calls | we count |
|---|---|---|---|---|---|
"""


def main() -> int:
    """Replace the table; returns the exit status."""
    if not SGLANG.is_dir():
        print(f"SGLang is not installed in {SGLANG}: `make clients` does it", file=sys.stderr)
        return 1
    with quiet():
        found = [each for dialect in DIALECTS for each in compare(dialect)]
    rows = "".join(f"{each.to_row()}\n" for each in found)
    missing = "".join(
        f"\nNot run of {library}: {'; '.join(f'{names}: {reason}' for names, reason in readers.items())}.\n"
        for library, readers in NOT_RUN.items()
    )
    PAGE.write_text(PAGE.read_text().partition(TITLE)[0] + TITLE + TEXT + rows + missing)
    print(f"{len(found)} readers: {PAGE}")
    return 1 if any(each.lost for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
