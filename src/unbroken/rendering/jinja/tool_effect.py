"""Finds what a template's tools can change in the text after a turn: nothing, if it writes them before all turns.

    {%- if tools -%}{{- '<tools>' + (tools | tojson) -}}{%- set ns.has_tools = true -%}{%- endif -%}
    {%- for m in messages -%}..{%- endfor -%}      from here on, a turn may have been written
    {%- if ns.has_tools -%}{{- 'call' -}}{%- endif -%}                    depends on whether there are tools

The analysis follows two things through variables, namespaces, macros and conditions, as if every branch were taken:
the tools, and messages that may be a turn: not the first one, nor one whose role was compared with another one. The
text before the first statement that may write such a message stands before every turn. Whatever a statement after it
writes, or decides, with something made of the tools is an effect on the bridge. Where it cannot follow, it reports an
effect. So a template for which it reports none writes the same after a turn with any tools that it accepts: that needs
no renderings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from jinja2 import nodes

_MAX_PASSES = 30
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


class _UnknownError(Exception):
    """The analysis cannot follow this."""


@dataclass(frozen=True, slots=True)
class _Value:
    """What a value may be made of."""

    truth: ToolEffect = ToolEffect.NOTHING
    """What of the tools decides whether it is true."""
    content: ToolEffect = ToolEffect.NOTHING
    """What of the tools it contains, or was chosen by."""
    has_messages: bool = False
    """Whether it may contain something of a message that may be a turn."""

    def __or__(self, other: _Value) -> _Value:
        return _Value(
            max(self.truth, other.truth), max(self.content, other.content), self.has_messages or other.has_messages
        )

    def under(self, condition: ToolEffect) -> _Value:
        """The value, if it was chosen by a condition."""
        return _Value(max(self.truth, condition), max(self.content, condition), self.has_messages)

    def changed(self) -> _Value:
        """What is made of the value."""
        return _Value(self.content, self.content, self.has_messages)

    def as_answer(self) -> _Value:
        """A true or false that is made of the value."""
        return _Value(self.content, self.content)


_NOTHING = _Value()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    number: int
    items: _Value
    """What its items are made of, and chosen by."""


def find_tool_effect(tree: nodes.Template) -> ToolEffect:
    """Find what of the tools may change the text after a turn."""
    analysis = _Analysis(keeps_tools=not _assigns(tree, "tools"))
    try:
        for _ in range(_MAX_PASSES):
            before = analysis.get_state()
            effect = analysis.run(tree)
            if analysis.get_state() == before:
                return effect
    except _UnknownError:
        pass
    return ToolEffect.ANYTHING


class _Analysis:
    """Variables have the name of their scope before their own: none, or the call of a macro with certain values."""

    def __init__(self, *, keeps_tools: bool) -> None:
        self._keeps_tools = keeps_tools
        self._values: dict[str, _Value] = {
            "tools": _Value(ToolEffect.PRESENCE, ToolEffect.ANYTHING),
            "messages": _Value(has_messages=True),
        }
        self._namespaces: set[str] = set()
        self._macros: dict[str, nodes.Macro] = {}
        self._written: dict[tuple[object, ...], _Value] = {}
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
        """Variables that are no turn here, because their role is another one."""
        self._loops: list[_Loop] = []
        self._captures: list[_Value] = []
        self._effect = ToolEffect.NOTHING
        self._may_write_turns = self._has_moved = False

    def get_state(self) -> tuple[object, ...]:
        """All that a pass may add to."""
        return dict(self._values), set(self._namespaces), dict(self._written), dict(self._left), set(self._macros)

    def run(self, tree: nodes.Template) -> ToolEffect:
        """One pass over the template; the effect is right when nothing was added any more."""
        self._visited.clear()
        self._effect, self._may_write_turns, self._has_moved = ToolEffect.NOTHING, False, False
        self._visit_all(tree.body, ToolEffect.NOTHING)
        return self._effect

    # Statements. `condition` is what of the tools decides whether they are reached.

    def _visit_all(self, statements: Sequence[nodes.Node], condition: ToolEffect) -> None:
        for statement in statements:
            self._visit(statement, condition)

    def _visit(self, node: nodes.Node, condition: ToolEffect) -> None:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                if not _raises(child):
                    self._write(self._evaluate(child, condition).under(condition))
        elif isinstance(node, nodes.If):
            self._visit_if(node, condition)
        elif isinstance(node, nodes.For):
            self._visit_for(node, condition)
        elif isinstance(node, nodes.Assign):
            self._visit_assign(node, condition)
        elif isinstance(node, nodes.AssignBlock):
            written = self._capture(node.body, condition)
            if node.filter is not None:
                written |= _join(self._evaluate(child, condition) for child in node.filter.iter_child_nodes())
            self._assign(node.target, written.changed().under(condition))
        elif isinstance(node, nodes.Macro):
            if self._macros.setdefault(node.name, node) is not node or len(self._scopes) > 1:
                raise _UnknownError  # Which one a call means depends on the order.
        elif isinstance(node, nodes.With):
            for target, value in zip(node.targets, node.values, strict=True):
                self._assign(target, self._evaluate(value, condition).under(condition))
            self._visit_all(node.body, condition)
        elif isinstance(node, (nodes.Scope, nodes.ScopedEvalContextModifier)) or _is_generation(node):
            self._visit_all(node.body, condition)  # type: ignore[attr-defined]
        elif isinstance(node, nodes.ExprStmt):
            self._evaluate(node.node, condition)
        elif isinstance(node, (nodes.Continue, nodes.Break)):
            number = self._loops[-1].number
            self._left[number] = max(self._left.get(number, ToolEffect.NOTHING), condition)
        else:
            raise _UnknownError

    def _visit_if(self, node: nodes.If, condition: ToolEffect) -> None:
        for branch in (node, *node.elif_):
            condition = max(condition, self._evaluate(branch.test, condition).truth)
            self._visit_narrowed(branch.test, branch.body, condition)
        self._visit_all(node.else_, condition)

    def _visit_narrowed(self, test: nodes.Node | None, body: Sequence[nodes.Node], condition: ToolEffect) -> None:
        """Visit what is reached only if the test is true."""
        changed = {name.name for node in body for name in node.find_all(nodes.Name) if name.ctx != "load"}
        others = [name for name in _find_other_roles(test) if name not in changed]
        self._others += others
        self._visit_all(body, condition)
        del self._others[len(self._others) - len(others) :]

    def _visit_for(self, node: nodes.For, condition: ToolEffect) -> None:
        if node.recursive:
            raise _UnknownError
        items = self._evaluate(node.iter, condition).changed()
        outside = condition = max(condition, items.content)
        condition = max(condition, self._left.get(id(node), ToolEffect.NOTHING))
        self._scopes.append(f"{self._scopes[-1]}{id(node)}:")
        self._assign(node.target, items.under(condition))
        if node.test is not None:
            condition = max(condition, self._evaluate(node.test, condition).truth)
        self._loops.append(_Loop(number=id(node), items=items.under(condition)))
        wrote_turns = self._may_write_turns
        self._visit_narrowed(node.test, node.body, condition)
        if self._may_write_turns and not wrote_turns:  # and the next round begins after a turn
            self._visit_narrowed(node.test, node.body, condition)
        self._loops.pop()
        self._scopes.pop()
        self._visit_all(node.else_, outside)

    def _visit_assign(self, node: nodes.Assign, condition: ToolEffect) -> None:
        call = node.node
        if isinstance(call, nodes.Call) and isinstance(call.node, nodes.Name) and call.node.name == "namespace":
            if not isinstance(node.target, nodes.Name) or call.args or call.dyn_args or call.dyn_kwargs:
                raise _UnknownError
            self._namespaces.add(f"{self._scopes[-1]}{node.target.name}")
            self._assign(node.target, _NOTHING.under(condition))
            for pair in call.kwargs:
                value = self._evaluate(pair.value, condition).under(condition)
                self._assign(nodes.NSRef(node.target.name, pair.key), value)
        else:
            self._assign(node.target, self._evaluate(node.node, condition).under(condition))

    def _assign(self, target: nodes.Node, value: _Value) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, value.changed())
        elif isinstance(target, nodes.NSRef):
            self._join(f"{self._find_namespace(target.name)}.{target.attr}", value)
        elif isinstance(target, nodes.Name):
            name = f"{self._scopes[-1]}{target.name}"
            if name in self._aliases:
                raise _UnknownError
            self._has_moved = self._has_moved or target.name == "messages"
            self._join(name, value)
        else:
            raise _UnknownError

    def _join(self, name: str, value: _Value) -> None:
        self._values[name] = self._values.get(name, _NOTHING) | value

    def _write(self, value: _Value) -> None:
        if self._captures:
            self._captures[-1] |= value
            return
        self._may_write_turns = self._may_write_turns or value.has_messages
        if self._may_write_turns:
            self._effect = max(self._effect, value.content)

    def _capture(self, body: Sequence[nodes.Node], condition: ToolEffect) -> _Value:
        self._captures.append(_NOTHING)
        self._visit_all(body, condition)
        return self._captures.pop()

    # Expressions.

    def _evaluate(self, node: nodes.Node | None, condition: ToolEffect) -> _Value:
        """What a value is made of. The condition matters to the macros that are called."""
        if node is None or isinstance(node, (nodes.Const, nodes.TemplateData)):
            return _NOTHING
        if isinstance(node, nodes.Name):
            return self._read_variable(node.name)
        if isinstance(node, (nodes.Getattr, nodes.Getitem)):
            return self._evaluate_item(node, condition)
        if isinstance(node, nodes.Call):
            return self._evaluate_call(node, condition)
        if isinstance(node, nodes.CondExpr):
            chosen = self._evaluate(node.expr1, condition) | self._evaluate(node.expr2, condition)
            return chosen.under(self._evaluate(node.test, condition).truth)
        joined = _join([self._evaluate(child, condition) for child in node.iter_child_nodes()])
        if isinstance(node, nodes.Not):
            return _Value(joined.truth, joined.truth)
        if isinstance(node, (nodes.And, nodes.Or)):
            return joined
        if isinstance(node, (nodes.Test, nodes.Compare)):
            asks_for_presence = self._asks_for_presence(node)
            return _Value(ToolEffect.PRESENCE, ToolEffect.PRESENCE) if asks_for_presence else joined.as_answer()
        if isinstance(node, nodes.Filter):
            return self._evaluate_filter(node, joined)
        return joined.changed()

    def _read_variable(self, name: str) -> _Value:
        if name == "loop" and self._loops:
            return self._loops[-1].items
        if name in self._macros or self._is_namespace(name) or name in ("self", "varargs", "kwargs", "caller"):
            raise _UnknownError  # As a value, it may become anything.
        value = _join([self._values.get(scoped, _NOTHING) for scoped in self._iterate_scopes(name)])
        return replace(value, has_messages=False) if name in self._others else value

    def _evaluate_item(self, node: nodes.Getattr | nodes.Getitem, condition: ToolEffect) -> _Value:
        arg = node.arg if isinstance(node, nodes.Getitem) else nodes.Const(node.attr)
        if isinstance(node.node, nodes.Name):
            name = node.node.name
            if self._is_namespace(name):
                if not isinstance(arg, nodes.Const):
                    raise _UnknownError
                space = self._find_namespace(name)
                return self._values.get(space, _NOTHING) | self._values.get(f"{space}.{arg.value}", _NOTHING)
            is_first = isinstance(arg, nodes.Const) and arg.value == 0 and type(arg.value) is int
            if name == "messages" and not self._has_moved and is_first and len(self._scopes) == 1:
                return _NOTHING
            if name == "loop" and self._loops and isinstance(arg, nodes.Const):
                if arg.value not in (*_PLACES, "previtem", "nextitem"):
                    raise _UnknownError  # `changed` remembers what it was called with.
                items = self._loops[-1].items
                return replace(items, has_messages=False) if arg.value in _PLACES else items
        return (self._evaluate(node.node, condition) | self._evaluate(arg, condition)).changed()

    def _evaluate_filter(self, node: nodes.Filter, joined: _Value) -> _Value:
        if node.node is None:
            raise _UnknownError
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

    def _evaluate_call(self, node: nodes.Call, condition: ToolEffect) -> _Value:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnknownError
        name = node.node.name if isinstance(node.node, nodes.Name) else ""
        if name in self._macros:
            return self._call_macro(self._macros[name], node, condition)
        given = _join([self._evaluate(child, condition) for child in (*node.args, *node.kwargs)])
        if isinstance(node.node, nodes.Getattr):
            return (given | self._evaluate(node.node, condition)).changed()
        if name in _PURE_FUNCTIONS:
            return given.changed()
        raise _UnknownError

    def _call_macro(self, macro: nodes.Macro, node: nodes.Call, condition: ToolEffect) -> _Value:
        names = [argument.name for argument in macro.args]
        expressions = dict(zip(names, node.args, strict=False)) | {pair.key: pair.value for pair in node.kwargs}
        if len(node.args) > len(names) or not set(names).issuperset(expressions):
            raise _UnknownError
        spaces = {name: part.name for name, part in expressions.items() if isinstance(part, nodes.Name)}
        spaces = {name: self._find_namespace(space) for name, space in spaces.items() if self._is_namespace(space)}
        given = {name: self._evaluate(part, condition) for name, part in expressions.items() if name not in spaces}
        key = (macro.name, condition, *((name, given.get(name), spaces.get(name)) for name in names))
        if key not in self._visited:
            self._visited.add(key)  # first, because a macro may call itself
            self._visit_macro(macro, key, given, spaces, condition)
        return self._written.get(key, _NOTHING)

    def _visit_macro(
        self,
        macro: nodes.Macro,
        key: tuple[object, ...],
        given: Mapping[str, _Value],
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
        self._written[key] = self._written.get(key, _NOTHING) | written.changed()

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
        raise _UnknownError


def _join(values: Iterator[_Value] | Sequence[_Value]) -> _Value:
    result = _NOTHING
    for value in values:
        result |= value
    return result


def _find_other_roles(test: nodes.Node | None) -> Iterator[str]:
    """The variables that are messages of other roles than a turn's, wherever the test is true."""
    if isinstance(test, nodes.And):
        yield from _find_other_roles(test.left)
        yield from _find_other_roles(test.right)
    if not isinstance(test, nodes.Compare) or len(test.ops) != 1:
        return
    operator, right, left = test.ops[0].op, test.ops[0].expr, test.expr
    roles = [right] if operator == "eq" else list(getattr(right, "items", ())) if operator == "in" else []
    is_other = all(isinstance(role, nodes.Const) and role.value not in ("assistant", None) for role in roles)
    is_role = (isinstance(left, nodes.Getattr) and left.attr == "role") or (
        isinstance(left, nodes.Getitem) and isinstance(left.arg, nodes.Const) and left.arg.value == "role"
    )
    if roles and is_other and is_role and isinstance(left.node, nodes.Name):  # type: ignore[attr-defined]
        yield left.node.name  # type: ignore[attr-defined]


def _assigns(tree: nodes.Template, name: str) -> bool:
    """Whether a template gives a variable of this name another value anywhere."""
    return any(found.name == name and found.ctx != "load" for found in tree.find_all(nodes.Name))


def _raises(node: nodes.Node) -> bool:
    """Whether a node writes nothing, because it ends the rendering."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "raise_exception"


def _is_generation(node: nodes.Node) -> bool:
    """Whether a node is a `{% generation %}` block, which writes its body."""
    return isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute)
