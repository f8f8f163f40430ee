"""All formats by name, in the order in which a template is compared with them."""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.rendering.parsing.format import Format
from unbroken.rendering.parsing.glm import GLM
from unbroken.rendering.parsing.hermes import HERMES
from unbroken.rendering.parsing.minimax import MINIMAX_M1, MINIMAX_M2
from unbroken.rendering.parsing.plain import PLAIN
from unbroken.rendering.parsing.qwen3_coder import QWEN3_CODER

FORMATS: tuple[Format, ...] = (
    QWEN3_CODER,
    GLM,
    MINIMAX_M1,
    MINIMAX_M2,
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
