"""`ToolEnv`, the common environment: a question, tools, and a reward at the end."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from unbroken.errors import ToolDefinitionError
from unbroken.messages import Message, ToolCall
from unbroken.rendering.base import ParsedResponse
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply
from unbroken.rollout.tools import Tool, ToolOutcome, ToolStatus
from unbroken.rollout.trajectory import CallTime, TrajectoryStatus
from unbroken.threads import run_in_daemon_thread
from unbroken.types import FinishReason

RewardFunction: TypeAlias = Callable[..., float] | Callable[..., Awaitable[float]]
"""Computes one finite number from the whole conversation. With an argument `status`, as `Env.reward`."""


class ToolEnv:
    """Answers tool calls until a reply has none or is cut by length.

    The calls of a reply run in parallel and are answered in order. A call of an unknown tool, with wrong arguments, or
    that fails is answered by a tool message that says so. Attempts that could not be parsed are listed in one user
    message after the answers.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], reward: RewardFunction) -> None:
        """Create an episode. A reward function that is not async runs in a thread.

        Raises:
            ToolDefinitionError: an entry of `tools` is not a `Tool`, or two have the same name.
        """
        self._messages = messages
        self._reward = reward
        self._sees_status = "status" in inspect.signature(reward).parameters
        self._tools: dict[str, Tool] = {}
        self.add_tools(tools)

    def add_tools(self, tools: Sequence[Tool]) -> None:
        """Add tools that are known only when the episode starts; `start` returns the schemas of all.

        Raises:
            ToolDefinitionError: as for the constructor.
        """
        for entry in tools:
            _check_is_tool(entry)
        names = [*self._tools, *(tool.name for tool in tools)]
        self._tools |= {tool.name: tool for tool in tools}
        if len(self._tools) != len(names):
            raise ToolDefinitionError(f"tools must have different names, got {names}")

    async def start(self) -> EnvStart:
        """Return the first messages and the schemas of the tools."""
        return EnvStart(messages=self._messages, tools=tuple(tool.schema for tool in self._tools.values()))

    async def step(self, reply: Reply) -> Outcome:
        """Answer every attempted call; `Done` if there are no calls, or if the reply was cut."""
        if reply.finish_reason is FinishReason.LENGTH or not reply.parsed.tool_calls:
            return Done()
        calls = reply.message.get("tool_calls", [])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._time_call(call)) for call in calls]
        outcomes, times = zip(*(task.result() for task in tasks), strict=True) if tasks else ((), ())
        messages = [_build_answer(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]
        if reply.parsed.failures:
            messages.append(_build_failure_message(reply.parsed))
        errors = tuple(outcome.status for outcome in outcomes if outcome.status is not ToolStatus.OK)
        return Continue(messages=messages, tool_errors=errors, calls=tuple(times))

    async def reward(self, messages: Sequence[Message], status: TrajectoryStatus | None = None) -> float:
        """Call the reward function, after a time-out only if it takes the `status`. The rollout checks the result."""
        if status is TrajectoryStatus.TIMEOUT and not self._sees_status:
            return 0.0
        call = functools.partial(self._reward, messages, **({"status": status} if self._sees_status else {}))
        result: Any = call() if inspect.iscoroutinefunction(self._reward) else await run_in_daemon_thread(call)
        value: float = await result if inspect.isawaitable(result) else result
        return value

    async def close(self) -> None:
        """Do nothing: the caller owns the resources of the tools."""

    async def _time_call(self, call: ToolCall) -> tuple[ToolOutcome, CallTime]:
        start_s = time.perf_counter()
        outcome = await self._call(call)
        name = call["function"]["name"]
        return outcome, CallTime(name=name, status=outcome.status, start_s=start_s, stop_s=time.perf_counter())

    async def _call(self, call: ToolCall) -> ToolOutcome:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in self._tools:
            content = f"Error: there is no tool {name!r}. The tools are: {', '.join(self._tools) or 'none'}."
            return ToolOutcome(status=ToolStatus.UNKNOWN_TOOL, content=content)
        if not isinstance(arguments, dict):
            content = f"Error: the arguments of {name} must be a JSON object, got {arguments!r}"
            return ToolOutcome(status=ToolStatus.INVALID_ARGUMENTS, content=content)
        return await self._tools[name].call(arguments)


def _check_is_tool(entry: Any) -> None:
    if not isinstance(entry, Tool):
        raise ToolDefinitionError(f"tools must be Tool objects, got {entry!r}: decorate the function with @tool")


def _build_answer(call: ToolCall, outcome: ToolOutcome) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": outcome.content}


def _build_failure_message(parsed: ParsedResponse) -> Message:
    """Build one user message for all attempts that could not be parsed: a tool message needs a call to answer."""
    # In Harmony and Mistral's format the name is not a part of `raw`: several failed calls would look alike.
    names = [f" in a call of {failure.name}" if failure.name else "" for failure in parsed.failures]
    lines = [
        f"- {failure.status.value}{name}: {failure.raw}" for failure, name in zip(parsed.failures, names, strict=True)
    ]
    return {"role": "user", "content": "\n".join(["These tool calls could not be read:", *lines])}
