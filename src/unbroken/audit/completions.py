r"""What a model samples for a turn, as the template has it: the text behind the generation prompt, and the stop.

prompt  <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n
last    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
                                                              `body´`- stop -´
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from unbroken.audit.subject import Subject
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.message_format import probe_call
from unbroken.rendering.reasoning import find_reasoning_markup

_SAID, _NEXT, _CALL_ID = "Zq8Said", "Zq8Next", "callzqe0z"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionText:
    """One turn as it is sampled."""

    prompt: str
    body: str
    stop: str
    """The token that ends it."""


def completion_text(
    subject: Subject, history: Sequence[Message], turn: Message, *, tools: Sequence[ToolSchema], then: str = "user"
) -> CompletionText | None:
    """The turn, which a message with the role `then` follows.

    None: the template refuses it, does not write it behind its generation prompt, or nothing ends it.
    """
    prompt = subject.text(history, tools=tools, generation_prompt=True)
    last = subject.text([*history, turn], tools=tools)
    if prompt is None or last is None or not isinstance(subject.ends, TurnEnds):
        return None
    body = _body(subject, prompt, last)
    if body is None:
        return None
    run = _last_run(subject, subject.ends, body)
    if run:
        num_close = _num_shared([token for token, _ in run], subject.ends.run)
        stop, start = run[max(num_close, 1) - 1]
        return CompletionText(prompt=prompt, body=body[:start], stop=stop)
    header = _header(subject, subject.ends, tools, then)
    return None if header is None else CompletionText(prompt=prompt, body=body.rstrip(), stop=header)


def _body(subject: Subject, prompt: str, last: str) -> str | None:
    """What stands behind the generation prompt, of which the template may leave out an opened reasoning later on."""
    shared = _num_shared(prompt, last)
    shared = next((m.start for m in subject.control.find(prompt) if m.start < shared < m.stop), shared)
    rest = prompt[shared:].strip()
    if not rest:
        return last[shared:]
    opening, closing = find_reasoning_markup(subject.template, subject.message_format, subject.control)
    return f"{closing}{last[shared:]}" if rest == opening else None


def _last_run(subject: Subject, ends: TurnEnds, body: str) -> list[tuple[str, int]]:
    """The ends, with their places, that the body closes with, only white space between them."""
    run: list[tuple[str, int]] = []
    stop = len(body)
    for match in reversed(list(subject.control.find(body))):
        if match.token not in ends.tokens or body[match.stop : stop].strip():
            break
        run.insert(0, (match.token, match.start))
        stop = match.start
    return run


def _header(subject: Subject, ends: TurnEnds, tools: Sequence[ToolSchema], then: str) -> str | None:
    """The header of what follows, where that is what ends a turn."""
    turn: Message = {"role": "assistant", "content": "" if then == "tool" else _SAID}
    following: Message = {"role": then, "content": _NEXT}
    if then == "tool":
        turn["tool_calls"] = [probe_call("search", _CALL_ID, {"query": _SAID})]
        following |= {"tool_call_id": _CALL_ID, "name": "search"}
    text = subject.text([{"role": "user", "content": "hi"}, turn, following], tools=tools, generation_prompt=True) or ""
    said = text.rfind(_SAID)
    if said < 0:
        return None
    return next((match.token for match in subject.control.find(text, said) if match.token in ends.tokens), None)


def _num_shared(left: Sequence[str], right: Sequence[str]) -> int:
    """How many characters or tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
