"""The replies of a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unbroken.errors import EngineError, InvariantError
from unbroken.types import FinishReason, Logprobs, RoutedExperts, SampleRequest, TokenIds, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """One completion. Like a real one it is cut after a stop id of the request, at `max_tokens`, and by the context."""

    completion_ids: TokenIds
    rollout_logprobs: Logprobs | None = None
    """[C]; None gives every id the engine's `logprob`."""
    finish_reason: FinishReason = FinishReason.STOP
    """Why the reply ends where the script ends it; STOP without a stop id means a stop string."""
    routed_experts: RoutedExperts | None = None
    """[P + C - 1, L, K] of the prompt and the reply, for requests that want them; cut with the reply."""
    queue_s: float | None = None
    """What the engine reports as the time in its queue."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_ids", token_ids(self.completion_ids, name="completion_ids"))
        if self.rollout_logprobs is not None and len(self.rollout_logprobs) != len(self.completion_ids):
            raise InvariantError(
                f"rollout_logprobs has {len(self.rollout_logprobs)} entries for {len(self.completion_ids)} "
                "completion_ids: one each is needed"
            )


Reply: TypeAlias = ScriptedReply | Sequence[int]
Script: TypeAlias = Sequence[Reply] | Callable[[TokenIds], Reply]
"""Replies in the order of the requests (n of them for a request with n), or a function of the prompt's ids."""


class ScriptReader:
    """Reads a script, reply by reply."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._num_replies = 0

    def next_reply(self, request: SampleRequest) -> ScriptedReply:
        """Get the reply to a request; raises `EngineError` if none is left."""
        if callable(self._script):
            reply = self._script(request.prompt_ids)
        elif self._num_replies < len(self._script):
            reply = self._script[self._num_replies]
        else:
            raise EngineError(f"the script has {len(self._script)} replies, {request.request_id!r} asks for another")
        self._num_replies += 1
        return reply if isinstance(reply, ScriptedReply) else ScriptedReply(completion_ids=token_ids(reply))
