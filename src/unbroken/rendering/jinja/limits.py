"""What a chat template may spend on one rendering: steps, seconds, characters.

A template is a program from outside. It cannot be stopped inside one operation of Python, so no operation may be large:
each step of a loop and each call is counted, and whatever makes a text or a list is asked for its size before.

    {% for i in range(99999) %}{% for j in range(99999) %}..    10,000,000 steps, then an error
    {{ 'x' * 10 ** 9 }}                                         an error, before there is such a text
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from unbroken.errors import InvalidInputError

_Value = TypeVar("_Value")
_STEPS_BETWEEN_LOOKS = 32
_BYTES_PER_ENTRY = 8
_CONTAINERS = (list, tuple, dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits of one rendering. The defaults are far above what a conversation of a million tokens needs.

    Raises:
        InvalidInputError: a limit is not positive.
    """

    timeout_s: float = 10.0
    num_steps: int = 10_000_000
    """Iterations of loops, and calls."""
    num_characters: int = 16_000_000
    """Of one text, or of one list or object with all that is in it; what it holds twice is counted twice."""
    num_characters_made: int = 500_000_000
    """Of all texts that are made on the way, an entry of a list counted as eight."""
    num_characters_of_source: int = 100_000
    """Of the template itself."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InvalidInputError(
                    f"TemplateLimits.{field.name} must be positive, got {getattr(self, field.name)!r}"
                )


class LimitError(Exception):
    """A template went over a limit. Never leaves this package; nothing in Jinja catches it."""


class Budget:
    """What is left of the limits in one rendering."""

    __slots__ = ("_deadline", "_limits", "_look_at", "_made", "_sizes", "_steps")

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.timeout_s
        self._steps = self._made = 0
        self._look_at = _STEPS_BETWEEN_LOOKS
        self._sizes: dict[int, tuple[object, int]] = {}

    def step(self) -> None:
        """Count one step.

        Raises:
            LimitError: there were too many, or the time is over.
        """
        self._steps += 1
        if self._steps >= self._look_at:
            self._look()

    def steps_of(self, values: Iterable[_Value]) -> Iterator[_Value]:
        """The values, a step for each."""
        for value in values:
            self.step()
            yield value

    def spend(self, num_characters: int) -> None:
        """Count characters that are made."""
        self._made += num_characters
        if self._made > self._limits.num_characters_made:
            raise LimitError(
                f"it makes more than {self._limits.num_characters_made} characters on the way "
                "(TemplateLimits.num_characters_made)"
            )

    def check_and_spend(self, num_characters: int) -> None:
        """Both, of a text that is made now."""
        self._made += num_characters
        if num_characters > self._limits.num_characters or self._made > self._limits.num_characters_made:
            self.check_size(num_characters)
            self.spend(0)

    def check_size(self, size: int) -> None:
        """Check the size of a value before it is made."""
        if size > self._limits.num_characters:
            raise LimitError(
                f"it makes a value of {size if size < 10**18 else 'more than 10**18'} characters or entries, more than "
                f"{self._limits.num_characters} (TemplateLimits.num_characters)"
            )

    def admit(self, value: _Value) -> _Value:
        """Check and count a value that was made, and hand it on."""
        if isinstance(value, (str, bytes)):
            self.check_and_spend(len(value))
        elif isinstance(value, _CONTAINERS):
            self.check_size(self.size_of(value))
            self.spend(_BYTES_PER_ENTRY * len(value))
        return value

    def size_of(self, value: Any) -> int:
        """Characters and entries in a value, all the way down; it stops counting above the limit.

        A list's size is found once: templates cannot change one.
        """
        if isinstance(value, (str, bytes)):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        self.step()
        size = 1 + len(value)
        for item in value:
            size += self.size_of(item)
            if isinstance(value, dict):
                size += self.size_of(value[item])
            if size > self._limits.num_characters:
                break
        # The value is kept, so that no other one gets its id.
        self._sizes[id(value)] = (value, size)
        return size

    def _look(self) -> None:
        self._look_at = self._steps + _STEPS_BETWEEN_LOOKS
        if self._steps > self._limits.num_steps:
            raise LimitError(f"it takes more than {self._limits.num_steps} steps (TemplateLimits.num_steps)")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {self._limits.timeout_s:g} s (TemplateLimits.timeout_s)")
