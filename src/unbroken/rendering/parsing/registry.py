"""All formats by name, in the order in which a template is compared with them."""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.rendering.parsing.cohere import COHERE, COHERE2
from unbroken.rendering.parsing.deepseek import DEEPSEEK
from unbroken.rendering.parsing.format import Format
from unbroken.rendering.parsing.gemma import FUNCTION_GEMMA, GEMMA4
from unbroken.rendering.parsing.glm import GLM
from unbroken.rendering.parsing.harmony import HARMONY
from unbroken.rendering.parsing.hermes import HERMES
from unbroken.rendering.parsing.kimi_k2 import KIMI_K2
from unbroken.rendering.parsing.lfm2 import LFM2
from unbroken.rendering.parsing.llama3 import LLAMA3
from unbroken.rendering.parsing.minimax import MINIMAX_M1, MINIMAX_M2
from unbroken.rendering.parsing.mistral import MISTRAL
from unbroken.rendering.parsing.muse import MUSE
from unbroken.rendering.parsing.nemotron import NEMOTRON
from unbroken.rendering.parsing.phi import PHI
from unbroken.rendering.parsing.plain import PLAIN
from unbroken.rendering.parsing.pythonic import PYTHONIC
from unbroken.rendering.parsing.qwen3_coder import QWEN3_CODER

FORMATS: tuple[Format, ...] = (
    QWEN3_CODER,
    GLM,
    MINIMAX_M1,
    MINIMAX_M2,
    HARMONY,
    MUSE,
    DEEPSEEK,
    KIMI_K2,
    GEMMA4,
    FUNCTION_GEMMA,
    LFM2,
    PYTHONIC,
    LLAMA3,
    MISTRAL,
    COHERE2,
    COHERE,
    NEMOTRON,
    PHI,
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
    raise InvalidInputError(
        f"parser must be one of {names}, 'response_template' for the tokenizer's own, or None to find it from the "
        f"template; got {name!r}"
    )
