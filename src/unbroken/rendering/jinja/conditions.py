"""Marks the conditions of a template, so that their outcomes can be recorded, and forced.

A template may write something only if several things hold at once, each of which is rare. To see whether one of them
matters, the others are forced:

    {%- if '/fast' in messages[0].content and messages | length > 9 and tools | length > 3 -%}
           condition 0: forced to be true     condition 1: as it is     condition 2: forced to be true
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from unbroken.rendering.jinja.literals import is_structural

Outcome: TypeAlias = tuple[int, bool]
"""The number of a condition, and what it was."""

_CONDITION, _BOTH, _EITHER = "condition number", "and also", "or else"
"""Tests that take the place of conditions. No template can spell a name with a space."""
_TYPE_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "iterable", "sequence"})
_ANSWERS = ("startswith", "endswith")


class Conditions:
    """The outcomes of a template's conditions in its renderings. Those that are `forced` have other results."""

    def __init__(self) -> None:
        self.forced: Mapping[int, bool] = {}
        self._true: set[int] = set()
        self._false: set[int] = set()

    def decide(self, value: Any, number: int) -> Any:
        """The result of a condition that has this value."""
        (self._true if value else self._false).add(number)
        return self.forced.get(number, value) if self.forced else value

    def get_tests(self) -> Mapping[str, Callable[..., Any]]:
        """The tests of a template with marked conditions, by name."""
        return {_CONDITION: self.decide, _BOTH: lambda a, b: a and b, _EITHER: lambda a, b: a or b}

    def take_outcomes(self) -> frozenset[Outcome]:
        """The outcomes since the last call, as they would be if the condition itself were not forced."""
        seen = {*((number, True) for number in self._true), *((number, False) for number in self._false)}
        self._true.clear()
        self._false.clear()
        return frozenset(seen)

    def add_outcomes(self, outcomes: frozenset[Outcome]) -> None:
        """Add the outcomes of a rendering that is not repeated."""
        for number, value in outcomes:
            (self._true if value else self._false).add(number)


def mark_conditions(tree: nodes.Template, *, reaches_all: bool = True) -> nodes.Template:
    """Give each condition of the tree, which is changed, a number by which it can be recorded and forced.

    With `reaches_all`, both sides of an `and` or `or` are evaluated, so that conditions are seen that are seldom
    reached. Where the left side may protect the right one from what is missing, it still does; the template may raise
    where that is not noticed.
    """
    marked: nodes.Template = _Marker(reaches_all=reaches_all).visit(tree)
    assert tree.environment is not None
    marked.set_environment(tree.environment)
    return marked


class _Marker(NodeTransformer):
    def __init__(self, *, reaches_all: bool) -> None:
        self._reaches_all = reaches_all
        self._num_conditions = 0

    def visit_If(self, node: nodes.If) -> nodes.Node:  # noqa: N802
        node.test = self._mark_condition(cast(nodes.Expr, node.test))
        node.body, node.elif_, node.else_ = (self._visit_all(part) for part in (node.body, node.elif_, node.else_))
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        node.iter = self.visit(node.iter)
        if node.test is not None:
            node.test = self._mark_condition(cast(nodes.Expr, node.test))
        node.body, node.else_ = self._visit_all(node.body), self._visit_all(node.else_)
        return node

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:  # noqa: N802
        node.test = self._mark_condition(node.test)
        node.expr1 = self.visit(node.expr1)
        node.expr2 = None if node.expr2 is None else self.visit(node.expr2)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        return self._mark(cast(nodes.Expr, self.generic_visit(node)))

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        is_answer = isinstance(node.node, nodes.Getattr) and node.node.attr in _ANSWERS
        changed = self.generic_visit(node)
        return self._mark(cast(nodes.Expr, changed)) if is_answer else changed

    def _visit_all(self, statements: Sequence[Any]) -> list[Any]:
        return [self.visit(statement) for statement in statements]

    def _mark_condition(self, node: nodes.Expr, guarded: tuple[nodes.Expr, ...] = ()) -> nodes.Expr:
        """Mark the parts of a condition, but not one that only protects the `guarded` ones from what is missing."""
        if isinstance(node, (nodes.And, nodes.Or)):
            is_lazy = not self._reaches_all or _guards_any(node.left, node.right)
            left = self._mark_condition(node.left, (*guarded, node.right))
            right = self._mark_condition(node.right, guarded)
            if is_lazy:
                return type(node)(left, right, lineno=node.lineno)
            name = _BOTH if isinstance(node, nodes.And) else _EITHER
            return nodes.Test(left, name, [right], [], None, None, lineno=node.lineno)
        if isinstance(node, nodes.Not):
            node.node = self._mark_condition(node.node, guarded)
            return node
        is_guard = _is_guard(node, guarded)
        changed: nodes.Expr = self.visit(node)
        is_marked = isinstance(changed, nodes.Test) and changed.name == _CONDITION
        return changed if is_guard or is_marked else self._mark(changed)

    def _mark(self, node: nodes.Expr) -> nodes.Expr:
        if not _is_specific(node) or _compares_ids(node):
            return node
        number = nodes.Const(self._num_conditions, lineno=node.lineno)
        self._num_conditions += 1
        return nodes.Test(node, _CONDITION, [number], [], None, None, lineno=node.lineno)


def _is_specific(node: nodes.Expr) -> bool:
    """Whether a condition asks for a text, a number, a key, tools or equal contents, and not only for the structure.

    Roles, types, flags and places are the template's own structure: forced, it writes what it never writes.
    """
    if is_structural(node) or next(node.find_all(nodes.Name), None) is None:
        return False
    values = [part.value for part in node.find_all(nodes.Const)]
    attributes = [part.attr for part in node.find_all(nodes.Getattr)]
    return (
        any(isinstance(value, str) or (type(value) is int and value > 2) for value in values)
        or any(name.name == "tools" for name in node.find_all(nodes.Name))
        or attributes.count("content") > 1
        or (isinstance(node, (nodes.Test, nodes.Call)) and bool(attributes))
    )


def _compares_ids(node: nodes.Expr) -> bool:
    """Whether a condition looks up a call: forced, it would find one that no template finds."""
    keys = [part.attr for part in node.find_all(nodes.Getattr)]
    keys += [part.arg.value for part in node.find_all(nodes.Getitem) if isinstance(part.arg, nodes.Const)]
    return not {"id", "tool_call_id"}.isdisjoint(keys)


def _guards_any(node: nodes.Expr, right: nodes.Expr) -> bool:
    """Whether a part of a condition is a guard of what comes after it; one on the place in a loop may be."""
    if any(name.name == "loop" for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)):
        return True
    if isinstance(node, (nodes.And, nodes.Or)):
        return _guards_any(node.left, right) or _guards_any(node.right, right)
    if isinstance(node, nodes.Not):
        return _guards_any(node.node, right)
    if isinstance(node, nodes.Compare):
        return any(_is_guard(side, (right,)) for side in (node.expr, *(operand.expr for operand in node.ops)))
    return _is_guard(node, (right,))


def _is_guard(node: nodes.Expr, guarded: Sequence[nodes.Expr]) -> bool:
    """Whether a condition asks if something is there that a later condition uses."""
    subject: nodes.Node = node
    if isinstance(node, nodes.Const):
        return False
    if isinstance(node, nodes.Test) and node.name in _TYPE_TESTS:
        subject = node.node
    return any(part == subject for other in guarded for part in (other, *other.find_all(type(subject))))
