"""The environment that chat templates run in: as transformers', with a `Budget` for whatever takes long or grows.

It has the same tags, filters and functions, and renders the same text. It is Jinja's immutable sandbox, which keeps
templates from attributes that lead out of it; using one is an error here, where Jinja's writes an empty text. `lipsum`,
which writes random text, is missing.

    environment = TemplateEnvironment(now=datetime.now())
    program = environment.compile_template(source)
    text = environment.run(program, {"messages": [...]}, TemplateLimits())
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import Context, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg, pass_context

from unbroken.rendering.jinja.growth import (
    FILTER_CHECKS,
    METHOD_CHECKS,
    Check,
    check_percent,
    check_power,
    check_product,
)
from unbroken.rendering.jinja.limits import Budget, LimitError, TemplateLimits
from unbroken.rendering.jinja.rewriting import ADD, ADMIT, CONCAT, SPEND, STEP, WRITE, add_budget

_LONGEST_DATE_FORMAT = 1_000
_SMALL_FILTERS = frozenset(
    {"abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "safe"}
)
"""Filters that make nothing larger than what they get."""
_OPERATORS: Mapping[str, Callable[[Budget, Any, Any], None]] = {
    "*": check_product,
    "**": check_power,
    "%": check_percent,
}


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs templates.

    Args:
        now: what `strftime_now` tells.
    """

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(_OPERATORS)  # type: ignore[misc]

    def __init__(self, *, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
        self.context_class = _BudgetedContext
        filters = {**self.filters, "tojson": _to_json, "sum": _sum}
        self.filters = {
            **{
                name: filter_ if name in _SMALL_FILTERS else _budgeted_filter(filter_, FILTER_CHECKS.get(name))
                for name, filter_ in filters.items()
            },
            "join": _budgeted_join(filters["join"]),
            ADD: _add_all,
            ADMIT: _admit,
            CONCAT: _concat,
            SPEND: _spend,
            STEP: _step,
            WRITE: _write,
        }
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _Clock(now)

    def compile_template(self, source: str) -> jinja2.Template:
        """The template as a program.

        Raises:
            Exception: whatever parser and compiler raise for it.
        """
        return self.from_string(add_budget(self.parse(source)))

    def run(self, program: jinja2.Template, variables: Mapping[str, Any], limits: TemplateLimits) -> str:
        """The text.

        Raises:
            LimitError: it went over a limit.
            Exception: whatever the template raises.
        """
        context = program.new_context(dict(variables))
        assert isinstance(context, _BudgetedContext)
        context.budget = budget = Budget(limits)
        most = limits.num_characters
        pieces = []
        length = 0
        for piece in program.root_render_func(context):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                budget.check_size(length)
        return "".join(pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or method; whatever a template calls comes through here."""
        budget: Budget = __context.budget  # type: ignore[attr-defined]
        budget.step()
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(method, (BuiltinMethodType, MethodType)):
            owner, check = method.__self__, METHOD_CHECKS.get(method.__name__)
            if check is not None and isinstance(owner, (str, bytes, int)):
                if method.__name__ == "join" and args:
                    args = (list(budget.steps_of(args[0])), *args[1:])
                check(budget, owner, args, kwargs)
        return budget.admit(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply one of `intercepted_binops`."""
        budget: Budget = context.budget  # type: ignore[attr-defined]
        _OPERATORS[operator](budget, left, right)
        return budget.admit(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute that leads out of the sandbox or changes a value.

        Raises:
            SecurityError: always.
        """
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} must not be used")


class _BudgetedContext(Context):
    """A template's variables, and the budget of the rendering."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002
        context = super().derived(locals)
        assert isinstance(context, _BudgetedContext)
        context.budget = self.budget
        return context


class _Namespace(Namespace):
    """A namespace that does not print what it holds: that may be one value a million times."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}`, which marks assistant text for training masks: here, just the text."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text_of"), [], [], body).set_lineno(line)

    def _text_of(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Clock:
    """`strftime_now`, which tells one time: else what a template writes would change at midnight."""

    def __init__(self, now: datetime) -> None:
        self._now = now

    def __call__(self, format: str) -> str:  # noqa: A002
        if len(format) > _LONGEST_DATE_FORMAT:
            raise LimitError(f"its date format is longer than {_LONGEST_DATE_FORMAT} characters")
        return self._now.strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: without HTML's escapes, and with the options of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _budgeted_filter(filter_: Callable[..., Any], check: Check | None) -> Callable[..., Any]:
    passed = _PassArg.from_obj(filter_)

    @pass_context
    def budgeted(context: _BudgetedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.step()
        if check is not None:
            check(budget, value, args, kwargs)
        if passed is None:
            made = filter_(value, *args, **kwargs)
        elif passed is _PassArg.context:
            made = filter_(context, value, *args, **kwargs)
        elif passed is _PassArg.eval_context:
            made = filter_(context.eval_ctx, value, *args, **kwargs)
        else:
            made = filter_(context.environment, value, *args, **kwargs)
        return budget.steps_of(made) if isinstance(made, GeneratorType) else budget.admit(made)

    return budgeted


def _budgeted_join(join: Callable[..., str]) -> Callable[..., str]:
    @pass_context
    def budgeted(context: _BudgetedContext, value: Any, d: str = "", attribute: Any = None) -> str:
        budget = context.budget
        if attribute is not None:
            value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
        items = list(budget.steps_of(value))
        budget.check_size(budget.size_of(items) + len(str(d)) * len(items))
        return budget.admit(join(context.eval_ctx, items, d))

    return budgeted


@pass_context
def _sum(context: _BudgetedContext, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    for item in context.budget.steps_of(value):
        start = _add(context.budget, start, item)
    return start


@pass_context
def _add_all(context: _BudgetedContext, values: list[Any]) -> Any:
    """`a + b + c`, from the left."""
    budget = context.budget
    length = 0
    for value in values:
        if type(value) is not str:
            break
        length += len(value)
    else:
        budget.check_and_spend(length)
        return "".join(values)
    total = values[0]
    for value in values[1:]:
        total = _add(budget, total, value)
    return total


def _add(budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, (str, list, tuple)):
        budget.check_size(budget.size_of(left) + budget.size_of(right))
    return budget.admit(left + right)


@pass_context
def _concat(context: _BudgetedContext, values: list[Any]) -> str:
    """`a ~ b ~ c`."""
    budget = context.budget
    budget.check_size(sum(map(budget.size_of, values)))
    return budget.admit((markup_join if context.eval_ctx.autoescape else str_join)(values))


@pass_context
def _admit(context: _BudgetedContext, value: Any) -> Any:
    return context.budget.admit(value)


@pass_context
def _write(context: _BudgetedContext, value: Any) -> Any:
    """A value on its way into a block's text."""
    context.budget.spend(context.budget.size_of(value))
    return value


@pass_context
def _spend(context: _BudgetedContext, num_characters: int) -> str:
    context.budget.spend(num_characters)
    return ""


@pass_context
def _step(context: _BudgetedContext, value: Any) -> Any:
    context.budget.step()
    return value
