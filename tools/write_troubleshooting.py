"""Write the tables of docs/troubleshooting.md from the rules of the diagnosis: `python tools/write_troubleshooting.py`.

Between the marks of a topic stand its rules; the rest of the page is written by hand. A test compares both.
"""

from __future__ import annotations

import re
from pathlib import Path

from unbroken.runs.diagnosis.rules import RULES, Topic

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- rules: {} -->\n", "<!-- end of the rules -->\n"


def make_page(text: str) -> str:
    """The page with its tables as the rules say them now; raises `ValueError` if a topic has no place in it."""
    for topic in Topic:
        begin = BEGIN.format(topic.value)
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{PAGE} must have the lines {begin!r} and {END!r}")
        table = begin + make_table(topic) + END
        text = pattern.sub(table.replace("\\", r"\\"), text)
    return text


def make_table(topic: Topic) -> str:
    """The rules of a topic, a line each; pages that an advice names are links."""
    lines = ["| diagnosis | when | what to do |", "|---|---|---|"]
    for rule in RULES:
        if rule.topic is topic:
            advice = re.sub(r"\bdocs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", rule.advice)
            lines.append(f'| <a id="{rule.name}"></a>`{rule.name}` | {rule.when} | {advice} |')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text("utf-8")), "utf-8")
