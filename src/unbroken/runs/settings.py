"""A recipe's config from what is given: a TOML file's tables, the command line's options, and the defaults.

    --trainer.optimizer.learning-rate 3e-4    =    [trainer.optimizer]
                                                   learning_rate = 3e-4

Both become `{"trainer.optimizer.learning_rate": 3e-4}`, and `build` makes the config of it. Only what is given is
changed: where a recipe has an `OptimizerConfig` of its own as the default, its other fields stay. Each small config
checks itself when it is made; nothing is changed afterwards.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeAlias

from unbroken.errors import InvalidInputError
from unbroken.runs.sections import Field, Section, section_of
from unbroken.runs.values import from_text, from_toml, plain, toml_of

Given: TypeAlias = Mapping[str, Any]
"""Values of fields by their dotted names."""


def read_options(words: Sequence[str], section: Section) -> dict[str, Any]:
    """The values that a command line gives: `--loop.num-steps 50` or `--loop.num_steps=50`.

    Raises:
        InvalidInputError: a word is no option, an option is no field, comes twice, lacks its value, or has one of
            another type.
    """
    fields = section.all_fields()
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise InvalidInputError(f"options must be written as --FIELD VALUE, got {word!r}")
        option, equals, text = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        field = fields.get(name)
        if field is None:
            raise _unknown(option, name, section)
        if name in given:
            raise InvalidInputError(f"{option} must be given once, got it twice")
        value = text if equals else next(rest, None)
        if value is None:
            raise InvalidInputError(f"{option} must be followed by a value, got nothing")
        if _config_kind(field) is None:
            given[name] = from_text(field.kind, value, name=option)
        else:
            given[name] = _value(field, toml_of(value, name=option), option, None)
    return given


def read_table(table: Mapping[str, Any], section: Section, *, source: str, folder: Path | None) -> dict[str, Any]:
    """The values in a TOML table; paths in it are relative to `folder`, and errors begin with `source`.

    Raises:
        InvalidInputError: a key is no field, or a value of another type.
    """
    given: dict[str, Any] = {}
    fields = {_last(field.name): field for field in section.fields}
    inner = {_last(each.prefix.removesuffix(".")): each for each in section.sections}
    for key, value in table.items():
        name = f"{source}{section.prefix}{key}"
        if key in fields:
            given[fields[key].name] = _value(fields[key], value, name, folder)
        elif key not in inner:
            raise _unknown(name, section.prefix + key, section)
        elif not isinstance(value, Mapping):
            raise InvalidInputError(f"{name} must be a table of {_names(inner[key].fields)}, got {value!r}")
        else:
            given |= read_table(value, inner[key], source=source, folder=folder)
    return given


def load_toml(path: Path) -> dict[str, Any]:
    """A TOML file's contents.

    Raises:
        InvalidInputError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} must be a TOML file: {error}") from None


def build(section: Section, given: Given) -> Any:
    """The config of a section, with what is given in the place of defaults.

    Raises:
        InvalidInputError: a value is missing, or a config refuses its values; the field is named from the top.
    """
    own: dict[str, Any] = {}
    for field in section.fields:
        if field.name in given:
            own[_last(field.name)] = given[field.name]
        elif section.base is None and field.default is MISSING:
            raise InvalidInputError(
                f"{field.name} must be given, by --{field.name.replace('_', '-')} or in the recipe's TOML: {field.doc}"
            )
    for inner in section.sections:
        is_named = any(name.startswith(inner.prefix) for name in given)
        if is_named or (inner.base is None and not inner.is_optional):
            own[_last(inner.prefix.removesuffix("."))] = build(inner, given)
    try:
        return section.kind(**own) if section.base is None else dataclasses.replace(section.base, **own)
    except InvalidInputError as error:
        raise InvalidInputError(_named_from_top(str(error), section)) from error


def describe(config: Any) -> dict[str, Any]:
    """All values of a config by their dotted names, as JSON can hold them; a part that is left out is None."""
    return _described(section_of(type(config), base=config))


def _described(section: Section) -> dict[str, Any]:
    if section.base is None:
        return {section.prefix.removesuffix("."): None}
    told = {field.name: plain(field.default) for field in section.fields}
    for inner in section.sections:
        told |= _described(inner)
    return told


def _value(field: Field, value: Any, name: str, folder: Path | None) -> Any:
    """What a TOML value is in a field; each table of a list of configs is checked as the whole is."""
    kind = _config_kind(field)
    if kind is None:
        return from_toml(field.kind, value, name=name, folder=folder)
    if not isinstance(value, list) or not all(isinstance(table, Mapping) for table in value):
        raise InvalidInputError(f"{name} must be a list of tables of {_names(section_of(kind).fields)}, got {value!r}")
    configs = []
    for k, table in enumerate(value):
        section = section_of(kind, prefix=f"{field.name}[{k}].")
        source = name.removesuffix(field.name)
        configs.append(build(section, read_table(table, section, source=source, folder=folder)))
    return tuple(configs)


def _config_kind(field: Field) -> type[Any] | None:
    """The dataclass of a field that is a `tuple[Dataclass, ...]`."""
    entry = typing.get_args(field.kind)[:1]
    return typing.cast("type[Any]", entry[0]) if entry and dataclasses.is_dataclass(entry[0]) else None


def _unknown(told: str, name: str, section: Section) -> InvalidInputError:
    """The error for a name that is no field, with those that may be meant."""
    known = section.all_fields()
    alike = [each for each in known if _last(each) == _last(name)]
    alike += difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    inside = [each for each in known if each.startswith(name + ".")]
    if inside:
        return InvalidInputError(f"{told} has fields of its own: give one of {', '.join(inside)}")
    hint = f"did you mean {' or '.join(dict.fromkeys(alike))}?" if alike else f"the fields are {', '.join(known)}"
    return InvalidInputError(f"{told} must be a field of the recipe: {hint} (--help lists them all)")


def _named_from_top(message: str, section: Section) -> str:
    """A config's message about a field of its own, with the field's dotted name in front."""
    own = {field.name for field in dataclasses.fields(section.kind)}
    told = message.removeprefix(f"{section.kind.__name__}.")
    first = re.match(r"\w+", told)
    if first is not None and first[0] in own:
        return section.prefix + told
    return f"{section.prefix.removesuffix('.')}: {message}" if section.prefix else message


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _names(fields: Iterable[Field]) -> str:
    return ", ".join(_last(field.name) for field in fields)
