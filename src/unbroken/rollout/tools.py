"""Python functions as tools that a model can call.

With `@tool` above `async def lookup(key: str) -> dict[str, str]` and a docstring that describes `key`,

    await lookup.call({"key": "raka"})    # ToolOutcome(status=ok, content='{"value": "v"}')
    await lookup.call({"kee": "raka"})    # ToolOutcome(status=invalid_arguments, content="Error: lookup: missing ...")

Every call ends with an outcome that can be sent to the model, even after wrong arguments or an exception in the tool.
Only a cancellation of the calling task and the user's interrupt are raised.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, overload

from unbroken.errors import ToolDefinitionError
from unbroken.messages import ContentPart, ToolSchema
from unbroken.rollout.copying import copy_containers
from unbroken.rollout.failures import format_error, must_propagate
from unbroken.rollout.limits import is_duration
from unbroken.rollout.schema import describe_function, find_problem
from unbroken.rollout.threads import run_in_daemon_thread
from unbroken.rollout.tool_results import to_content


class ToolStatus(StrEnum):
    """How a tool call ended. The names other than OK are metrics and must stay stable."""

    OK = "ok"
    ERROR = "error"
    """The tool raised, or returned something that is neither JSON nor images."""
    TIMEOUT = "timeout"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments do not match the signature; the tool was not called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The answer to a tool call."""

    status: ToolStatus
    content: str | list[ContentPart]
    """For the model: the result as text, JSON or parts, or a description of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model can call, with its description."""

    function: Callable[..., Any]
    schema: ToolSchema
    timeout_s: float
    checks_arguments: bool = True
    """Whether arguments that do not fit the schema are refused here; False for a function that checks them itself."""

    @property
    def name(self) -> str:
        """The name in the schema."""
        return self.schema["function"]["name"]

    async def call(self, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Check the arguments against the signature and call the function, for at most `timeout_s` seconds.

        The function gets a copy of the arguments. A `ToolOutcome` that it returns is the answer as it is. An async
        function runs in this event loop, must not block it, and is cancelled at the timeout. A plain function runs in a
        thread, and continues there after a timeout.
        """
        clock = asyncio.timeout(self.timeout_s)
        try:
            problem = find_problem(self.schema, arguments) if self.checks_arguments else None
            if problem is not None:
                return ToolOutcome(status=ToolStatus.INVALID_ARGUMENTS, content=f"Error: {self.name}: {problem}")
            async with clock:
                return await self._run(copy_containers(dict(arguments)))
        # Any exception of the tool is an answer, even SystemExit (`exit()` in a code interpreter).
        except BaseException as error:
            if must_propagate(error):
                raise
            if isinstance(error, TimeoutError) and clock.expired():
                content = f"Error: {self.name} did not answer within {self.timeout_s:g} s"
                return ToolOutcome(status=ToolStatus.TIMEOUT, content=content)
            content = f"Error: {self.name} failed with {format_error(error)}"
            return ToolOutcome(status=ToolStatus.ERROR, content=content)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Call the function and convert its result, in a thread unless both are quick."""
        if not inspect.iscoroutinefunction(self.function):
            return await run_in_daemon_thread(lambda: _to_outcome(self.function(**arguments)))
        result = await self.function(**arguments)
        if isinstance(result, (str, ToolOutcome)):
            return _to_outcome(result)
        return await run_in_daemon_thread(functools.partial(_to_outcome, result))


@overload
def tool(function: Callable[..., Any], *, timeout_s: float = 30.0) -> Tool: ...
@overload
def tool(function: None = None, *, timeout_s: float = 30.0) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, *, timeout_s: float = 30.0
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool from a function: `@tool`, `@tool(timeout_s=5)` or `tool(function)`.

    Each parameter needs a type annotation and a description in a Google-style docstring. A returned string is the
    answer; pictures and lists with pictures become parts (`tool_results.to_content`); anything else becomes JSON.

    Raises:
        ToolDefinitionError: the function cannot be described, or `timeout_s` is not a positive number.
    """
    if not is_duration(timeout_s):
        raise ToolDefinitionError(f"timeout_s must be a finite number of seconds > 0, got {timeout_s!r}")
    if function is None:
        return functools.partial(tool, timeout_s=timeout_s)
    return Tool(function=function, schema=describe_function(function), timeout_s=timeout_s)


def _to_outcome(result: Any) -> ToolOutcome:
    return result if isinstance(result, ToolOutcome) else ToolOutcome(status=ToolStatus.OK, content=to_content(result))
