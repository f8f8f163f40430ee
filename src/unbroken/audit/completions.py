r"""Makes the text of a completion as a model would sample it: the template's text after its generation prompt.

prompt  <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n
last    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
                                                              `body´`- stop -´
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from unbroken.audit.conversations import make_call
from unbroken.audit.subject import Subject
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Refusal
from unbroken.rendering.facts import TemplateFacts, TurnEnds

_SAID, _NEXT, _CALL_ID = "Zq8Said", "Zq8Next", "callzqe0z"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionText:
    """The text of one sampled turn; `stop` is the token that ends it."""

    prompt: str
    body: str
    stop: str


def make_completion(
    subject: Subject, history: Sequence[Message], turn: Message, *, tools: Sequence[ToolSchema], next_role: str = "user"
) -> CompletionText | None:
    """Make the completion for a turn that a message with the role `next_role` follows.

    None: the template refuses the turn, does not write it after its generation prompt, or nothing ends it.
    """
    ends = subject.facts.turn_ends
    prompt = subject.render_text(history, tools=tools, add_generation_prompt=True)
    last = subject.render_text([*history, turn], tools=tools)
    if prompt is None or last is None or isinstance(ends, Refusal):
        return None
    if prompt == subject.render_text(history, tools=tools):
        last = _drop_generation_prompt(subject.facts, ends, prompt, last)
    body = _find_body(subject.facts, prompt, last)
    if body is None:
        return None
    run = _find_end_run(subject.facts, ends, body)
    if run:
        num_close = _count_shared([token for token, _ in run], ends.sequence)
        stop, start = run[max(num_close, 1) - 1]
        return CompletionText(prompt=prompt, body=body[:start], stop=stop)
    header = _find_header(subject, ends, tools, next_role)
    return None if header is None else CompletionText(prompt=prompt, body=body.rstrip(), stop=header)


def _drop_generation_prompt(facts: TemplateFacts, ends: TurnEnds, prompt: str, last: str) -> str:
    """Without the generation prompt, for a template that writes it after every conversation."""
    num_shared = _count_shared(prompt[::-1], last[::-1])
    start = len(last) - num_shared
    stops = [match.stop for match in facts.control_tokens.find(last, start) if match.token in ends.tokens]
    return last[: stops[-1]] if stops else last


def _find_body(facts: TemplateFacts, prompt: str, last: str) -> str | None:
    """The text after the generation prompt, which may open reasoning that the template leaves out later on."""
    shared = _count_shared(prompt, last)
    shared = next((m.start for m in facts.control_tokens.find(prompt) if m.start < shared < m.stop), shared)
    rest = prompt[shared:].strip()
    if not rest:
        return last[shared:]
    opening, closing = facts.reasoning_markup
    body = last[shared:]
    closes = body.lstrip().startswith(closing)
    if rest == opening:  # The model closes the empty reasoning, which the template may have left out.
        return body if closes else f"{closing}{body}"
    if "".join(rest.split()) == opening + closing and closes:
        return body.lstrip().removeprefix(closing)
    return None


def _find_end_run(facts: TemplateFacts, ends: TurnEnds, body: str) -> list[tuple[str, int]]:
    """The end tokens that close the body, with their positions and only white space between them."""
    run: list[tuple[str, int]] = []
    stop = len(body)
    for match in reversed(list(facts.control_tokens.find(body))):
        if match.token not in ends.tokens or body[match.stop : stop].strip():
            break
        run.insert(0, (match.token, match.start))
        stop = match.start
    return run


def _find_header(subject: Subject, ends: TurnEnds, tools: Sequence[ToolSchema], next_role: str) -> str | None:
    """The header of the next message, for templates where it ends a turn."""
    turn: Message = {"role": "assistant", "content": "" if next_role == "tool" else _SAID}
    following: Message = {"role": next_role, "content": _NEXT}
    if next_role == "tool":
        turn["tool_calls"] = [make_call("search", _CALL_ID, {"query": _SAID})]
        following |= {"tool_call_id": _CALL_ID, "name": "search"}
    messages: list[Message] = [{"role": "user", "content": "hi"}, turn, following]
    text = subject.render_text(messages, tools=tools, add_generation_prompt=True) or ""
    said = text.rfind(_SAID)
    if said < 0:
        return None
    matches = subject.facts.control_tokens.find(text, said)
    return next((match.token for match in matches if match.token in ends.tokens), None)


def _count_shared(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
