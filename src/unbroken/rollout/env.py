"""What a rollout plays against: one episode of a task, in messages only.

An environment never sees token ids. It gets each reply as a message, with the parse it came from, and says what
follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import ParsedResponse
from unbroken.rollout.tools import ToolStatus
from unbroken.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStart:
    """The conversation a policy is asked to continue first."""

    messages: Sequence[Message]
    tools: tuple[ToolSchema, ...] = ()
    """The tools offered in every prompt of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy answered."""

    message: Message
    """The assistant message, with the calls that parsed."""
    parsed: ParsedResponse
    """Every attempt at a call, the malformed ones too."""
    finish_reason: FinishReason
    """STOP or LENGTH; an aborted completion is no reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Append these messages and go on. The next prompt is all ids so far and a bridge."""

    messages: Sequence[Message]
    tool_errors: tuple[ToolStatus, ...] = ()
    """How the calls that these messages answer failed, one each; for the counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """These messages are the whole history now. The next prompt is rendered afresh, and forks."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The episode is over."""


Outcome: TypeAlias = Continue | Rewrite | Done


@runtime_checkable
class Env(Protocol):
    """One episode. An object is used once, by one rollout; what it needs is acquired in `start`, released in `close`.

    Whatever the first three methods raise ends the episode as FAILED, with the exception kept; other episodes go on.
    What they get is theirs to keep and to change: the record holds copies. Of images it holds the files: where messages
    come back, an image part has an `EncodedImage`.
    """

    async def start(self) -> EnvStart:
        """The first messages and the tools; called once, before anything else."""
        ...

    async def step(self, reply: Reply) -> Outcome:
        """What follows a reply; called for every turn, the last one included."""
        ...

    async def reward(self, messages: Sequence[Message]) -> float:
        """One finite number for the whole episode, the larger the better.

        Called once, after the last turn, with the whole conversation; not after a timeout, an abort or a failure.
        """
        ...

    async def close(self) -> None:
        """Release everything; called exactly once, whatever happened, also if `start` raised.

        It has `Limits.close_timeout_s` of its own. If it raises or takes longer, the trajectory keeps its status and
        its reward, and the failure is kept as `Trajectory.close_error` and counted.
        """
        ...
