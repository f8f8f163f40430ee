"""Numbers that add up over micro batches, updates and processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers that add up field by field; subclasses are dataclasses of them."""

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})
