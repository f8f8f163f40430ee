"""How large the value of an operation will be, asked before it is made: operators, methods and filters that can grow.

Each check gets a `Budget` and the operation's arguments, and raises `LimitError`. What is not here makes nothing larger
than a few times its arguments, and is only counted afterwards. Some operations are slow and not large: they are here
too.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unbroken.rendering.jinja.limits import Budget, LimitError

Check = Callable[[Budget, Any, Sequence[Any], Mapping[str, Any]], None]

_MOST_BITS = 65_536
_MOST_DIGITS = 1_000
_LONGEST_FOR_SLOW = 100_000
_MOST_COMPARISONS = 10**9
_LONGEST_SEPARATOR = 64
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_SEQUENCES = (str, bytes, list, tuple)


def check_product(budget: Budget, left: Any, right: Any) -> None:
    """`left * right`."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, _SEQUENCES) and isinstance(times, int):
            budget.check_size(budget.size_of(sequence) * max(times, 0))


def check_power(_: Budget, left: Any, right: Any) -> None:
    """`left ** right`."""
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        _check_bits(left.bit_length() * right)


def check_percent(budget: Budget, left: Any, right: Any) -> None:
    """`left % right`, which formats if `left` is a text."""
    if not isinstance(left, (str, bytes)):
        return
    text = left if isinstance(left, str) else left.decode("latin-1")
    widths = [width for match in _PERCENT.finditer(text) for width in match.groups("0")]
    _check_fields(budget, text, widths, len(widths) // 2, right)


def _check_format(budget: Budget, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`text.format(*args, **kwargs)`."""
    specs = [spec or "" for _, field, spec, _ in string.Formatter().parse(text) if field is not None]
    widths = [width for spec in specs for width in ("*",) * ("{" in spec) + tuple(re.findall(r"\d+", spec))]
    _check_fields(budget, text, widths, len(specs), [*args, *kwargs.values()])


def _check_fields(budget: Budget, text: str, widths: Sequence[str], num_fields: int, values: Any) -> None:
    if "*" in widths:
        raise LimitError(f"the width in {text[:40]!r} must be written out")
    budget.check_size(len(text) + num_fields * (max(map(int, widths), default=0) + budget.size_of(values)))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MOST_BITS:
        raise LimitError(f"it makes a number of more than {_MOST_BITS} bits")


def _check_width(budget: Budget, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Any number given is a width or a number of entries."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            budget.check_size(budget.size_of(text) + value)


def _check_indent(budget: Budget, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`text | indent(width)`, and `text.expandtabs(tabsize)`: a width for each line or tab."""
    given = [*args[:1], *(kwargs[key] for key in ("width", "tabsize") if key in kwargs), 8]
    width = given[0] if isinstance(given[0], int) else budget.size_of(given[0])
    text = str(text)
    budget.check_size(len(text) + width * (len(text.splitlines()) + text.count("\t") + 1))


def _check_replace(budget: Budget, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    named = {**dict(zip(("old", "new"), args, strict=False)), **kwargs}
    text = str(text)
    budget.check_size(len(text) + text.count(str(named.get("old"))) * len(str(named.get("new"))))


def _check_join(budget: Budget, separator: Any, args: Sequence[Any], _: Mapping[str, Any]) -> None:
    budget.check_size(budget.size_of(args[0]) + len(separator) * len(args[0]))


def _check_translate(budget: Budget, text: Any, args: Sequence[Any], _: Mapping[str, Any]) -> None:
    budget.check_size(len(text) * budget.size_of(args[0]))


def _check_scan(_: Budget, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Python looks for the second text at each character of the first."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (str, bytes)) and len(value) * len(text) > _MOST_COMPARISONS:
            raise LimitError(f"it looks for a text of {len(value)} characters in one of {len(text)} from the right")


def _check_short(_: Budget, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if isinstance(text, str) and len(text) > _LONGEST_FOR_SLOW:
        raise LimitError(f"it gives {len(text)} characters to a filter that is slow above {_LONGEST_FOR_SLOW}")


def _check_short_list(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if budget.size_of(value) > _LONGEST_FOR_SLOW:
        raise LimitError(f"it gives a value to a filter that is slow above {_LONGEST_FOR_SLOW} characters")


def _check_digits(_: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`| round(precision)`, `| int(base=..)` and `number.to_bytes(length)`."""
    for number in (*args, *kwargs.values()):
        if isinstance(number, int) and abs(number) > _MOST_DIGITS:
            raise LimitError(f"it makes a number of {abs(number)} digits, more than {_MOST_DIGITS}")
    if isinstance(value, str) and len(value) > _MOST_DIGITS:
        raise LimitError(f"it reads a number of {len(value)} digits, more than {_MOST_DIGITS}")


def _check_json(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    budget.check_size(budget.size_of(value))
    for option in (*args, *kwargs.values()):
        for part in option if isinstance(option, (list, tuple)) else (option,):
            if (len(part) if isinstance(part, str) else part or 0) > _LONGEST_SEPARATOR:
                raise LimitError(f"it indents or separates JSON by more than {_LONGEST_SEPARATOR} characters")


def _check_value(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    budget.check_size(budget.size_of(value) + sum(map(budget.size_of, (*args, *kwargs.values()))))


def _check_percent_filter(budget: Budget, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    check_percent(budget, text, [*args, *kwargs.values()])


METHOD_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width),
    "expandtabs": _check_indent,
    "format": _check_format,
    "format_map": _check_format,
    "join": _check_join,
    "replace": _check_replace,
    "to_bytes": _check_digits,
    "translate": _check_translate,
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"), _check_scan),
    **dict.fromkeys(("striptags", "unescape"), _check_short),
}
"""By the method's name; for texts and numbers."""

FILTER_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("center", "batch", "slice", "truncate"), _check_width),
    "indent": _check_indent,
    "format": _check_percent_filter,
    "replace": _check_replace,
    "trim": _check_scan,
    "round": _check_digits,
    "int": _check_digits,
    "tojson": _check_json,
    **dict.fromkeys(("string", "escape", "e", "forceescape", "urlencode"), _check_value),
    **dict.fromkeys(("striptags", "title", "urlize", "wordcount", "wordwrap"), _check_short),
    **dict.fromkeys(("pprint", "xmlattr"), _check_short_list),
}
"""By the filter's name."""
