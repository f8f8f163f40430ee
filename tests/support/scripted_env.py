"""An environment that follows a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unbroken.messages import Message
from unbroken.rollout.env import Done, EnvStart, Outcome, Reply

QUESTION: tuple[Message, ...] = ({"role": "user", "content": "hi"},)


class ScriptedEnv:
    """Answers the k-th reply with the k-th of `outcomes` (an exception is raised), then is done; records the calls."""

    def __init__(
        self,
        outcomes: Iterable[Outcome | Exception] = (),
        *,
        messages: Sequence[Message] = QUESTION,
        reward: object = 1.0,
    ) -> None:
        self.replies: list[Reply] = []
        self.calls: list[str] = []
        self.rewarded: list[Message] = []
        self._outcomes = iter(outcomes)
        self._messages = messages
        self._reward = reward

    async def start(self) -> EnvStart:
        self.calls.append("start")
        return EnvStart(messages=self._messages)

    async def step(self, reply: Reply) -> Outcome:
        self.calls.append("step")
        self.replies.append(reply)
        outcome = next(self._outcomes, Done())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def reward(self, messages: Sequence[Message]) -> float:
        self.calls.append("reward")
        self.rewarded = list(messages)
        if isinstance(self._reward, Exception):
            raise self._reward
        return self._reward  # type: ignore[return-value]

    async def close(self) -> None:
        self.calls.append("close")
