r"""Cuts tool results that are too long, so that megabytes of text neither fill the context nor take seconds to encode.

cut_text("abcdefghij", 4)    # "ab\n[... 6 of 10 characters were cut ...]\nij"
"""

from __future__ import annotations

from enum import StrEnum

from unbroken.messages import Message


class CutReason(StrEnum):
    """What was cut. The names are metrics and must stay stable."""

    TOOL_RESULT = "tool_result"
    """By `Limits.max_result_chars`."""


def cut_tool_result(message: Message, max_chars: int | None) -> bool:
    """Cut the text of a tool message to `max_chars` characters, in place; returns whether that was needed.

    The message must be well-formed, and `max_chars` None cuts nothing. Text parts are cut one after the other, until
    the rest of them has no room; images stay. Other messages stay as they are.
    """
    if max_chars is None or message["role"] != "tool":
        return False
    content = message["content"]
    if isinstance(content, str):
        message["content"] = cut_text(content, max_chars)
        return len(content) > max_chars
    num_left = max_chars
    is_cut = False
    for part in content or ():
        if part["type"] == "text":
            num_chars = len(part["text"])
            part["text"] = cut_text(part["text"], num_left)
            is_cut |= num_chars > num_left
            num_left = max(num_left - num_chars, 0)
    return is_cut


def cut_text(text: str, max_chars: int) -> str:
    """Keep the first and the last characters of a text, `max_chars` in all, with a mark between them if any is cut."""
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text
    num_first = max_chars - max_chars // 2
    mark = f"\n[... {num_cut} of {len(text)} characters were cut ...]\n"
    return f"{text[:num_first]}{mark}{text[num_first + num_cut :]}"
