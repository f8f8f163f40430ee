"""The tools of a question, from each dialect's own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from unbroken.messages import ToolSchema
from unbroken.server.http.errors import HttpError, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools a reply may call, and must call. See the fields of `Question`."""

    reads_calls: bool
    required_functions: Sequence[ToolSchema] = ()
    may_call_several: bool = True


def make_tool(name: str, description: str | None, parameters: Any) -> ToolSchema:
    """Make a tool in the OpenAI form, as its chat clients send it."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return cast(ToolSchema, {"type": "function", "function": function})


def get_name(tool: Any) -> Any:
    """Get the name of a tool; None where it has no function, as a client's may."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def require_tool(tools: Sequence[ToolSchema], *, name: str | None, choice: Any) -> Sequence[ToolSchema]:
    """The tools of which one must be called: the one with this name, or all. Raises `HttpError` if there are none."""
    chosen = [tool for tool in tools if name is None or get_name(tool) == name]
    if not chosen:
        raise HttpError(400, f"tool_choice must match a function in tools, got {shorten(choice)}", param="tool_choice")
    return chosen
