"""Calls of a `tokenizers.Tokenizer` that neither hold up other threads nor end in a panic."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from unbroken.errors import InvalidInputError
from unbroken.rendering.lock import RendererLock

_CHUNK = 2**13
"""How many ids or offsets are read in one step: a list of a million takes 0.3 s with the interpreter's lock."""
_MAX_HELD_CHARS = 2**11
"""Longest text that is encoded with the interpreter's lock, in a few milliseconds: `encode` does not release it."""


def encode_text(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False, lock: RendererLock | None = None
) -> Any:
    """Encode a text; returns a `tokenizers.Encoding`. For a long one the interpreter's lock and `lock` are released.

    Raises:
        InvalidInputError: the tokenizer panics, as for millions of spaces in a row, which its expression cannot match.
    """
    try:
        if len(text) <= _MAX_HELD_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        with nullcontext() if lock is None else lock.released():
            return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InvalidInputError(
            f"a text of {len(text)} characters must be one that the tokenizer can encode, and it fails: {error}"
        ) from None


def read_ids(encoding: Any) -> NDArray[np.int32]:
    """[T] the ids of an encoding."""
    if len(encoding) <= _CHUNK:
        return np.array(encoding.ids, dtype=np.int32)
    return _concatenate([np.array(chunk, dtype=np.int32) for chunk in _split(encoding.ids)], (0,), np.int32)


def read_offsets(encoding: Any) -> NDArray[np.int64]:
    """[T, 2] the characters of each id, half-open."""
    if len(encoding) <= _CHUNK:
        numbers = chain.from_iterable(encoding.offsets)
        return np.fromiter(numbers, dtype=np.int64, count=2 * len(encoding)).reshape(-1, 2)
    get = encoding.token_to_chars
    chunks = [
        np.array([get(k) for k in range(start, min(start + _CHUNK, len(encoding)))], dtype=np.int64)
        for start in range(0, len(encoding), _CHUNK)
    ]
    return _concatenate(chunks, (0, 2), np.int64)


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked: pyo3's exception is no `Exception`, and cannot be imported."""
    return type(error).__name__ == "PanicException"


def _split(values: list[int]) -> list[list[int]]:
    return [values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK)]


def _concatenate(chunks: list[NDArray[Any]], empty: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.concatenate(chunks) if chunks else np.empty(empty, dtype=dtype)
