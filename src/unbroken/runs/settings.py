"""Settings: the fields of a config class, and a config made from a TOML file's tables and the command line's options.

    --trainer.optimizer.learning-rate 3e-4    =    [trainer.optimizer]
                                                   learning_rate = 3e-4

Both become `{"trainer.optimizer.learning_rate": 3e-4}`, and `build` makes the config from it. Only the given fields
change: where a recipe has its own default `OptimizerConfig`, the other fields keep its values. Each small config checks
itself when it is made; nothing is changed afterwards.

@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    loop: LoopConfig = LoopConfig(num_steps=50)

section_of(Config).all_fields()["loop.num_steps"]     _Field(name="loop.num_steps", hint=int, default=50, doc=...)

A config class may have `elsewhere: ClassVar[Mapping[str, str]]`: names that are no settings, and for each what to do
instead, which the error says. They are names of other packages, and fields that are for callers in Python alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from unbroken.docstrings import first_paragraph, read_class_docs, read_field_docs
from unbroken.errors import InvalidInputError
from unbroken.runs.python_files import CommandWord, DataName, FunctionName, ModelName
from unbroken.untrusted import MAX_FACTS_BYTES, read_text


def _parse_word(hint: Any, text: str, *, name: str) -> Any:
    """Parse a word of the command line; an `InvalidInputError` begins with `name`.

    `none` stands for None where that is allowed. A list is written as in TOML, `["a", "b"]`, or with commas, `a,b`.
    """
    if text.lower() == "none" and types.NoneType in typing.get_args(hint):
        return None
    hint = _choose_member(hint, is_list=text.lstrip().startswith("["))
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and members[1:] == (...,) and not text.lstrip().startswith("["):
        words = tuple(_parse_word(members[0], word.strip(), name=name) for word in text.split(",") if word.strip())
        return _resolve_paths(words, Path())
    if origin is tuple and not text.lstrip().startswith("["):
        text = f"[{text}]"
    if origin in (tuple, dict, Mapping):
        return check_toml(hint, _parse_toml(text, name=name), name=name, folder=Path())
    return _validate(_adapter(hint, name).validate_strings, text, text, name)


def check_toml(hint: Any, value: Any, *, name: str, folder: Path | None = None) -> Any:
    """Convert a TOML value to `hint`, its paths relative to `folder`; an `InvalidInputError` begins with `name`."""
    adapter = _adapter(_choose_member(hint, is_list=isinstance(value, list)), name)
    # JSON's strict mode takes a list for a tuple and a string for an enum or a path, but no "3" for a number.
    text = json.dumps(value, default=str)
    return _resolve_paths(_validate(lambda read: adapter.validate_json(read, strict=True), text, value, name), folder)


def _choose_member(hint: Any, *, is_list: bool) -> Any:
    """What a value is converted to, of a type that is one value or a list, `PATH|[PATH,...]`; other types stay."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    lists = [member for member in members if typing.get_origin(member) is tuple]
    others = [member for member in members if member not in lists]
    if not lists or set(others) <= {types.NoneType}:
        return hint
    return lists[0] if is_list else functools.reduce(operator.or_, others)


def _parse_toml(text: str, *, name: str) -> Any:
    """Parse one value in TOML's syntax; an `InvalidInputError` begins with `name`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{name} must be written as in TOML, got {text!r}: {error}") from None


_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?i:^token|(?:^|[_.-])(?:api[_-]?keys?|(?:access|private|secret)[_-]?keys?|secret|passw(?:or)?d|passphrase|"
    r"credentials?|authorization|(?:access|api|auth|bearer|hf|hub|refresh)[_-]?token))$"
    r"|^[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASS|CREDENTIALS)$"
)
"""Of a variable, a header or an argument whose value is a secret."""
_SECRETS = (
    re.compile(r"(^postgres(?:ql)?://[^:@\s]*:).+(?=@)"),
    re.compile(r"(://[^/\s:@]*:)[^/\s]+(?=@)"),
    re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password|signature|sig)=)[^&\s#]+"),
    re.compile(r"((?i:\bauthorization: *(?:\w+ )?)|\bBearer (?=[\w.~+/=-]{16}))\S+"),
    re.compile(r"()\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"),
)
"""Secrets in a text, after what stays: a URL's password or parameters, a header's credentials, keys of known forms."""


def _to_json(value: Any) -> Any:
    """Convert a value to what JSON can hold, so that equal values stay equal."""
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def redact(value: Any, name: str = "") -> Any:
    """A value of JSON without the secrets in it: what names or forms say is one. The rest stays, to be compared."""
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_NAME.search(name):
        return _HIDDEN
    for pattern in _SECRETS:
        value = pattern.sub(rf"\g<1>{_HIDDEN}", value)
    return value


def format_value(value: Any) -> str:
    """Write a value as the command line takes it."""
    converted = _to_json(value)
    if isinstance(converted, str):
        return converted or '""'
    return "none" if converted is None else _format_toml(converted)


def _format_type(hint: Any) -> str:
    """Write a type as the help shows it: `INT`, `{grpo,rloo}`, `[TEXT,...]`."""
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    if isinstance(hint, types.UnionType):
        return "|".join(_format_type(member) for member in members)
    if typing.get_origin(hint) is tuple:
        return f"[{','.join('...' if member is ... else _format_type(member) for member in members)}]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"{{{','.join(str(member.value) for member in hint)}}}"
    if dataclasses.is_dataclass(hint):
        return f"{{{','.join(field.name for field in dataclasses.fields(hint))}}}"
    return {
        int: "INT",
        float: "FLOAT",
        bool: "BOOL",
        str: "TEXT",
        Path: "PATH",
        FunctionName: "NAME",
        CommandWord: "TEXT",
        DataName: "TEXT",
        ModelName: "TEXT",
    }.get(hint, "TOML")


def _format_toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    if isinstance(value, dict):
        names = {name: name if name.isidentifier() else json.dumps(name) for name in value}
        given = {name: item for name, item in value.items() if item is not None}  # TOML has no word for none
        return f"{{{', '.join(f'{names[name]} = {_format_toml(item)}' for name, item in given.items())}}}"
    return json.dumps(value)


def _adapter(hint: Any, name: str) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        raise InvalidInputError(f"{name} cannot be set: a value of the type {hint} cannot be written") from None


def _validate(validate: Callable[[str], Any], text: str, value: Any, name: str) -> Any:
    try:
        return validate(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        message = first["msg"].partition(", unable to")[0]
        rule = message.removeprefix("Input should ") if message.startswith("Input should ") else f"be valid: {message}"
        raise InvalidInputError(f"{name}{place} must {rule}, got {value!r}") from None


def _resolve_paths(value: Any, folder: Path | None) -> Any:
    if folder is None:
        return value
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, FunctionName):
        return value.relative_to(folder)
    return tuple(_resolve_paths(item, folder) for item in value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A single value that can be set."""

    name: str
    """Dotted, from the top of the config."""
    hint: Any
    """The type annotation."""
    default: Any
    """`dataclasses.MISSING` where a value must be given."""
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One of the small configs that make up the whole."""

    prefix: str
    """The beginning of its fields' names: `trainer.optimizer.`, or nothing at the top."""
    config_class: type[Any]
    base: Any | None
    """The default instance, whose other fields are kept, if there is one."""
    is_optional: bool
    """Whether it is None unless one of its fields is given."""
    fields: tuple[_Field, ...]
    sections: tuple[Section, ...]
    elsewhere: Mapping[str, str]
    """Names that are no settings, and what to do instead."""

    def all_sections(self) -> Iterator[Section]:
        """Iterate over this section and all sections inside it, in order."""
        yield self
        for section in self.sections:
            yield from section.all_sections()

    def all_fields(self) -> dict[str, _Field]:
        """The fields of all sections by their dotted names."""
        return {field.name: field for section in self.all_sections() for field in section.fields}


def section_of(
    config_class: type[Any], *, base: Any | None = None, prefix: str = "", is_optional: bool = False
) -> Section:
    """Describe a config class, or the part of a config whose names begin with `prefix`."""
    hints, docs = _read_class(config_class)  # type: ignore[arg-type]  # mypy takes a type of dataclasses for none that has a hash
    elsewhere: Mapping[str, str] = getattr(config_class, "elsewhere", {})
    fields, sections = [], []
    for field in dataclasses.fields(config_class):
        if field.name in elsewhere:
            continue
        name, hint = prefix + field.name, hints[field.name]
        default = _default_of(field) if base is None else getattr(base, field.name)
        inner = _dataclass_in(hint)
        if inner is None:
            doc = docs.get(field.name, "") + _enum_docs(hint)
            fields.append(_Field(name=name, hint=hint, default=default, doc=doc))
        else:
            inner_base = default if dataclasses.is_dataclass(default) else None
            sections.append(section_of(inner, base=inner_base, prefix=f"{name}.", is_optional=default is None))
    return Section(
        prefix=prefix,
        config_class=config_class,
        base=base,
        is_optional=is_optional,
        fields=tuple(fields),
        sections=tuple(sections),
        elsewhere=elsewhere,
    )


@functools.cache  # reading sources takes most of the time in which options are parsed, and a class is read many times
def _read_class(config_class: type[Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The types and the docstrings of a config class's fields."""
    return typing.get_type_hints(config_class), read_field_docs(config_class)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass of a field annotated `Dataclass` or `Dataclass | None`."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    found = [member for member in members if dataclasses.is_dataclass(member)]
    only_one = len(found) == 1 and all(member in (found[0], types.NoneType) for member in members)
    return typing.cast("type[Any]", found[0]) if only_one else None


def _enum_docs(hint: Any) -> str:
    """The docstrings of an enum's members, to follow the field's."""
    if not (isinstance(hint, type) and issubclass(hint, Enum)):
        return ""
    docs = read_class_docs(hint)
    return " ".join(
        ["", *(f"{member.value}: {docs[name]}" for name, member in hint.__members__.items() if name in docs)]
    )


_SYNTAX = "Lists are written a,b or as in TOML. `none` means no value, where a field allows it."
_WIDTH = 100


def format_help(top: Section, values: Mapping[str, Any], *, command: str, doc: str, shown: Collection[str] = ()) -> str:
    """The help of a command: its docstring and every field, with its type, docstring and value or default.

    With `shown`, that of these fields and the names of all others.
    """
    lines = [f"usage: {command} [--FIELD VALUE ...]", "", doc, "", _SYNTAX]
    if shown:
        return "\n".join([*lines, *_format_short(top, values, shown)])
    for section in top.all_sections():
        lines += ["", *_format_heading(section)]
        for field in section.fields:
            lines += _format_field(field, values.get(field.name, field.default))
    return "\n".join(lines)


def _format_short(top: Section, values: Mapping[str, Any], shown: Collection[str]) -> Iterator[str]:
    """The first sentences of these fields, and the names of the others."""
    wrap = functools.partial(textwrap.wrap, width=118, subsequent_indent=" " * 6, break_on_hyphens=False)
    yield from ("", "The most common fields, those of a first hour first; each is a line of the TOML file too:")
    for field in filter(None, map(top.all_fields().get, shown)):
        (line, *_) = _format_field(field, values.get(field.name, field.default))
        sentence = re.split(r"(?<=[.;]) ", field.doc)[0].rstrip(";") if field.doc[:1].isupper() else ""
        yield from wrap(f"{line}  {sentence}")
    yield from ("", "All others, which --help-all describes:")
    listed: dict[type[Any], str] = {}
    for section in top.all_sections():
        rest = _names(field for field in section.fields if field.name not in shown)
        first = listed.setdefault(section.config_class, section.prefix)
        names = rest if first == section.prefix else f"as {first.removesuffix('.')}"
        name = section.prefix.removesuffix(".") or "run"
        yield from wrap(f"  {name}: {names}".replace("_", "-")) if rest else ()


def _format_heading(section: Section) -> Iterator[str]:
    name = section.prefix.removesuffix(".") or "run"
    optional = " (left out unless one of these is given)" if section.is_optional else ""
    heading = f"{name}{optional}: {first_paragraph(section.config_class.__doc__)}"
    yield from textwrap.wrap(heading, _WIDTH, break_on_hyphens=False)


def _format_field(field: _Field, default: Any) -> Iterator[str]:
    note = "must be given" if default is MISSING else f"default: {format_value(default)}"
    yield f"  --{field.name.replace('_', '-')} {_format_type(field.hint)}  ({note})"
    indent = " " * 8
    yield from textwrap.wrap(
        field.doc.strip(), _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


Values: TypeAlias = Mapping[str, Any]
"""Values of fields by their dotted names."""


class Mistakes:
    """What is wrong with settings: all of it is said at once, a line for each mistake."""

    def __init__(self) -> None:
        self._lines: dict[str, InvalidInputError | None] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep an `InvalidInputError` of the block, and go on after it."""
        try:
            yield
        except InvalidInputError as error:
            self.add(str(error), error)

    def add(self, message: str, error: InvalidInputError | None = None) -> None:
        """Keep what is wrong, unless it was said already."""
        for line in message.split("\n"):
            self._lines.setdefault(line, error)

    def __len__(self) -> int:
        return len(self._lines)

    def raise_all(self) -> None:
        """Raise an `InvalidInputError` with all of them, if there are any."""
        if self._lines:
            raise InvalidInputError("\n".join(self._lines)) from next(iter(self._lines.values()))


def read_options(words: Sequence[str], section: Section) -> dict[str, Any]:
    """Read options, `--loop.num-steps 50` or `--loop.num_steps=50`; raises `InvalidInputError` for the wrong ones."""
    values: dict[str, Any] = {}
    mistakes, rest = Mistakes(), list(words)
    while rest:
        with mistakes.collect():
            word = rest.pop(0)
            if not word.startswith("--"):
                raise InvalidInputError(f"options must be written as --FIELD VALUE, got {word!r}")
            option, equals, text = word.partition("=")
            value = text if equals else rest.pop(0) if rest else None
            _read_option(option, value, section, values)
    mistakes.raise_all()
    return values


def _read_option(option: str, value: str | None, section: Section, values: dict[str, Any]) -> None:
    """Add the value of an option to `values`."""
    name = option.removeprefix("--").replace("-", "_")
    field = section.all_fields().get(name)
    if field is None:
        raise _unknown_field(option, name, section)
    if name in values:
        raise InvalidInputError(f"{option} must be given once, but is given twice")
    if value is None:
        raise InvalidInputError(f"{option} must be followed by a value")
    if _config_class_in(field) is None:
        values[name] = _parse_word(field.hint, value, name=option)
    else:
        values[name] = _check_value(field, _parse_toml(value, name=option), option, None)


def read_table(
    table: Mapping[str, Any], section: Section, *, source: str, folder: Path | None, top: Section | None = None
) -> dict[str, Any]:
    """Read the values in a TOML table, its paths relative to `folder`.

    `top` is the section of the whole file that the table is in; without it, it is the file's own table.

    Raises:
        InvalidInputError: with a line for each mistake, which begins with `source`. If there is one in the table, what
            would be refused of the other sections later is said too.
    """
    reading = _Reading(source=source, folder=folder, top=top or section)
    _read_section(table, section, reading)
    if reading.mistakes:
        _build(section, reading.values, reading.mistakes, source=source, wrong=reading.wrong)
    reading.mistakes.raise_all()
    return reading.values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A file of TOML that is read: its arguments as those of `read_table`, and what was found."""

    source: str
    folder: Path | None
    top: Section
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    mistakes: Mistakes = dataclasses.field(default_factory=Mistakes)
    wrong: set[str] = dataclasses.field(default_factory=set)
    """Prefixes of the sections that have a mistake."""


def _list_keys(section: Section) -> list[str]:
    """The keys that a section's table may have."""
    return [_last(field.name) for field in section.fields] + [_name_part(each) for each in section.sections]


def _name_part(section: Section) -> str:
    """The key of a section in the table that it is in."""
    return _last(section.prefix.removesuffix("."))


def _read_section(table: Mapping[str, Any], section: Section, reading: _Reading) -> None:
    fields = {_last(field.name): field for field in section.fields}
    inner = {_name_part(each): each for each in section.sections}
    for key, value in table.items():
        name, before = f"{reading.source}{section.prefix}{key}", len(reading.mistakes)
        with reading.mistakes.collect():
            if key in fields:
                found = _check_value(fields[key], value, name, reading.folder, reading.top)
                reading.values[fields[key].name] = found
            elif key not in inner:
                raise _unknown_key(name, key, section, reading.top, value)
            elif not isinstance(value, Mapping):
                raise InvalidInputError(f"{name} must be a table of {_names(inner[key].fields)}, got {value!r}")
            else:
                _read_section(value, inner[key], reading)
        if len(reading.mistakes) > before:
            reading.wrong.add(section.prefix)


def read_described(settings: Mapping[str, Any], section: Section) -> dict[str, Any]:
    """Read the values that `describe` gave of a config of this section; those that are the defaults are left out.

    So are fields that are no settings (`elsewhere`): the recipe's code gives them again, or nobody did.

    Raises:
        InvalidInputError: one is of no field, or was a secret, which is not kept.
    """
    fields, values = section.all_fields(), {}
    parts = {each.prefix.removesuffix(".") for each in section.all_sections()}
    for name, value in settings.items():
        is_left_out = value is None and name in parts
        if is_left_out or _find_reason(name, section) is not None:
            continue
        if name not in fields:
            raise _unknown_field(name, name, section)
        if _HIDDEN in json.dumps(value):
            raise InvalidInputError(f"{name} must be given again, by --{name.replace('_', '-')}: secrets are not kept")
        if value != _to_json(fields[name].default):
            values[name] = (
                None if value is None else _check_value(fields[name], _to_toml(value, fields[name]), name, None)
            )
    return values


def _to_toml(value: Any, field: _Field) -> Any:
    """A described value as TOML would give it; of a list of configs, each is a table."""
    config_class = _config_class_in(field)
    if config_class is None:
        return _without_none(value)
    return [_to_table(item, section_of(config_class)) for item in value]


def _to_table(described: Mapping[str, Any], section: Section) -> dict[str, Any]:
    """One config of a list as a table of TOML: without None, and without defaults of fields that are no settings.

    Another value of such a field stays, and is refused: this table takes the place of the recipe's own.
    """
    own = dataclasses.fields(section.config_class)
    defaults = {field.name: _to_json(_default_of(field)) for field in own if field.name in section.elsewhere}
    parts = {_last(part.prefix.removesuffix(".")): part for part in section.sections}
    table = {}
    for key, value in described.items():
        is_unset = value is None or (key in defaults and value == defaults[key])
        if not is_unset:
            table[key] = _to_table(value, parts[key]) if key in parts else _without_none(value)
    return table


def _without_none(value: Any) -> Any:
    """A list of tables without what is None in them, which TOML has no word for."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def load_toml(path: Path) -> dict[str, Any]:
    """Load a TOML file; raises `InvalidInputError` if it cannot be read or parsed."""
    try:
        return tomllib.loads(read_text(path, max_bytes=MAX_FACTS_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} must be a TOML file: {error}") from None


def build(section: Section, values: Values) -> Any:
    """Build a section's config from `values` and the defaults.

    Raises:
        InvalidInputError: with a line for each mistake, which begins with the field's dotted name.
    """
    mistakes = Mistakes()
    config = _build(section, values, mistakes)
    mistakes.raise_all()
    return config


def _build(
    section: Section, values: Values, mistakes: Mistakes, *, source: str = "", wrong: Collection[str] | None = None
) -> Any:
    """Build as `build` does, and add what is wrong to `mistakes`; None if there is something in this section.

    With `wrong`, prefixes of sections with a mistake that was said already, values may be missing: they are of a file.
    """
    own: dict[str, Any] = {}
    is_whole = wrong is None or section.prefix not in wrong
    for field in section.fields:
        if field.name in values:
            own[_last(field.name)] = values[field.name]
        elif section.base is None and field.default is MISSING:
            is_whole = False
            if wrong is None:
                option = f"--{field.name.replace('_', '-')}"
                mistakes.add(f"{field.name} must be given, by {option} or in the recipe's TOML: {field.doc}")
    for inner in section.sections:
        if _is_built(inner, values):
            own[_name_part(inner)] = config = _build(inner, values, mistakes, source=source, wrong=wrong)
            is_whole &= config is not None
    return _make_config(section, own, mistakes, source) if is_whole else None


def _is_built(section: Section, values: Values) -> bool:
    """Whether a part of a config is made anew: it has values, or no default."""
    has_default = section.base is not None or section.is_optional
    return not has_default or any(name.startswith(section.prefix) for name in values)


def _make_config(section: Section, own: Mapping[str, Any], mistakes: Mistakes, source: str) -> Any:
    """Make a section's config of its `own` values; None if they are refused.

    A config raises for the first field that is wrong. It is made again without that field, so that the next one is
    said too, unless the message names a field that was left out: then it may be wrong only for lack of it.
    """
    can_lack = {_last(field.name) for field in section.fields if field.default is not MISSING}
    rest, left_out = dict(own), set[str]()
    while True:
        try:
            config = section.config_class(**rest) if section.base is None else dataclasses.replace(section.base, **rest)
            return None if left_out else config
        except InvalidInputError as error:
            message = _name_from_top(str(error), section)
            name = message.removeprefix(section.prefix).partition(" ")[0]
            if left_out & set(re.findall(r"\w+", message)):
                return None
            mistakes.add(f"{source}{message}", error)
            if name not in can_lack & rest.keys():
                return None
            left_out.add(name)
            del rest[name]


def describe(config: Any) -> dict[str, Any]:
    """Get all values of a config by their dotted names, as JSON values, to be kept and compared: without secrets.

    Fields that are no settings have one too. An optional part that is left out is None.
    """
    return {name: redact(_to_json(value), name) for name, value in _list_values(config, prefix="")}


def _list_values(config: Any, *, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _list_values(value, prefix=f"{name}.")
        else:
            yield name, value


def _check_value(field: _Field, value: Any, name: str, folder: Path | None, top: Section | None = None) -> Any:
    """Convert a TOML value to its field's type; in a list of configs, each table is read like a section."""
    config_class = _config_class_in(field)
    if config_class is None:
        return check_toml(field.hint, value, name=name, folder=folder)
    if not isinstance(value, list) or not all(isinstance(table, Mapping) for table in value):
        names = _names(section_of(config_class).fields)
        raise InvalidInputError(f"{name} must be a list of tables of {names}, got {value!r}")
    configs, mistakes = [], Mistakes()
    for k, table in enumerate(value):
        section = section_of(config_class, prefix=f"{field.name}[{k}].")
        source = name.removesuffix(field.name)
        with mistakes.collect():
            configs.append(build(section, read_table(table, section, source=source, folder=folder, top=top)))
    mistakes.raise_all()
    return tuple(configs)


def _config_class_in(field: _Field) -> type[Any] | None:
    """The dataclass of a field annotated `tuple[Dataclass, ...]`."""
    entry = typing.get_args(field.hint)[:1]
    return typing.cast("type[Any]", entry[0]) if entry and dataclasses.is_dataclass(entry[0]) else None


def _find_reason(name: str, section: Section) -> str | None:
    """Why a name is no setting, as its config says in `elsewhere`; None if it says nothing."""
    for part in section.all_sections():
        if name.startswith(part.prefix):
            # All of a part that is no setting has its reason: `sampling.structured_output.regex`.
            own = name.removeprefix(part.prefix).partition(".")[0]
            if own in part.elsewhere:
                return part.elsewhere[own]
    return None


def _is_table(value: Any) -> bool:
    """Whether a value of TOML is a table or a list of them."""
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(each, Mapping) for each in value))


def _unknown_key(shown_name: str, key: str, section: Section, top: Section, value: Any) -> InvalidInputError:
    """The error for an unknown key of a table in a file whose whole section is `top`."""
    if key not in _list_keys(top) or key in section.elsewhere:
        if _is_table(value) and _find_reason(section.prefix + key, section) is None:
            return _unknown_section(shown_name, section.prefix + key, section, top)
        return _unknown_field(shown_name, section.prefix + key, section, top)
    # TOML gives each line to the last table above it, and a file's options are often written one by one.
    written = _write_header(key, value, top)
    as_table = f"; as a table, write {written}" if written else ""
    return InvalidInputError(
        f"{shown_name} must be a field of the recipe, and {key} is one at the top of the file: move it above the first "
        f"table, because TOML gives a line after [table] or [[table]] to that table{as_table}"
    )


def _write_header(key: str, value: Any, top: Section) -> str:
    """The header of a table that belongs to the top of the file: `[rollouts.sampling]`; empty for a line's value.

    Whether a table was written by its header, or as a line `loop.num_steps = 3`, TOML does not tell.
    """
    tables = _list_tables(top)
    if key not in tables or not _is_table(value):
        return ""
    if isinstance(value, list):
        return f"[[{key}]]"
    inner = [each for each in value if _is_table(value[each]) and f"{key}.{each}" in tables]
    return _write_header(f"{key}.{inner[0]}", value[inner[0]], top) if len(value) == len(inner) == 1 else f"[{key}]"


def _unknown_field(shown_name: str, name: str, section: Section, top: Section | None = None) -> InvalidInputError:
    """The error for an unknown field, with similar names: of the whole recipe those with the same last part."""
    if (reason := _find_reason(name, section)) is not None:
        return InvalidInputError(f"{shown_name} must be left out: {reason}")
    known = section.all_fields()
    inside = [each for each in known if each.startswith(name + ".")]
    if inside:
        return InvalidInputError(f"{shown_name} has its own fields: give one of {', '.join(inside)}")
    similar = _find_same(name, known) or _find_same(name, (top or section).all_fields())
    if not similar and (hint := _hint_at_section(name, section, top or section)):
        return InvalidInputError(f"{shown_name} must be a field of the recipe: {hint} (--help-all lists them all)")
    similar = similar or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if shown_name.startswith("--"):
        similar = [f"--{each.replace('_', '-')}" for each in similar]
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"the fields are {', '.join(known)}"
    return InvalidInputError(f"{shown_name} must be a field of the recipe: {hint} (--help-all lists them all)")


def _unknown_section(shown_name: str, name: str, section: Section, top: Section) -> InvalidInputError:
    """The error for an unknown table, with tables of similar names, or the field that it is meant to be."""
    known = _list_tables(section)
    if similar := _find_similar(name, known, _list_tables(top)):
        hint = f"did you mean {' or '.join(similar)}?"
    elif fields := _find_same(name, {**section.all_fields(), **top.all_fields()}):
        hint = f"did you mean the field {' or '.join(fields)}? It has a value and is no table"
    elif not known:
        hint = f"{section.prefix.removesuffix('.') or 'it'} has no sections, but the fields {_names(section.fields)}"
    else:
        hint = f"the sections are {', '.join(known)}"
    return InvalidInputError(f"{shown_name} must be a section of the recipe: {hint} (--help-all lists them all)")


def _hint_at_section(name: str, section: Section, top: Section) -> str:
    """Which section a value was given to in the place of its fields; empty where the most similar name is a field's."""
    parts = {each.prefix.removesuffix("."): each for each in (*section.all_sections(), *top.all_sections())}
    found = _find_similar(name, [each for each in parts if each.startswith(section.prefix)], [*parts])
    names = {_last(each) for each in (*top.all_fields(), *parts)}
    if not found or _last(found[0]) not in difflib.get_close_matches(_last(name), names, n=1):
        return ""
    owner = name.rpartition(".")[0] or "the recipe"
    sections = f"{' and '.join(found)} {'is a section' if len(found) == 1 else 'are sections'}"
    return f"{owner} has no field {_last(name)}, and {sections}, with the fields {_names(parts[found[0]].fields)}"


def _list_tables(section: Section) -> list[str]:
    """The names of all tables inside a section: of sections, and of fields that take some."""
    inner = [each.prefix.removesuffix(".") for each in section.all_sections() if each is not section]
    return inner + [each.name for each in section.all_fields().values() if _takes_tables(each)]


def _find_same(name: str, known: Iterable[str]) -> list[str]:
    """The fields with the same last part, or whose last part has it for its initials."""
    return [each for each in known if _last(name) in (_last(each), _initials(each))]


def _find_similar(name: str, *places: Sequence[str]) -> list[str]:
    """The tables with the same last part, else with the most similar one; of the first place that has some.

    Whole names are not compared: what two have in common is then mostly where they stand.
    """
    for cutoff in (1.0, 0.75):  # at 0.6, "rewards" is like "kwargs"
        for known in places:
            if parts := difflib.get_close_matches(_last(name), {_last(each) for each in known}, n=1, cutoff=cutoff):
                return [each for each in known if _last(each) in parts]
    return []


def _takes_tables(field: _Field) -> bool:
    """Whether a field's value is a table of any keys, or a list of tables."""
    hints = (field.hint, *typing.get_args(field.hint))
    return _config_class_in(field) is not None or any(typing.get_origin(each) in (Mapping, dict) for each in hints)


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


def _names(fields: Iterable[_Field]) -> str:
    return ", ".join(_last(field.name) for field in fields)
