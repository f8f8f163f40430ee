"""A compiled chat template: the one place that runs Jinja, with the machinery that transformers uses for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from unbroken.errors import TemplateError
from unbroken.messages import ToolSchema

_ATTRIBUTES_OF_STRUCTURE = frozenset({"role", "type"})
_MESSAGE_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})


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
        self._variables = {"documents": None, **variables}

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
        """String constants that the template may compare message text with, e.g. `/no_think`.

        All of them but those it only writes, looks keys up with, or compares a role or type with.
        """
        return tuple(sorted({text for text in _compared_strings(self._syntax_tree) if text.strip()}))

    def integers(self) -> tuple[int, ...]:
        """Integer constants above 2: lengths and counts at which the template may change its mind."""
        values = {node.value for node in self._syntax_tree.find_all(nodes.Const) if type(node.value) is int}
        return tuple(sorted(value for value in values if value > 2))


def _compared_strings(node: nodes.Node, *, is_written: bool = False) -> Iterator[str]:
    """The string constants below `node`; `is_written` says that its value goes into the text and nowhere else."""
    if isinstance(node, nodes.Const):
        if isinstance(node.value, str) and not is_written:
            yield node.value
        return
    if isinstance(node, nodes.AssignBlock):
        yield from (part.data for part in node.find_all(nodes.TemplateData))
        yield from (part.value for part in node.find_all(nodes.Const) if isinstance(part.value, str))
        return
    if _is_structural(node):
        return
    if isinstance(node, (nodes.Add, nodes.Concat)) and not is_written:
        yield from _joined(node)
    for field, value in node.iter_fields():
        if isinstance(node, nodes.Getitem) and field == "arg" and isinstance(value, nodes.Const):
            continue
        if field == "args" and _looks_up_a_key(node):
            value = [argument for argument in value[:1] if not isinstance(argument, nodes.Const)] + value[1:]
        passes_on = isinstance(node, (nodes.Add, nodes.Concat)) or (
            isinstance(node, nodes.CondExpr) and field in ("expr1", "expr2")
        )
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, nodes.Node):
                yield from _compared_strings(
                    child, is_written=isinstance(node, nodes.Output) or (is_written and passes_on)
                )


def _is_structural(node: nodes.Node) -> bool:
    """Whether a node compares a role or type, or makes an error message or a date."""
    if isinstance(node, nodes.Compare):
        return any(_is_role_or_type(side) for side in (node.expr, *(operand.expr for operand in node.ops)))
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGE_FUNCTIONS


def _looks_up_a_key(node: nodes.Node) -> bool:
    """Whether a node is `mapping.get(..)`."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get"


def _is_role_or_type(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_role_or_type(node.node)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value in _ATTRIBUTES_OF_STRUCTURE
    return (isinstance(node, nodes.Getattr) and node.attr in _ATTRIBUTES_OF_STRUCTURE) or (
        isinstance(node, nodes.Name) and node.name in _ATTRIBUTES_OF_STRUCTURE
    )


def _joined(node: nodes.Expr) -> Iterator[str]:
    try:
        value = node.as_const()
    except nodes.Impossible:
        return
    if isinstance(value, str):
        yield value
