"""A server of the package openenv-core: `python openenv_server.py PORT [text|tools]`, with two sessions."""

from __future__ import annotations

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    prompt: str
    words: tuple[str, ...] = ()


class Guessing(Environment):
    """A number from 0 to 9, by the seed; three guesses; 0.25 for each wrong one, 1 for the right one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.left = 0, 0

    def reset(self, seed=None, episode_id=None, largest=9, **kwargs):
        self.number, self.left = (seed or 0) % (largest + 1), 3
        return Hint(prompt=f"Guess my number from 0 to {largest}.", words=("begin",))

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        guess = action.message.strip()
        if guess == str(self.number):
            return Hint(prompt="Right.", done=True, reward=1.0)
        return Hint(prompt=f"Not {guess}.", words=("no",), done=self.left == 0, reward=0.25)

    @property
    def state(self) -> State:
        return State(episode_id="x", step_count=3 - self.left)


class Adding(MCPEnvironment):
    """A tool; the reward of a call is 0.5, and the fourth call ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("adding")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(tools)
        self.num_calls = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.num_calls = 0
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError(f"no action {action}")

    def _rewarded(self, action, observation):
        if isinstance(action, CallToolAction):
            self.num_calls += 1
            observation.reward, observation.done = 0.5, self.num_calls == 4
        return observation

    def step(self, action, timeout_s=None, **kwargs):
        return self._rewarded(action, super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._rewarded(action, await super().step_async(action, timeout_s=timeout_s, **kwargs))

    @property
    def state(self) -> State:
        return State(episode_id="x", step_count=self.num_calls)


if __name__ == "__main__":
    port, kind = int(sys.argv[1]), sys.argv[2]
    if kind == "tools":
        app = create_app(Adding, CallToolAction, CallToolObservation, max_concurrent_envs=2)
    else:
        app = create_app(Guessing, Guess, Hint, max_concurrent_envs=2)
    uvicorn.run(app, port=port, log_level="error")
