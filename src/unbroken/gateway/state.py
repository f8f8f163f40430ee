"""What a session has recorded, in memory and as records for the store: the same records make it live again.

answer ──► plan ──► TurnCommit ──► store           a turn exists when its commit is on disk
             └────► apply ──► forest, tree         in memory only then
stored session ──► restore ──► the same forest, tree and turns

A record names images by their hash: each is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson

from unbroken.counters import Counters, Event
from unbroken.ledger.forest import BrokenReply, Forest, Match, TurnSettings
from unbroken.ledger.matching import digest_json
from unbroken.ledger.nodes import ForkReason, Position
from unbroken.ledger.records import (
    GivenRecord,
    ImageRecord,
    MessageRecord,
    StoredSession,
    StreamRecord,
    TurnCommit,
    TurnRecord,
)
from unbroken.ledger.tree import TokenTree
from unbroken.messages import IMAGE_TYPES, Message, ToolSchema, get_image_source, make_call
from unbroken.rendering.base import BridgeOutcome, ParsedResponse, Refusal, RefusalReason, ToolCallStatus
from unbroken.rollout.prompts import GivenIds, Prompt, attach_given, count_prompt
from unbroken.rollout.trajectory import Turn
from unbroken.server.turns import RetryHint
from unbroken.server.wire.reply import ReplyReader
from unbroken.types import EncodedImage, ImageSpan, SampledSequence

Parse = Callable[[TurnRecord, SampledSequence, Any, Sequence[ToolSchema]], ParsedResponse]
"""Parses a recorded completion: the turn, its sequence, its prompt's ids, and its tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn of a session: what the store has of it, and the turn itself."""

    record: TurnRecord
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A completion that was sampled for a request, and how the request was understood."""

    match: Match
    prompt: Prompt
    sequence: SampledSequence
    reply: ReplyReader
    """Closed."""
    choice: int
    answer_id: str
    tools: tuple[ToolSchema, ...]
    options: Mapping[str, Any]
    """What else the prompt depends on, as JSON."""
    settings: TurnSettings
    """Their digests."""
    retry: RetryHint
    policy: str
    sampling: Mapping[str, Any]
    conversation: str | None
    """Of Responses, which it is added to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A turn with its numbers: the commit for the store, and what memory holds besides."""

    commit: TurnCommit
    messages: tuple[Message, ...]
    """Of `commit.messages`, with their images."""
    given: GivenIds | None
    parsed: ParsedResponse
    prompt: Prompt
    settings: TurnSettings


class SessionState:
    """Forest, tree, turns and counters of one session."""

    def __init__(self) -> None:
        self.forest = Forest()
        self.tree = TokenTree()
        self.turns: list[RecordedTurn] = []
        self.tools: dict[str, tuple[ToolSchema, ...]] = {}
        self.counters = Counters()
        self.num_sampled = 0
        """Number of ids sampled in all turns."""
        self._last_tools: tuple[bytes, str] | None = None
        """The tools of the last request, as JSON, and their key."""
        self._given: dict[tuple[Position | None, bytes, tuple[ImageSpan, ...]], Position] = {}
        """The end of given ids by where they are attached: siblings share their prompt."""
        self.images: set[str] = set()
        """SHA-256 of all its images."""
        self.broken: dict[str, BrokenReply] = {}
        """What was streamed of replies that are not recorded, by the id of the answer, the newest last."""
        self.conversations: dict[str, Mapping[str, Any]] = {}
        """As in `TurnCommit.conversations`."""
        self.num_pieces = 0
        """One more than the number of the last piece of a stream."""

    def learn_tools(self, tools: Sequence[ToolSchema]) -> str:
        """Learn the tools of a request, before its messages are matched; returns their key."""
        try:
            spelled = orjson.dumps(list(tools))
        except TypeError:  # numbers that are too large
            spelled = None
        if self._last_tools is not None and self._last_tools[0] == spelled:
            return self._last_tools[1]
        key = digest_json(list(tools))
        self.forest.learn_tools(key, tools)
        self._last_tools = None if spelled is None else (spelled, key)
        return key

    def plan(self, session_id: str, answered: Answered, *, created_s: float) -> _Planned:
        """Give a turn its numbers. Nothing else may be planned until this is applied or given up."""
        match, prompt, tools_key = answered.match, answered.prompt, answered.settings.tools
        parsed = answered.reply.parsed
        reply, delivered = _make_messages(parsed, answered.reply)
        new, parent = self._find_new_messages(match)
        messages = (*new, reply)
        records = self._number_messages(messages, parent, delivered=None if delivered == reply else delivered)
        prompt_node, reply_node = records[-1].parent, records[-1].node
        assert prompt_node is not None, "a conversation has messages"
        given, prompt_end = self._find_new_ids(prompt)
        turn = TurnRecord(
            number=len(self.turns),
            choice=answered.choice,
            tree=0,
            prompt_node=prompt_node,
            reply_node=reply_node,
            tools_key=tools_key,
            options=answered.options,
            given=None if given is None else _to_given_record(prompt.parent, given),
            parent=prompt_end,
            sequence=answered.sequence,
            continued=None if prompt.continued is None else prompt.continued.value,
            fork=None if prompt.fork is None else prompt.fork.value,
            refusal=prompt.bridge.reason.value if isinstance(prompt.bridge, Refusal) else None,
            tolerances=tuple(sorted(tolerance.value for tolerance in match.tolerances)),
            request_digest=bytes.fromhex(answered.retry.body_sha256),
            idempotency_key=answered.retry.idempotency_key,
            answer_id=answered.answer_id,
            created_s=created_s,
            policy=answered.policy,
            sampling=answered.sampling,
        )
        commit = TurnCommit(
            session_id=session_id,
            messages=records,
            tools={} if tools_key in self.tools else {tools_key: answered.tools},
            images=self._find_new_images(new, given),
            turns=(turn,),
            counters=_count(prompt, parsed, turn).as_dict(),
            conversations=(
                {} if answered.conversation is None else {answered.conversation: {"answer_id": answered.answer_id}}
            ),
        )
        return _Planned(
            commit=commit, messages=messages, given=given, parsed=parsed, prompt=prompt, settings=answered.settings
        )

    def apply(self, planned: _Planned) -> None:
        """Record a planned turn, which is on disk."""
        (turn,) = planned.commit.turns
        self.tools.update(planned.commit.tools)
        self.images.update(planned.commit.images)
        self.conversations.update(planned.commit.conversations)
        for record, message in zip(planned.commit.messages, planned.messages, strict=True):
            self._add_message(record, message, turn, planned.settings)
        self._attach_given(turn, planned.given)
        end = self.tree.add_sampled(turn.sequence, parent=turn.parent)
        self._add_turn(turn, end, planned.parsed, planned.prompt.bridge)
        for name, number in planned.commit.counters.items():
            self.counters.add(name, number)

    @staticmethod
    def restore(stored: StoredSession, *, load_image: LoadImage, parse: Parse) -> SessionState:
        """Make the state that was recorded."""
        state = SessionState()
        state.tools.update(stored.tools)
        for digest, tools in stored.tools.items():
            state.forest.learn_tools(digest, tools)
        by_reply = {turn.reply_node: turn for turn in stored.turns}
        for record in stored.messages:
            state.images.update(record.image_sha256s)
            turn = by_reply.get(record.node)
            settings = None if turn is None else make_settings(turn.tools_key, turn.options)
            state._add_message(record, _from_json(record.message, load_image), turn, settings)
        for one in stored.turns:
            given = None if one.given is None else _from_given_record(one.given, load_image)
            state.images.update(one.image_sha256s)
            state._attach_given(one, given)
            end = state.tree.add_sampled(one.sequence, parent=one.parent)
            parsed = parse(one, one.sequence, state.tree.token_ids(one.parent), state.tools[one.tools_key])
            refusal = None if one.refusal is None else Refusal(reason=RefusalReason(one.refusal))
            state._add_turn(one, end, parsed, refusal)
        for name, number in stored.counters.items():
            state.counters.add(name, number)
        state.conversations.update(stored.conversations)
        state.broken = _join_pieces(stored.streamed)
        state.num_pieces = max((piece.piece for piece in stored.streamed), default=-1) + 1
        return state

    def _find_new_messages(self, match: Match) -> tuple[Sequence[Message], int | None]:
        """The messages of a request that are not recorded, also not since it was matched; and the node before them."""
        parent = match.node
        for position in range(match.num_matched, len(match.messages)):
            node = self.forest.find_given(match.messages[position], parent=parent)
            if node is None:
                return match.messages[position:], parent
            parent = node
        return (), parent

    def _number_messages(
        self, messages: Sequence[Message], parent: int | None, *, delivered: Message | None
    ) -> tuple[MessageRecord, ...]:
        """Give messages the forest's next numbers, each behind the one before; the last is the reply.

        With 5 nodes recorded, a tool message and a reply after node 4:

            node  parent  message
            5     4       tool
            6     5       assistant, sampled    the turn's prompt_node is its parent, 5, and its reply_node 6
        """
        first = len(self.forest.nodes)
        parents = (parent, *range(first, first + len(messages) - 1))
        *given, last = (
            MessageRecord(node=node, parent=before, message=name_images(message), sampled=False)
            for node, (before, message) in enumerate(zip(parents, messages, strict=True), start=first)
        )
        return *given, replace(last, sampled=True, delivered=delivered)

    def _find_new_images(self, messages: Sequence[Message], given: GivenIds | None) -> dict[str, bytes]:
        """The files of the images in new messages and ids that are not recorded, by SHA-256."""
        images = [*_list_images(messages), *(span.image for span in (given.images if given else ()))]
        return {image.sha256: image.data for image in images if image.sha256 not in self.images}

    def _find_new_ids(self, prompt: Prompt) -> tuple[GivenIds | None, Position]:
        """The ids of a prompt that are not recorded, and its end."""
        given = prompt.given
        if prompt.parent is not None and len(given.token_ids) == 0:
            return None, prompt.parent
        if (end := self._given.get(_given_key(prompt.parent, given))) is not None:
            return None, end
        return given, Position(node=len(self.tree.nodes), offset=len(given.token_ids))

    def _add_message(
        self, record: MessageRecord, message: Message, turn: TurnRecord | None, settings: TurnSettings | None
    ) -> None:
        """`turn` and its `settings` are those that sampled it."""
        if record.sampled:
            assert turn is not None
            assert settings is not None
            assert record.parent is not None
            node = self.forest.add_reply(
                message,
                cast(Message, record.delivered or message),
                parent=record.parent,
                turn=turn.number,
                settings=settings,
            )
        else:
            node = self.forest.add_given(message, parent=record.parent)
        assert node == record.node, f"message {record.node} was recorded as {node}"

    def _attach_given(self, record: TurnRecord, given: GivenIds | None) -> None:
        """Attach the ids that a turn was given, if they are not in the tree."""
        if given is not None:
            assert record.given is not None
            parent = record.given.parent
            self._given[_given_key(parent, given)] = attach_given(self.tree, parent, given)

    def _add_turn(
        self, record: TurnRecord, end: Position, parsed: ParsedResponse, bridge: BridgeOutcome | None
    ) -> None:
        """Add a turn whose ids are in the tree, the sampled ones up to `end`. A store has no bridge, only a refusal."""
        self.num_sampled += record.sequence.num_sampled
        self.turns.append(
            RecordedTurn(
                record=record,
                turn=Turn(
                    prompt_end=record.parent,
                    end=end,
                    sequence=record.sequence,
                    message=self.forest.nodes[record.reply_node].message,
                    parsed=parsed,
                    bridge=bridge,
                    fork=None if record.fork is None else ForkReason(record.fork),
                    cut_by=None,
                ),
            )
        )


def _join_pieces(pieces: Iterable[StreamRecord]) -> dict[str, BrokenReply]:
    """What was streamed, by the id of the answer; the one that ended last is the last."""
    found: dict[str, BrokenReply] = {}
    for piece in pieces:
        before = found.pop(piece.answer_id, None)
        begun: Any = {} if before is None else before.message
        text = {name: begun.get(name, "") + more for name, more in piece.message.items()}
        message: Any = {"role": "assistant", **text}
        found[piece.answer_id] = BrokenReply(history=piece.history, message=message)
    return found


def make_settings(tools_key: str, options: Mapping[str, Any]) -> TurnSettings:
    """The digests by which turns are compared."""
    return TurnSettings(tools=tools_key, options=digest_json(options))


def _count(prompt: Prompt, parsed: ParsedResponse, turn: TurnRecord) -> Counters:
    counters = Counters()
    count_prompt(prompt, counters)
    for tolerance in turn.tolerances:
        counters.count(Event.TOLERANCE, tolerance)
    for failure in parsed.failures:
        counters.count(Event.PARSE_FAILURE, failure.status)
    if turn.sequence.num_sampled < len(turn.sequence.completion_ids):
        counters.count(Event.CLOSING, "thinking")
    return counters


def _given_key(parent: Position | None, given: GivenIds) -> tuple[Position | None, bytes, tuple[ImageSpan, ...]]:
    return parent, given.token_ids.tobytes(), given.images


LoadImage = Callable[[str], EncodedImage]
"""Loads an image by its SHA-256."""


def _make_messages(parsed: ParsedResponse, reply: ReplyReader) -> tuple[Message, Message]:
    """The reply as it is rendered, and as it was delivered, with the same call ids."""
    delivered_ids = iter([call.call_id for call in reply.calls])
    # A call within a stop string is not delivered.
    call_ids = [next(delivered_ids, "") if call.status is ToolCallStatus.OK else "" for call in parsed.tool_calls]
    delivered: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        delivered["reasoning_content"] = reply.reasoning
    if reply.calls:
        delivered["tool_calls"] = [make_call(call.call_id, call.name, call.arguments) for call in reply.calls]
    return parsed.to_message(call_ids), delivered


def _to_given_record(parent: Position | None, given: GivenIds) -> GivenRecord:
    """The record of given ids that are attached at `parent`."""
    return GivenRecord(
        parent=parent,
        origin=given.origin,
        token_ids=given.token_ids,
        message_indices=given.message_indices,
        images=tuple(map(ImageRecord.from_span, given.images)),
    )


def _from_given_record(record: GivenRecord, load_image: LoadImage) -> GivenIds:
    """The given ids of a record."""
    return GivenIds(
        origin=record.origin,
        token_ids=record.token_ids,
        message_indices=record.message_indices,
        images=tuple(image.to_span(load_image(image.sha256)) for image in record.images),
    )


def _list_images(messages: Sequence[Message]) -> list[EncodedImage]:
    """The images of messages, in order."""
    parts = [part for message in messages for part in _get_parts(message) if part["type"] in IMAGE_TYPES]
    sources = [get_image_source(part) for part in parts]
    return [source for source in sources if isinstance(source, EncodedImage)]


def name_images(message: Message) -> dict[str, Any]:
    """A message whose images are named by their hash."""
    record: dict[str, Any] = dict(message)
    if isinstance(message.get("content"), list):
        record["content"] = [
            {"type": "image", "sha256": get_image_source(part).sha256} if part["type"] in IMAGE_TYPES else part
            for part in _get_parts(message)
        ]
    return record


def _from_json(record: Mapping[str, Any], load_image: LoadImage) -> Message:
    """The message of a record, with its images."""
    message = dict(record)
    if isinstance(message.get("content"), list):
        message["content"] = [
            {"type": "image", "image": load_image(part["sha256"])} if part["type"] == "image" else part
            for part in message["content"]
        ]
    return cast(Message, message)


def _get_parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
