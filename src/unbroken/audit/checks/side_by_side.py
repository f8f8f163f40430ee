"""One conversation as two sequences: the ids that we train on, and those of the usual decode, parse, render, tokenise.

Its made-up turns differ from the template's text as those of a model do: other spaces in the JSON of a call, an answer
cut by length, a word spelled with two tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from unbroken.audit.checks.template import find_json_style
from unbroken.audit.checks.turns import make_completion
from unbroken.audit.conversations import TOOLS
from unbroken.audit.report import ShownConversation
from unbroken.audit.subject import Subject
from unbroken.errors import UnbrokenError
from unbroken.messages import Message, ToolSchema, make_call
from unbroken.rendering.base import TEMPLATE, Refusal
from unbroken.retokenising.changes import IdOrigin
from unbroken.retokenising.comparison import SampledTurn, retokenise
from unbroken.types import token_ids
from unbroken.viewer.reports import show_side_by_side

_CALL_ID = "call00001"
_ARGUMENTS = {"query": "library hours", "limit": 3}
_RESULT = '{"hours": "9 to 17", "days": ["monday", "friday"]}'
_ANSWER = "The library is open from 9 to 17."
_CUT = "On Saturdays the library is"
_LAST = "It is closed on Sundays, and open until noon on Saturdays."


@dataclass(slots=True)
class _Trajectory:
    """The sequence that we train on so far, and its messages."""

    messages: list[Message]
    tools: Sequence[ToolSchema]
    ids: list[int] = field(default_factory=list)
    origins: list[IdOrigin] = field(default_factory=list)
    turns: list[SampledTurn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def extend(self, ids: Sequence[int], origins: Sequence[IdOrigin]) -> None:
        """Append ids with their origins."""
        self.ids += [int(i) for i in ids]
        self.origins += origins


_Sampler = Callable[[Subject, _Trajectory], "list[int] | None"]
"""Makes the ids of a turn; None if the template does not write it after its generation prompt."""


def find_side_by_side(subject: Subject, *, max_calls: int) -> ShownConversation:
    """Run the conversation through the renderer under audit."""
    try:
        return _run_conversation(subject, with_call=max_calls > 0)
    except UnbrokenError as error:
        return _make_missing(str(error))


def _run_conversation(subject: Subject, *, with_call: bool) -> ShownConversation:
    tools = TOOLS if with_call else ()
    history: list[Message] = [{"role": "user", "content": "When is the library open?"}]
    result: Message = {"role": "tool", "content": _RESULT, "name": "search", "tool_call_id": _CALL_ID}
    question: Message = {"role": "user", "content": "And on Saturdays?"}
    path = _Trajectory(messages=history, tools=tools)
    prompt = subject.renderer.render(history, tools=tools).token_ids.tolist()
    path.extend(prompt, [IdOrigin.PROMPT] * len(prompt))
    turns: list[tuple[_Sampler, list[Message]]] = [(_sample_cut, [question]), (_sample_split, [])]
    if with_call:
        turns.insert(0, (_sample_call, [result]))
    for sample, new in turns:
        missing = _append_turn(subject, path, sample(subject, path), new)
        if missing:
            return _make_missing(missing)
    return _compare(subject, path)


def _append_turn(subject: Subject, path: _Trajectory, completion: list[int] | None, new: list[Message]) -> str:
    """Append a sampled turn and the messages after it; returns the reason if that is impossible, else an empty text."""
    if completion is None:
        return "the template does not write a turn after its own generation prompt"
    prompt = token_ids(path.ids)
    sampled = token_ids(completion)
    parsed = subject.renderer.parse_response(sampled, prompt_ids=prompt, tools=path.tools)
    message = parsed.to_message([_CALL_ID] * len(parsed.tool_calls))
    earlier = list(path.messages)
    path.extend(completion, [IdOrigin.SAMPLED] * len(completion))
    path.messages.append(message)
    turn = SampledTurn(
        completion_ids=sampled, parsed=parsed, message=message, start=len(prompt), num_ids=len(completion)
    )
    path.turns.append(turn)
    if not new:
        return ""
    outcome = subject.renderer.bridge_to_next_turn(
        prompt, sampled, new, assistant=message, tools=path.tools, earlier=earlier
    )
    if isinstance(outcome, Refusal):
        return f"the bridge to the next turn is refused ({outcome.reason.value}): {outcome.detail}"
    if outcome.num_taken_back:
        del path.ids[-1], path.origins[-1]
        path.turns[-1] = replace(turn, num_ids=len(completion) - 1)
    origins = [IdOrigin.BRIDGE if i == TEMPLATE else IdOrigin.MESSAGE for i in outcome.message_indices.tolist()]
    path.extend(outcome.bridge_ids.tolist(), origins)
    path.messages += new
    return ""


def _sample_call(subject: Subject, path: _Trajectory) -> list[int] | None:
    turn: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [make_call(_CALL_ID, "search", _ARGUMENTS)],
    }
    sampled = make_completion(subject, path.messages, turn, tools=path.tools, next_role="tool")
    if sampled is None:
        return None
    body, style = sampled.body, find_json_style(subject)
    if style is not None:
        spaced = (", ", ": ")
        other = (",", ":") if style["separators"] == spaced else spaced
        respelled = json.dumps(_ARGUMENTS, separators=other)
        body = body.replace(json.dumps(_ARGUMENTS, **style), respelled)
        path.notes.append(f"the call's arguments were sampled as {respelled}")
    return subject.encode(body + sampled.stop)


def _sample_cut(subject: Subject, path: _Trajectory) -> list[int] | None:
    sampled = _sample_text(subject, path, f"{_ANSWER} {_CUT}")
    if sampled is None:
        return None
    path.notes.append(
        "an answer was cut by length, so that no end of turn was sampled (retokenised, one is trained on)"
    )
    return subject.encode(sampled[0])


def _sample_split(subject: Subject, path: _Trajectory) -> list[int] | None:
    sampled = _sample_text(subject, path, _LAST)
    if sampled is None:
        return None
    ids = subject.encode("".join(sampled))
    split = _split_word(subject, ids)
    if split is not None:
        path.notes.append(f"{split[0]!r} was sampled as {' + '.join(map(repr, split[1]))}")
        ids = split[2]
    return ids


def _sample_text(subject: Subject, path: _Trajectory, text: str) -> tuple[str, str] | None:
    turn: Message = {"role": "assistant", "content": text}
    sampled = make_completion(subject, path.messages, turn, tools=path.tools)
    return None if sampled is None else (sampled.body, sampled.stop)


def _split_word(subject: Subject, ids: list[int]) -> tuple[str, tuple[str, ...], list[int]] | None:
    """Spell the longest possible word with two tokens: the word, its pieces and the new ids; None if no word can be."""
    texts = [token.text for token in subject.get_tokens(ids)]
    for position in sorted(range(len(ids)), key=lambda i: -len(texts[i])):
        text = texts[position]
        if ids[position] in subject.facts.control_tokens.ids or not text.strip().isalpha():
            continue
        for middle in range(len(text) - 1, 0, -1):
            pieces = subject.encode(text[:middle]) + subject.encode(text[middle:])
            other = [*ids[:position], *pieces, *ids[position + 1 :]]
            if len(pieces) == 2 and subject.decode(other) == subject.decode(ids):
                return text, tuple(token.text for token in subject.get_tokens(pieces)), other
    return None


def _compare(subject: Subject, path: _Trajectory) -> ShownConversation:
    found = retokenise(subject, token_ids(path.ids), path.origins, path.turns, path.messages, tools=path.tools)
    if found is None:
        return _make_missing("the template refuses the parsed conversation")
    return ShownConversation(sides=show_side_by_side(found, subject.get_text), notes=tuple(path.notes))


def _make_missing(why: str) -> ShownConversation:
    return ShownConversation(sides=None, missing=why)
