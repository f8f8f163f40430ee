"""Follows what a template reads of a conversation to the text that it writes after a turn.

The analysis runs over the syntax tree, as if every branch were taken: it knows for each variable what may be in it and
what that depends on, and repeats until nothing changes. What it reports is never too little, and may be too much.

    {%- for m in messages -%}{%- if '/fast' in m.content -%}{%- set ns.fast = true -%}{%- endif -%}{%- endfor -%}
    {%- for m in messages -%}..{%- endfor -%}        the first loop that writes: from here on, text may be in a bridge
    {%- if ns.fast -%}{{- 'be fast' -}}{%- endif -%}         depends on a TEXT read, '/fast', of any message

A loop in a macro, or one that keeps text in a variable, counts from the next text that the template writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import nodes

from unbroken.rendering.jinja.expressions import Expressions
from unbroken.rendering.jinja.reads import Read, ReadKind, Source, TemplateReads, Value, forget_owner, union

_MAX_PASSES = 12


def find_reads(tree: nodes.Template, variables: Mapping[str, Any]) -> TemplateReads:
    """Find the reads that may change a bridge, for a template that is rendered with these variables."""
    flow = _Flow(variables)
    for _ in range(_MAX_PASSES):
        before = dict(flow.values)
        flow.run(tree)
        if flow.values == before:
            break
    else:
        flow.of_history.add(Read(ReadKind.OPAQUE, "variables that depend on each other"))
    everything = flow.of_history | flow.of_turn | flow.seen
    return TemplateReads(
        of_history=frozenset(flow.of_history),
        of_turn=frozenset(flow.of_turn),
        keys=frozenset(read.value for read in everything if read.kind is ReadKind.KEY),
        roles=frozenset(read.value for read in everything if read.kind is ReadKind.ROLE and read.value is not None),
    )


class _Flow(Expressions):
    """One analysis: visits the statements."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        super().__init__(variables)
        self.of_history: set[Read] = set()
        self.of_turn: set[Read] = set()
        self._captures: list[list[Value]] = []
        """What is written into a variable or by a macro, the innermost last."""
        self._writes_turns = False

    def run(self, tree: nodes.Template) -> None:
        """One pass."""
        self._writes_turns = self._keeps_turns = False
        self._called.clear()
        self._visit_all(tree.body)

    def _visit_all(self, statements: Sequence[nodes.Node]) -> None:
        for statement in statements:
            self._visit(statement)

    def _visit(self, node: nodes.Node) -> None:
        visit = getattr(self, f"_visit_{type(node).__name__.lower()}", None)
        if visit is not None:
            visit(node)
        elif isinstance(node, (nodes.Scope, nodes.ScopedEvalContextModifier, nodes.CallBlock, nodes.Block)):
            self._visit_all(node.body)
        elif not isinstance(node, (nodes.Continue, nodes.Break)):
            self._write(Value(reads=frozenset({Read(ReadKind.OPAQUE, f"{type(node).__name__}, line {node.lineno}")})))

    def _visit_output(self, node: nodes.Output) -> None:
        for child in node.nodes:
            if not isinstance(child, nodes.TemplateData) or self._conditions:
                self._write(self.evaluate(child))

    def _visit_exprstmt(self, node: nodes.ExprStmt) -> None:
        self.evaluate(node.node)

    def _visit_with(self, node: nodes.With) -> None:
        for target, value in zip(node.targets, node.values, strict=True):
            self._assign(target, self.evaluate(value))
        self._visit_all(node.body)

    def _visit_macro(self, node: nodes.Macro) -> None:
        self._macros[node.name] = node

    def _visit_assign(self, node: nodes.Assign) -> None:
        call, target = node.node, node.target
        if isinstance(call, nodes.Call) and isinstance(call.node, nodes.Name) and call.node.name == "namespace":
            assert isinstance(target, nodes.Name)
            name = f"{self._scope}{target.name}"
            self._namespaces.add(name)
            if not (self._scope or self._num_message_loops):
                self._shared.add(name)
            for pair in call.kwargs:
                self._assign(nodes.NSRef(target.name, pair.key), self.evaluate(pair.value))
            return
        value = self.evaluate(node.node)
        if _refers_to(node.node, target):
            if value.numbers:  # a counter
                value |= Value(frozenset({(Source.COUNT, False)}))
            value = replace(value, texts=frozenset(), numbers=frozenset())
        if isinstance(target, nodes.NSRef) and self._loops:
            # It may have been set for each message before this one.
            value |= Value(reads=frozenset({Read(ReadKind.COUNT, 0)}))
        self._assign(node.target, value)

    def _visit_assignblock(self, node: nodes.AssignBlock) -> None:
        self._assign(node.target, self._capture(node.body))

    def _visit_filterblock(self, node: nodes.FilterBlock) -> None:
        self._write(self._capture(node.body))

    def _visit_if(self, node: nodes.If) -> None:
        num_before = len(self._conditions)
        for branch in (node, *node.elif_):
            self._conditions.append(self._condition(branch.test))
            self._visit_all(branch.body)
        self._visit_all(node.else_)
        reads = frozenset[Read]().union(*self._conditions[num_before:])
        del self._conditions[num_before:]
        if self._loops and next(node.find_all((nodes.Continue, nodes.Break)), None) is not None:
            self._loops[-1] |= Value(reads=reads)
            self._conditions.append(reads | forget_owner(reads))  # for the rest of the loop's body

    def _visit_for(self, node: nodes.For) -> None:
        items = self.evaluate(node.iter)
        is_of_messages = items.has(Source.MESSAGES)
        is_of_places = items.has(Source.COUNT)
        if (
            (is_of_messages or is_of_places)
            and self._num_message_loops == 0
            and next(node.find_all(nodes.Output), None) is not None
        ):
            if self._captures:
                self._keeps_turns = True
            else:
                self._writes_turns = True
        item = items if is_of_places else items.become(Source.TEXT)
        if is_of_messages:
            is_own = self._num_message_loops == 0
            item = Value(frozenset({(Source.MESSAGE, is_own)}), items.reads)
        num_before = len(self._conditions)
        self._num_message_loops += is_of_messages
        self._assign(node.target, item, is_loop_variable=True)
        is_counted = is_of_messages or is_of_places
        position = Value(frozenset({(Source.COUNT, False)})) if is_counted else items.become(Source.LENGTH)
        self._loops.append(Value(position.sources | {(Source.LOOP, False)}, items.reads))
        self._conditions.append(items.reads)
        if node.test is not None:
            reads = self._condition(node.test)
            self._conditions.append(reads)
            self._loops[-1] |= Value(reads=forget_owner(reads))
        if not is_of_messages and items.sources:
            self._conditions.append(items.reading(ReadKind.EMPTY).reads)
        self._visit_all(node.body)
        del self._conditions[num_before:]
        self._num_message_loops -= is_of_messages
        self._loops.pop()
        self._visit_all(node.else_)

    def _capture(self, body: Sequence[nodes.Node]) -> Value:
        """What the statements write, as a value."""
        self._captures.append([])
        self._visit_all(body)
        value = union(self._captures.pop())
        is_of_one = not any(self._loops_over_messages(node) for statement in body for node in _find_loops(statement))
        return value if is_of_one else Value(value.become(Source.CHANGED).sources, value.reads, value.texts)

    def _loops_over_messages(self, node: nodes.For) -> bool:
        return self.evaluate(node.iter).has(Source.MESSAGES)

    def _write(self, value: Value) -> None:
        reads = value.reads.union(*self._conditions)
        if self._loops:
            reads |= self._loops[-1].reads
        if value.has(Source.COUNT, Source.LENGTH):
            reads |= value.reading(ReadKind.COUNT, 0).reads
        if self._captures:
            self._captures[-1].append(Value(value.sources, reads, value.texts))
            return
        self.seen |= reads
        self._writes_turns = self._writes_turns or self._keeps_turns
        if self._writes_turns:
            for read in reads:
                is_own = read.is_own and self._num_message_loops > 0
                (self.of_turn if is_own else self.of_history).add(read)

    def _visit_macro_body(self, macro: nodes.Macro, scope: str) -> Value:
        outside = self._scope, self._loops, self._conditions
        self._scope, self._loops, self._conditions = scope, [], []
        written = self._capture(macro.body)
        self._scope, self._loops, self._conditions = outside
        return written


def _refers_to(node: nodes.Node, target: nodes.Node) -> bool:
    """Whether the value of a variable is made from the one that it had."""
    if isinstance(target, nodes.NSRef):
        return any(
            isinstance(part.node, nodes.Name) and part.node.name == target.name and part.attr == target.attr
            for part in node.find_all(nodes.Getattr)
        )
    names = {name.name for name in target.find_all(nodes.Name)} | {getattr(target, "name", "")}
    return any(part.name in names for part in (*node.find_all(nodes.Name), node) if isinstance(part, nodes.Name))


def _find_loops(node: nodes.Node) -> list[nodes.For]:
    own = [node] if isinstance(node, nodes.For) else []
    return [*own, *node.find_all(nodes.For)]
