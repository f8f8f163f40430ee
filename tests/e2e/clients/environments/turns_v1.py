"""An environment of verifiers 0.4 with several turns: it answers each reply, as a user would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["Guesses", "GuessesEnv"]


class Guess(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def variety(self, trace: Any) -> float:
        return len(set(trace.last_reply)) / 100


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self) -> Iterable[Guess]:
        for k in range(8):
            yield Guess(vf.TaskData(prompt=f"Guess my number, {k} to 9."), self.config.task)


class GuessesConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessesEnv(vf.Env[GuessesConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for k in (1, 2):
                await interaction.turn(f"Wrong. Try {k} again.")
