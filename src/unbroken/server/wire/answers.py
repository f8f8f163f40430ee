"""Answers of Responses that are kept in memory, for requests that name an earlier one instead of sending it again.

    answer resp_a                       kept: its input items, then its output items
    previous_response_id: resp_a        the request's items follow these
    item_reference msg_a_1              stands for output item 1 of resp_a
    conversation: conv_b                what the last answer of the conversation has kept

A session has all of it on disk: an answer that is not here is looked for there (`TurnOpener.recall`), and a
conversation only there, as another gateway may have added to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from unbroken.images.lru_cache import LruCache
from unbroken.messages import Message
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.responses import Item, MessageItem, ResponsesBody

MAX_BYTES = 64 * 2**20
"""Of the bodies and answers that are kept; the oldest are forgotten."""
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    items: tuple[Item, ...]
    num_bytes: int


class KeptAnswers:
    """The last answers of a server. A session's are found with its own key only."""

    def __init__(self) -> None:
        self._kept: LruCache[tuple[str | None, str], _Kept] = LruCache(MAX_BYTES, lambda kept: kept.num_bytes)

    def keep(self, owner: str | None, name: str, items: Sequence[Item], *, num_bytes: int) -> None:
        """Keep the items of an answer or conversation; `owner` is the session, `num_bytes` what they count."""
        self._kept.put((owner, name), _Kept(items=tuple(items), num_bytes=num_bytes + 1000))

    def find(self, owner: str | None, name: str) -> Sequence[Item] | None:
        """The items of an answer or conversation; None if it is not kept, or not any more."""
        kept = self._kept.get((owner, name))
        return None if kept is None else kept.items


def list_input(body: ResponsesBody) -> list[Item]:
    """The items of a body's own input."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input)


def read_items(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Items as a client sends them; those of an answer are sent back."""
    return _ITEMS.validate_python(list(items))


def dump_item(item: Item) -> dict[str, Any]:
    """The inverse of `read_items` for one item."""
    return item.model_dump(mode="json", by_alias=True, exclude_unset=True)


def get_answer_id(item_id: str) -> str:
    """The id of the answer that an item belongs to."""
    return f"resp_{item_id.split('_')[1]}" if item_id.count("_") == 2 else ""


def find_item(items: Sequence[Item], item_id: str) -> Item | None:
    """The item with this id."""
    return next((item for item in items if (item.model_extra or {}).get("id") == item_id), None)


def make_item(reply: Message, item_id: str) -> Item | None:
    """The item with this id of a reply that is on disk: its reasoning, its text, or one of its calls."""
    kind, _, number = item_id.split("_")
    reasoning, content = reply.get("reasoning_content"), reply.get("content")
    if kind == "rs" and reasoning:
        return read_items([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]}])[0]
    if kind == "msg" and isinstance(content, str):
        return MessageItem(role="assistant", content=content)
    calls = reply.get("tool_calls") or []
    position = int(number) - bool(reasoning) - bool(content) if number.isdecimal() else -1
    if kind not in ("fc", "ctc") or not 0 <= position < len(calls):
        return None
    call: Any = calls[position]
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    fields = {"call_id": call["id"], "name": call["function"]["name"], "arguments": text}
    return read_items([{"type": "function_call", **fields}])[0]


def refuse_forgotten(field: str, name: str) -> HttpError:
    """The error for an answer or conversation that is not kept."""
    return HttpError(
        400,
        f"{field} must be of an answer that is kept, got {shorten(name)}: without a session the last answers are in "
        f"memory ({MAX_BYTES // 2**20} MB), not those with store false, and none after a restart. Send the whole "
        "conversation as input, or use a session of the gateway",
        param=field,
        code="previous_response_not_found",
    )
