"""A compiled chat template: the one place that runs Jinja, with the machinery that transformers uses for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from unbroken.errors import TemplateError
from unbroken.messages import ToolSchema

_TEXT_METHODS = frozenset(
    {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "replace", "find", "index", "count"}
)
_STRUCTURE_WORDS = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
    | {"role", "content", "reasoning_content", "type", "text", "image", "video", "audio", "items"}
    | {"name", "id", "arguments", "tool_calls", "tool_call_id", "properties", "required"}
)
"""Roles, keys and types: compared with the structure of messages, not with their text."""


class ChatTemplate:
    """A chat template that compiled, with the variables it is always given (special tokens, template arguments)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        try:
            self._template = _compile_jinja_template(source)
            self._syntax_tree = self._template.environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}. "
                "Mend it, or pass another one as chat_template="
            ) from None
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool,
    ) -> str:
        """The template's text for a conversation.

        Raises:
            TemplateError: the template refuses the messages, or fails on them.
        """
        try:
            text: str = self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        # A template is a program from outside: whatever it raises is its verdict on these messages.
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            more = f", and {len(messages) - 8} more" if len(messages) > 8 else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise TemplateError(
                f"the chat template refuses these messages (roles: {roles}{more}): {kind}{error}. "
                "Give it the roles in an order it knows, or pass another template as chat_template="
            ) from None
        return text

    def literals(self) -> tuple[str, ...]:
        """String constants that the template may compare message text with, e.g. `/no_think`."""
        found: set[str] = set()
        for node in self._syntax_tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
            for text in _constants_of(node):
                if len(text.strip()) >= 2 and text.strip() not in _STRUCTURE_WORDS:
                    found.add(text)
        return tuple(sorted(found))

    def integers(self) -> tuple[int, ...]:
        """Integer constants above 2: lengths and counts at which the template may change its mind."""
        values = {node.value for node in self._syntax_tree.find_all(nodes.Const) if type(node.value) is int}
        return tuple(sorted(value for value in values if value > 2))


def _constants_of(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Call) and not (isinstance(node.node, nodes.Getattr) and node.node.attr in _TEXT_METHODS):
        return
    for constant in node.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
