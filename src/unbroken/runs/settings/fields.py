"""The fields of a config class by dotted name, with type, default and docstring.

@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    loop: LoopConfig = LoopConfig(num_steps=50)

section_of(Config).all_fields()["loop.num_steps"]     Field(name="loop.num_steps", hint=int, default=50, doc=...)
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any

from unbroken.docstrings import read_class_docs, read_field_docs


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
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
    fields: tuple[Field, ...]
    sections: tuple[Section, ...]

    def all_sections(self) -> Iterator[Section]:
        """Iterate over this section and all sections inside it, in order."""
        yield self
        for section in self.sections:
            yield from section.all_sections()

    def all_fields(self) -> dict[str, Field]:
        """The fields of all sections by their dotted names."""
        return {field.name: field for section in self.all_sections() for field in section.fields}


def section_of(
    config_class: type[Any], *, base: Any | None = None, prefix: str = "", is_optional: bool = False
) -> Section:
    """Describe a config class, or the part of a config whose names begin with `prefix`."""
    hints = typing.get_type_hints(config_class)
    docs = read_field_docs(config_class)
    fields, sections = [], []
    for field in dataclasses.fields(config_class):
        name, hint = prefix + field.name, hints[field.name]
        default = _default_of(field) if base is None else getattr(base, field.name)
        inner = _dataclass_in(hint)
        if inner is None:
            doc = docs.get(field.name, "") + _enum_docs(hint)
            fields.append(Field(name=name, hint=hint, default=default, doc=doc))
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
    )


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
