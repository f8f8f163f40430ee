"""What a config consists of: its fields by dotted name, with type, default and docstring.

@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    loop: LoopConfig = LoopConfig(num_steps=50)

section_of(Config).field("loop.num_steps")     Field(name="loop.num_steps", kind=int, default=50, doc=...)
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A value that can be set."""

    name: str
    """Dotted, from the top of the config."""
    kind: Any
    """Its type, as annotated."""
    default: Any
    """`dataclasses.MISSING` where a value must be given."""
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One of the small configs that make up the whole."""

    prefix: str
    """What the names of its fields begin with: `trainer.optimizer.`, or nothing at the top."""
    kind: type[Any]
    """Its dataclass."""
    base: Any | None
    """The instance that changes are made to; None where it is made from what is given."""
    is_optional: bool
    """Whether it is None unless one of its fields is given."""
    fields: tuple[Field, ...]
    sections: tuple[Section, ...]

    def all_sections(self) -> Iterator[Section]:
        """The section itself and all within it, in order."""
        yield self
        for section in self.sections:
            yield from section.all_sections()

    def all_fields(self) -> dict[str, Field]:
        """The fields of all sections by their dotted names."""
        return {field.name: field for section in self.all_sections() for field in section.fields}


def section_of(kind: type[Any], *, base: Any | None = None, prefix: str = "", is_optional: bool = False) -> Section:
    """Describe a config class, or the part of a config that `prefix` names."""
    hints = typing.get_type_hints(kind)
    docs = _field_docs(kind)
    fields, sections = [], []
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        default = _default_of(field) if base is None else getattr(base, field.name)
        inner = _dataclass_in(hint)
        if inner is None:
            fields.append(Field(name=name, kind=hint, default=default, doc=docs.get(field.name, "") + _members(hint)))
        else:
            inner_base = default if dataclasses.is_dataclass(default) else None
            sections.append(section_of(inner, base=inner_base, prefix=f"{name}.", is_optional=default is None))
    return Section(
        prefix=prefix,
        kind=kind,
        base=base,
        is_optional=is_optional,
        fields=tuple(fields),
        sections=tuple(sections),
    )


def first_line(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass that a field holds, or may hold instead of None."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    found = [member for member in members if dataclasses.is_dataclass(member)]
    only_one = len(found) == 1 and all(member in (found[0], types.NoneType) for member in members)
    return typing.cast("type[Any]", found[0]) if only_one else None


def _members(hint: Any) -> str:
    """What the members of an enum say of themselves."""
    if not (isinstance(hint, type) and issubclass(hint, Enum)):
        return ""
    docs = _docs_in(hint)
    return " ".join(
        ["", *(f"{member.value}: {docs[name]}" for name, member in hint.__members__.items() if name in docs)]
    )


def _field_docs(kind: type[Any]) -> dict[str, str]:
    """The strings behind the fields of a class and of those it inherits from."""
    docs: dict[str, str] = {}
    for owner in reversed([each for each in kind.__mro__ if dataclasses.is_dataclass(each)]):
        docs |= _docs_in(owner)
    return docs


def _docs_in(kind: type[Any]) -> dict[str, str]:
    """The strings behind the names that a class's body binds."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, behind in zip(body.body, body.body[1:], strict=False):
        match statement, behind:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
