"""Agents in a config: a function, or a command."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from unbroken.errors import InvalidInputError
from unbroken.rollout.agents.command import CommandAgent, CommandReward
from unbroken.rollout.agents.session import Agent
from unbroken.runs.python_files import CommandWord, FunctionName, load_function


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """A program that attempts each row as it would with any model: it gets a URL and a key (docs/gateway.md)."""

    function: FunctionName | None = None
    """An async function that takes an `AgentSession`, whose `task` is the row, and returns a reward or None, written
    module:function or file.py:function."""
    command: tuple[CommandWord, ...] = ()
    """Instead of a function: words of a command, which is run for each attempt, with the session and the row in its
    environment (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, UNBROKEN_TASK, ...). It runs in a folder of its own; a word with a
    dot or a slash that names a file beside the TOML file stands for that file."""
    reward: CommandReward = CommandReward.NONE
    """For a command. none: the reward comes from `rewards`, or from `finish` of the session; exit: 1 if it exits
    with 0; output: the last line that it prints."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For a command: further variables."""
    inherit: tuple[str, ...] = ()
    """For a command: names of variables of the trainer that it gets beside PATH, HOME and the like; no other is passed
    on."""

    def __post_init__(self) -> None:
        if (self.function is None) == (not self.command):
            raise InvalidInputError(
                f"agent must have exactly one of function and command, got function={self.function}, "
                f"command={list(self.command)}"
            )
        if self.function is not None and (self.reward is not CommandReward.NONE or self.environment or self.inherit):
            raise InvalidInputError(
                "agent.reward, agent.environment and agent.inherit must be left out with agent.function"
            )

    def load(self, *, logs: Path) -> Agent:
        """Load the agent; commands write their output to `logs`. `InvalidInputError` without an async function."""
        if self.function is None:
            return CommandAgent(
                command=self.command, reward=self.reward, environment=self.environment, inherit=self.inherit, logs=logs
            )
        found = load_function(self.function, field="agent.function")
        if not inspect.iscoroutinefunction(found):
            raise InvalidInputError(
                f"agent.function must be an async function of an AgentSession, got {self.function!s}: {found!r}"
            )
        return cast(Agent, found)
