"""Count what a newcomer reads and types, from the README to a task of their own: `python tools/measure_reading.py`.

The path is the README's beginning, what `unbroken new` and `unbroken train` print, and the files of the new folder.
Words are read at 240 a minute and characters typed at 200. What can be pasted, a block of a page, is not typed.
The status is 1 if there is more than a reader has time for in ten minutes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from unbroken.demo.new import write_task

ROOT = Path(__file__).parents[1]
LAST_HEADING = "## Your own task in ten minutes\n"
EDITED = ("make_data.py", "tools.py", "rewards.py", "task.toml")
TYPED = (
    "unbroken new words\n",
    "cd words\n",
    "unbroken train task.toml\n",
    "second",  # in make_data.py: the answer is the word of the first lookup
    "    return [float(sum(each['role'] == 'tool' for each in talk) == 1) for talk in messages]\n",  # if it is another
    "second",  # in task.toml: the folder; the three # are removed by as many keys
    "xxx",
    "python make_data.py\n",
    "python test_rewards.py\n",
    "unbroken train task.toml\n",
    "unbroken view runs/second\n",
    "unbroken eval task.toml --model model --model runs/second\n",
)
"""An own task, if nothing of it is pasted."""
MAX_WORDS, MAX_CHARACTERS = 700, 600
WORDS_A_MINUTE, CHARACTERS_A_MINUTE = 240, 200


def main() -> int:
    """Print the table; 1 if it is too much."""
    sections = list_sections()
    words, typed = sum(number for _, number in sections), sum(map(len, TYPED))
    for name, number in sections:
        print(f"{name:60}{number:7,} words")
    print(f"{'read':60}{words:7,} words, at most {MAX_WORDS:,}: {words / WORDS_A_MINUTE:.1f} min")
    print(f"{'typed':60}{typed:7,} characters, at most {MAX_CHARACTERS}: {typed / CHARACTERS_A_MINUTE:.1f} min")
    return words > MAX_WORDS or typed > MAX_CHARACTERS


def list_sections() -> list[tuple[str, int]]:
    """What is read on the way, in order, with its number of words."""
    readme = (ROOT / "README.md").read_text("utf-8")
    before, found, after = readme.partition(LAST_HEADING)
    if not found:
        raise ValueError(f"README.md must have the heading {LAST_HEADING!r}")
    sections = _split("README.md", before + found + after.partition("\n## ")[0])
    page = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    (printed,) = re.findall(r"```text\n(numerics: .*?)```", page, re.DOTALL)
    sections.append(("what `unbroken train` prints", _count(printed)))
    with tempfile.TemporaryDirectory() as folder:
        write_task(task := Path(folder) / "words")
        sections += _split("words/README.md", (task / "README.md").read_text("utf-8"))
        sections += [(f"words/{name}", _count((task / name).read_text("utf-8"))) for name in EDITED]
    return sections


def _split(name: str, text: str) -> list[tuple[str, int]]:
    """The sections of a page by their headings; a `#` in a block of code is no heading."""
    parts = re.split(r"(?m)^(?=#+ [A-Z])", text)
    titles = [part.partition("\n")[0].lstrip("# ") for part in parts]
    return [
        (f"{name}: {title}" if title else name, _count(part)) for title, part in zip(titles, parts, strict=True) if part
    ]


def _count(text: str) -> int:
    """Words, without what has no letter: the lines of tables, the marks of pages."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


if __name__ == "__main__":
    sys.exit(main())
