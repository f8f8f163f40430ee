"""Renderers of the PyPI package `renderers` over local tokenizers, because tests download no models."""

import re
from typing import Any

from renderers import config_from_name, create_renderer
from tokenizers import AddedToken

from support.corpus import corpus_template
from support.tokenizers import make_tokenizer

NEEDS_A_DOWNLOAD = ("gpt-oss",)
"""It encodes with a vocabulary of its own, which `openai_harmony` loads from the network."""

_MOST_CONTROL_TOKENS = 100


def package_tokenizer(name: str, *, template: str | None = None) -> Any:
    """A tokenizer with the control tokens that the package's renderer of this name looks up.

    They are found by trial: its constructor fails at the first missing one, and names it. `template` is
    a template of the corpus, whose control tokens and special tokens the tokenizer then has as well.
    """
    tokenizer = make_tokenizer(None) if template is None else corpus_template(template).tokenizer()
    for _ in range(_MOST_CONTROL_TOKENS):
        try:
            create_renderer(tokenizer, config_from_name(name))
        except (AssertionError, ValueError) as error:
            missing = re.findall(r"'([^']+)'", str(error))[0]
            tokenizer.add_tokens([AddedToken(missing, special=True, normalized=False)], special_tokens=True)
        else:
            return tokenizer
    raise RuntimeError(f"{name} asks for more than {_MOST_CONTROL_TOKENS} control tokens")
