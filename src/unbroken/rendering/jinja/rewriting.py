"""A template's syntax tree with calls of the budget in it, as filters that `sandbox.TemplateEnvironment` has.

    {% for m in messages %}..            {% for m in messages %}{% do none | step %}..
    {% for m in messages if m.name %}    {% for m in messages if (true | step) and m.name %}
    'a' + b + 'c'                        ['a', b, 'c'] | add
    a ~ b                                [a, b] | concat
    [a, b], (a, b), {'a': b}, a[1:]      [a, b] | admit, ..
    {% set x %}text {{ a }}{% endset %}  {% set x %}text {{ a | write }}{{ 5 | spend }}{% endset %}

Text that is written straight into the rendering is counted there; blocks, macros and calls collect theirs before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

ADD, ADMIT, CONCAT, SPEND, STEP, WRITE = (
    f"_budget_{name}" for name in ("add", "admit", "concat", "spend", "step", "write")
)
"""Names of the filters."""


def add_budget(tree: nodes.Template) -> nodes.Template:
    """Rewrite a tree in place, and return it."""
    _Rewriter().visit(tree)
    return tree


class _Rewriter(NodeTransformer):
    def __init__(self) -> None:
        self._num_collecting = 0
        self._visitors: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
            nodes.For: self._visit_for,
            nodes.Add: self._visit_add,
            nodes.Concat: self._visit_concat,
            nodes.List: self._visit_literal,
            nodes.Dict: self._visit_literal,
            nodes.Tuple: self._visit_literal,
            nodes.Getitem: self._visit_item,
            nodes.Output: self._visit_output,
            nodes.AssignBlock: self._visit_collecting,
            nodes.FilterBlock: self._visit_collecting,
            nodes.Macro: self._visit_collecting,
            nodes.CallBlock: self._visit_collecting,
            nodes.Block: self._visit_collecting,
        }

    def get_visitor(self, node: nodes.Node) -> Any:
        return self._visitors.get(type(node))

    def _visit_for(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), STEP), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(True), STEP), node.test, lineno=node.lineno)
        return node

    def _visit_add(self, node: nodes.Add) -> nodes.Node:
        """A whole chain at once: a deep tree of them would be too deep for Python's compiler."""
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        visited = [self.visit(operand) for operand in (left, *reversed(operands))]
        joined = [visited[0]]
        for operand in visited[1:]:
            if _is_text(operand) and _is_text(joined[-1]):
                joined[-1] = nodes.Const(joined[-1].value + operand.value, lineno=node.lineno)
            else:
                joined.append(operand)
        return joined[0] if len(joined) == 1 else _filtered(nodes.List(joined, lineno=node.lineno), ADD)

    def _visit_concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def _visit_literal(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if is_target or _is_constant(node) else _filtered(node, ADMIT)

    def _visit_item(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, ADMIT) if isinstance(node.arg, nodes.Slice) else node

    def _visit_output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        if self._num_collecting:
            length = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
            node.nodes = [c if isinstance(c, nodes.TemplateData) else _filtered(c, WRITE) for c in node.nodes]
            if length:
                node.nodes.append(_filtered(nodes.Const(length, lineno=node.lineno), SPEND))
        return node

    def _visit_collecting(self, node: nodes.Node) -> nodes.Node:
        self._num_collecting += 1
        self.generic_visit(node)
        self._num_collecting -= 1
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_text(node: Any) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _is_constant(node: nodes.Node) -> bool:
    """Whether a literal holds only constants: it is as large as the template writes it."""
    return isinstance(node, nodes.Const) or (
        isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair))
        and all(map(_is_constant, node.iter_child_nodes()))
    )
