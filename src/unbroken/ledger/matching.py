"""Whether a message that an agent sends back is one that is recorded.

Agents send the whole conversation with every request, and spell it anew: without the reasoning, with other white space,
with arguments written differently, under other call ids. Such differences are tolerated by rules with names;
any other makes it another message. What is recorded stays as it is: a match only selects.

Given messages (from the agent: system, user, tool) must be equal, but for forms that mean the same. Replies (sampled by
us) are compared with what was delivered, by `Tolerance`.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, cast

from unbroken.messages import (
    IMAGE_TYPES,
    REASONING_KEYS,
    Message,
    ToolSchema,
    get_image_source,
    get_reasoning,
    get_text,
    has_images,
)
from unbroken.types import EncodedImage


class Tolerance(StrEnum):
    """A difference between a reply that was delivered and the same reply in a later request. The names are metrics."""

    DROPPED_REASONING = "dropped_reasoning"
    FOLDED_REASONING = "folded_reasoning"
    """Reasoning that came back inside the content: as `<think>..</think>`, or just before it."""
    DROPPED_TEXT = "dropped_text"
    """Calls that came back without the text beside them; or the beginning of a reply whose stream broke, which came
    back alone or before the reply to the retry, and is left out."""
    FOLDED_CALLS = "folded_calls"
    """Calls that came back inside the content: after the text, a line that announces them and a list of them."""
    WHITE_SPACE = "white_space"
    """At the ends of the content or the reasoning."""
    CONTENT_FORM = "content_form"
    """Text as a list of text parts; no content as an empty list; a given reply and ours as one message. Null and empty
    text are one form."""
    ARGUMENT_SPELLING = "argument_spelling"
    """Other JSON text of equal arguments."""
    ARGUMENT_DEFAULTS = "argument_defaults"
    """Arguments that were left out, and came back with the default of the tool's schema; or the reverse."""
    CALL_IDS = "call_ids"
    """Calls under other ids, or without, and their results likewise."""
    EXTRA_FIELDS = "extra_fields"
    """Fields that are not part of a message, such as `annotations` or `refusal: null`."""
    SEVERAL_MATCHES = "several_matches"
    """Several recorded replies are equal to it: the one with the longest matching history, then the newest, counts."""


_JSON = json.JSONEncoder(sort_keys=True, default=str, separators=(",", ":"))
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning"}
)
_NO_CONTENT_FIELDS = frozenset(
    {
        "annotations",
        "audio",
        "cache_control",
        "function_call",
        "id",
        "index",
        "provider_specific_fields",
        "refusal",
        "status",
        "type",
    }
)
"""Fields that SDKs add to messages. A given message may have them; other unknown fields make it another message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """What a message is, apart from its spelling."""

    role: str
    key: bytes
    """Digest of everything that must be equal. For assistant messages: without reasoning and outer white space, and
    without arguments that are the default."""
    calls_key: bytes
    """The same without the content."""
    exact_key: bytes
    """The same without the content, with arguments that are the default."""
    text: str | None
    """The content, if it is only text."""
    reasoning: str
    is_plain: bool
    """The content is not a list."""
    arguments: tuple[str, ...]
    """The JSON text of each call's arguments, as the message spells it."""
    call_ids: tuple[str | None, ...]
    answers: tuple[int, int] | None
    """The call that a tool message answers: how many messages before it, and which call of that message."""
    has_extra_fields: bool


Defaults: TypeAlias = Mapping[tuple[str, str], Collection[bytes]]
"""Defaults of arguments, encoded, by the names of the function and of the argument."""


def find_defaults(tools: Sequence[ToolSchema]) -> dict[tuple[str, str], set[bytes]]:
    """Find the defaults of all arguments in the schemas of tools."""
    found: dict[tuple[str, str], set[bytes]] = {}
    for tool in tools:
        function: Any = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(schema, Mapping) and "default" in schema:
                key = (str(function.get("name")), name)
                found.setdefault(key, set()).add(_encode(_unify_numbers(schema["default"])))
    return found


@dataclass(frozen=True, slots=True)
class _Calls:
    """A message with calls, linked to the one before it."""

    earlier: _Calls | None
    position: int
    ids: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a conversation: what it needs to know of the messages before it."""

    position: int = 0
    """The number of messages before it."""
    calls: _Calls | None = None
    num_answered: int = 0
    """How many of the last message's calls have an answer."""
    defaults: Defaults = field(default_factory=dict)
    """Of the conversation's tools."""


def identify(message: Message, place: Place) -> tuple[MessageForm, Place]:
    """The form of a message at a place, and the place after it.

    Calls are known by their place, so that ids may be replaced. A tool message without an id answers the next call that
    has no answer yet.
    """
    made: Sequence[Any] = message.get("tool_calls") or ()
    call_ids = tuple(call.get("id") for call in made)
    answers = _find_call(message.get("tool_call_id"), place) if message["role"] == "tool" else None
    after = Place(
        place.position + 1,
        _Calls(place.calls, place.position, call_ids) if made else place.calls,
        0 if made else place.num_answered + (message["role"] == "tool"),
        place.defaults,
    )
    return _make_form(message, call_ids, answers, place.defaults), after


def compare_reply(sent: MessageForm, delivered: MessageForm) -> frozenset[Tolerance] | None:
    """The tolerances under which a message is a delivered reply; None if it is another message."""
    if sent.calls_key != delivered.calls_key:
        return None
    of_text, of_reasoning = _compare_text(sent, delivered), _compare_reasoning(sent, delivered)
    if of_text is None or of_reasoning is None:
        return None
    if Tolerance.FOLDED_REASONING in of_text:  # it is not dropped: it is in the text
        of_reasoning -= {Tolerance.DROPPED_REASONING}
    differences = {
        Tolerance.CONTENT_FORM: sent.is_plain != delivered.is_plain,
        Tolerance.ARGUMENT_SPELLING: sent.arguments != delivered.arguments and sent.exact_key == delivered.exact_key,
        Tolerance.ARGUMENT_DEFAULTS: sent.exact_key != delivered.exact_key,
        Tolerance.CALL_IDS: sent.call_ids != delivered.call_ids,
        Tolerance.EXTRA_FIELDS: sent.has_extra_fields,
    }
    return of_text | of_reasoning | {tolerance for tolerance, is_used in differences.items() if is_used}


def _compare_text(sent: MessageForm, delivered: MessageForm) -> frozenset[Tolerance] | None:
    """The tolerances under which the text is that of a delivered reply; None if it is another text."""
    if sent.key == delivered.key:
        return frozenset([Tolerance.WHITE_SPACE] if sent.text != delivered.text else [])
    if _has_folded(sent, delivered):
        return frozenset([Tolerance.FOLDED_REASONING])
    # The calls say which reply it is.
    if sent.text is not None and not sent.text.strip() and sent.call_ids:
        return frozenset([Tolerance.DROPPED_TEXT])
    return None


def _compare_reasoning(sent: MessageForm, delivered: MessageForm) -> frozenset[Tolerance] | None:
    """The tolerances under which the reasoning is that of a delivered reply; None if it is another one."""
    if not sent.reasoning:
        return frozenset([Tolerance.DROPPED_REASONING] if delivered.reasoning.strip() else [])
    if sent.reasoning.strip() != delivered.reasoning.strip():
        return None
    return frozenset([Tolerance.WHITE_SPACE] if sent.reasoning != delivered.reasoning else [])


_OPENING, _CLOSING = "<think>", "</think>"
"""How agents fold reasoning into the content, whatever tokens the model has for it."""


def _has_folded(sent: MessageForm, delivered: MessageForm) -> bool:
    """Whether the text sent is the reasoning delivered, between `<think>` and `</think>` or not, and then its text."""
    reasoning = delivered.reasoning.strip()
    if sent.text is None or delivered.text is None or sent.reasoning or not reasoning:
        return False
    text = sent.text.strip().removeprefix(_OPENING).lstrip()
    rest = text.removeprefix(reasoning).lstrip().removeprefix(_CLOSING)
    return text.startswith(reasoning) and rest.strip() == delivered.text.strip()


_MAX_SPELLING = 10
"""How many characters a list of calls may have for one of the reply: JSON may write six for an accented letter."""


def compare_listed(sent: MessageForm, delivered: MessageForm, reply: Message) -> frozenset[Tolerance] | None:
    """The tolerances under which a text is a reply that lists its calls; None if it says anything else.

    smolagents 1.26 sends the text, the line `Calling tools:` and `[{'id': .., 'type': 'function', 'function': {..}}]`,
    in the order of the ids. It puts back a stop string that was cut: the text may be that of `reply` too, which has it.
    """
    own, reasoning = get_text(reply.get("content")), delivered.reasoning.strip()
    head, _, listed = (sent.text or "").rstrip().rpartition("\n")
    said, _, announced = head.rpartition("\n")
    has_text = said.strip() in (own.strip(), (delivered.text or "").strip()) and announced.rstrip().endswith(":")
    if not has_text or sent.call_ids or sent.reasoning.strip() not in ("", reasoning):
        return None
    if not _lists_calls(listed, own, reply.get("tool_calls") or ()):
        return None
    differences = {
        Tolerance.FOLDED_CALLS: True,
        Tolerance.DROPPED_REASONING: bool(reasoning) and not sent.reasoning,
        Tolerance.CONTENT_FORM: sent.is_plain != delivered.is_plain,
        Tolerance.EXTRA_FIELDS: sent.has_extra_fields,
    }
    return frozenset(tolerance for tolerance, is_used in differences.items() if is_used)


def _lists_calls(listed: str, text: str, made: Sequence[Any]) -> bool:
    """Whether a list is that of the calls of a reply, or of a reply without any has nothing but what its text says.

    smolagents' `CodeAgent` makes a call from the code in a text, and lists it.
    """
    if len(listed) > _MAX_SPELLING * (len(text) + sum(100 + len(str(call["function"])) for call in made)):
        return False
    calls = _read_list(listed)
    if made:
        return _encode_calls(calls) == _encode_calls(made)
    arguments = [call["function"].get("arguments") for call in calls]
    return bool(calls) and all(isinstance(own, str) and own.strip() and own.strip() in text for own in arguments)


def _read_list(line: str) -> list[Any]:
    """The calls of a list as Python or JSON writes it; none if it is no such list."""
    try:
        found = ast.literal_eval(line)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return []
    is_list = isinstance(found, list) and all(isinstance(call, dict) for call in found)
    return found if is_list and all(isinstance(call.get("function"), dict) for call in found) else []


def _encode_calls(calls: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Ids, names and arguments, in an order that does not depend on that of the calls."""
    return sorted(
        _encode([call.get("id"), call["function"].get("name"), _decode_arguments(call["function"].get("arguments"))])
        for call in calls
    )


def begins_reply(sent: MessageForm, streamed: MessageForm) -> bool:
    """Whether a message is the beginning of a reply whose stream broke: what an agent had of it."""
    return not sent.call_ids and sent.text is not None and _is_beginning(sent.text, sent.reasoning, streamed)


def follows_beginning(sent: MessageForm, delivered: MessageForm, streamed: Sequence[MessageForm]) -> bool:
    """Whether a message is the beginning of one of the `streamed` replies, and then the delivered one."""
    if sent.calls_key != delivered.calls_key or sent.text is None or delivered.text is None:
        return False
    text, reasoning = sent.text.strip(), sent.reasoning.strip()
    own_text, own_reasoning = delivered.text.strip(), delivered.reasoning.strip()
    if not text.endswith(own_text) or (reasoning and not reasoning.endswith(own_reasoning)):
        return False
    begun = text.removesuffix(own_text), reasoning.removesuffix(own_reasoning)
    return any(_is_beginning(*begun, one) for one in streamed)


def _is_beginning(text: str, reasoning: str, streamed: MessageForm) -> bool:
    text, reasoning = text.strip(), reasoning.strip()
    return (
        bool(text or reasoning)
        and (streamed.text or "").lstrip().startswith(text)
        and streamed.reasoning.lstrip().startswith(reasoning)
    )


def unfold_reasoning(message: Message) -> Message:
    """A message whose reasoning is a separate field; the same message if its text has none."""
    content = message.get("content")
    if message["role"] != "assistant" or has_images(content) or _CLOSING not in get_text(content):
        return message
    before, _, after = get_text(content).rpartition(_CLOSING)
    reasoning = "\n".join(filter(None, (get_reasoning(message), before.strip().removeprefix(_OPENING).strip())))
    others = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    return cast(Message, {**others, "content": after.lstrip("\n"), "reasoning_content": reasoning})


def digest_json(value: Any) -> str:
    """Digest of a JSON value, equal for equal values."""
    return hashlib.blake2b(_encode(value), digest_size=16).hexdigest()


def _find_call(call_id: str | None, place: Place) -> tuple[int, int] | None:
    calls = place.calls
    if call_id is None:
        if calls is None or place.num_answered >= len(calls.ids):
            return None
        return place.position - calls.position, place.num_answered
    while calls is not None:
        if call_id in calls.ids:
            return place.position - calls.position, calls.ids.index(call_id)
        calls = calls.earlier
    return None


def _read_content(message: Message) -> Any:
    """The content in its canonical form; the parts of a reply joined."""
    content = _canonical_content(message.get("content"))
    is_parts = not isinstance(content, str) and all(isinstance(part, str) for part in content)
    # Agents cut a reply into parts; parts of others stay, as templates may show them.
    return "".join(content) if is_parts and message["role"] == "assistant" else content


def _list_other_fields(message: Message, extra: Mapping[str, Any], answers: tuple[int, int] | None) -> list[Any]:
    """What else of a message has to be the same: of a reply neither reasoning nor `extra` fields."""
    role = message["role"]
    # A result is known by the call that it answers: agents write other ids.
    own_id = message.get("tool_call_id") if answers is None else None
    fields: list[Any] = [role, message.get("name"), answers, own_id]
    if role != "assistant":
        fields.append(get_reasoning(message))
        fields.append({name: value for name, value in extra.items() if name not in _NO_CONTENT_FIELDS})
    return fields


def _make_form(
    message: Message, call_ids: tuple[str | None, ...], answers: tuple[int, int] | None, defaults: Defaults
) -> MessageForm:
    role, content = message["role"], _read_content(message)
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    extra = {name: value for name, value in message.items() if name not in _MESSAGE_FIELDS}
    calls = [(function["name"], _decode_arguments(function.get("arguments"))) for function in functions]
    others = _list_other_fields(message, extra, answers)
    exact_key = calls_key = _digest([calls, *others])
    shortened = [(name, _leave_out_defaults(name, arguments, defaults)) for name, arguments in calls]
    if shortened != calls:
        calls_key = _digest([shortened, *others])
    is_text = isinstance(content, str)
    return MessageForm(
        role=role,
        key=_digest([calls_key.hex(), content.strip() if role == "assistant" and is_text else content]),
        calls_key=calls_key,
        exact_key=exact_key,
        text=content if is_text else None,
        reasoning=get_reasoning(message) or "",
        is_plain=not isinstance(message.get("content"), list),
        arguments=tuple(_spell_arguments(function.get("arguments")) for function in functions),
        call_ids=call_ids,
        answers=answers,
        has_extra_fields=bool(extra),
    )


def _spell_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)


def _canonical_content(content: Any) -> Any:
    """Text for what is only text: null, a list without parts, a list of one text. Images by their hash."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_canonical_part(part) for part in content]
    if all(isinstance(part, str) for part in parts) and len(parts) <= 1:
        return "".join(parts)
    return parts


def _canonical_part(part: Mapping[str, Any]) -> Any:
    if part["type"] == "text":
        return part["text"]
    if part["type"] in IMAGE_TYPES:
        source = get_image_source(part)
        return ["image", source.sha256 if isinstance(source, EncodedImage) else source]
    return {name: value for name, value in part.items() if name not in _NO_CONTENT_FIELDS or name == "type"}


def _decode_arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return _unify_numbers(arguments)


def _leave_out_defaults(name: str, arguments: Any, defaults: Defaults) -> Any:
    if not isinstance(arguments, Mapping):
        return arguments
    return {key: value for key, value in arguments.items() if _encode(value) not in defaults.get((name, key), ())}


def _digest(parts: Sequence[Any]) -> bytes:
    return hashlib.blake2b(_encode(parts), digest_size=16).digest()


def _unify_numbers(value: Any) -> Any:
    """1.0 as 1: JavaScript writes both so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _unify_numbers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_unify_numbers(item) for item in value]
    return value


def _encode(value: Any) -> bytes:
    return _JSON.encode(value).encode(errors="surrogatepass")
