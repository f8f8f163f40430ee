r"""The grammar of a turn that must call tools, derived from calls that the template renders.

    <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "now", ...{}}\n</tool_call>
    `----- opening ------´   `- middle -----´        `----------------- joint ----------------´          `- closing ---´

It exists for templates that write arguments as JSON after the name. What the grammar describes is parsed once, so that
a call which obeys it is one that the parser reads. Its form is xgrammar's structural tag, which vLLM takes
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag): control tokens in it are ids, which text cannot spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_CONTENT,
    PROBE_NAMES,
    PROBE_TOOLS,
    PROBE_USER,
    MessageFormat,
    probe_call,
)

_CALL_IDS = ("callprob1", "callprob2")
_CALL_ID = "[a-zA-Z0-9]{1,9}"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SPACE = "[ \\n]{0,4}"
PROBE_CALLS = tuple((name, {"value": f"{PROBE_ARGUMENT}{k}"}) for k, name in enumerate(PROBE_NAMES))
"""The calls of the probes: names and arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """The texts around names and arguments. A call id in them stands for any other."""

    opening: str
    middle: str
    joint: str | None
    """None if a turn has one call only, or if the others are written differently."""
    closing: str

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write calls as the grammar describes them."""
        written = [name + self.middle + json.dumps(arguments) for name, arguments in calls]
        return self.opening + (self.joint or "").join(written) + self.closing

    def to_structural_tag(
        self,
        functions: Sequence[ToolSchema],
        control: AddedTokens,
        *,
        several: bool,
        before: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The grammar of calls to these functions, as JSON text: one, or with `several` any number from one on.

        `before` are the formats of what may come before the calls.
        """
        calls = [self._describe_call(tool["function"], control) for tool in functions]
        call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
        more: list[Mapping[str, Any]] = []
        if several and self.joint is not None:
            more = [{"type": "star", "content": _sequence([*_describe_text(self.joint, control), call])}]
        opening, closing = _describe_text(self.opening, control), _describe_text(self.closing, control)
        turn = _sequence([*before, *opening, call, *more, *closing])
        return json.dumps({"type": "structural_tag", "format": turn})

    def _describe_call(self, function: Mapping[str, Any], control: AddedTokens) -> Mapping[str, Any]:
        schema = function.get("parameters") or _ANY_OBJECT
        return _sequence(
            [*_describe_text(function["name"] + self.middle, control), {"type": "json_schema", "json_schema": schema}]
        )


def find_call_grammar(
    template: ChatTemplate, message_format: MessageFormat, turn_ends: Collection[str]
) -> CallGrammar | None:
    """Find the grammar by rendering one call and two; None if the template does not write arguments as JSON."""
    one = _render_calls(template, message_format, 1, turn_ends)
    if one is None or (found := _split(one, 0)) is None:
        return None
    opening, middle, closing = found
    two = _render_calls(template, message_format, 2, turn_ends)
    return CallGrammar(
        opening=opening, middle=middle, joint=_find_joint(two, opening, middle, closing), closing=closing
    )


def describe_reasoning(
    opening_id: int, closing_id: int, *, is_open: bool, stop_token_ids: Collection[int]
) -> list[Mapping[str, Any]]:
    """The formats of reasoning before the calls, between two control ids; optional unless the prompt opened it."""
    inside = {"type": "exclude_token", "exclude_tokens": sorted({opening_id, closing_id, *stop_token_ids})}
    rest = [{"type": "star", "content": inside}, _token(closing_id), {"type": "regex", "pattern": _SPACE}]
    if is_open:
        return list(rest)
    return [{"type": "optional", "content": _sequence([_token(opening_id), *rest])}]


def _render_calls(
    template: ChatTemplate, message_format: MessageFormat, number: int, turn_ends: Collection[str]
) -> str | None:
    """The text of a turn with this many calls, from the first of them to the turn's end; None if it is not clear."""
    calls = [
        probe_call(name, _CALL_IDS[k], dict(arguments)) for k, (name, arguments) in enumerate(PROBE_CALLS[:number])
    ]
    for content in (PROBE_CONTENT, ""):
        user: Message = {"role": "user", "content": PROBE_USER}
        turn: Message = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            text = _render(template, message_format, [user, turn])
            prompt = _render(template, message_format, [user], add_generation_prompt=True)
        except TemplateError:
            continue
        after = text.rpartition(content)[2] if content else text.removeprefix(prompt)
        if (content and content not in text) or after == text:
            continue
        end = min((place for stop in turn_ends if (place := after.find(stop)) >= 0), default=len(after))
        body = after[:end].strip()
        if PROBE_NAMES[number - 1] in body:
            return body
    return None


def _render(
    template: ChatTemplate,
    message_format: MessageFormat,
    messages: list[Message],
    *,
    add_generation_prompt: bool = False,
) -> str:
    return template.render(
        message_format.convert(messages), tools=PROBE_TOOLS, add_generation_prompt=add_generation_prompt
    )


def _split(text: str, k: int) -> tuple[str, str, str] | None:
    """Split at the name and the arguments of call `k`: the texts before, between and after; None if not in order."""
    name, arguments = PROBE_CALLS[k]
    before, found_name, rest = text.partition(name)
    for separators in ((", ", ": "), (",", ":")):
        middle, found_arguments, after = rest.partition(json.dumps(arguments, separators=separators))
        if found_name and found_arguments and name not in after:
            return before, middle, after
    return None


def _find_joint(text: str | None, opening: str, middle: str, closing: str) -> str | None:
    if text is None or (first := _split(text, 0)) is None:
        return None
    second = _split(first[2], 1)
    if second is None:
        return None
    joint, second_middle, second_closing = (part.replace(_CALL_IDS[1], _CALL_IDS[0]) for part in second)
    same = (first[0], first[1], second_middle, second_closing) == (opening, middle, middle, closing)
    return joint if same else None


def _describe_text(text: str, control: AddedTokens) -> list[Mapping[str, Any]]:
    """Formats of a text: control tokens by id, call ids as a pattern, and the rest as it is."""
    return [piece for part in re.split(f"({_CALL_IDS[0]})", text) for piece in _describe_part(part, control)]


def _describe_part(text: str, control: AddedTokens) -> Iterator[Mapping[str, Any]]:
    if text == _CALL_IDS[0]:
        yield {"type": "regex", "pattern": _CALL_ID}
        return
    position = 0
    for match in control.find(text):
        yield from _constant(text[position : match.start])
        token_id = control.get_id(match.token)
        assert token_id is not None
        yield _token(token_id)
        position = match.stop
    yield from _constant(text[position:])


def _constant(text: str) -> Iterator[Mapping[str, Any]]:
    if text:
        yield {"type": "const_string", "value": text}


def _token(token_id: int) -> Mapping[str, Any]:
    return {"type": "token", "token": token_id}


def _sequence(elements: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}
