"""The environment protocol: one episode of a task, in messages only, never in token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import ParsedResponse
from unbroken.rollout.tools import ToolStatus
from unbroken.rollout.trajectory import CallTime
from unbroken.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStart:
    """The first messages of an episode, and the tools of all its prompts."""

    messages: Sequence[Message]
    tools: tuple[ToolSchema, ...] = ()
    policy: str | None = None
    """Who speaks next, in a run of several policies (`rollout.policies`); None in any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The policy's reply to a prompt."""

    message: Message
    """The assistant message, with the tool calls that could be parsed."""
    parsed: ParsedResponse
    """The response with every attempted call, including malformed ones."""
    finish_reason: FinishReason
    """STOP or LENGTH; an aborted completion gives no reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Append these messages. The next prompt is all ids so far plus a bridge."""

    messages: Sequence[Message]
    tool_errors: tuple[ToolStatus, ...] = ()
    """The status of each answered call that failed, for the counters."""
    reward: float | None = None
    """The reward of the turn that this answers, if turns have rewards; a finite number."""
    calls: tuple[CallTime, ...] = field(default=(), compare=False)
    """When each answered call ran, if that is known."""
    policy: str | None = None
    """Who speaks next, in a run of several policies: the messages are added to that policy's own conversation, or begin
    it. None: who spoke last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Replace the whole history by these messages. The next prompt is rendered afresh, and forks."""

    messages: Sequence[Message]
    reward: float | None = None
    """As in `Continue`."""
    policy: str | None = None
    """As in `Continue`; the history that is replaced is that policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """End the episode."""

    reward: float | None = None
    """As in `Continue`."""


Outcome: TypeAlias = Continue | Rewrite | Done


@runtime_checkable
class Env(Protocol):
    """One episode. Each object is used for one rollout, acquires resources in `start` and releases them in `close`.

    An exception in the first three methods ends only this episode, as FAILED, and is kept. The methods may keep and
    change their arguments, which are copies. In these messages an image part has an `EncodedImage`.
    """

    async def start(self) -> EnvStart:
        """Return the first messages and the tools. Called once, before anything else."""
        ...

    async def step(self, reply: Reply) -> Outcome:
        """Return what follows a reply. Called for every turn, including the last."""
        ...

    async def reward(self, messages: Sequence[Message]) -> float | Mapping[str, float]:
        """Return the reward of the whole episode: one finite number, the larger the better; in a run of several
        policies one for each that spoke, by its name.

        The rewards of single turns are added to it, so it need not have them.

        Called once, after the last turn, with the whole conversation; not after an abort or a failure. A method with
        another argument `status` gets the `TrajectoryStatus` (completed, max_turns, ...), and is called after a
        time-out too, for at most `Limits.close_timeout_s`. Without it a time-out is worth 0.
        """
        ...

    async def close(self) -> None:
        """Release all resources. Called exactly once in every case, even if `start` raised.

        If it raises or takes longer than `Limits.close_timeout_s`, the trajectory keeps its status and its reward; the
        failure is counted and kept as `Trajectory.close_error`.
        """
        ...
