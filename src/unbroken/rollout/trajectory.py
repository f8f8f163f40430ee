"""The finished record of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from unbroken.counters import Counters
from unbroken.ledger.nodes import Position
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import BridgeOutcome, ParsedResponse
from unbroken.rollout.limits import Limit
from unbroken.types import SampledSequence


class TrajectoryStatus(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    """The environment was done."""
    TRUNCATED = "truncated"
    """A turn was cut by its own length, and the environment was done with that."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The token budget of the rollout or the engine's context is used up."""
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    """The engine aborted a request; its partial ids are not recorded."""
    FAILED = "failed"
    """Something raised; the exception is kept in `Trajectory.error`."""


class BridgeKind(StrEnum):
    """How ids that continue a turn were found. Stable names: they are metrics."""

    DERIVED = "derived"
    """By the renderer's bridge."""
    RENDERED = "rendered"
    """By a fresh rendering, which turned out to begin with all ids so far."""


class ForkReason(StrEnum):
    """Why a prompt does not begin with all ids so far (I1). Stable names: they are metrics."""

    REFUSED_BRIDGE = "refused_bridge"
    """The renderer could not prove a bridge, and a fresh rendering differs from what is recorded."""
    WRONG_HEADER = "wrong_header"
    """The sampled stop id is the header of a role that does not follow, and was left out."""
    REWRITTEN_HISTORY = "rewritten_history"
    """The environment replaced the history."""
    TEMPLATE_REWRITES = "template_rewrites"
    """The renderer follows the template (`HistoryPolicy.TEMPLATE`), which renders what came before in another way."""
    FAILED_AUDIT = "failed_audit"
    """A shadow audit found the bridge of the turn before to be wrong: what was sampled behind it stays, and nothing is
    put behind that."""


class CloseFailure(StrEnum):
    """How an environment failed to close. Stable names: they are metrics."""

    ERROR = "error"
    """It raised."""
    TIMEOUT = "timeout"
    """It took longer than `Limits.close_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine call and the reply to it."""

    prompt_end: Position
    """Behind the last id of the prompt."""
    end: Position
    """Behind the last sampled id."""
    sequence: SampledSequence
    message: Message
    parsed: ParsedResponse
    bridge: BridgeOutcome | None
    """What the renderer answered when asked for the bridge to this turn; None if it was not asked (the first turn, a
    rewritten history, a failed audit)."""
    fork: ForkReason | None
    """Why this turn's prompt left the path before it; None where it continues that path."""
    cut_by: Limit | None
    """What set the length at which the completion was cut; None if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode as it happened. Turned into rows by `ledger.export.export_samples(trajectory.tree, advantage)`."""

    trajectory_id: str
    tree: TokenTree
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """The whole conversation, as it stood at the end; the last messages need not be in `tree`."""
    tools: tuple[ToolSchema, ...]
    status: TrajectoryStatus
    reward: float | None
    """None where there is none to have: after a timeout, an abort or a failure."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """By name what the reward was made of, where that is known; for the metrics."""
    counters: Counters
    """What happened, by reason (I8)."""
    error: BaseException | None
    """Set if and only if the status is FAILED."""
    close_error: BaseException | None = None
    """What `Env.close` raised; a TimeoutError if it hung. Nothing of the record is missing for it: status and reward
    stand, and the failure is counted as `close_failures/...`."""
    wall_time_s: float

    @property
    def num_sampled(self) -> int:
        """Ids sampled in all turns."""
        return sum(len(turn.sequence.completion_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Siblings: several rollouts of one problem."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The rewards in order; None where a trajectory has none."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def counters(self) -> Counters:
        """The counts of all trajectories together."""
        counters = Counters()
        for trajectory in self.trajectories:
            counters.merge(trajectory.counters)
        return counters
