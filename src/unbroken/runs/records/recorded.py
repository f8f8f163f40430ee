"""A step's file of rollouts, read back: groups that can be trained on as when they were sampled.

The tree of a rollout is made of its rows. Worked example: two rows, of which the second goes on from id 3 of the first.

    row 0    token_ids 1 2 3 4    segments [0, 2) prompt, node 0    [2, 4) sampled, node 1
    row 1    token_ids 1 2 3 9 8  segments [0, 2) prompt, node 0    [2, 3) sampled, node 1    [3, 4) prompt, node 3 ...
    nodes    0: 1 2    1: 3 4 (the longest part of it in a row)    3: 9    4: 8

Of nodes that no row has, such as a prompt that was never answered, only the place is known: nobody trains their ids.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError, InvariantError, RolloutError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message
from unbroken.rendering.base import ParsedResponse
from unbroken.rollout.policies import Speech
from unbroken.rollout.trajectory import SpanReward, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn
from unbroken.runs.records.files import MAX_TEXT, MAX_TEXTS, TEXTS, make_first_lines, read_all, summarize
from unbroken.types import FinishReason, LogitControls, SampledSequence, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What the file of a step has."""

    path: Path
    head: Mapping[str, Any]
    """Its first line."""
    texts: Sequence[str] | None
    """Of its second line, which not all files have."""
    records: Sequence[Mapping[str, Any]]
    """A line for each trajectory."""

    def make_groups(self, *, policies: Sequence[str] = ()) -> list[TrajectoryGroup]:
        """The groups, with all that training needs. Parsed calls and images in messages are not read back; of several
        `policies` (`rollout.policies`), nor which messages each had.

        Raises:
            InvalidInputError: a record is incomplete, or does not fit together.
        """
        groups = []
        for name, siblings in itertools.groupby(self.records, key=lambda record: record.get("group")):
            records = list(siblings)
            members = tuple(self._make_trajectory(record, policies) for record in records)
            data = records[0].get("data")
            groups.append(TrajectoryGroup(group_id=str(name), trajectories=members, data=data))
        return groups

    def find_changed_texts(self) -> str | None:
        """The first column of the first line, or the texts of the second, that the records do not give again; None if
        they give all, or the file has none.
        """
        if "columns" not in self.head:
            return None
        max_text = min(MAX_TEXT, MAX_TEXTS // max(len(self.records), 1))
        try:
            first, texts = make_first_lines({}, [summarize(record, max_text=max_text) for record in self.records])
        except (KeyError, TypeError, ValueError, AttributeError, LookupError) as error:
            return f"a record ({type(error).__name__}: {error})"
        columns, made = self.head["columns"], json.loads(json.dumps(first["columns"]))
        changed = [name for name in columns if columns[name] != made.get(name)]
        return next(iter(changed), "texts" if self.texts != texts["texts"] else None)

    def _make_trajectory(self, record: Mapping[str, Any], policies: Sequence[str]) -> Trajectory:
        try:
            return _make_trajectory(record, policies)
        except (TypeError, ValueError, AttributeError, LookupError, InvariantError) as error:
            raise InvalidInputError(
                f"{self.path} must have whole records, and trajectory {record.get('trajectory')} is none: "
                f"{type(error).__name__}: {error}"
            ) from error


def read_step(path: Path) -> RecordedStep:
    """Read the file of a step; raises `InvalidInputError` if it is not such a file, or is damaged."""
    lines = list(read_all(path))
    texts = next((line.get("texts") for line in lines[1:2] if line.get("kind") == TEXTS), None)
    records = [line for line in lines[1:] if line.get("kind") != TEXTS]
    return RecordedStep(path=path, head=lines[0], texts=texts, records=records)


def _make_trajectory(record: Mapping[str, Any], policies: Sequence[str]) -> Trajectory:
    if not policies:
        tree, turns = _make_tree(record["rows"], record["turns"])
        _check_turns(record, len(turns))
        return _fill(record, tree, turns)
    speakers = dict.fromkeys(str(turn["policy"]) for turn in record["turns"])
    conversations = {name: _make_tree(*_take_conversation(record, name)) for name in speakers}
    _check_turns(record, sum(len(turns) for _, turns in conversations.values()))
    rest = {name: iter(turns) for name, (_, turns) in conversations.items()}
    said = [
        Speech(policy=name, given=(), replaces=False, turn=next(rest[name]))
        for name in (str(turn["policy"]) for turn in record["turns"])
    ]
    tree, joined, _ = Speech.join(said, {name: own for name, (own, _) in conversations.items()}, ())
    whole = _fill(record, tree, joined)
    parts = {name: _make_part(whole, name, *conversations[name]) for name in policies if name in conversations}
    return replace(whole, parts=parts)


def _take_conversation(
    record: Mapping[str, Any], speaker: str
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The rows and turns of who spoke, of several policies."""
    turns = record["turns"]
    rows = [row for row in record["rows"] if turns[row["turns"][0]]["policy"] == speaker]
    return rows, [turn for turn in turns if turn["policy"] == speaker]


def _check_turns(record: Mapping[str, Any], num_found: int) -> None:
    if num_found != len(record["turns"]):
        raise InvariantError(f"rows have the sampled ids of {num_found} turns, and there are {len(record['turns'])}")


def _make_part(whole: Trajectory, name: str, tree: TokenTree, turns: Sequence[Turn]) -> Trajectory:
    """What one policy said, as `run_rollout` gives it to the trainer."""
    pairs = zip(whole.turns, whole.turn_rewards, strict=False)
    return replace(
        whole,
        trajectory_id=f"{whole.trajectory_id}/{name}",
        tree=tree,
        turns=tuple(turns),
        reward=whole.reward_parts.get(name),
        turn_rewards=tuple(reward for turn, reward in pairs if turn.policy == name),
        counters=Counters(),
    )


def _fill(record: Mapping[str, Any], tree: TokenTree, turns: Sequence[Turn]) -> Trajectory:
    counters, status = Counters(), TrajectoryStatus(record["status"])
    for key, times in record["counters"].items():
        counters.add(key, times)
    rewards = [turn["reward"] for turn in record["turns"]]
    return Trajectory(
        trajectory_id=record["trajectory"],
        tree=tree,
        turns=tuple(turns),
        messages=tuple(record["messages"]),
        tools=tuple(record["tools"]),
        status=status,
        reward=record["reward"],
        turn_rewards=() if None in rewards else tuple(rewards),
        span_rewards=tuple(SpanReward(*span) for span in record.get("span_rewards") or ()),
        reward_parts=record["reward_parts"],
        reward_weights=record.get("reward_weights") or {},
        counters=counters,
        error=RolloutError(record["error"]) if status is TrajectoryStatus.FAILED else None,
        wall_time_s=record["wall_time_s"],
    )


def _make_tree(
    rows: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]
) -> tuple[TokenTree, list[Turn]]:
    """The tree of a trajectory's rows, and its `recorded` turns: one for each sampled node, in their order."""
    if len({row["temperature"] for row in rows}) > 1:
        raise InvariantError("rows have several temperatures, which no step trains together")
    tree = TokenTree()
    turns: list[Turn] = []
    added: dict[int, Position] = {}
    nodes = _find_nodes(rows)
    ends = _find_lost_ends(rows, nodes)
    for number in sorted(nodes.keys() | ends.keys()):
        if number in ends:
            node, offset = ends[number]
            tree.add_given([0], Origin.PROMPT, parent=Position(node=added[node].node, offset=offset))
            continue
        row, place, segment = nodes[number]
        parent = None
        if place:
            before = row["segments"][place - 1]
            parent = Position(node=added[before["node"]].node, offset=before["stop"] - before["start"])
        if (origin := Origin(segment["origin"])) is not Origin.SAMPLED:
            added[number] = tree.add_given(row["token_ids"][segment["start"] : segment["stop"]], origin, parent=parent)
            continue
        if parent is None:
            raise InvariantError(f"node {number} is sampled, and has no prompt")
        sequence = _make_sequence(row, segment["start"], segment["stop"], recorded[len(turns)])
        turn = recorded[len(turns)]
        added[number] = tree.add_sampled(sequence, parent=parent, policy=turn["policy"])
        turns.append(_make_turn(sequence, parent, added[number], message=turn["message"], policy=turn["policy"]))
    return tree, turns


_Nodes: TypeAlias = Mapping[int, tuple[Mapping[str, Any], int, Mapping[str, Any]]]
"""For each node the row that has the longest part of it, with the place of its segment, and the segment."""


def _find_nodes(rows: Iterable[Mapping[str, Any]]) -> _Nodes:
    found: dict[int, tuple[Mapping[str, Any], int, Mapping[str, Any]]] = {}
    for row in rows:
        for place, segment in enumerate(row["segments"]):
            known = found.get(segment["node"])
            if known is None or segment["stop"] - segment["start"] > known[2]["stop"] - known[2]["start"]:
                found[segment["node"]] = row, place, segment
    return found


def _find_lost_ends(rows: Iterable[Mapping[str, Any]], nodes: _Nodes) -> dict[int, tuple[int, int]]:
    """Where rows ended whose branch went on with ids that nobody trains: (node, offset) by the number of a new node.

    Rows are made of leaves, in the order of their numbers, and the first branch trains the ids that several share. So
    without a prompt that was never answered, another row would train what the row before it did.
    """
    attached = {
        (before["node"], before["stop"] - before["start"])
        for row, place, _ in nodes.values()
        if place and (before := row["segments"][place - 1])
    }
    ends: dict[int, tuple[int, int]] = {}
    newest = -1
    for row in rows:
        segment = row["segments"][-1]
        number, offset = segment["node"], segment["stop"] - segment["start"]
        longest = nodes[number][2]
        is_leaf = offset == longest["stop"] - longest["start"] and (number, offset) not in attached
        if is_leaf and number > newest:
            newest = number
            continue
        newest = max(newest, number) + 1
        while newest in nodes:  # the number that it had is free, and lower than that of the next row's leaf
            newest += 1
        ends[newest] = number, offset
    return ends


def _make_sequence(row: Mapping[str, Any], start: int, stop: int, turn: Mapping[str, Any]) -> SampledSequence:
    """The completion [start, stop) of a row, which is this turn's; ids in it without a version were given."""
    before = sum(min(last, start) - first for first, last, _ in row["policy_versions"] if first < start)
    spans = [
        VersionSpan(start=max(first, start) - start, stop=min(last, stop) - start, policy_version=version)
        for first, last, version in row["policy_versions"]
        if first < stop and last > start
    ]
    logprobs = np.full(stop - start, np.nan, dtype=np.float32)
    for span in spans:
        own = row["rollout_logprobs"][before : before + span.stop - span.start]
        if len(own) != span.stop - span.start:
            raise InvariantError(f"rollout_logprobs has {len(row['rollout_logprobs'])} entries: each version needs one")
        logprobs[span.start : span.stop] = own
        before += len(own)
    return SampledSequence(
        completion_ids=np.array(row["token_ids"][start:stop], dtype=np.int32),
        rollout_logprobs=logprobs,
        finish_reason=FinishReason(turn["finish_reason"]),
        version_spans=tuple(spans),
        temperature=row["temperature"],
        controls=LogitControls.from_json(turn.get("controls") or {}),
    )


def _make_turn(
    sequence: SampledSequence, prompt_end: Position, end: Position, *, message: Message, policy: str | None
) -> Turn:
    return Turn(
        prompt_end=prompt_end,
        end=end,
        sequence=sequence,
        message=message,
        parsed=ParsedResponse(content=""),
        bridge=None,
        fork=None,
        cut_by=None,
        policy=policy,
    )
