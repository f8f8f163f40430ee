"""What a token tree is made of (`Node`, `Position`), and what is known of one walk through it (`Path`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from unbroken.types import BoolMask, ImageSpan, Logprobs, TokenIds


class Origin(StrEnum):
    """Where a run of ids comes from."""

    PROMPT = "prompt"
    """A rendering of messages: the first prompt, or what a fresh rendering put after a fork."""
    SAMPLED = "sampled"
    """An engine sampled it."""
    BRIDGE = "bridge"
    """Put behind a sampled turn to bring the next messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in the tree: behind the first `offset` ids of node number `node`."""

    node: int
    offset: int
    """From 1 to the number of ids of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A run of ids of one origin; K is their number."""

    parent: Position | None
    """Where it is attached; None at the start of a sequence."""
    origin: Origin
    token_ids: TokenIds
    """[K]"""
    rollout_logprobs: Logprobs
    """[K] NaN unless sampled."""
    policy_versions: NDArray[np.int32]
    """[K] `NO_VERSION` unless sampled."""
    message_indices: TokenIds
    """[K] which message an id spells; `TEMPLATE` where the template wrote it, and in sampled ids."""
    images: tuple[ImageSpan, ...] = ()
    """Offsets count from the start of this node."""
    temperature: float | None = None
    """What the logprobs refer to; None for given ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The ids [start, stop) of a path: the first `stop - start` ids of one node."""

    node: int
    origin: Origin
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One walk from the start of a sequence to a position, with all that is known of its T ids."""

    token_ids: TokenIds
    """[T]"""
    sampled_mask: BoolMask
    """[T] true exactly on ids that an engine sampled."""
    rollout_logprobs: Logprobs
    """[T] NaN where `sampled_mask` is false."""
    policy_versions: NDArray[np.int32]
    """[T] `NO_VERSION` where `sampled_mask` is false."""
    message_indices: TokenIds
    """[T] index of the message an id spells, in the conversation as it was when the id was added; `TEMPLATE` where the
    template wrote it, and on sampled ids. A BRIDGE id with an index of at least 0 is text of a tool or user message."""
    segments: tuple[Segment, ...]
    """Consecutive; cover [0, T)."""
    images: tuple[ImageSpan, ...]
    """Offsets count from the start of the path."""
    temperatures: tuple[float, ...]
    """The distinct temperatures that `rollout_logprobs` refer to, in order of appearance; none without sampled ids."""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """[T] the origin of each id."""
        return tuple(segment.origin for segment in self.segments for _ in range(segment.start, segment.stop))
