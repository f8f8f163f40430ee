"""The help of `unbroken train RECIPE --help`: every field, with its type, default and docstring."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from unbroken.docstrings import first_paragraph
from unbroken.runs.recipe import load_recipe
from unbroken.runs.settings.fields import Field, Section
from unbroken.runs.settings.values import format_type, format_value

_SYNTAX = "Lists are written a,b or as in TOML. `none` means no value, where a field allows it."
_WIDTH = 100


def format_help(path: Path | None) -> str:
    """The docstring and all fields of a file's recipe, or of the built-in one; raises `InvalidInputError` if the file
    is not a recipe.
    """
    recipe = load_recipe(path)
    lines = [f"usage: unbroken train {path or '--env NAME'} [--FIELD VALUE ...]", "", recipe.doc, "", _SYNTAX]
    for section in recipe.section.all_sections():
        lines += ["", *_format_heading(section)]
        for field in section.fields:
            lines += _format_field(field, recipe.values.get(field.name, field.default))
    return "\n".join(lines)


def _format_heading(section: Section) -> Iterator[str]:
    name = section.prefix.removesuffix(".") or "run"
    optional = " (left out unless one of these is given)" if section.is_optional else ""
    heading = f"{name}{optional}: {first_paragraph(section.config_class.__doc__)}"
    yield from textwrap.wrap(heading, _WIDTH, break_on_hyphens=False)


def _format_field(field: Field, default: Any) -> Iterator[str]:
    note = "must be given" if default is MISSING else f"default: {format_value(default)}"
    yield f"  --{field.name.replace('_', '-')} {format_type(field.hint)}  ({note})"
    indent = " " * 8
    yield from textwrap.wrap(
        field.doc.strip(), _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
