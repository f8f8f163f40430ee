"""The tools of a question, from each dialect's own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from unbroken.messages import ToolSchema
from unbroken.server.http.errors import HttpError, shorten


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Refuse a tool whose calls could not be read."""
    if (kind := tool.get("type", "function")) != "function":
        raise PydanticCustomError(
            "type", "of the type {found} is no tool that this server takes (function)", {"found": shorten(kind)}
        )
    if "type" in tool and not (isinstance(name := get_name(tool), str) and name):
        raise PydanticCustomError("name", "must have a function with a name")
    return tool


Tools = Annotated[list[Annotated[dict[str, Any], AfterValidator(_check_tool)]], Field(fail_fast=True)]
"""The tools of dialects in OpenAI's form."""


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
