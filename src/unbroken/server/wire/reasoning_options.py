"""A dialect's wish how much to reason, as variables of the template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def choose_reasoning_options(effort: str | None, *, reads_option: Callable[[str], bool]) -> dict[str, Any]:
    """The template options for an effort; none for an option that the template does not read.

    "none" is `enable_thinking: false`, and any other effort is `reasoning_effort`. Without an effort, and for a
    template that knows neither, the model reasons as it does.
    """
    if effort is None:
        return {}
    name, value = ("enable_thinking", False) if effort == "none" else ("reasoning_effort", effort)
    return {name: value} if reads_option(name) else {}
