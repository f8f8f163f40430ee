"""The parts of a token tree (`Node`, `Position`), and a path through it (`Path`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from unbroken.types import (
    NO_VERSION,
    BoolMask,
    ControlSpan,
    ImageSpan,
    KeptIds,
    LogitControls,
    Logprobs,
    RoutedExperts,
    TokenIds,
)


class Origin(StrEnum):
    """Where the ids of a node come from."""

    PROMPT = "prompt"
    """Rendered messages: the first prompt, or the new part of a fresh rendering after a fork."""
    SAMPLED = "sampled"
    """A completion, with the ids that were given inside it."""
    BRIDGE = "bridge"
    """Appended to a sampled turn, with the next messages."""


class BridgeKind(StrEnum):
    """How a prompt that continues a turn was made. The names are metrics and must stay stable."""

    DERIVED = "derived"
    """By the renderer's bridge."""
    RENDERED = "rendered"
    """By a fresh rendering that begins with all ids so far."""


class ForkReason(StrEnum):
    """Why a prompt does not begin with all ids so far (I1). The names are metrics and must stay stable."""

    REFUSED_BRIDGE = "refused_bridge"
    """There is no bridge, and a fresh rendering differs from the recorded ids."""
    WRONG_HEADER = "wrong_header"
    """The sampled stop id is the header of a role other than the next one, and was left out."""
    REWRITTEN_HISTORY = "rewritten_history"
    """The environment or the agent replaced the history."""
    TEMPLATE_REWRITES = "template_rewrites"
    """The renderer follows the template (`HistoryPolicy.TEMPLATE`), which now renders earlier turns differently."""
    EDITED_REPLY = "edited_reply"
    """The agent sent another reply in the place of ours."""
    DROPPED_REPLY = "dropped_reply"
    """The agent continued from an earlier message, and left out the replies after it. If it left out only what follows
    a turn, the prompt begins with all ids of that turn."""
    FOREIGN_REPLY = "foreign_reply"
    """The agent sent an assistant message that was never sampled."""
    CHANGED_TOOLS = "changed_tools"
    CHANGED_OPTIONS = "changed_options"
    """Other options of the template than in the turn before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in the tree: after the first `offset` ids of node number `node`."""

    node: int
    offset: int
    """From 1 to the node's number of ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """K consecutive ids of the same origin; all arrays are [K]."""

    parent: Position | None
    """Where the node is attached; None at the start of a sequence."""
    origin: Origin
    token_ids: TokenIds
    rollout_logprobs: Logprobs
    """NaN unless sampled."""
    policy_versions: NDArray[np.int32]
    """`NO_VERSION` unless sampled, also on ids that were given inside a completion (`SampledSequence`)."""
    message_indices: TokenIds
    """The message that each id belongs to; `TEMPLATE` for ids that the template wrote, and for sampled ids."""
    images: tuple[ImageSpan, ...] = ()
    """Offsets count from the start of this node."""
    temperature: float | None = None
    """The temperature that the logprobs refer to; None for given ids."""
    routed_experts: RoutedExperts | None = None
    """[R, L, K] of a sampled node: the experts of the ids on its path from `routed_start` on, which are those that no
    earlier node knows: given ids before it, its own but the last, and the last one of the completion before."""
    routed_start: int = 0
    kept_ids: KeptIds | None = None
    """[K] of a sampled node, if the engine returned them."""
    controls: LogitControls | None = None
    """What changed the logits of a sampled node; None if nothing did."""
    policy: str | None = None
    """The policy that sampled it, of a run of several."""

    @property
    def sampled_mask(self) -> BoolMask:
        """True exactly on the ids that an engine sampled."""
        mask: BoolMask = self.policy_versions != NO_VERSION
        return mask

    @property
    def num_sampled(self) -> int:
        """Number of sampled ids."""
        return int(np.count_nonzero(self.sampled_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The ids [start, stop) of a path: the first `stop - start` ids of one node."""

    node: int
    origin: Origin
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The T ids from the start of a sequence to a position, with all that is known about them; all arrays are [T]."""

    token_ids: TokenIds
    sampled_mask: BoolMask
    """True exactly on the ids that an engine sampled."""
    rollout_logprobs: Logprobs
    """NaN where `sampled_mask` is false."""
    policy_versions: NDArray[np.int32]
    """`NO_VERSION` where `sampled_mask` is false."""
    message_indices: TokenIds
    """As in `Node`, an index into the conversation when the id was added. A BRIDGE id with an index >= 0 is text of a
    tool or user message."""
    segments: tuple[Segment, ...]
    """Consecutive segments that cover [0, T)."""
    images: tuple[ImageSpan, ...]
    """Offsets count from the start of the path."""
    temperatures: tuple[float, ...]
    """The distinct temperatures that `rollout_logprobs` refer to, in order of appearance; empty without sampled ids."""
    routed_experts: RoutedExperts | None = None
    """[R, L, K] the experts of the first R ids, as they were first computed; None if none are known."""
    kept_ids: KeptIds | None = None
    """[T] the ids that each id was sampled from; None if none are known."""
    controls: tuple[ControlSpan, ...] = ()
    """For each completion on the path where anything changed the logits."""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """[T] the origin of each id."""
        return tuple(segment.origin for segment in self.segments for _ in range(segment.start, segment.stop))
