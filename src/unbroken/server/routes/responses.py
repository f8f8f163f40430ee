"""OpenAI's Responses, whole and streamed. A request may name earlier answers instead of sending them again.

A whole answer is its stream, joined.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from pydantic import Field, TypeAdapter

from unbroken.counters import Event as CountedEvent
from unbroken.errors import ContextOverflowError
from unbroken.messages import Message
from unbroken.rendering.base import PartKind
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import StrictBody
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.event_stream import open_event_stream
from unbroken.server.http.json import SESSION, json_response, note_ignored
from unbroken.server.questions import make_question
from unbroken.server.turns import OpenTurn, Question, open_reply, stream_events
from unbroken.server.wire.answers import MAX_BYTES
from unbroken.server.wire.conversation import make_seal
from unbroken.server.wire.openai import format_finish_reason, list_version_spans
from unbroken.server.wire.reply import ReplyCall, ReplyPiece, ReplyReader, WholeReply
from unbroken.server.wire.responses import Item, MessageItem, ReferenceItem, ResponsesBody, read_conversation
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
router = Routes(Access.CLIENT)
_T = TypeVar("_T")


class NewConversation(StrictBody):
    """A conversation to begin."""

    items: Annotated[list[Item], Field(fail_fast=True)] | None = None
    """What it begins with."""
    metadata: dict[str, Any] | None = None
    """Comes back in the answer."""


@router.post(
    "/v1/responses",
    summary="OpenAI's Responses",
    response_description="a response with `output` items, `status`, `usage`, `policy_versions`; or events",
)
async def _responses(body: ResponsesBody, request: Request) -> Response:
    """Render the input and answer."""
    context = get_context(request)
    ignored = body.check_supported()
    earlier = await _find_earlier(context, request, body)
    conversation = read_conversation(body, earlier.items, earlier=earlier.messages, num_earlier=earlier.num_items)
    note_ignored(request, [*ignored, *conversation.ignored])
    asked = await make_question(context, request, body, conversation, format_name="text.format")
    question = replace(
        asked,
        sampling=body.sampling,
        max_tokens=body.max_output_tokens,
        caps_max_tokens=True,
        conversation=body.conversation_id,
    )
    turn = await _open_turn(context, request, question, truncates=body.truncation == "auto")
    writer = _ResponseWriter(
        answer_id=turn.answer_id,
        model_name=body.model or context.config.model_name,
        body=body,
        request=turn.request,
        keep=_make_keep(context, request, body, earlier, turn.answer_id, len(await request.body())),
    )
    if body.stream:
        stream = _ResponseStream(writer, open_reply(turn, question, context.codec, context.metrics.events))
        return await open_event_stream(
            stream_events(turn, [stream]), format_error=stream.format_failure, is_named=True, end=b""
        )
    (sequence,) = (await turn.sample()).sequences
    return json_response(writer.format_whole(await context.read_reply(turn, question, sequence), sequence))


@router.post(
    "/v1/conversations",
    summary="Begin a conversation of OpenAI's Responses",
    response_description="`id`, for the field `conversation` of `/v1/responses`",
)
async def _create_conversation(body: NewConversation, request: Request) -> Response:
    """Begin a conversation, which is stored with its session, or else kept in memory."""
    context, items = get_context(request), body.items or ()
    name = f"conv_{uuid4().hex}"
    if not await context.turns.open_conversation(request, name, [_dump_item(item) for item in items]):
        context.answers.keep(None, name, items, num_bytes=sum(len(str(item)) for item in items))
    made = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata or {}}
    return json_response(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a request names instead of sending it."""

    items: Sequence[Item]
    """All items of the conversation."""
    num_items: int = 0
    """How many of them come before the input of the request."""
    messages: Sequence[Message] = ()
    """What comes before all items, from the disk."""


async def _find_earlier(context: ServerContext, request: Request, body: ResponsesBody) -> Earlier:
    """Find the answers, items and the conversation that a request names.

    Raises:
        HttpError: one of them is not kept.
    """
    owner = request.scope.get(SESSION)
    items: Sequence[Item] | None = ()
    messages: Sequence[Message] = ()
    named, place = body.previous_response_id, "previous_response_id"
    if (name := body.conversation_id) is not None:
        stored = await context.turns.recall_conversation(request, name) or {}
        named, place = stored.get("answer_id"), "conversation"
        if named is None:
            kept = context.answers.find(None, name) if owner is None else None
            items = _read_items(stored["items"]) if "items" in stored else _require(kept, place, name)
    if named is not None and (items := context.answers.find(owner, named)) is None:
        recorded = _require(await context.turns.recall(request, named), place, named)
        # Instructions are those of each request; on disk they are a system message like others.
        items, messages = (), recorded[bool(body.instructions and recorded[0]["role"] == "system") :]
    assert items is not None
    own = [
        await _dereference(context, request, item, f"input.{k}") if isinstance(item, ReferenceItem) else item
        for k, item in enumerate(_list_input(body))
    ]
    return Earlier(items=[*items, *own], num_items=len(items), messages=messages)


def _require(found: Sequence[_T] | None, place: str, name: str) -> Sequence[_T]:
    if found is None:
        raise _refuse_forgotten(place, name)
    return found


async def _dereference(context: ServerContext, request: Request, item: ReferenceItem, place: str) -> Item:
    """The item that a reference stands for."""
    answer_id = _get_answer_id(item.id)
    found = None
    if (kept := context.answers.find(request.scope.get(SESSION), answer_id)) is not None:
        found = _find_item(kept, item.id)
    elif recorded := await context.turns.recall(request, answer_id):
        found = _make_recorded_item(recorded[-1], item.id)
    if found is None:
        raise _refuse_forgotten(f"{place}.id", item.id)
    return found


def _make_keep(
    context: ServerContext, request: Request, body: ResponsesBody, earlier: Earlier, answer_id: str, num_bytes: int
) -> Callable[[Sequence[dict[str, Any]]], None]:
    """What keeps the items of an answer, once they are whole."""

    def keep(output: Sequence[dict[str, Any]]) -> None:
        items = [*earlier.items, *_read_items(output)]
        own = body.conversation_id if request.scope.get(SESSION) is None else None  # a session's is stored
        for name in (answer_id if body.store is not False else None, own):
            if name is not None and not earlier.messages:  # what is on disk is found there
                context.answers.keep(request.scope.get(SESSION), name, items, num_bytes=2 * num_bytes)

    return keep


async def _open_turn(context: ServerContext, request: Request, question: Question, *, truncates: bool) -> OpenTurn:
    """Open the turn; with `truncates`, of a conversation that is too long the oldest messages are left out.

    Raises:
        ContextOverflowError: the conversation is too long, and may not be cut, or cannot be cut any more.
    """
    number = 0
    while True:
        messages = question.messages if number == 0 else _leave_out_oldest(question.messages, number)
        try:
            turn = await context.turns.open(request, replace(question, messages=messages), id_prefix="resp_")
        except ContextOverflowError:
            number = max(1, 2 * number)
            if not truncates or len(_leave_out_oldest(question.messages, number)) == len(messages):
                raise
            continue
        context.metrics.events.count(CountedEvent.CUT, "truncation_auto", len(question.messages) - len(messages))
        return turn


def _leave_out_oldest(messages: Sequence[Message], number: int) -> Sequence[Message]:
    """Messages without the oldest after the first question: at most `number`, each with the results that follow it.

    The last one stays, with what it answers.
    """
    roles = [message["role"] for message in messages]
    first = roles.index("user") + 1 if "user" in roles else 0
    starts = [k for k in range(first, len(messages)) if roles[k] != "tool"]
    if len(starts) < 2:
        return messages
    return [*messages[:first], *messages[starts[min(number, len(starts) - 1)] :]]


Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponseWriter:
    """Formats one answer."""

    keep: Callable[[Sequence[dict[str, Any]]], None]
    """Keeps the output items."""

    answer_id: str
    model_name: str
    body: ResponsesBody
    request: SampleRequest
    created_s: int = field(default_factory=lambda: int(time.time()))

    def format_response(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response object. It says what was asked."""
        body = self.body
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "reasoning": {"effort": body.effort, "summary": None},
            "store": body.store is not False,
            "temperature": self.request.params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            "top_p": self.request.params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            **fields,
        }

    def format_end(
        self, reply: ReplyReader, items: _ItemList, sampled: SampledSequence | SampleChunk, num_sampled: int
    ) -> dict[str, Any]:
        """The response object at its end."""
        assert sampled.finish_reason is not None
        is_cut = format_finish_reason(sampled.finish_reason) == "length"
        malformed = reply.list_malformed()
        self.keep(items.items)
        return self.format_response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=items.items,
            usage=self._format_usage(reply, num_sampled),
            policy_versions=list_version_spans(sampled),
            **({"malformed_tool_calls": malformed} if malformed else {}),
        )

    def format_whole(self, reply: WholeReply, sequence: SampledSequence) -> dict[str, Any]:
        """Format a whole answer."""
        items = self.make_items()
        for piece in reply.pieces:
            list(items.add(piece))
        list(items.end(is_cut=sequence.finish_reason is FinishReason.LENGTH))
        return self.format_end(reply.reader, items, sequence, len(sequence.completion_ids))

    def make_items(self) -> _ItemList:
        """Make the empty list of output items."""
        return _ItemList(
            self.answer_id.removeprefix("resp_"),
            seals=self.body.seals_reasoning,
            namespaces=self.body.find_namespaces(),
            custom=self.body.find_custom(),
        )

    def _format_usage(self, reply: ReplyReader, num_sampled: int) -> dict[str, Any]:
        """The counts of ids. What the engine has cached is not known here."""
        reasoning = [part.span for part in reply.parsed.parts if part.kind is PartKind.REASONING]
        num_prompt = len(self.request.prompt_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": sum(stop - start for start, stop in reasoning)},
            "total_tokens": num_prompt + num_sampled,
        }


class _ResponseStream:
    """Formats the events of one answer."""

    def __init__(self, writer: _ResponseWriter, reply: ReplyReader) -> None:
        self._writer = writer
        self.reply = reply
        self._items = writer.make_items()
        self._num_sampled = 0
        self._num_events = 0

    def format_events(self, chunk: SampleChunk) -> Iterator[Event]:
        """Format the events of one chunk. Text that is not certain yet comes with a later one."""
        for event in self._format_events(chunk):
            yield self._count(event)

    def format_failure(self, error: HttpError) -> Event:
        """The event of an error after the first chunk."""
        failed = {"code": "server_error", "message": error.message}
        return self._count(
            {
                "type": "response.failed",
                "response": self._writer.format_response("failed", error=failed, output=self._items.items),
            }
        )

    def _format_events(self, chunk: SampleChunk) -> Iterator[Event]:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                yield {"type": f"response.{kind}", "response": self._writer.format_response("in_progress")}
        self._num_sampled += len(chunk.completion_ids)
        for piece in self.reply.read(chunk):
            yield from self._items.add(piece)
        if chunk.finish_reason is not None:
            yield from self._items.end(is_cut=chunk.finish_reason is FinishReason.LENGTH)
            response = self._writer.format_end(self.reply, self._items, chunk, self._num_sampled)
            yield {"type": f"response.{response['status']}", "response": response}

    def _count(self, event: Event) -> Event:
        self._num_events += 1
        return {"type": event["type"], "sequence_number": self._num_events - 1, **event}


class _ItemList:
    """The output items so far. The last one may be open."""

    def __init__(self, name: str, *, seals: bool, namespaces: Mapping[str, tuple[str, str]], custom: Set[str]) -> None:
        """`namespaces` and `custom` have the names of functions with another form than `function_call`."""
        self.items: list[dict[str, Any]] = []
        self._name = name
        self._seals = seals
        self._namespaces = namespaces
        self._custom = custom
        self._open: PartKind | None = None

    def add(self, piece: ReplyPiece) -> Iterator[Event]:
        """Add a piece; yields the events that tell it."""
        if piece.call is not None:
            yield from self.end()
            yield from self._add_call(piece.call)
            return
        if self._open is not piece.kind:
            yield from self.end()
            yield from self._begin(piece.kind)
        self._part["text"] += piece.text
        yield self._tell(f"response.{self._part['type']}.delta", content_index=0, delta=piece.text, **self._logprobs)

    def end(self, *, is_cut: bool = False) -> Iterator[Event]:
        """End the open item; `is_cut` if the reply was cut in it."""
        if self._open is None:
            return
        item, part = self.items[-1], self._part
        item["status"] = "incomplete" if is_cut else "completed"
        if self._open is PartKind.REASONING and self._seals:
            item["encrypted_content"] = make_seal(part["text"], packed=True)
        yield self._tell(f"response.{part['type']}.done", content_index=0, text=part["text"], **self._logprobs)
        yield self._tell("response.content_part.done", content_index=0, part=part)
        yield self._tell_item("done")
        self._open = None

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._open is PartKind.CONTENT else {}

    def _begin(self, kind: PartKind) -> Iterator[Event]:
        self._open = kind
        if kind is PartKind.REASONING:
            item = self._make_item("rs", "reasoning", summary=[], content=[], encrypted_content=None)
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = self._make_item("msg", "message", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items.append(item)
        yield self._tell_item("added")
        item["content"] = [part]
        yield self._tell("response.content_part.added", content_index=0, part=dict(part))

    def _add_call(self, call: ReplyCall) -> Iterator[Event]:
        if call.name in self._custom:
            yield from self._add_custom_call(call)
            return
        namespace, name = self._namespaces.get(call.name, (None, call.name))
        item = self._make_item("fc", "function_call", call_id=call.call_id, name=name, arguments="")
        if namespace is not None:
            item["namespace"] = namespace
        self.items.append(item)
        yield self._tell_item("added")
        yield self._tell("response.function_call_arguments.delta", delta=call.arguments)
        yield self._tell("response.function_call_arguments.done", name=name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._tell_item("done")

    def _add_custom_call(self, call: ReplyCall) -> Iterator[Event]:
        given = json.loads(call.arguments)
        # Without the text `input`, the tool gets all that the model wrote.
        text = given["input"] if isinstance(given.get("input"), str) else call.arguments
        item = self._make_item("ctc", "custom_tool_call", call_id=call.call_id, name=call.name, input="")
        self.items.append(item)
        yield self._tell_item("added")
        yield self._tell("response.custom_tool_call_input.delta", delta=text)
        yield self._tell("response.custom_tool_call_input.done", input=text)
        item |= {"input": text, "status": "completed"}
        yield self._tell_item("done")

    def _tell(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _tell_item(self, what: str) -> Event:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _make_item(self, prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
        return {"id": f"{prefix}_{self._name}_{len(self.items)}", "type": kind, "status": "in_progress", **fields}


def _list_input(body: ResponsesBody) -> list[Item]:
    """The items of a body's own input."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input)


def _make_recorded_item(reply: Message, item_id: str) -> Item | None:
    """The item with this id of a reply that is on disk: its reasoning, its text, or one of its calls."""
    kind, _, number = item_id.split("_")
    reasoning, content = reply.get("reasoning_content"), reply.get("content")
    if kind == "rs" and reasoning:
        return _read_items([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]}])[0]
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
    return _read_items([{"type": "function_call", **fields}])[0]


def _read_items(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Items as a client sends them; those of an answer are sent back."""
    return _ITEMS.validate_python(list(items))


def _dump_item(item: Item) -> dict[str, Any]:
    """The inverse of `_read_items` for one item."""
    return item.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _get_answer_id(item_id: str) -> str:
    """The id of the answer that an item belongs to."""
    return f"resp_{item_id.split('_')[1]}" if item_id.count("_") == 2 else ""


def _find_item(items: Sequence[Item], item_id: str) -> Item | None:
    """The item with this id."""
    return next((item for item in items if (item.model_extra or {}).get("id") == item_id), None)


def _refuse_forgotten(field: str, name: str) -> HttpError:
    """The error for an answer or conversation that is not kept."""
    return HttpError(
        400,
        f"{field} must be of an answer that is kept, got {shorten(name)}: without a session the last answers are in "
        f"memory ({MAX_BYTES // 2**20} MB), not those with store false, and none after a restart. Send the whole "
        "conversation as input, or use a session of the gateway",
        param=field,
        code="previous_response_not_found",
    )
