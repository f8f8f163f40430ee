"""A session as a gateway tells it, as a `Trajectory`: the same tree, ids and logprobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from unbroken.counters import Counters
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import ForkReason, Origin, Position
from unbroken.ledger.records import ImageRecord
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema, get_reasoning, get_text
from unbroken.rendering.base import ParsedResponse, ParsedToolCall, ToolCallStatus
from unbroken.rollout.trajectory import Turn
from unbroken.types import EncodedImage, FinishReason, SampledSequence, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """What a session has recorded."""

    tree: TokenTree
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """Of the first conversation: the path to its newest reply."""
    tools: tuple[ToolSchema, ...]
    """Of the newest turn of that conversation."""
    counters: Counters


def find_images(recorded: Mapping[str, Any]) -> set[str]:
    """The SHA-256 of all images that a session has in its prompts."""
    return {image["sha256"] for node in recorded["nodes"] for image in node["images"]}


def read_session(
    recorded: Mapping[str, Any], counters: Mapping[str, int], *, images: Mapping[str, EncodedImage]
) -> RecordedSession:
    """Read the answer of `/v1/sessions/{id}/tree` and the session's counters; `images` are those of `find_images`.

    A node becomes the node of the same number. Raises `InvariantError` if the answer contradicts itself.
    """
    tree = TokenTree()
    sequences: dict[int, SampledSequence] = {}
    finished = {turn["end"]["node"]: FinishReason(turn["finish_reason"]) for turn in recorded["turns"]}
    for number, node in enumerate(recorded["nodes"]):
        sequence = _add_node(tree, node, finished.get(number), images)
        if sequence is not None:
            sequences[number] = sequence
    by_node = {message["node"]: message for message in recorded["messages"]}
    turns = tuple(_read_turn(turn, by_node, sequences) for turn in recorded["turns"])
    last = _find_last(recorded["turns"], by_node)
    counted = Counters()
    for name, times in counters.items():
        counted.add(name, times)
    return RecordedSession(
        tree=tree,
        turns=turns,
        messages=() if last is None else tuple(_get_path(last["reply_message"], by_node, images)),
        tools=() if last is None else tuple(recorded["tools"][last["tools"]]),
        counters=counted,
    )


def _add_node(
    tree: TokenTree,
    node: Mapping[str, Any],
    finish_reason: FinishReason | None,
    images: Mapping[str, EncodedImage],
) -> SampledSequence | None:
    parent = None if node["parent"] is None else Position(**node["parent"])
    if node["origin"] != Origin.SAMPLED.value:
        tree.add_given(
            node["token_ids"],
            Origin(node["origin"]),
            parent=parent,
            message_indices=np.asarray(node["message_indices"]),
            images=[ImageRecord(**image).to_span(images[image["sha256"]]) for image in node["images"]],
        )
        return None
    if parent is None or finish_reason is None:
        raise InvariantError("a sampled node of a session must have a parent and a turn")
    sequence = SampledSequence(
        completion_ids=node["token_ids"],
        rollout_logprobs=node["rollout_logprobs"],
        finish_reason=finish_reason,
        version_spans=_to_spans(node["policy_versions"]),
        temperature=node["temperature"],
    )
    tree.add_sampled(sequence, parent=parent)
    return sequence


def _to_spans(versions: Any) -> tuple[VersionSpan, ...]:
    values = np.asarray(versions, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    stops = [*starts[1:], len(values)]
    return tuple(
        VersionSpan(start=start, stop=stop, policy_version=int(values[start]))
        for start, stop in zip(starts, stops, strict=True)
    )


def _read_turn(
    turn: Mapping[str, Any], by_node: Mapping[int, Mapping[str, Any]], sequences: Mapping[int, SampledSequence]
) -> Turn:
    message = cast(Message, by_node[turn["reply_message"]]["message"])
    end = Position(**turn["end"])
    return Turn(
        prompt_end=Position(**turn["prompt_end"]),
        end=end,
        sequence=sequences[end.node],
        message=message,
        parsed=_read_message(message),
        bridge=None,
        fork=None if turn["fork"] is None else ForkReason(turn["fork"]),
        cut_by=None,
    )


def _read_message(message: Message) -> ParsedResponse:
    """What was parsed, apart from its place among the ids and from failed calls: the session has counted those."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments: Any = call["function"]["arguments"]
        calls.append(
            ParsedToolCall(
                raw=json.dumps(arguments, ensure_ascii=False),
                status=ToolCallStatus.OK,
                span=(0, 0),
                name=call["function"]["name"],
                arguments=arguments,
                call_id=call["id"],
            )
        )
    return ParsedResponse(
        content=get_text(message.get("content")), reasoning=get_reasoning(message) or "", tool_calls=tuple(calls)
    )


def _find_last(
    turns: Sequence[Mapping[str, Any]], by_node: Mapping[int, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The newest turn of the first conversation."""
    of_first = [turn for turn in turns if by_node[turn["reply_message"]]["conversation"] == 0]
    return of_first[-1] if of_first else None


def _get_path(
    node: int | None, by_node: Mapping[int, Mapping[str, Any]], images: Mapping[str, EncodedImage]
) -> list[Message]:
    path: list[Message] = []
    while node is not None:
        path.append(_with_images(by_node[node]["message"], images))
        node = by_node[node]["parent"]
    return path[::-1]


def _with_images(message: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        parts = [{**part, "image": images[part["sha256"]]} if part["type"] == "image" else part for part in content]
        message = {**message, "content": parts}
    return cast(Message, message)
