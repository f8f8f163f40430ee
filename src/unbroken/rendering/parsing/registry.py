"""All formats by name, in the order in which a template is compared with them."""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.rendering.parsing.format import Format
from unbroken.rendering.parsing.hermes import HERMES
from unbroken.rendering.parsing.plain import PLAIN

FORMATS: tuple[Format, ...] = (
    HERMES,
    PLAIN,
)
"""A format whose signs another one's templates show too stands behind that one."""


def format_named(name: str) -> Format:
    """The format of this name.

    Raises:
        InvalidInputError: there is none.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    names = ", ".join(repr(known.name) for known in FORMATS)
    raise InvalidInputError(f"parser must be one of {names}, or None to find it from the template; got {name!r}")
