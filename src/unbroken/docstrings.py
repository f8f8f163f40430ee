"""Docstrings as data, for the help of command lines: those of classes, and the strings below their fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any


def first_paragraph(docstring: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def read_field_docs(config_class: type[Any]) -> dict[str, str]:
    """Read the docstrings of a dataclass's fields, inherited ones included."""
    docs: dict[str, str] = {}
    for owner in reversed([each for each in config_class.__mro__ if dataclasses.is_dataclass(each)]):
        docs |= read_class_docs(owner)
    return docs


def read_class_docs(owner: type[Any]) -> dict[str, str]:
    """Read the strings below the names in a class's body, such as fields or an enum's members."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
