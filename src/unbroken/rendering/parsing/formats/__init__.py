"""The call formats, one file for each family of models.

To add one, write a file here and add its `CallFormat` to `FORMATS`.
"""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats.apertus import APERTUS
from unbroken.rendering.parsing.formats.cohere import COHERE, COHERE2
from unbroken.rendering.parsing.formats.deepseek import DEEPSEEK
from unbroken.rendering.parsing.formats.deepseek_dsml import DEEPSEEK_V4, DEEPSEEK_V32
from unbroken.rendering.parsing.formats.functionary import FUNCTIONARY
from unbroken.rendering.parsing.formats.functionary_v31 import FUNCTIONARY_V31
from unbroken.rendering.parsing.formats.gemma import FUNCTION_GEMMA, GEMMA4
from unbroken.rendering.parsing.formats.gigachat import GIGACHAT, GIGACHAT3
from unbroken.rendering.parsing.formats.glm import GLM
from unbroken.rendering.parsing.formats.harmony import HARMONY
from unbroken.rendering.parsing.formats.hermes import HERMES
from unbroken.rendering.parsing.formats.hunyuan import HUNYUAN3
from unbroken.rendering.parsing.formats.inkling import INKLING
from unbroken.rendering.parsing.formats.json_lists import GRANITE, INTERNLM, NEMOTRON, PHI, XLAM
from unbroken.rendering.parsing.formats.kimi_k2 import KIMI_K2
from unbroken.rendering.parsing.formats.kimi_k3 import KIMI_K3
from unbroken.rendering.parsing.formats.lfm2 import LFM2
from unbroken.rendering.parsing.formats.llama3 import LLAMA3
from unbroken.rendering.parsing.formats.llama4 import LLAMA4
from unbroken.rendering.parsing.formats.minicpm import MINICPM5
from unbroken.rendering.parsing.formats.minimax import MINIMAX_M1, MINIMAX_M2
from unbroken.rendering.parsing.formats.minimax_m3 import MINIMAX_M3
from unbroken.rendering.parsing.formats.mistral import MISTRAL
from unbroken.rendering.parsing.formats.muse import MUSE
from unbroken.rendering.parsing.formats.plain import PLAIN
from unbroken.rendering.parsing.formats.pythonic import OLMO3, PYTHONIC, TOOL_CODE
from unbroken.rendering.parsing.formats.qwen3_coder import QWEN3_CODER, SEED
from unbroken.rendering.parsing.formats.solar import SOLAR

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
    TOOL_CODE,
    OLMO3,
    XLAM,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    COHERE2,
    COHERE,
    APERTUS,
    GIGACHAT,
    GIGACHAT3,
    NEMOTRON,
    GRANITE,
    INTERNLM,
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
