"""Build a recipe's config from a TOML file's tables, the command line's options, and the defaults.

    --trainer.optimizer.learning-rate 3e-4    =    [trainer.optimizer]
                                                   learning_rate = 3e-4

Both become `{"trainer.optimizer.learning_rate": 3e-4}`, and `build` makes the config from it. Only the given fields
change: where a recipe has its own default `OptimizerConfig`, the other fields keep its values. Each small config checks
itself when it is made; nothing is changed afterwards.
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
from unbroken.runs.settings.fields import Field, Section, section_of
from unbroken.runs.settings.values import check_toml, parse_toml, parse_word, redact, to_json

Values: TypeAlias = Mapping[str, Any]
"""Values of fields by their dotted names."""


def read_options(words: Sequence[str], section: Section) -> dict[str, Any]:
    """Read options, `--loop.num-steps 50` or `--loop.num_steps=50`; raises `InvalidInputError` for a wrong one."""
    fields = section.all_fields()
    values: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise InvalidInputError(f"options must be written as --FIELD VALUE, got {word!r}")
        option, equals, text = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        field = fields.get(name)
        if field is None:
            raise _unknown_field(option, name, section)
        if name in values:
            raise InvalidInputError(f"{option} must be given once, but is given twice")
        value = text if equals else next(rest, None)
        if value is None:
            raise InvalidInputError(f"{option} must be followed by a value")
        if _config_class_in(field) is None:
            values[name] = parse_word(field.hint, value, name=option)
        else:
            values[name] = _check_value(field, parse_toml(value, name=option), option, None)
    return values


def read_table(table: Mapping[str, Any], section: Section, *, source: str, folder: Path | None) -> dict[str, Any]:
    """Read the values in a TOML table, its paths relative to `folder`; an `InvalidInputError` begins with `source`."""
    values: dict[str, Any] = {}
    fields = {_last(field.name): field for field in section.fields}
    inner = {_last(each.prefix.removesuffix(".")): each for each in section.sections}
    for key, value in table.items():
        name = f"{source}{section.prefix}{key}"
        if key in fields:
            values[fields[key].name] = _check_value(fields[key], value, name, folder)
        elif key not in inner:
            raise _unknown_field(name, section.prefix + key, section)
        elif not isinstance(value, Mapping):
            raise InvalidInputError(f"{name} must be a table of {_names(inner[key].fields)}, got {value!r}")
        else:
            values |= read_table(value, inner[key], source=source, folder=folder)
    return values


def load_toml(path: Path) -> dict[str, Any]:
    """Load a TOML file; raises `InvalidInputError` if it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} must be a TOML file: {error}") from None


def build(section: Section, values: Values) -> Any:
    """Build a section's config from `values` and the defaults; an `InvalidInputError` has the field's dotted name."""
    own: dict[str, Any] = {}
    for field in section.fields:
        if field.name in values:
            own[_last(field.name)] = values[field.name]
        elif section.base is None and field.default is MISSING:
            raise InvalidInputError(
                f"{field.name} must be given, by --{field.name.replace('_', '-')} or in the recipe's TOML: {field.doc}"
            )
    for inner in section.sections:
        is_given = any(name.startswith(inner.prefix) for name in values)
        if is_given or (inner.base is None and not inner.is_optional):
            own[_last(inner.prefix.removesuffix("."))] = build(inner, values)
    try:
        return section.config_class(**own) if section.base is None else dataclasses.replace(section.base, **own)
    except InvalidInputError as error:
        raise InvalidInputError(_name_from_top(str(error), section)) from error


def describe(config: Any) -> dict[str, Any]:
    """Get all values of a config by their dotted names, as JSON values, to be kept and compared: without secrets.

    An optional part that is left out is None.
    """
    return {
        name: redact(value, name) for name, value in _describe_section(section_of(type(config), base=config)).items()
    }


def _describe_section(section: Section) -> dict[str, Any]:
    if section.base is None:
        return {section.prefix.removesuffix("."): None}
    values = {field.name: to_json(field.default) for field in section.fields}
    for inner in section.sections:
        values |= _describe_section(inner)
    return values


def _check_value(field: Field, value: Any, name: str, folder: Path | None) -> Any:
    """Convert a TOML value to its field's type; in a list of configs, each table is read like a section."""
    config_class = _config_class_in(field)
    if config_class is None:
        return check_toml(field.hint, value, name=name, folder=folder)
    if not isinstance(value, list) or not all(isinstance(table, Mapping) for table in value):
        names = _names(section_of(config_class).fields)
        raise InvalidInputError(f"{name} must be a list of tables of {names}, got {value!r}")
    configs = []
    for k, table in enumerate(value):
        section = section_of(config_class, prefix=f"{field.name}[{k}].")
        source = name.removesuffix(field.name)
        configs.append(build(section, read_table(table, section, source=source, folder=folder)))
    return tuple(configs)


def _config_class_in(field: Field) -> type[Any] | None:
    """The dataclass of a field annotated `tuple[Dataclass, ...]`."""
    entry = typing.get_args(field.hint)[:1]
    return typing.cast("type[Any]", entry[0]) if entry and dataclasses.is_dataclass(entry[0]) else None


def _unknown_field(shown_name: str, name: str, section: Section) -> InvalidInputError:
    """The error for an unknown field, with similar names."""
    known = section.all_fields()
    parts = {each.prefix: each.config_class for each in section.all_sections()}
    elsewhere = getattr(parts.get(name.removesuffix(_last(name))), "elsewhere", {})
    if (why := elsewhere.get(_last(name))) is not None:
        return InvalidInputError(f"{shown_name} must be left out: {why}")
    inside = [each for each in known if each.startswith(name + ".")]
    if inside:
        return InvalidInputError(f"{shown_name} has fields of its own: give one of {', '.join(inside)}")
    similar = [each for each in known if _last(name) in (_last(each), _initials(each))]
    similar = similar or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if shown_name.startswith("--"):
        similar = [f"--{each.replace('_', '-')}" for each in similar]
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"the fields are {', '.join(known)}"
    return InvalidInputError(f"{shown_name} must be a field of the recipe: {hint} (--help lists them all)")


def _name_from_top(message: str, section: Section) -> str:
    """A config's message about one of its fields, with the field's dotted name in front."""
    own = {field.name for field in dataclasses.fields(section.config_class)}
    rule = message.removeprefix(f"{section.config_class.__name__}.")
    first = re.match(r"\w+", rule)
    if first is not None and first[0] in own:
        return section.prefix + rule
    return f"{section.prefix.removesuffix('.')}: {message}" if section.prefix else message


def _initials(name: str) -> str:
    """How users of other packages shorten a name: lr for learning_rate."""
    return "".join(word[:1] for word in _last(name).split("_"))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _names(fields: Iterable[Field]) -> str:
    return ", ".join(_last(field.name) for field in fields)
