"""What has no effect on a prompt: tools that a template does not show, variables that it does not read.

A template that knows no tools renders the same text with and without them, and the model would have to guess them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from unbroken.errors import InvalidInputError, ToolsNotShownError, UnbrokenError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Renderer
from unbroken.rendering.parsing.syntax.arguments import list_names
from unbroken.rendering.template import TemplateRenderer

_log = logging.getLogger(__name__)
_USER: Message = {"role": "user", "content": "Zq8User"}
_SYSTEM: Message = {"role": "system", "content": "Zq8System"}


def shows_tools(renderer: Renderer, tools: Sequence[ToolSchema]) -> bool:
    """Whether a prompt with these tools is another one than without them: 2 to 4 short renderings.

    True for tools that the template refuses, because a prompt with them is refused too.
    """
    # Some templates show tools in a system message, which must be there.
    return any(_changes_prompt(renderer, messages, tools) for messages in ([_USER], [_SYSTEM, _USER]))


def check_tools_shown(renderer: Renderer, tools: Sequence[ToolSchema]) -> None:
    """Raise `ToolsNotShownError` if there are tools, and prompts do not show them."""
    if tools and not shows_tools(renderer, tools):
        raise ToolsNotShownError(list_names(tools))


class ToolsWarning:
    """Warns once, of the first tools that it gets, if prompts do not show them: `check_tools` of a rollout."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._is_done = False

    def __call__(self, tools: Sequence[ToolSchema]) -> None:
        """Look at these tools, unless there are none."""
        if not tools or self._is_done:
            return
        self._is_done = True
        if not shows_tools(self._renderer, tools):
            _log.warning(
                "the chat template does not show tools to the model: its calls are guesses, unless the messages "
                "describe the tools"
            )


def find_unread_options(renderer: Renderer, options: Iterable[str]) -> tuple[str, ...]:
    """The template options that have no effect: misspelled, or meant for another model.

    None for a renderer of another package, which refuses options that it does not know.
    """
    if not (names := set(options)) or not isinstance(renderer, TemplateRenderer):
        return ()  # finding variables takes as long as compiling the template
    return tuple(sorted(names - renderer.find_variables()))


def check_options_read(renderer: Renderer, options: Iterable[str], *, name: str) -> None:
    """Raise `InvalidInputError` for options, the field `name`, that have no effect."""
    if not (unread := find_unread_options(renderer, options)):
        return
    assert isinstance(renderer, TemplateRenderer)
    read = sorted(renderer.find_variables() - {"messages", "add_generation_prompt", "tools"})
    raise InvalidInputError(
        f"{name} must have variables that the chat template reads, got {', '.join(unread)}: it reads "
        f"{', '.join(read) or 'none'}"
    )


def _changes_prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
    try:
        plain = _render(renderer, messages, ())
    except UnbrokenError:
        return False  # the template refuses a system message, or has no text for a user's alone
    try:
        return bool(_render(renderer, messages, tools) != plain)
    except UnbrokenError:
        return True


def _render(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Any:
    if isinstance(renderer, TemplateRenderer):
        return renderer.render_text(messages, tools=tools, add_generation_prompt=True)
    return renderer.render_ids(messages, tools=tools, add_generation_prompt=True).tolist()
