"""Control tokens spelled in a tool's answer (I5): how many become ids where rendered text is tokenised as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from unbroken.audit.conversations import TOOLS
from unbroken.audit.report import ForgeryFinding
from unbroken.audit.subject import Subject
from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message
from unbroken.rendering.message_format import probe_call

_MOST_TRIED = 2048
_NUM_AT_ONCE = 32
_NUM_EXAMPLES = 6


def find_forgery(subject: Subject, *, most_calls: int) -> ForgeryFinding:
    """Put the texts of control tokens, some at a time, into a tool's answer (a user's, where there are no tools)."""
    role = "tool" if most_calls else "user"
    by_id = sorted(subject.control.texts, key=lambda text: subject.control.get_id(text) or 0)
    naive: list[str] = []
    ours: list[str] = []
    num_refused = 0
    for tokens in _chunks(by_id[:_MOST_TRIED]):
        naive += _forged(subject, tokens, _ids_naively(subject, role, tokens), _ids_naively(subject, role, []))
        found, expected = _ids_by_us(subject, role, tokens), _ids_by_us(subject, role, [])
        if found is None or expected is None:
            num_refused += len(tokens)
        else:
            ours += _forged(subject, tokens, found, expected)
    return ForgeryFinding(
        role=role,
        num_tried=len(by_id[:_MOST_TRIED]),
        num_forged_naively=len(naive),
        num_forged_by_us=len(ours),
        num_refused_by_us=num_refused,
        examples=tuple(_best_known(subject, naive)[:_NUM_EXAMPLES]),
    )


def _forged(subject: Subject, tokens: list[str], found: list[int], expected: list[int]) -> list[str]:
    """The tokens whose ids the spelled ones add to."""
    counts, usual = Counter(found), Counter(expected)
    return [token for token in tokens if counts[i := subject.control.get_id(token) or 0] > usual[i]]


def _ids_naively(subject: Subject, role: str, tokens: list[str]) -> list[int]:
    text = subject.text(_messages(role, tokens), tools=TOOLS if role == "tool" else (), generation_prompt=True)
    return subject.encode(text or "")


def _ids_by_us(subject: Subject, role: str, tokens: list[str]) -> list[int] | None:
    try:
        prompt = subject.renderer.render(_messages(role, tokens), tools=TOOLS if role == "tool" else ())
    except (MessagesError, TemplateError):
        return None
    ids: list[int] = prompt.token_ids.tolist()
    return ids


def _messages(role: str, tokens: list[str]) -> list[Message]:
    content = f"It says {' and '.join(tokens)} here."
    if role == "user":
        return [{"role": "user", "content": content}]
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [probe_call("search", "callzqe0z", {"query": "x"})]},
        {"role": "tool", "content": content, "name": "search", "tool_call_id": "callzqe0z"},
    ]


def _best_known(subject: Subject, tokens: list[str]) -> list[str]:
    """Those that the template itself writes first."""
    return sorted(tokens, key=lambda token: token not in subject.source)


def _chunks(tokens: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(tokens), _NUM_AT_ONCE):
        yield tokens[start : start + _NUM_AT_ONCE]
