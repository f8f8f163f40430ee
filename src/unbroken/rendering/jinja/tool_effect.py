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

from collections.abc import Iterator, Sequence

from jinja2 import nodes

from unbroken.rendering.jinja.tool_expressions import (
    NO_TOOLS,
    ToolEffect,
    ToolExpressions,
    ToolLoop,
    ToolValue,
    UnknownToolsError,
    join_values,
)

_MAX_PASSES = 30


def find_tool_effect(tree: nodes.Template) -> ToolEffect:
    """Find what of the tools may change the text after a turn."""
    analysis = _Analysis(keeps_tools=not _assigns(tree, "tools"))
    try:
        for _ in range(_MAX_PASSES):
            before = analysis.get_state()
            effect = analysis.run(tree)
            if analysis.get_state() == before:
                return effect
    except UnknownToolsError:
        pass
    return ToolEffect.ANYTHING


class _Analysis(ToolExpressions):
    """Visits the statements. Their `condition` is what of the tools decides whether they are reached."""

    def get_state(self) -> tuple[object, ...]:
        """All that a pass may add to."""
        return dict(self._values), set(self._namespaces), dict(self._written), dict(self._left), set(self._macros)

    def run(self, tree: nodes.Template) -> ToolEffect:
        """One pass over the template; the effect is right when nothing was added any more."""
        self._visited.clear()
        self._effect, self._may_write_turns, self._has_moved = ToolEffect.NOTHING, False, False
        self._visit_all(tree.body, ToolEffect.NOTHING)
        return self._effect

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
                written |= join_values(self._evaluate(child, condition) for child in node.filter.iter_child_nodes())
            self._assign(node.target, written.changed().under(condition))
        elif isinstance(node, nodes.Macro):
            if self._macros.setdefault(node.name, node) is not node or len(self._scopes) > 1:
                raise UnknownToolsError  # Which one a call means depends on the order.
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
            raise UnknownToolsError

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
            raise UnknownToolsError
        items = self._evaluate(node.iter, condition).changed()
        outside = condition = max(condition, items.content)
        condition = max(condition, self._left.get(id(node), ToolEffect.NOTHING))
        self._scopes.append(f"{self._scopes[-1]}{id(node)}:")
        self._assign(node.target, items.under(condition))
        if node.test is not None:
            condition = max(condition, self._evaluate(node.test, condition).truth)
        self._loops.append(ToolLoop(number=id(node), items=items.under(condition)))
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
                raise UnknownToolsError
            self._namespaces.add(f"{self._scopes[-1]}{node.target.name}")
            self._assign(node.target, NO_TOOLS.under(condition))
            for pair in call.kwargs:
                value = self._evaluate(pair.value, condition).under(condition)
                self._assign(nodes.NSRef(node.target.name, pair.key), value)
        else:
            self._assign(node.target, self._evaluate(node.node, condition).under(condition))

    def _assign(self, target: nodes.Node, value: ToolValue) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, value.changed())
        elif isinstance(target, nodes.NSRef):
            self._join(f"{self._find_namespace(target.name)}.{target.attr}", value)
        elif isinstance(target, nodes.Name):
            name = f"{self._scopes[-1]}{target.name}"
            if name in self._aliases:
                raise UnknownToolsError
            self._has_moved = self._has_moved or target.name == "messages"
            self._join(name, value)
        else:
            raise UnknownToolsError

    def _write(self, value: ToolValue) -> None:
        if self._captures:
            self._captures[-1] |= value
            return
        self._may_write_turns = self._may_write_turns or value.has_messages
        if self._may_write_turns:
            self._effect = max(self._effect, value.content)

    def _capture(self, body: Sequence[nodes.Node], condition: ToolEffect) -> ToolValue:
        self._captures.append(NO_TOOLS)
        self._visit_all(body, condition)
        return self._captures.pop()


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
