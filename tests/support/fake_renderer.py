"""A renderer over bytes and a few control ids: the whole Renderer protocol, without a tokenizer or a template.

A message is its header, the bytes of its text, its calls, END and a newline:

    [USER] h i [END] \\n [ASSISTANT] [CALL] {"name": ...} [CALL_END] [END] \\n [TOOL] 4 2 [END] \\n [ASSISTANT]

Calls are re-serialised when they are rendered, as real templates do, and bytes that are not UTF-8 become U+FFFD when
they are parsed, as real tokenizers do: decoding and encoding again is not the identity here either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from unbroken.messages import Message, ToolSchema, check_messages, get_text
from unbroken.rendering.base import (
    TEMPLATE,
    Bridge,
    BridgeOutcome,
    BufferedReader,
    Closing,
    ParsedResponse,
    ParsedToolCall,
    Refusal,
    RefusalReason,
    RenderedPrompt,
    ResponseReader,
    ToolCallStatus,
)
from unbroken.threads import DaemonThreads
from unbroken.types import TokenIds, token_ids

HEADERS = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260
OTHER_END = 261
CALL = 262
CALL_END = 263
VOCAB_SIZE = 264
STOP_IDS = (END, OTHER_END, HEADERS["user"], HEADERS["tool"])
"""Some models end a turn with the header of the next one: a wrong one is what `num_taken_back` is for."""

NEWLINE = ord("\n")


class FakeRenderer:
    """Refuses the k-th bridge for the k-th reason in `refusals`; None and the end of the list let a bridge pass."""

    def __init__(self, *, refusals: Iterable[RefusalReason | None] = ()) -> None:
        self._refusals = iter(refusals)
        self.renderer_threads = DaemonThreads(1)

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        check_messages(messages)
        ids, indices = _render_messages(messages)
        return RenderedPrompt(
            token_ids=token_ids([*ids, HEADERS["assistant"]]), message_indices=np.array([*indices, TEMPLATE], np.int32)
        )

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        ids = self.render(messages, tools=tools).token_ids
        return ids if add_generation_prompt else ids[:-1]

    def open_response(
        self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> ResponseReader:
        assert reads_calls, "rollouts always read calls"
        return BufferedReader(lambda ids: self.parse_response(token_ids(ids), prompt_ids=prompt_ids, tools=tools))

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        ids = completion_ids.tolist()
        body = ids[:-1] if ids and ids[-1] in STOP_IDS else ids
        content: list[int] = []
        calls: list[ParsedToolCall] = []
        position = 0
        while position < len(body):
            if body[position] == CALL:
                call = _parse_call(body, position)
                calls.append(call)
                position = call.span[1]
            else:
                content.append(body[position])
                position += 1
        return ParsedResponse(content=decode(content), tool_calls=tuple(calls))

    def get_stop_token_ids(self) -> tuple[int, ...]:
        return STOP_IDS

    def bridge_to_next_turn(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema] = (),
        earlier: Sequence[Message] = (),
    ) -> BridgeOutcome:
        refusal = next(self._refusals, None)
        if refusal is not None:
            return Refusal(reason=refusal)
        if any(message["role"] == "assistant" for message in new_messages):
            return Refusal(reason=RefusalReason.BAD_EXTENSION)
        last = int(completion_ids[-1])
        took_header = last in STOP_IDS and last in HEADERS.values()
        closing = {END: Closing.NONE, OTHER_END: Closing.FOREIGN_STOP}.get(last, Closing.TRUNCATED)
        closing = Closing.FOREIGN_STOP if took_header else closing
        end = [NEWLINE] if closing is Closing.NONE else [END, NEWLINE]
        ids, indices = _render_messages(new_messages)
        return Bridge(
            bridge_ids=token_ids([*end, *ids, HEADERS["assistant"]]),
            message_indices=np.array([*[TEMPLATE] * len(end), *indices, TEMPLATE], np.int32),
            closing=closing,
            num_taken_back=int(took_header),
        )


def encode(text: str) -> list[int]:
    """The ids of ordinary text: its bytes."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """Text of any ids; control ids are spelled out, broken UTF-8 becomes U+FFFD."""
    return b"".join(bytes([i]) if i < 256 else b"<%d>" % i for i in ids).decode(errors="replace")


def call_ids(name: str, arguments: object) -> list[int]:
    """The ids of a call, written compactly, which is not how it is rendered again."""
    return [CALL, *encode(json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))), CALL_END]


def _render_messages(messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    indices: list[int] = []
    for index, message in enumerate(messages):
        text = encode(get_text(message["content"]))
        calls = [i for call in message.get("tool_calls", []) for i in _render_call(call["function"])]
        for run, owner in (
            ([HEADERS[message["role"]]], TEMPLATE),
            (text, index),
            (calls, index),
            ([END, NEWLINE], TEMPLATE),
        ):
            ids += run
            indices += [owner] * len(run)
    return ids, indices


def _render_call(function: object) -> list[int]:
    return [CALL, *encode(json.dumps(function)), CALL_END]


def _parse_call(body: list[int], start: int) -> ParsedToolCall:
    if CALL_END not in body[start:]:
        return ParsedToolCall(raw=decode(body[start + 1 :]), status=ToolCallStatus.UNCLOSED, span=(start, len(body)))
    stop = body.index(CALL_END, start) + 1
    raw = decode(body[start + 1 : stop - 1])
    try:
        call = json.loads(raw)
    except json.JSONDecodeError:
        return ParsedToolCall(raw=raw, status=ToolCallStatus.INVALID_JSON, span=(start, stop))
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]):
        return ParsedToolCall(raw=raw, status=ToolCallStatus.MISSING_NAME, span=(start, stop))
    if not isinstance(call.get("arguments"), dict):
        return ParsedToolCall(raw=raw, status=ToolCallStatus.INVALID_ARGUMENTS, span=(start, stop))
    return ParsedToolCall(
        raw=raw, status=ToolCallStatus.OK, span=(start, stop), name=call["name"], arguments=call["arguments"]
    )
