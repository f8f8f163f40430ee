"""How the parts of a recorded rollout belong together: nodes and turns, messages and turns, branches and their forks.

Worked example: the rows 1 2 3 4 and 1 2 5 6 of a rollout fork at position 2; the ids there are 3 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unbroken.rendering.encoding.text_codec import TokenTexts

_BRANCHES = {"prompt": "new_conversation", "bridge": "continued_again", "sampled": "sampled_again"}
"""Branches without a fork, by the origin of their first own id."""


def describe_trajectory(
    record: Mapping[str, Any],
    texts: TokenTexts | None,
    *,
    turn_of_node: Mapping[int, int] | None = None,
    turn_of_message: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """What a page shows of a rollout beside its record; `texts` has the text of its ids.

    Which turn sampled a node or a message is found by comparing them, unless it is given.
    """
    rows, turns = record.get("rows") or [], record.get("turns") or []
    turn_of_node = match_turns(rows, turns) if turn_of_node is None else turn_of_node
    if turn_of_message is None:
        turn_of_message = match_messages(record.get("messages") or [], turns)
    ids = {token_id for row in rows for token_id in row["token_ids"]}
    found = {} if texts is None else texts.get_all(ids)
    return {
        "turn_of_node": turn_of_node,
        "turn_of_message": turn_of_message,
        "forks": find_forks(rows, turns, turn_of_node),
        "texts": {token_id: text.text for token_id, text in found.items()},
        "bytes": {token_id: text.data.hex(" ") for token_id, text in found.items() if "\ufffd" in text.text},
    }


def match_turns(rows: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The turn that sampled each node. Nodes get their numbers in the order of the turns; not all are in rows.

    Where turns are not in rows, a node has a turn only if its length leaves no other.
    """
    lengths: dict[int, int] = {}
    for row in rows:
        for segment in row["segments"]:
            if segment["origin"] == "sampled":
                node, length = segment["node"], segment["stop"] - segment["start"]
                lengths[node] = max(length, lengths.get(node, 0))
    numbered = [(number, turn["num_sampled"]) for number, turn in enumerate(turns) if turn["num_sampled"]]
    nodes = sorted(lengths.items())
    if len(numbered) == len(nodes):
        return {node: number for (node, _), (number, _) in zip(nodes, numbered, strict=True)}
    first, last = _match_lengths(nodes, numbered), _match_lengths(nodes[::-1], numbered[::-1])
    return {node: number for node, number in first.items() if last.get(node) == number}


def _match_lengths(nodes: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Match nodes and turns of the same length in this order, each as early as possible; {} if a node is left."""
    matched, rest = {}, iter(turns)
    for node, length in nodes:
        found = next((number for number, of_turn in rest if of_turn == length), None)
        if found is None:
            return {}
        matched[node] = found
    return matched


def match_messages(messages: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The turn that sampled each assistant message, where the message is what the turn was read as."""
    matched: dict[int, int] = {}
    first = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        for number in range(first, len(turns)):
            if turns[number].get("message") == message:
                matched[index] = number
                first = number + 1
                break
    return matched


def find_forks(
    rows: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]], turn_of_node: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Where each row leaves the earlier row with which it shares most ids, and why, if the turn says so."""
    arrays = [np.asarray(row["token_ids"], dtype=np.int64) for row in rows]
    forks = []
    for number in range(1, len(rows)):
        shared = [_count_shared(arrays[number], earlier) for earlier in arrays[:number]]
        parent = int(np.argmax(shared))
        position = shared[parent]
        turn = _find_turn(rows[number], position, turn_of_node)
        forks.append(
            {
                "row": number,
                "parent_row": parent,
                "position": position,
                "turn": turn,
                "reason": None if turn is None else _find_reason(turns[turn], rows[number], position),
                "ids": [_id_at(arrays[parent], position), _id_at(arrays[number], position)],
            }
        )
    return forks


def _find_reason(turn: Mapping[str, Any], row: Mapping[str, Any], position: int) -> str | None:
    """Why the turn forked; where it did not, as an agent may begin anew anywhere, what it began with."""
    if (reason := turn.get("fork") or turn.get("branch")) is not None:
        return str(reason)
    origins = [each["origin"] for each in row["segments"] if each["start"] <= position < each["stop"]]
    return _BRANCHES.get(origins[0]) if origins else None


def _count_shared(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> int:
    length = min(len(ours), len(theirs))
    differs = np.flatnonzero(ours[:length] != theirs[:length])
    return int(differs[0]) if len(differs) else length


def _find_turn(row: Mapping[str, Any], position: int, turn_of_node: Mapping[int, int]) -> int | None:
    """The turn of the first sampled ids at a position or after it."""
    for segment in row["segments"]:
        if segment["origin"] == "sampled" and segment["stop"] > position:
            return turn_of_node.get(segment["node"])
    return None


def _id_at(token_ids: np.ndarray[Any, Any], position: int) -> int | None:
    return int(token_ids[position]) if position < len(token_ids) else None
