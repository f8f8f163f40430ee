"""A compiled chat template: what runs it, within limits (`TemplateLimits`), and the constants in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from unbroken.errors import TemplateError
from unbroken.messages import ToolSchema, iterate_strings
from unbroken.rendering.jinja.limits import LimitError, TemplateLimits
from unbroken.rendering.jinja.sandbox import TemplateEnvironment

_ATTRIBUTES_OF_STRUCTURE = frozenset({"role", "type"})
_MESSAGE_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
_ORDINARY_LENGTH = 200_000


class ChatTemplate:
    """A chat template that compiled, with the variables it is always given (special tokens, template arguments).

    A template that goes over a limit on a conversation of ordinary length is not run again: it would do so for each of
    the hundreds of small conversations it is probed with.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        *,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
    ) -> None:
        """Compile it, and run it once on one message.

        Args:
            source: the template.
            variables: what it is always given.
            limits: of each rendering.
            now: what `strftime_now` tells it, always; the time of this call by default.

        Raises:
            TemplateError: it does not compile, is too long, or goes over a limit.
        """
        self._limits = limits or TemplateLimits()
        self._fault: str | None = None
        self._variables = dict(variables)
        if len(source) > self._limits.num_characters_of_source:
            raise TemplateError(
                f"the chat template must have at most {self._limits.num_characters_of_source} characters "
                f"(TemplateLimits.num_characters_of_source), got {len(source)}: is this a template?"
            )
        self._environment = TemplateEnvironment(now=now or datetime.now())
        try:
            self._program = self._environment.compile_template(source)
            tree = self._environment.parse(source)
            compared = {text for text in _compared_strings(tree) if text.strip()}
            integers = {node.value for node in tree.find_all(nodes.Const) if type(node.value) is int}
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}. "
                "Mend it, or pass another one as chat_template="
            ) from None
        # Parser and compiler give up on deeply nested or huge expressions in many ways, RecursionError the usual one.
        except Exception as error:
            raise TemplateError(
                f"the chat template does not compile: {type(error).__name__}: {error}. "
                "Nest its expressions and blocks less, or pass another one as chat_template="
            ) from None
        self._literals = tuple(sorted(compared))
        self._integers = tuple(sorted(value for value in integers if value > 2))
        self._try_out()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool,
    ) -> str:
        """The template's text for a conversation.

        Raises:
            TemplateError: the template refuses the messages, fails on them, goes over a limit, or writes what is no
                Unicode text.
        """
        self.check_within_limits()
        variables = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        try:
            text = self._environment.run(self._program, variables, self._limits)
            if not text.isascii():
                text.encode()
            return text
        except LimitError as error:
            raise TemplateError(self._over_limit(error, [messages, tools])) from None
        # A template is a program from outside: whatever it raises is its verdict on these messages.
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            more = f", and {len(messages) - 8} more" if len(messages) > 8 else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise TemplateError(
                f"the chat template refuses these messages (roles: {roles}{more}): {kind}{error}. "
                "Give it the roles in an order it knows, or pass another template as chat_template="
            ) from None

    def _over_limit(self, error: LimitError, rendered: object) -> str:
        length = sum(map(len, iterate_strings(rendered)))
        text = f"the chat template goes over a limit on messages and tools of {length} characters: {error}"
        if length > _ORDINARY_LENGTH:
            return f"{text}. Shorten them, or raise the limit"
        self._fault = f"{text}. It is not run again: mend it, or pass another one as chat_template="
        return self._fault

    def _try_out(self) -> None:
        """Find a template out that never comes to an end, however it may refuse one message."""
        try:
            self.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        except TemplateError:
            self.check_within_limits()

    def check_within_limits(self) -> None:
        """Check that no rendering has shown the template itself to go over a limit; probes take that for a refusal.

        Raises:
            TemplateError: one has.
        """
        if self._fault is not None:
            raise TemplateError(self._fault)

    def literals(self) -> tuple[str, ...]:
        """String constants that the template may compare message text with, e.g. `/no_think`.

        All of them but those it only writes, looks keys up with, or compares a role or type with.
        """
        return self._literals

    def integers(self) -> tuple[int, ...]:
        """Integer constants above 2: lengths and counts at which the template may change its mind."""
        return self._integers


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
    """The text that constants are joined to."""
    parts = [node]
    values: list[str] = []
    while parts:
        part = parts.pop()
        if isinstance(part, nodes.Add):
            parts += [part.right, part.left]
        elif isinstance(part, nodes.Concat):
            parts += reversed(part.nodes)
        elif isinstance(part, nodes.Const):
            values.append(str(part.value))
        else:
            return
    yield "".join(values)
