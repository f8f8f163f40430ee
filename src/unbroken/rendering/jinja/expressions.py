"""Says what the expressions of a template may be, and what they depend on; see `dataflow`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import add, floordiv, mod, mul, sub, truediv
from typing import Any

from jinja2 import nodes

from unbroken.messages import iterate_strings
from unbroken.rendering.jinja.operations import call_method, compare, get_item, run_filter, run_test
from unbroken.rendering.jinja.reads import Read, ReadKind, Source, Value, forget_owner, union

_MAX_CONSTANTS = 16
_MAX_JOINED_LENGTH = 80
_OPERATORS = {"+": add, "-": sub, "*": mul, "//": floordiv, "/": truediv, "%": mod}
_OF_ALL = ("join", "map", "string", "tojson")
"""Filters that make text of all messages without a loop."""
_NOTHING = Value()
_UNDEFINED = Value(numbers=frozenset({0}))
"""Its length is 0."""


class Expressions(ABC):
    """Evaluates expressions. `values` are the variables, and `name.attribute` those of namespaces."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.values: dict[str, Value] = {name: _get_constants(value) for name, value in variables.items()}
        self._given = {"tools", "documents", "add_generation_prompt", "loop", "caller"}
        self.values["messages"] = Value(frozenset({(Source.MESSAGES, False)}))
        self.seen: set[Read] = set()
        """All reads, whether they reach a bridge or not."""
        self._macros: dict[str, nodes.Macro] = {}
        self._namespaces: set[str] = set()
        self._unlimited: set[str] = set()
        """Variables that may be too many numbers."""
        self._shared: set[str] = set()
        """Those that are made once, and not for each message or call of a macro."""
        self._conditions: list[frozenset[Read]] = []
        self._loops: list[Value] = []
        self._num_message_loops = 0
        self._scope = ""
        """The call of a macro that is visited; variables of a macro have it before their names."""
        self._called: dict[Any, Value] = {}
        """What macros write, in this pass, by name and the sources of the arguments."""
        self._contexts: dict[Any, int] = {}
        self._keeps_turns = False
        """Whether turns may be in a variable, or in what a macro writes."""

    def evaluate(self, node: nodes.Node | None) -> Value:
        """What an expression may be."""
        if node is None:
            return _NOTHING
        evaluate = getattr(self, f"_evaluate_{type(node).__name__.lower()}", None)
        if evaluate is not None:
            value: Value = evaluate(node)
            return value
        return union([self.evaluate(child) for child in node.iter_child_nodes()])

    def _evaluate_const(self, node: nodes.Const) -> Value:
        if isinstance(node.value, str):
            return Value(texts=frozenset({node.value}))
        is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return Value(numbers=frozenset({int(node.value)})) if is_number else _NOTHING

    def _evaluate_templatedata(self, node: nodes.TemplateData) -> Value:
        return Value(texts=frozenset({node.data}))

    def _evaluate_name(self, node: nodes.Name) -> Value:
        if node.name == "loop" and self._loops:
            return self._loops[-1]
        known = (self.values[name] for name in self._iterate_scopes(node.name) if name in self.values)
        return next(known, _NOTHING if node.name in self._given else _UNDEFINED)

    def _evaluate_getattr(self, node: nodes.Getattr) -> Value:
        if isinstance(node.node, nodes.Name) and (name := self._find_namespace(node.node.name)) is not None:
            return self.values.get(f"{name}.{node.attr}", _NOTHING)
        return get_item(self.evaluate(node.node), Value(texts=frozenset({node.attr})), node)

    def _evaluate_getitem(self, node: nodes.Getitem) -> Value:
        if isinstance(node.node, nodes.Name) and (space := self._find_namespace(node.node.name)) is not None:
            prefix = f"{space}."
            return union([value for name, value in self.values.items() if name.startswith(prefix)])
        return get_item(self.evaluate(node.node), self.evaluate(node.arg), node)

    def _evaluate_filter(self, node: nodes.Filter) -> Value:
        arguments = [self.evaluate(child) for child in (*node.args, *(pair.value for pair in node.kwargs))]
        value = self.evaluate(node.node)
        self._keeps_turns = self._keeps_turns or (node.name in _OF_ALL and value.has(Source.MESSAGES))
        return run_filter(node.name, value, arguments, node)

    def _evaluate_test(self, node: nodes.Test) -> Value:
        return run_test(node.name, self.evaluate(node.node), [self.evaluate(child) for child in node.args], node)

    def _evaluate_compare(self, node: nodes.Compare) -> Value:
        left, results = self.evaluate(node.expr), [_NOTHING]
        for operand in node.ops:
            right = self.evaluate(operand.expr)
            results.append(compare(left, operand.op, right, node))
            left = right
        return union(results)

    def _evaluate_condexpr(self, node: nodes.CondExpr) -> Value:
        chosen = self.evaluate(node.expr1) | self.evaluate(node.expr2)
        return chosen | Value(reads=self._condition(node.test))

    def _evaluate_and(self, node: nodes.And | nodes.Or) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        reads = left.reading(ReadKind.EMPTY).reads if left.sources else left.reads
        return left | right | Value(reads=reads)

    _evaluate_or = _evaluate_and

    def _evaluate_not(self, node: nodes.Not) -> Value:
        value = self.evaluate(node.node)
        return value.reading(ReadKind.EMPTY) if value.sources else Value(reads=value.reads)

    def _evaluate_neg(self, node: nodes.Neg) -> Value:
        value = self.evaluate(node.node)
        return Value(value.sources, value.reads, numbers=frozenset(-number for number in value.numbers))

    def _evaluate_add(self, node: nodes.Add | nodes.Sub) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        both = left | right
        if both.has(Source.COUNT, Source.LENGTH):
            if both.has(Source.LENGTH) and left.sources and right.sources:
                return _opaque(both, "a sum of lengths", node)
            return Value(both.sources, both.reads, both.texts, both.numbers)
        if not both.sources:
            return Value(
                reads=both.reads,
                texts=_join_texts([left, right]),
                numbers=_calculate(node.operator, left.numbers, right.numbers),
            )
        is_list = isinstance(node.left, nodes.List) or isinstance(node.right, nodes.List)
        keeps = both.has(Source.MESSAGES) or is_list
        sources = both.sources if keeps else both.become(Source.CHANGED).sources
        return Value(sources, both.reads, both.texts)

    _evaluate_sub = _evaluate_add

    def _evaluate_concat(self, node: nodes.Concat) -> Value:
        parts = [self.evaluate(child) for child in node.nodes]
        value = union(parts)
        numbers = frozenset(source for source in value.sources if source[0] in (Source.COUNT, Source.LENGTH))
        texts = Value(value.sources - numbers).become(Source.CHANGED).sources
        return Value(numbers | texts, value.reads, _join_texts(parts))

    def _evaluate_mod(self, node: nodes.Mod) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if left.has(Source.COUNT) and right.numbers and not right.sources:
            reads = [left.reading(ReadKind.COUNT, number).reads for number in right.numbers]
            return Value(left.sources, left.reads.union(*reads))
        return self._calculate(node)  # or a text's formatting

    def _calculate(self, node: nodes.BinExpr) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        both = left | right
        if both.sources:
            return _opaque(both, "a calculation", node)
        return Value(reads=both.reads, texts=both.texts, numbers=_calculate(node.operator, left.numbers, right.numbers))

    _evaluate_mul = _evaluate_div = _evaluate_floordiv = _evaluate_pow = _calculate

    def _evaluate_call(self, node: nodes.Call) -> Value:
        keywords = {pair.key: self.evaluate(pair.value) for pair in node.kwargs}
        arguments = [self.evaluate(child) for child in node.args]
        given = union([*arguments, *keywords.values()])
        if isinstance(node.node, nodes.Getattr):
            base = self.evaluate(node.node.node)
            if node.node.attr in ("append", "extend", "insert", "update"):
                self._keep(node.node.node, given)
            return call_method(node.node.attr, base, arguments, node)
        name = node.node.name if isinstance(node.node, nodes.Name) else ""
        if name in self._macros:
            return self._call_macro(self._macros[name], arguments, keywords)
        if name in ("raise_exception", "strftime_now", "caller"):
            return _NOTHING
        if name in ("range", "dict", "list"):
            return given
        return _opaque(given, f"{name or 'a call'}()", node) if given.sources else given

    def _call_macro(self, macro: nodes.Macro, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        names = [argument.name for argument in macro.args]
        defaults = dict(zip(names[len(names) - len(macro.defaults) :], macro.defaults, strict=True))
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        values = tuple(given[name] if name in given else self.evaluate(defaults.get(name)) for name in names)
        key = (macro.name, self._num_message_loops > 0, tuple(value.sources for value in values))
        number = self._contexts.setdefault(key, len(self._contexts))
        for name, value in zip(names, values, strict=True):
            self._join(f"{number}/{name}", value)
        if key not in self._called:
            self._called[key] = _NOTHING  # first, because a macro may call itself
            self._called[key] = self._visit_macro_body(macro, f"{number}/")
        reads = forget_owner(frozenset[Read]().union(*self._conditions))
        for target in macro.find_all(nodes.NSRef):
            space = self._find_namespace(target.name)
            if space is not None:
                self._join(f"{space}.{target.attr}", Value(reads=reads))
        return self._called[key]

    @abstractmethod
    def _visit_macro_body(self, macro: nodes.Macro, scope: str) -> Value:
        """What a macro writes, with its variables in this scope."""

    def _condition(self, node: nodes.Node) -> frozenset[Read]:
        value = self.evaluate(node)
        reads = value.reads | (value.reading(ReadKind.EMPTY).reads if value.sources else frozenset())
        self.seen |= reads
        return reads

    def _assign(self, target: nodes.Node, value: Value, *, is_loop_variable: bool = False) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, value, is_loop_variable=is_loop_variable)
            return
        reads = value.reads if is_loop_variable else value.reads.union(*self._conditions)
        value = Value(value.sources, reads, value.texts, value.numbers)
        self.seen |= reads
        if isinstance(target, nodes.NSRef):
            name = self._find_namespace(target.name) or target.name
            self._join(f"{name}.{target.attr}", value.forget_owner() if name in self._shared else value)
            self._note_turns(value)
        elif isinstance(target, nodes.Name):
            self._add(target.name, value)

    def _keep(self, target: nodes.Node, value: Value) -> None:
        """Add to the list in a variable or in a namespace."""
        if isinstance(target, nodes.Name):
            self._add(target.name, value.forget_owner())
        elif isinstance(target, nodes.Getattr) and isinstance(target.node, nodes.Name):
            name = self._find_namespace(target.node.name) or target.node.name
            self._join(f"{name}.{target.attr}", value.forget_owner())
        self._note_turns(value)

    def _note_turns(self, kept: Value) -> None:
        """Note that a variable keeps text of each message of a loop, which may be written later."""
        if self._num_message_loops and kept.has(Source.MESSAGE, Source.TEXT, Source.CHANGED):
            self._keeps_turns = True

    def _add(self, name: str, value: Value) -> None:
        self._join(f"{self._scope}{name}", value)

    def _join(self, name: str, value: Value) -> None:
        joined = self.values.get(name, _NOTHING) | value
        if len(joined.numbers) > _MAX_CONSTANTS:
            self._unlimited.add(name)
        self.values[name] = replace(joined, numbers=frozenset()) if name in self._unlimited else joined

    def _find_namespace(self, name: str) -> str | None:
        return next((scoped for scoped in self._iterate_scopes(name) if scoped in self._namespaces), None)

    def _iterate_scopes(self, name: str) -> Iterator[str]:
        """The name in each scope, the innermost first."""
        if self._scope:
            yield f"{self._scope}{name}"
        yield name


def _get_constants(variable: Any) -> Value:
    """The constants in a variable of the renderings."""
    texts = frozenset(iterate_strings(variable)) if isinstance(variable, (str, list, tuple, dict)) else frozenset[str]()
    return Value(texts=texts, numbers=frozenset({variable}) if type(variable) is int else frozenset())


def _calculate(operator: str, left: frozenset[int], right: frozenset[int]) -> frozenset[int]:
    """All results of an operation; none if there are too many, or it has no result."""
    if operator not in _OPERATORS or len(left) * len(right) > _MAX_CONSTANTS:
        return frozenset()
    try:
        return frozenset(int(_OPERATORS[operator](a, b)) for a in left for b in right)
    except (ArithmeticError, ValueError):
        return frozenset()


def _join_texts(parts: Sequence[Value]) -> frozenset[str]:
    """The texts that the parts may join to, if they are few, and those of the parts."""
    own = union(parts).texts
    joined = frozenset({""})
    for part in parts:
        if not part.texts or len(joined) * len(part.texts) > _MAX_CONSTANTS:
            return own
        joined = frozenset(before + text for before in joined for text in part.texts)
    return own | frozenset(text for text in joined if len(text) <= _MAX_JOINED_LENGTH)


def _opaque(value: Value, what: str, node: nodes.Node) -> Value:
    return value | value.reading(ReadKind.OPAQUE, f"{what}, line {node.lineno}")
