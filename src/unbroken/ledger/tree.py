"""The token tree: all given and all sampled ids of one rollout, append-only; and its export as training rows.

A worked example. The prompt is `[1, 2]`; the engine samples `[3, 4]`; the bridge `[5, 6]` adds a tool's answer; the
engine samples `[7, 4]`. This makes a line of four nodes:

    node            0 PROMPT   1 SAMPLED   2 BRIDGE    3 SAMPLED
    attached at     -          (0, 2)      (1, 2)      (2, 2)

    path(Position(node=3, offset=2))
    token_ids         1    2    3    4    5    6    7    4
    sampled_mask      -    -    x    x    -    -    x    x
    rollout_logprobs  NaN  NaN  -.1  -.2  NaN  NaN  -.3  -.4
    policy_versions  -1   -1    0    0   -1   -1    0    0

Now the agent rewrites its history and the prompt becomes `[1, 2, 3, 9]`. `find_longest_prefix` finds that its first
three ids are recorded: they end at (1, 1), inside the first completion. The new id is attached there; no node is split:

    node            0 PROMPT   1 SAMPLED   4 PROMPT    5 SAMPLED
    attached at     -          (0, 2)      (1, 1)      (4, 1)

    path(Position(node=5, offset=1))
    token_ids         1    2    3    9    8
    sampled_mask      -    -    x    -    x

`leaves()` then returns (3, 2) and (5, 1): two branches that share the ids 1, 2 and the sampled 3. Each is a row of
`export_samples`:

    branch to (3, 2)   token_ids     1  2  3  4  5  6  7  4
                       sampled_mask  -  -  x  x  -  -  x  x
                       loss_mask     -  -  x  x  -  -  x  x     its row trains 3 4 7 4
    branch to (5, 1)   token_ids     1  2  3  9  8
                       sampled_mask  -  -  x  -  x
                       loss_mask     -  -  -  -  x              its row trains 8: the shared 3 is trained above

Both rows have the trajectory's advantage, or that of the id or its turn, where their loss mask is true, otherwise zero.
A branch whose turns were sampled at several temperatures gives a row for each, which trains the ids of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError, InvariantError
from unbroken.ledger.branches import BranchIndex
from unbroken.ledger.nodes import Node, Origin, Path, Position, Segment
from unbroken.ledger.numbers import MAX_FLOAT32, to_finite_float32
from unbroken.ledger.records import ImageRecord, StoredSession
from unbroken.messages import ToolSchema
from unbroken.rendering.base import TEMPLATE
from unbroken.types import (
    NO_VERSION,
    BoolMask,
    ControlSpan,
    FinishReason,
    ImageSpan,
    KeptIds,
    RoutedExperts,
    SampledSequence,
    TokenIds,
    TrainingSample,
    find_misplaced_span,
    freeze,
    token_ids,
)


class TokenTree:
    """An append-only tree of token ids. Nodes are never changed, split or removed."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._branches = BranchIndex()
        self._leaves: dict[int, None] = {}
        """The numbers of the nodes at whose end nothing is attached, in order."""
        self._has_images = False
        self._last_ids: tuple[Position, TokenIds] | None = None
        """The path that was asked for last: the next prompt continues it."""
        self._rows: tuple[int, Sequence[tuple[Path, TrainingSample]]] = (0, ())
        """Those of so many nodes."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, oldest first."""
        return tuple(self._nodes)

    @property
    def num_sampled(self) -> int:
        """Number of sampled ids of all branches, each counted once."""
        return sum(node.num_sampled for node in self._sampled_nodes)

    @property
    def sampled_versions(self) -> tuple[int, ...]:
        """The policy versions that sampled an id, ascending, each once."""
        return tuple(sorted(set().union(*(_find_versions(node.policy_versions) for node in self._sampled_nodes))))

    @property
    def rows(self) -> Sequence[tuple[Path, TrainingSample]]:
        """The rows to train on, without advantages, each with its path, which may end after it.

        A step trains them, compares them and records them: they are built once, and again if the tree has grown.
        """
        num_nodes = len(self._nodes)
        if self._rows[0] != num_nodes:
            self._rows = num_nodes, tuple(_find_rows(self))
        return self._rows[1]

    def copy(self) -> TokenTree:
        """A tree with the same nodes, to read in one thread while another adds to this one."""
        copied = TokenTree()
        for node in self._nodes:
            copied._add(node)
        return copied

    def add_given(
        self,
        ids: Iterable[int] | NDArray[Any],
        origin: Origin,
        *,
        parent: Position | None,
        message_indices: TokenIds | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Position:
        """Attach ids that no engine sampled, and return the position after them.

        `message_indices` is [K], by default all `TEMPLATE`; the offsets of `images` count from the first of `ids`.

        Raises:
            InvariantError: there are no ids, `origin` is SAMPLED, the parent does not exist, or lengths differ.
        """
        given = token_ids(ids)
        num_ids = len(given)
        if origin is Origin.SAMPLED:
            raise InvariantError("origin must be prompt or bridge, got sampled: add sampled ids with add_sampled")
        indices = _fill(num_ids, TEMPLATE) if message_indices is None else np.asarray(message_indices, np.int32)
        if indices.shape != (num_ids,):
            raise InvariantError(f"message_indices has shape {indices.shape} for {num_ids} ids: they must agree")
        if (problem := find_misplaced_span(images, num_ids, of="ids")) is not None:
            raise InvariantError(f"image spans must be in order: {problem}")
        return self._add(
            Node(
                parent=parent,
                origin=origin,
                token_ids=given,
                rollout_logprobs=_own(np.full(num_ids, np.nan, dtype=np.float32)),
                policy_versions=_fill(num_ids, NO_VERSION),
                message_indices=freeze(indices),
                images=tuple(images),
            )
        )

    def append(self, other: TokenTree) -> int:
        """Add the nodes of another tree beside these, which share nothing; returns what is added to their numbers."""
        shift = len(self._nodes)
        for node in other._nodes:
            parent = node.parent
            self._add(node if parent is None else replace(node, parent=replace(parent, node=parent.node + shift)))
        return shift

    def add_sampled(self, sequence: SampledSequence, *, parent: Position, policy: str | None = None) -> Position:
        """Attach a completion to the prompt it was sampled from, and return the position after its last id.

        Ids that were given inside it stay what they are: without logprob and version, and never trained.

        Raises:
            InvariantError: the completion was aborted or is empty, or the parent does not exist.
        """
        if sequence.finish_reason is FinishReason.ABORT:
            raise InvariantError("an aborted completion is never trained on and must not be added to the tree")
        routed_start, experts = self._find_new_experts(sequence, parent)
        return self._add(
            Node(
                parent=parent,
                origin=Origin.SAMPLED,
                token_ids=sequence.completion_ids,
                rollout_logprobs=sequence.rollout_logprobs,
                policy_versions=_own(sequence.policy_versions),
                message_indices=_fill(len(sequence.completion_ids), TEMPLATE),
                temperature=sequence.temperature,
                routed_experts=experts,
                routed_start=routed_start,
                kept_ids=sequence.kept_ids,
                controls=sequence.controls,
                policy=policy,
            )
        )

    def path(self, position: Position) -> Path:
        """Get the path from the start of the sequence to `position`."""
        steps = self._steps(position)
        parts = [(self._nodes[step.node], step.offset) for step in steps]
        segments = self._make_segments(steps)
        policy_versions = _concatenate([node.policy_versions[:size] for node, size in parts])
        return Path(
            token_ids=self.token_ids(position),
            sampled_mask=_own(policy_versions != NO_VERSION),
            rollout_logprobs=_concatenate([node.rollout_logprobs[:size] for node, size in parts]),
            policy_versions=policy_versions,
            message_indices=_concatenate([node.message_indices[:size] for node, size in parts]),
            segments=segments,
            images=self.images(position),
            temperatures=tuple(dict.fromkeys(node.temperature for node, _ in parts if node.temperature is not None)),
            routed_experts=self._join_experts(steps),
            kept_ids=KeptIds.join(
                [(None if node.kept_ids is None else node.kept_ids.cut(size), size) for node, size in parts]
            ),
            controls=self._find_controls(segments),
        )

    def _find_controls(self, segments: Sequence[Segment]) -> tuple[ControlSpan, ...]:
        return tuple(
            ControlSpan(start=each.start, stop=each.stop, controls=controls)
            for each in segments
            if (controls := self._nodes[each.node].controls) is not None
        )

    def token_ids(self, position: Position) -> TokenIds:
        """Get the ids of the path to `position`, [T], read-only."""
        known = self._last_ids
        parts = []
        for step in self._walk_back(position):
            if known is not None and step == known[0]:
                parts.append(known[1])
                break
            parts.append(self._nodes[step.node].token_ids[: step.offset])
        ids: TokenIds = parts[0] if len(parts) == 1 else _concatenate(parts[::-1])
        self._last_ids = position, ids
        return ids

    def images(self, position: Position) -> tuple[ImageSpan, ...]:
        """Get the images on the path to `position`; offsets count from the start of the path."""
        if not self._has_images:
            return ()
        return tuple(
            replace(image, offset=image.offset + segment.start)
            for segment in self._make_segments(self._steps(position))
            for image in self._nodes[segment.node].images
            if image.offset < segment.stop - segment.start
        )

    def leaves(self) -> list[Position]:
        """Get the ends of nodes that nothing is attached to, in the order of the nodes."""
        return [Position(node=number, offset=len(self._nodes[number].token_ids)) for number in self._leaves]

    def find_longest_prefix(
        self, ids: Iterable[int] | NDArray[Any], *, images: Sequence[ImageSpan] = ()
    ) -> tuple[Position | None, int]:
        """Find the longest recorded prefix of a prompt: the position after it, and its number of ids.

        Of nodes in which equally many ids end, the newest is taken. The prefix also ends before the first different
        image, as different images can have the same ids. The time depends on the ids that are shared, not on the number
        of branches.
        """
        return self._branches.find_longest_prefix(token_ids(ids), images)

    def step_back(self, position: Position, num_ids: int) -> Position | None:
        """Get the position `num_ids` (>= 0) ids before `position` on its path; None for the start of the sequence."""
        remaining = num_ids
        for step in self._walk_back(position):
            if remaining < step.offset:
                return replace(step, offset=step.offset - remaining)
            remaining -= step.offset
        if remaining:
            raise InvariantError(f"cannot step back {num_ids} ids on a path of {num_ids - remaining}")
        return None

    @property
    def _sampled_nodes(self) -> Iterator[Node]:
        return (node for node in self._nodes if node.origin is Origin.SAMPLED)

    def _find_new_experts(self, sequence: SampledSequence, parent: Position) -> tuple[int, RoutedExperts | None]:
        """The experts that no node on the path knows, and the position of the first; the known ones stay."""
        if sequence.routed_experts is None:
            return 0, None
        steps = self._steps(parent)
        num_computed = sum(step.offset for step in steps) + len(sequence.completion_ids) - 1
        if len(sequence.routed_experts) != num_computed:
            raise InvariantError(
                f"routed_experts has {len(sequence.routed_experts)} entries for {num_computed + 1} ids on the path: "
                "every id but the last needs one"
            )
        known = self._join_experts(steps)
        if known is not None and known.shape[1:] != sequence.routed_experts.shape[1:]:
            raise InvariantError(
                f"routed_experts must have the layers and experts per id of the ids before, {known.shape[1:]}, got "
                f"{sequence.routed_experts.shape[1:]}"
            )
        start = 0 if known is None else len(known)
        return start, freeze(sequence.routed_experts[start:].copy())

    def _join_experts(self, steps: Sequence[Position]) -> RoutedExperts | None:
        """[R, L, K] the experts of the first R ids of a path, which are all that are known."""
        parts: list[RoutedExperts] = []
        stop = 0
        for step in steps:
            node = self._nodes[step.node]
            stop += step.offset
            if node.routed_experts is not None:
                parts.append(node.routed_experts[: max(stop - node.routed_start, 0)])
        experts: RoutedExperts | None = _concatenate(parts) if parts else None
        return experts

    def _add(self, node: Node) -> Position:
        num_ids = len(node.token_ids)
        if num_ids == 0:
            raise InvariantError(f"a node must have at least one id, got none ({node.origin})")
        if node.parent is not None:
            self._check_parent(node.parent)
            if node.parent.offset == len(self._nodes[node.parent.node].token_ids):
                self._leaves.pop(node.parent.node, None)
        self._leaves[len(self._nodes)] = None
        self._has_images |= bool(node.images)
        self._nodes.append(node)
        self._branches.add(node)
        return Position(node=len(self._nodes) - 1, offset=num_ids)

    def _check_parent(self, parent: Position) -> None:
        if not 0 <= parent.node < len(self._nodes):
            raise InvariantError(f"parent node {parent.node} is not one of the {len(self._nodes)} nodes of this tree")
        node = self._nodes[parent.node]
        if not 1 <= parent.offset <= len(node.token_ids):
            raise InvariantError(
                f"parent offset must lie in [1, {len(node.token_ids)}] (node {parent.node}), got {parent.offset}"
            )
        for image in node.images:
            if image.offset < parent.offset < image.offset + image.length:
                raise InvariantError(
                    f"parent offset {parent.offset} lies inside the image at [{image.offset}, "
                    f"{image.offset + image.length}) of node {parent.node}: an image must not be divided"
                )

    def _make_segments(self, steps: Sequence[Position]) -> tuple[Segment, ...]:
        stops = accumulate(step.offset for step in steps)
        return tuple(
            Segment(node=step.node, origin=self._nodes[step.node].origin, start=stop - step.offset, stop=stop)
            for step, stop in zip(steps, stops, strict=True)
        )

    def _steps(self, position: Position) -> list[Position]:
        """Get the position at which the path leaves each of its nodes, from the start to `position`."""
        return list(self._walk_back(position))[::-1]

    def _walk_back(self, position: Position) -> Iterator[Position]:
        """Iterate over the steps of a path, from `position` to the start."""
        self._check_parent(position)
        step: Position | None = position
        while step is not None:
            yield step
            step = self._nodes[step.node].parent


def _find_versions(versions: NDArray[np.int32]) -> set[int]:
    """Nearly all completions have one version, which is found without sorting."""
    oldest, newest = int(versions.min()), int(versions.max())
    return {oldest} if oldest == newest else set(np.unique(versions).tolist()) - {NO_VERSION}


def _fill(num_ids: int, value: int) -> NDArray[np.int32]:
    array: NDArray[np.int32] = _own(np.full(num_ids, value, dtype=np.int32))
    return array


def _concatenate(parts: Sequence[NDArray[Any]]) -> Any:
    return _own(np.concatenate(parts))


def _own(array: NDArray[Any]) -> Any:
    """Make an array read-only that was just made, without the copy that `freeze` would make."""
    array.flags.writeable = False
    return array


def export_samples(
    tree: TokenTree, advantage: float | Mapping[int, float | NDArray[np.float64]]
) -> list[TrainingSample]:
    """Export one row per leaf that has sampled ids that no other leaf has, in the order in which the leaves were added.

    If these ids have several temperatures there is a row for each, in the order in which the temperatures appear.

    `advantage` is one number for all ids; or, by the number of each node that was sampled, one for all of its ids or
    one for each.

    A sampled id that several branches share is in the loss of the first only. A leaf with no ids left to train (an
    unanswered prompt, a branch that ends inside an earlier one) gives no row. A row ends with its last trained id:
    later ids would only cost time.

    Raises:
        InvalidInputError: an advantage is not a finite number, that of a sampled node is missing, or a node has more or
            fewer than ids.
    """
    if not isinstance(advantage, Mapping) and advantage == 0:  # of half of the rollouts, often
        return [row for _, row in tree.rows]
    by_node = _check_advantages(tree, advantage)
    return [_add_advantages(path, row, by_node) for path, row in tree.rows]


_Advantages: TypeAlias = Mapping[int, NDArray[np.float32]]
"""Of the ids of each sampled node, [its ids]."""


def _check_advantages(tree: TokenTree, advantage: float | Mapping[int, float | NDArray[np.float64]]) -> _Advantages:
    numbers = [number for number, node in enumerate(tree.nodes) if node.origin is Origin.SAMPLED]
    if not isinstance(advantage, Mapping):
        advantage = dict.fromkeys(numbers, advantage)
        names = dict.fromkeys(numbers, "advantage")
    else:
        names = {number: f"advantage[{number}]" for number in numbers}
    if missing := [number for number in numbers if number not in advantage]:
        raise InvalidInputError(f"advantage must have a number for each sampled node, but has none for {missing}")
    return {
        number: _expand(advantage[number], len(tree.nodes[number].token_ids), name=names[number]) for number in numbers
    }


def _expand(value: float | NDArray[np.float64], num_ids: int, *, name: str) -> NDArray[np.float32]:
    """The advantage of each of a node's ids."""
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return np.full(num_ids, to_finite_float32(value, name=name), dtype=np.float32)
    if value.shape != (num_ids,):
        raise InvalidInputError(f"{name} must be one number, or one for each of {num_ids} ids, got {value.shape}")
    if not (np.abs(value) <= MAX_FLOAT32).all():
        raise InvalidInputError(f"{name} must be finite in float32, got {value}")
    return value.astype(np.float32)


def _add_advantages(path: Path, row: TrainingSample, by_node: _Advantages) -> TrainingSample:
    # A path has a prefix of each of its nodes.
    advantages = np.concatenate(
        [
            by_node[each.node][: each.stop - each.start] if each.node in by_node else np.zeros(each.stop - each.start)
            for each in path.segments
        ]
    ).astype(np.float32)
    return replace(row, advantages=np.where(row.loss_mask, advantages[: len(row.token_ids)], np.float32(0)))


def _find_rows(tree: TokenTree) -> Iterator[tuple[Path, TrainingSample]]:
    """The path of each row, and the row with the advantage 0."""
    nodes = tree.nodes
    num_trained = [0] * len(nodes)
    for leaf in tree.leaves():
        path = tree.path(leaf)
        untrained = _mask_untrained(path, num_trained)
        for temperature in path.temperatures:
            loss_mask = untrained.copy()
            for segment in path.segments:
                if nodes[segment.node].temperature != temperature:
                    loss_mask[segment.start : segment.stop] = False
            if loss_mask.any():
                yield path, _build_row(path, loss_mask, temperature, policy=_find_policy(tree, path))


def _mask_untrained(path: Path, num_trained: list[int]) -> BoolMask:
    """Mask the sampled ids that no earlier branch trains, [T].

    A path contains a prefix of each of its nodes, so the trained ids of a node are a prefix too. `num_trained` has its
    length for each node, and is updated.
    """
    mask = path.sampled_mask.copy()
    for segment in path.segments:
        num_ids = segment.stop - segment.start
        mask[segment.start : segment.start + min(num_ids, num_trained[segment.node])] = False
        num_trained[segment.node] = max(num_ids, num_trained[segment.node])
    return mask


def _find_policy(tree: TokenTree, path: Path) -> str | None:
    """The policy of a path's sampled ids: each policy of a rollout has branches of its own."""
    return next(tree.nodes[each.node].policy for each in path.segments[::-1] if each.origin is Origin.SAMPLED)


def _build_row(path: Path, loss_mask: BoolMask, temperature: float, *, policy: str | None) -> TrainingSample:
    end = int(loss_mask.nonzero()[0][-1]) + 1
    return TrainingSample(
        token_ids=path.token_ids[:end],
        sampled_mask=path.sampled_mask[:end],
        loss_mask=_own(loss_mask)[:end],
        rollout_logprobs=path.rollout_logprobs[:end],
        policy_versions=path.policy_versions[:end],
        advantages=_own(np.zeros(end, dtype=np.float32)),
        temperature=temperature,
        images=tuple(image for image in path.images if image.offset < end),
        routed_experts=None if path.routed_experts is None else path.routed_experts[:end],
        kept_ids=None if path.kept_ids is None else path.kept_ids.cut(end),
        controls=tuple(replace(each, stop=min(each.stop, end)) for each in path.controls if each.start < end),
        policy=policy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The messages of a session, and which of its turns, messages and tools belong to a branch of its ids.

    The branches are of several agents, such as a sub-agent. Turns and messages are their places in the session's lists.
    """

    messages: Sequence[Mapping[str, Any]]
    """Of all conversations, in the order in which they came."""
    parents: Sequence[int | None]
    """Of each message the one before it; None for the first of a conversation."""
    turn_of_node: Mapping[int, int]
    """By sampled node."""
    replies: Sequence[int]
    """Of each turn the message that it became."""
    tools: Sequence[Sequence[ToolSchema]]
    """Of each turn."""

    def find_turns(self, path: Path) -> list[int]:
        """The turns that sampled ids of a path, the last of them last."""
        return [self.turn_of_node[each.node] for each in path.segments if each.origin is Origin.SAMPLED]

    def find_messages(self, turn: int) -> list[int]:
        """The messages of a conversation, from its first one to the reply of a turn."""
        found = []
        message: int | None = self.replies[turn]
        while message is not None:
            found.append(message)
            message = self.parents[message]
        return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTree:
    """The token tree of a stored session, and what of the session belongs to its nodes."""

    stored: StoredSession
    tree: TokenTree
    turn_of_node: Mapping[int, int]
    """By sampled node; a turn is its place in the session's list."""
    images_of_node: Mapping[int, Sequence[ImageRecord]]

    @classmethod
    def grow(cls, stored: StoredSession) -> StoredTree:
        """Grow the tree turn by turn, as the session did."""
        tree, turn_of_node, images_of_node = TokenTree(), {}, {}
        for number, turn in enumerate(stored.turns):
            given = turn.given
            if given is not None:
                end = tree.add_given(
                    given.token_ids, given.origin, parent=given.parent, message_indices=given.message_indices
                )
                images_of_node[end.node] = given.images
            turn_of_node[tree.add_sampled(turn.sequence, parent=turn.parent).node] = number
        return cls(stored=stored, tree=tree, turn_of_node=turn_of_node, images_of_node=images_of_node)

    @property
    def conversations(self) -> Conversations:
        """The messages of the session, and what belongs to its branches."""
        stored = self.stored
        return Conversations(
            messages=[message.message for message in stored.messages],
            parents=[message.parent for message in stored.messages],
            turn_of_node=self.turn_of_node,
            replies=[turn.reply_node for turn in stored.turns],
            tools=[stored.tools.get(turn.tools_key, ()) for turn in stored.turns],
        )

    def find_images(self, path: Path) -> list[dict[str, Any]]:
        """The images of a path, as records of rows have them."""
        return [
            {"start": segment.start + image.offset, "stop": stop, "sha256": image.sha256}
            for segment in path.segments
            for image in self.images_of_node.get(segment.node, ())
            if (stop := segment.start + image.offset + image.length) <= segment.stop
        ]
