"""From a recipe's file and a command line's options to its run, or to the list of its fields."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from unbroken.runs.folder import claim
from unbroken.runs.loading import load_recipe
from unbroken.runs.processes import main_process_first
from unbroken.runs.sections import Field, Section, first_line
from unbroken.runs.settings import describe
from unbroken.runs.values import kind_in_words, shown


def run_recipe(path: Path, options: Sequence[str]) -> None:
    """Run a recipe, or go on with it where its output folder holds a run of it.

    With several processes (`accelerate launch -m unbroken train ...`), the first one claims the folder.

    Raises:
        UnbrokenError: what the user can mend, with how.
    """
    recipe = load_recipe(path)
    config = recipe.configure(options)
    with main_process_first():
        claim(config.output, recipe.name, describe(config))
    asyncio.run(recipe.run(config))


def list_fields(path: Path) -> str:
    """What `--help` prints: the recipe's docstring and every field, with type, default and docstring.

    Raises:
        InvalidInputError: the file holds no recipe.
    """
    recipe = load_recipe(path)
    lines = [f"usage: unbroken train {path} [--FIELD VALUE ...]", "", recipe.doc, "", _WRITING]
    for section in recipe.section.all_sections():
        lines += ["", *_heading(section)]
        for field in section.fields:
            lines += _entry(field, recipe.given.get(field.name, field.default))
    return "\n".join(lines)


_WRITING = "Lists are written a,b or as in TOML, and `none` where a field may have no value."


def _heading(section: Section) -> Iterator[str]:
    name = section.prefix.removesuffix(".") or "run"
    optional = " (left out unless one of these is given)" if section.is_optional else ""
    yield from textwrap.wrap(f"{name}{optional}: {first_line(section.kind.__doc__)}", 100, break_on_hyphens=False)


def _entry(field: Field, default: Any) -> Iterator[str]:
    told = "must be given" if default is MISSING else f"default: {shown(default)}"
    yield f"  --{field.name.replace('_', '-')} {kind_in_words(field.kind)}  ({told})"
    indent = " " * 8
    yield from textwrap.wrap(
        field.doc.strip(), 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
