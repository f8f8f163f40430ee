"""Docstrings as data, for the help of command lines: those of classes, and the strings below their fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from functools import lru_cache
from itertools import pairwise
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


@lru_cache(maxsize=1024)
def read_class_docs(owner: type[Any]) -> dict[str, str]:
    """Read the strings below the names in a class's body, such as fields or an enum's members."""
    return _docs_of_classes(inspect.getsource(sys.modules[owner.__module__]))[owner.__qualname__]


@lru_cache(maxsize=256)  # a run's config has 90 classes in 30 files, and is described several times
def _docs_of_classes(source: str) -> dict[str, dict[str, str]]:
    """What `read_class_docs` reads, for each class of a file by its `__qualname__`."""
    docs: dict[str, dict[str, str]] = {}
    _collect(ast.parse(source), "", docs)
    return docs


def _collect(node: ast.AST, prefix: str, docs: dict[str, dict[str, str]]) -> None:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name, body=body):
                docs.setdefault(prefix + name, _docs_in(body))
                _collect(child, f"{prefix}{name}.", docs)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                _collect(child, f"{prefix}{name}.<locals>.", docs)
            case ast.stmt():
                _collect(child, prefix, docs)


def _docs_in(body: list[ast.stmt]) -> dict[str, str]:
    docs = {}
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
