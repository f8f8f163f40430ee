"""`Trajectory`, the finished record of a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from unbroken.counters import Counters
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import ForkReason, Position
from unbroken.ledger.tree import Conversations, TokenTree
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import BridgeOutcome, ParsedResponse
from unbroken.rollout.limits import Limit
from unbroken.types import SampledSequence


class SpanReward(NamedTuple):
    """A reward for a part of what a trajectory sampled."""

    start: int
    stop: int
    """It is for the ids [start, stop) of all that were sampled, in the order of their turns; ids that were given inside
    a turn do not count (`SampledSequence`)."""
    reward: float


class TrajectoryStatus(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """The last turn was cut by its length limit, and the environment ended the episode."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The token limit of the rollout or the engine's context is used up."""
    TIMEOUT = "timeout"
    """Environment, tools or agent have used up `Limits.timeout_s`."""
    ABORTED = "aborted"
    """The engine aborted a request; its partial ids are not recorded."""
    FAILED = "failed"
    """An exception of the engine, the environment or the reward, which the policy has not caused."""
    UNSCORED = "unscored"
    """It ended by itself, but no reward function has an opinion on it: each returned None."""


class CloseFailure(StrEnum):
    """How `Env.close` failed. The names are metrics and must stay stable."""

    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """When a tool call ran, in seconds: of `time.perf_counter` in an `Outcome`, since the rollout began in a record."""

    name: str
    status: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """When a turn happened, in seconds since the rollout began."""

    start_s: float
    """Its prompt is built from here on."""
    sampling_s: float
    """It is sampled from here on."""
    sampled_s: float
    """The environment has its reply from here on."""
    answered_s: float | None = None
    """The environment has answered; None if it did not."""
    calls: tuple[CallTime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply of the policy: of one engine call, or of two where its reasoning was bounded (`rollout.thinking`)."""

    prompt_end: Position
    """After the last id of the prompt."""
    end: Position
    """After the last sampled id."""
    sequence: SampledSequence
    message: Message
    parsed: ParsedResponse
    bridge: BridgeOutcome | None
    """The bridge to this turn, or its refusal; None if not requested (first turn, rewritten history, failed audit)."""
    fork: ForkReason | None
    """Why the prompt does not continue the newest turn before it; None if it does, and for the first turn."""
    cut_by: Limit | None
    policy: str | None = None
    """The policy that spoke: its name, or NAME@VERSION for a frozen copy; of a gateway, what it answered with. None if
    there is one, the run's."""


def sum_queue_s(turns: Iterable[Turn]) -> float | None:
    """How long turns together waited in the engine's queue; None without turns, or if the engine did not report one."""
    waits = [turn.sequence.queue_s for turn in turns]
    known = [wait for wait in waits if wait is not None]
    return sum(known) if known and len(known) == len(waits) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one episode. `ledger.tree.export_samples(trajectory.tree, advantage)` turns it into rows."""

    trajectory_id: str
    tree: TokenTree
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """The whole conversation; the last messages are not always in `tree`."""
    tools: tuple[ToolSchema, ...]
    conversations: Conversations | None = None
    """Of a session, whose branches have their own messages and tools; `messages` and `tools` are the first one's."""
    status: TrajectoryStatus
    reward: float | None
    """The environment's, and those of the turns. None after an abort or a failure, and if it is unscored."""
    turn_rewards: tuple[float, ...] = ()
    """One for each of `turns`, 0 where the environment gave none; empty if it gave none at all."""
    span_rewards: tuple[SpanReward, ...] = ()
    """In the order of their ends, if a reward function gave rewards for spans to a sibling: then all that functions
    gave, times their weights; a number is for all ids. They are in `reward` too."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The known parts of the reward by name, for the metrics."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """If `reward` is a weighted sum of parts: the weight of each, also of those that have no opinion on this one."""
    times: tuple[TurnTimes, ...] = ()
    """One for each of `turns`; empty if they are not known."""
    parts: Mapping[str, Trajectory] = field(default_factory=dict)
    """Of several policies (`rollout.policies`): what each that is trained said, with its own reward, by its name."""
    counters: Counters
    error: BaseException | None
    """The exception, if and only if the status is FAILED."""
    close_error: BaseException | None = None
    """The exception of `Env.close`, or a TimeoutError; counted as `close_failures/...`."""
    wall_time_s: float
    engine_s: float = 0.0
    """How much of it was waiting for the engine, in its queue and while it sampled."""
    queue_s: float | None = None
    """How long its turns waited in the engine's queue; None if the engine did not report that (`sum_queue_s`)."""

    def __post_init__(self) -> None:
        if self.turn_rewards and len(self.turn_rewards) != len(self.turns):
            raise InvariantError(f"turn_rewards has {len(self.turn_rewards)} entries for {len(self.turns)} turns")
        if any(not 0 <= span.start < span.stop <= self.num_sampled for span in self.span_rewards):
            raise InvariantError(f"span_rewards must be of {self.num_sampled} sampled ids, got {self.span_rewards}")
        if self.times and len(self.times) != len(self.turns):
            raise InvariantError(f"times has {len(self.times)} entries for {len(self.turns)} turns")

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled in all turns."""
        return self.tree.num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Rollouts of one problem (siblings)."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
    data: Mapping[str, Any] | None = None
    """The problem's row of a data set: its `index`, and its `columns` in types that JSON has."""
    reward_costs: Mapping[str, float] = field(default_factory=dict)
    """What its reward functions counted, by the name of a metric, which is the sum over all groups of a step."""

    def take_part(self, policy: str) -> TrajectoryGroup | None:
        """What one of several policies said; siblings in which it did not speak are left out, and None if it never
        did.
        """
        parts = tuple(each.parts[policy] for each in self.trajectories if policy in each.parts)
        return replace(self, trajectories=parts) if parts else None

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The rewards in order; None for a trajectory without one."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled in all trajectories."""
        return sum(trajectory.num_sampled for trajectory in self.trajectories)

    @property
    def sampled_versions(self) -> tuple[int, ...]:
        """The policy versions that sampled an id, ascending, each once."""
        return tuple(sorted({version for each in self.trajectories for version in each.tree.sampled_versions}))

    @property
    def counters(self) -> Counters:
        """The counts of all trajectories together."""
        counters = Counters()
        for trajectory in self.trajectories:
            counters.merge(trajectory.counters)
        return counters
