"""Says what the expressions of a template are made of: the tools, or messages that may be a turn; see `tool_effect`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from jinja2 import nodes

_PURE_FUNCTIONS = frozenset({"range", "dict", "strftime_now", "raise_exception"})
_TYPE_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean"})
_SAME_TRUTH = frozenset({"default", "d", "list"})
_PLACES = frozenset({"index", "index0", "first", "last", "length", "revindex", "revindex0", "depth", "depth0"})
_SIZES = frozenset({"length", "count"})
_EMPTY_TESTS = frozenset({("gt", 0), ("ne", 0), ("eq", 0), ("gteq", 1), ("lt", 1)})


class ToolEffect(IntEnum):
    """What of the tools may change the text after a turn."""

    NOTHING = 0
    PRESENCE = 1
    """Only whether there are any."""
    ANYTHING = 2


class UnknownToolsError(Exception):
    """The analysis cannot follow this."""


@dataclass(frozen=True, slots=True)
class ToolValue:
    """What a value may be made of."""

    truth: ToolEffect = ToolEffect.NOTHING
    """What of the tools decides whether it is true."""
    content: ToolEffect = ToolEffect.NOTHING
    """What of the tools it contains, or was chosen by."""
    has_messages: bool = False
    """Whether it may contain something of a message that may be a turn."""

    def __or__(self, other: ToolValue) -> ToolValue:
        return ToolValue(
            max(self.truth, other.truth), max(self.content, other.content), self.has_messages or other.has_messages
        )

    def under(self, condition: ToolEffect) -> ToolValue:
        """The value, if it was chosen by a condition."""
        return ToolValue(max(self.truth, condition), max(self.content, condition), self.has_messages)

    def changed(self) -> ToolValue:
        """What is made of the value."""
        return ToolValue(self.content, self.content, self.has_messages)

    def as_answer(self) -> ToolValue:
        """A true or false that is made of the value."""
        return ToolValue(self.content, self.content)


NO_TOOLS = ToolValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoop:
    """A loop that is visited, by the number of its node."""

    number: int
    items: ToolValue
    """What its items are made of, and chosen by."""


class ToolExpressions(ABC):
    """Evaluates expressions. Variables have their scope before their names: none, the call of a macro, or a loop."""

    def __init__(self, *, keeps_tools: bool) -> None:
        self._keeps_tools = keeps_tools
        self._values: dict[str, ToolValue] = {
            "tools": ToolValue(ToolEffect.PRESENCE, ToolEffect.ANYTHING),
            "messages": ToolValue(has_messages=True),
        }
        self._namespaces: set[str] = set()
        self._macros: dict[str, nodes.Macro] = {}
        self._written: dict[tuple[object, ...], ToolValue] = {}
        """What macros write, by name and the values that they are called with."""
        self._contexts: dict[tuple[object, ...], int] = {}
        self._visited: set[tuple[object, ...]] = set()
        self._left: dict[int, ToolEffect] = {}
        """What decides when a loop is left, or goes on with the next item."""
        self._scopes: list[str] = [""]
        """Those that can be read, the innermost last: of the template, of macros, and of loops."""
        self._aliases: dict[str, str] = {}
        """Parameters of macros that are namespaces."""
        self._others: list[str] = []
        """Variables that are not a turn here, because their role is another one."""
        self._loops: list[ToolLoop] = []
        self._captures: list[ToolValue] = []
        self._effect = ToolEffect.NOTHING
        self._may_write_turns = self._has_moved = False

    def _evaluate(self, node: nodes.Node | None, condition: ToolEffect) -> ToolValue:
        """What a value is made of. The condition matters to the macros that are called."""
        if node is None or isinstance(node, (nodes.Const, nodes.TemplateData)):
            return NO_TOOLS
        if isinstance(node, nodes.Name):
            return self._read_variable(node.name)
        if isinstance(node, (nodes.Getattr, nodes.Getitem)):
            return self._evaluate_item(node, condition)
        if isinstance(node, nodes.Call):
            return self._evaluate_call(node, condition)
        if isinstance(node, nodes.CondExpr):
            chosen = self._evaluate(node.expr1, condition) | self._evaluate(node.expr2, condition)
            return chosen.under(self._evaluate(node.test, condition).truth)
        joined = join_values([self._evaluate(child, condition) for child in node.iter_child_nodes()])
        if isinstance(node, nodes.Not):
            return ToolValue(joined.truth, joined.truth)
        if isinstance(node, (nodes.And, nodes.Or)):
            return joined
        if isinstance(node, (nodes.Test, nodes.Compare)):
            asks_for_presence = self._asks_for_presence(node)
            return ToolValue(ToolEffect.PRESENCE, ToolEffect.PRESENCE) if asks_for_presence else joined.as_answer()
        if isinstance(node, nodes.Filter):
            return self._evaluate_filter(node, joined)
        return joined.changed()

    def _read_variable(self, name: str) -> ToolValue:
        if name == "loop" and self._loops:
            return self._loops[-1].items
        if name in self._macros or self._is_namespace(name) or name in ("self", "varargs", "kwargs", "caller"):
            raise UnknownToolsError  # As a value, it may become anything.
        value = join_values([self._values.get(scoped, NO_TOOLS) for scoped in self._iterate_scopes(name)])
        return replace(value, has_messages=False) if name in self._others else value

    def _evaluate_item(self, node: nodes.Getattr | nodes.Getitem, condition: ToolEffect) -> ToolValue:
        arg = node.arg if isinstance(node, nodes.Getitem) else nodes.Const(node.attr)
        if isinstance(node.node, nodes.Name):
            name = node.node.name
            if self._is_namespace(name):
                if not isinstance(arg, nodes.Const):
                    raise UnknownToolsError
                space = self._find_namespace(name)
                return self._values.get(space, NO_TOOLS) | self._values.get(f"{space}.{arg.value}", NO_TOOLS)
            is_first = isinstance(arg, nodes.Const) and arg.value == 0 and type(arg.value) is int
            if name == "messages" and not self._has_moved and is_first and len(self._scopes) == 1:
                return NO_TOOLS
            if name == "loop" and self._loops and isinstance(arg, nodes.Const):
                if arg.value not in (*_PLACES, "previtem", "nextitem"):
                    raise UnknownToolsError  # `changed` remembers what it was called with.
                items = self._loops[-1].items
                return replace(items, has_messages=False) if arg.value in _PLACES else items
        return (self._evaluate(node.node, condition) | self._evaluate(arg, condition)).changed()

    def _evaluate_filter(self, node: nodes.Filter, joined: ToolValue) -> ToolValue:
        if node.node is None:
            raise UnknownToolsError
        if node.name in _SAME_TRUTH:
            return joined
        if node.name in _SIZES:
            return joined.as_answer()
        return joined.changed()

    def _asks_for_presence(self, node: nodes.Test | nodes.Compare) -> bool:
        """Whether a test or comparison asks only if there are tools. They are None, or a list that is not empty."""
        if isinstance(node, nodes.Test):
            return self._is_tools(node.node) and node.name in _TYPE_TESTS
        if len(node.ops) != 1 or not isinstance(node.ops[0].expr, nodes.Const):
            return False
        operator, other = node.ops[0].op, node.ops[0].expr.value
        if other is None:
            return self._is_tools(node.expr) and operator in ("eq", "ne")
        sized = node.expr.node if isinstance(node.expr, nodes.Filter) and node.expr.name in _SIZES else None
        return self._is_tools(sized) and (operator, other) in _EMPTY_TESTS

    def _is_tools(self, node: nodes.Node | None) -> bool:
        return isinstance(node, nodes.Name) and node.name == "tools" and self._keeps_tools

    def _evaluate_call(self, node: nodes.Call, condition: ToolEffect) -> ToolValue:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise UnknownToolsError
        name = node.node.name if isinstance(node.node, nodes.Name) else ""
        if name in self._macros:
            return self._call_macro(self._macros[name], node, condition)
        given = join_values([self._evaluate(child, condition) for child in (*node.args, *node.kwargs)])
        if isinstance(node.node, nodes.Getattr):
            return (given | self._evaluate(node.node, condition)).changed()
        if name in _PURE_FUNCTIONS:
            return given.changed()
        raise UnknownToolsError

    def _call_macro(self, macro: nodes.Macro, node: nodes.Call, condition: ToolEffect) -> ToolValue:
        names = [argument.name for argument in macro.args]
        expressions = dict(zip(names, node.args, strict=False)) | {pair.key: pair.value for pair in node.kwargs}
        if len(node.args) > len(names) or not set(names).issuperset(expressions):
            raise UnknownToolsError
        spaces = {name: part.name for name, part in expressions.items() if isinstance(part, nodes.Name)}
        spaces = {name: self._find_namespace(space) for name, space in spaces.items() if self._is_namespace(space)}
        given = {name: self._evaluate(part, condition) for name, part in expressions.items() if name not in spaces}
        key = (macro.name, condition, *((name, given.get(name), spaces.get(name)) for name in names))
        if key not in self._visited:
            self._visited.add(key)  # first, because a macro may call itself
            self._visit_macro(macro, key, given, spaces, condition)
        return self._written.get(key, NO_TOOLS)

    def _visit_macro(
        self,
        macro: nodes.Macro,
        key: tuple[object, ...],
        given: Mapping[str, ToolValue],
        spaces: Mapping[str, str],
        condition: ToolEffect,
    ) -> None:
        """Find what a macro writes, when it is called like this."""
        scope = f"{self._contexts.setdefault(key, len(self._contexts))}/"
        outside = self._scopes, self._loops, self._others
        self._scopes, self._loops, self._others = ["", scope], [], []
        names = [argument.name for argument in macro.args]
        defaults = dict(zip(names[len(names) - len(macro.defaults) :], macro.defaults, strict=True))
        for name in names:
            if name in spaces:
                self._aliases[f"{scope}{name}"] = spaces[name]
            else:
                value = given[name] if name in given else self._evaluate(defaults.get(name), condition)
                self._join(f"{scope}{name}", value)
        written = self._capture(macro.body, condition)
        self._scopes, self._loops, self._others = outside
        self._written[key] = self._written.get(key, NO_TOOLS) | written.changed()

    def _iterate_scopes(self, name: str) -> Iterator[str]:
        for scope in reversed(self._scopes):
            yield f"{scope}{name}"

    def _is_namespace(self, name: str) -> bool:
        return any(scoped in self._namespaces or scoped in self._aliases for scoped in self._iterate_scopes(name))

    def _find_namespace(self, name: str) -> str:
        for scoped in self._iterate_scopes(name):
            if scoped in self._namespaces:
                return scoped
            if scoped in self._aliases:
                return self._aliases[scoped]
        raise UnknownToolsError

    def _join(self, name: str, value: ToolValue) -> None:
        self._values[name] = self._values.get(name, NO_TOOLS) | value

    @abstractmethod
    def _capture(self, body: Sequence[nodes.Node], condition: ToolEffect) -> ToolValue:
        """What the statements write, as a value."""


def join_values(values: Iterable[ToolValue]) -> ToolValue:
    """What may be any of the values."""
    result = NO_TOOLS
    for value in values:
        result |= value
    return result
