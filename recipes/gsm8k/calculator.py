"""A calculator as a tool: arithmetic in Python's notation, which is read and not executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from unbroken import tool

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_MAX_LENGTH = 200


@tool
def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % and parentheses, such as (48 + 24) / 2.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"expression must have at most {_MAX_LENGTH} characters, got {len(expression)}")
    value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    if not math.isfinite(value):
        raise ValueError(f"expression must have a finite value, got {value}")
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def evaluate(node: ast.AST) -> float:
    """The value of an expression; raises `ValueError` for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](evaluate(left), evaluate(right))
        case _:
            raise ValueError(f"expression must be arithmetic, got {ast.unparse(node)}")
