"""All call formats, in the order in which a template is compared with them.

To add one, write a file in `formats/` and add its `CallFormat` to `FORMATS`.
"""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats.json_calls.apertus import APERTUS
from unbroken.rendering.parsing.formats.json_calls.cohere import COHERE, COHERE2
from unbroken.rendering.parsing.formats.json_calls.deepseek import DEEPSEEK
from unbroken.rendering.parsing.formats.json_calls.functionary_v31 import FUNCTIONARY_V31
from unbroken.rendering.parsing.formats.json_calls.gigachat import GIGACHAT, GIGACHAT3
from unbroken.rendering.parsing.formats.json_calls.hermes import HERMES
from unbroken.rendering.parsing.formats.json_calls.kimi_k2 import KIMI_K2
from unbroken.rendering.parsing.formats.json_calls.llama3 import LLAMA3
from unbroken.rendering.parsing.formats.json_calls.llama4 import LLAMA4
from unbroken.rendering.parsing.formats.json_calls.mistral import MISTRAL
from unbroken.rendering.parsing.formats.json_calls.nemotron import NEMOTRON
from unbroken.rendering.parsing.formats.json_calls.phi import PHI
from unbroken.rendering.parsing.formats.messages.functionary import FUNCTIONARY
from unbroken.rendering.parsing.formats.messages.harmony import HARMONY
from unbroken.rendering.parsing.formats.messages.inkling import INKLING
from unbroken.rendering.parsing.formats.messages.muse import MUSE
from unbroken.rendering.parsing.formats.messages.solar import SOLAR
from unbroken.rendering.parsing.formats.plain import PLAIN
from unbroken.rendering.parsing.formats.python_calls.gemma import FUNCTION_GEMMA, GEMMA4
from unbroken.rendering.parsing.formats.python_calls.lfm2 import LFM2
from unbroken.rendering.parsing.formats.python_calls.pythonic import PYTHONIC
from unbroken.rendering.parsing.formats.tagged_calls.deepseek_dsml import DEEPSEEK_V4, DEEPSEEK_V32
from unbroken.rendering.parsing.formats.tagged_calls.glm import GLM
from unbroken.rendering.parsing.formats.tagged_calls.hunyuan import HUNYUAN3
from unbroken.rendering.parsing.formats.tagged_calls.kimi_k3 import KIMI_K3
from unbroken.rendering.parsing.formats.tagged_calls.minicpm import MINICPM5
from unbroken.rendering.parsing.formats.tagged_calls.minimax import MINIMAX_M1, MINIMAX_M2
from unbroken.rendering.parsing.formats.tagged_calls.minimax_m3 import MINIMAX_M3
from unbroken.rendering.parsing.formats.tagged_calls.qwen3_coder import QWEN3_CODER, SEED

FORMATS: tuple[CallFormat, ...] = (
    SEED,
    QWEN3_CODER,
    HUNYUAN3,
    GLM,
    MINIMAX_M1,
    MINIMAX_M2,
    MINIMAX_M3,
    MINICPM5,
    HARMONY,
    MUSE,
    SOLAR,
    INKLING,
    FUNCTIONARY,
    FUNCTIONARY_V31,
    DEEPSEEK,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI_K2,
    KIMI_K3,
    GEMMA4,
    FUNCTION_GEMMA,
    LFM2,
    PYTHONIC,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    COHERE2,
    COHERE,
    APERTUS,
    GIGACHAT,
    GIGACHAT3,
    NEMOTRON,
    PHI,
    HERMES,
    PLAIN,
)
"""A format that also matches another format's templates comes after that one."""


def get_format(name: str) -> CallFormat:
    """Get a format by name. Raises `InvalidInputError` for an unknown one."""
    for known in FORMATS:
        if known.name == name:
            return known
    names = ", ".join(repr(known.name) for known in FORMATS)
    raise InvalidInputError(
        f"parser must be one of {names}, 'response_template' for the tokenizer's own, or None to detect it from "
        f"the template; got {name!r}"
    )
