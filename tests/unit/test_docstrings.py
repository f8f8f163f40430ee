"""Docstrings of fields, read from the source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from unbroken.docstrings import read_class_docs, read_field_docs


class Color(StrEnum):
    RED = "red"
    """As a
    tomato."""
    BLUE = "blue"


@dataclass(frozen=True)
class Base:
    size: int = 1
    """In pixels."""
    color: Color = Color.RED
    """Of the frame."""


def test_inherited_fields_have_docs_that_a_subclass_may_replace():
    @dataclass(frozen=True)
    class Child(Base):
        @dataclass(frozen=True)
        class Inner:
            size: int = 3
            """Of the inner one."""

        size: int = 2
        """In points."""
        name: str = ""

    assert read_field_docs(Child) == {"size": "In points.", "color": "Of the frame."}
    assert read_field_docs(Child.Inner) == {"size": "Of the inner one."}


def test_members_of_an_enum_have_docs():
    assert read_class_docs(Color) == {"RED": "As a tomato."}
