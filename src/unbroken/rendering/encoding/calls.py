"""Calls of a `tokenizers.Tokenizer` that neither hold up other threads nor end in a panic."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from unbroken.errors import InvalidInputError

_MAX_HELD_CHARS = 2**13
"""Longest text that is encoded with the interpreter's lock, in a few milliseconds: `encode` does not release it."""


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Any:
    """Encode a text, with the lock of the interpreter released if it is long; returns a `tokenizers.Encoding`.

    Raises:
        InvalidInputError: the tokenizer panics, as for millions of spaces in a row, which its expression cannot match.
    """
    try:
        if len(text) <= _MAX_HELD_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InvalidInputError(
            f"a text of {len(text)} characters must be one that the tokenizer can encode, and it fails: {error}"
        ) from None


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked: pyo3's exception is no `Exception`, and cannot be imported."""
    return type(error).__name__ == "PanicException"
