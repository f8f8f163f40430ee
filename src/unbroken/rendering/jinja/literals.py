"""The string and integer constants of a template that its text may depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jinja2 import nodes

_STRUCTURAL_ATTRIBUTES = frozenset({"role", "type"})
_MESSAGE_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
_CAPTURES = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)
"""Statements whose output is a value, which may be compared."""


def find_literals(tree: nodes.Template) -> tuple[str, ...]:
    """Find the strings that the template may compare message text with, e.g. `/no_think`.

    These are all string constants except those that it only writes, looks up as a key, or compares with a role or type.
    """
    only_written = _find_only_written(tree)
    return tuple(sorted({text for text in _iterate_compared(tree, only_written) if text.strip()}))


def find_integers(tree: nodes.Template) -> tuple[int, ...]:
    """Find the integer constants above 2: lengths and counts at which the template may behave differently."""
    values = {node.value for node in tree.find_all(nodes.Const) if type(node.value) is int}
    return tuple(sorted(value for value in values if value > 2))


def _find_only_written(tree: nodes.Template) -> frozenset[str]:
    """Find the variables whose value goes into the output and nowhere else."""
    captured = {id(output) for block in tree.find_all(_CAPTURES) for output in block.find_all(nodes.Output)}
    outputs = [output for output in tree.find_all(nodes.Output) if id(output) not in captured]
    num_written = Counter(node.name for each in outputs for node in each.nodes if isinstance(node, nodes.Name))
    num_used = Counter(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    return frozenset(name for name, number in num_written.items() if number == num_used[name])


def _iterate_compared(node: nodes.Node, only_written: frozenset[str], *, is_written: bool = False) -> Iterator[str]:
    """Yield the string constants below `node`; `is_written`: its value goes into the output and nowhere else."""
    if isinstance(node, nodes.Const):
        if isinstance(node.value, str) and not is_written:
            yield node.value
        return
    if isinstance(node, nodes.AssignBlock) and not (
        isinstance(node.target, nodes.Name) and node.target.name in only_written and node.filter is None
    ):
        yield from (part.data for part in node.find_all(nodes.TemplateData))
        yield from (part.value for part in node.find_all(nodes.Const) if isinstance(part.value, str))
        return
    if is_structural(node):
        return
    if isinstance(node, (nodes.Add, nodes.Concat)) and not is_written:
        yield from _join_constants(node)
    for field, value in node.iter_fields():
        if isinstance(node, nodes.Getitem) and field == "arg" and isinstance(value, nodes.Const):
            continue
        if field == "args" and _is_key_lookup(node):
            value = [argument for argument in value[:1] if not isinstance(argument, nodes.Const)] + value[1:]
        passes_on = isinstance(node, (nodes.Add, nodes.Concat)) or (
            isinstance(node, nodes.CondExpr) and field in ("expr1", "expr2")
        )
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, nodes.Node):
                yield from _iterate_compared(
                    child, only_written, is_written=isinstance(node, nodes.Output) or (is_written and passes_on)
                )


def is_structural(node: nodes.Node) -> bool:
    """Whether a node compares a role or type, or makes an error message or a date."""
    if isinstance(node, nodes.Compare):
        return any(_is_role_or_type(side) for side in (node.expr, *(operand.expr for operand in node.ops)))
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGE_FUNCTIONS


def _is_key_lookup(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get"


def _is_role_or_type(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_role_or_type(node.node)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value in _STRUCTURAL_ATTRIBUTES
    return (isinstance(node, nodes.Getattr) and node.attr in _STRUCTURAL_ATTRIBUTES) or (
        isinstance(node, nodes.Name) and node.name in _STRUCTURAL_ATTRIBUTES
    )


def _join_constants(node: nodes.Expr) -> Iterator[str]:
    """Yield the text of a chain of `+` or `~` whose operands are all constants."""
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
