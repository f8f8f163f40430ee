"""A tokenizer: what rendering needs of it, its added tokens, its copies, and calls that neither hold up nor panic."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from unbroken.errors import InvalidInputError
from unbroken.threads import RendererLock

_COPIED_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_CHUNK = 2**13
"""How many ids or offsets are read in one step: a list of a million takes 0.3 s with the interpreter's lock."""
_MAX_HELD_CHARS = 2**11
"""Longest text that is encoded with the interpreter's lock, in a few milliseconds: `encode` does not release it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What rendering needs of a fast tokenizer of transformers. They can be used without transformers and its torch."""

    backend: Tokenizer
    chat_template: str | Mapping[str, str] | None
    """A template, or several by name."""
    special_tokens: Mapping[str, str]
    """Such as `bos_token`, with its text."""
    eos_token_id: int | None
    response_template: Any
    """How transformers parses completions of this model; None for nearly all."""
    model: str | Path | None = None
    """The folder or hub name that it was loaded from; None for a tokenizer of the caller."""

    @classmethod
    def of(cls, tokenizer: Any, *, model: str | Path | None = None) -> TokenizerFacts:
        """Get the facts of a fast tokenizer of transformers; facts are returned as they are.

        Raises:
            InvalidInputError: it is not a fast one.
        """
        if isinstance(tokenizer, TokenizerFacts):
            return tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidInputError(
                f"tokenizer must be a fast tokenizer of transformers, got {type(tokenizer).__name__}: load the model "
                "with load_renderer, which converts a tekken.json too, or wrap a tokenizers.Tokenizer in "
                "PreTrainedTokenizerFast(tokenizer_object=...)"
            )
        return cls(
            backend=backend,
            chat_template=tokenizer.chat_template,
            special_tokens=dict(tokenizer.special_tokens_map),
            eos_token_id=tokenizer.eos_token_id,
            response_template=getattr(tokenizer, "response_template", None),
            model=model,
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, model: str | Path | None = None) -> TokenizerFacts:
        """Read what `to_bytes` wrote."""
        small, _, backend = data.partition(b"\n")
        return cls(backend=Tokenizer.from_buffer(backend), model=model, **json.loads(small))

    def to_bytes(self) -> bytes:
        """Write the facts, without the model's name: two lines of JSON, of which the second is the backend."""
        names = ("chat_template", "special_tokens", "eos_token_id", "response_template")
        small = json.dumps({name: getattr(self, name) for name in names})
        return f"{small}\n{self.backend.to_str()}".encode()

    @property
    def vocab_size(self) -> int:
        """Ids with a text are in [0, vocab_size)."""
        size: int = self.backend.get_vocab_size(with_added_tokens=True)
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMatch:
    """One added token in a rendered text."""

    token: str
    start: int
    stop: int


class AddedTokens:
    """A set of added tokens, by text and by id. Text from outside must never become one of the control tokens (I5).

    Added tokens that are only white space, or the `▁` that some tokenizers write for it, are ordinary text; all others
    are control tokens.
    """

    def __init__(self, ids: Mapping[str, int], *, spellings: Iterable[str] = ()) -> None:
        """`spellings` are other texts that the tokenizer encodes as these tokens."""
        self._ids = dict(ids)
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        spelled = {*self._ids, *spellings}
        self._all = "\n".join(sorted(spelled))
        self._heads = frozenset(text[:k] for text in spelled for k in range(1, len(text)))
        self._tails = frozenset(text[k:] for text in spelled for k in range(1, len(text)))
        self._longest = max(map(len, spelled), default=0)
        self._edges = frozenset(edge for text in spelled for edge in (text[:1], text[-1:]))

    @classmethod
    def find_control(cls, tokenizer: Any) -> AddedTokens:
        """Find the control tokens of a `tokenizers.Tokenizer`."""
        ids = {text: token_id for text, token_id in _find_added(tokenizer) if not is_blank(text)}
        normalizer = tokenizer.normalizer
        return cls(ids, spellings=map(normalizer.normalize_str, ids) if normalizer is not None else ())

    @classmethod
    def find_blank(cls, tokenizer: Any) -> AddedTokens:
        """Find the added tokens of a `tokenizers.Tokenizer` that are only white space."""
        return cls({text: token_id for text, token_id in _find_added(tokenizer) if is_blank(text)})

    def get_id(self, text: str) -> int | None:
        """The id of a token, None if `text` is not one."""
        return self._ids.get(text)

    def get_text(self, token_id: int) -> str | None:
        """The text of a token, None if the id is not one of these."""
        return self._texts.get(token_id)

    @property
    def ids(self) -> frozenset[int]:
        """All ids."""
        return frozenset(self._texts)

    @property
    def texts(self) -> frozenset[str]:
        """All tokens as text."""
        return frozenset(self._ids)

    def occurs_in(self, text: str) -> bool:
        """Whether `text` contains the text of a token."""
        return self._pattern.search(text) is not None

    def find(self, text: str, start: int = 0, stop: int | None = None) -> Iterator[TokenMatch]:
        """The tokens in `text[start:stop]`, left to right."""
        for match in self._pattern.finditer(text, start, len(text) if stop is None else stop):
            yield TokenMatch(token=match.group(), start=match.start(), stop=match.end())

    def may_overlap(self, text: str) -> bool:
        """Whether a token may be inside `text`, across one of its ends, or around it.

        In doubt true, except for parts of a word such as `object` in `<|object_ref|>`.
        """
        core = text.strip()
        if not self._edges.isdisjoint(text):
            if self.occurs_in(text):
                return True
            lengths = range(1, min(self._longest, len(core) + 1))
            if any(core[-k:] in self._heads or core[:k] in self._tails for k in lengths):
                return True
        if not core or core not in self._all:
            return False
        before = r"(?<!\w)" if re.match(r"\w", core) else ""
        after = r"(?!\w)" if re.search(r"\w\Z", core) else ""
        return re.search(before + re.escape(core) + after, self._all) is not None


def is_blank(text: str) -> bool:
    """Whether an added token is only white space, as it is or as sentencepiece writes it."""
    return not text.replace("▁", " ").strip()


def _find_added(tokenizer: Any) -> Iterator[tuple[str, int]]:
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        yield token.content, token_id


def copy_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer, without its truncation and padding, so that no caller can reconfigure the copy.

    A copy through JSON takes seconds for 130k entries. This one shares model, normaliser and pre-tokenizer, but not
    what calls set: truncation, padding, added tokens.
    """
    copy = Tokenizer(tokenizer.model)
    for part in _COPIED_PARTS:
        if getattr(tokenizer, part) is not None:
            setattr(copy, part, getattr(tokenizer, part))
    added = tokenizer.get_added_tokens_decoder()
    in_order = (added[token_id] for token_id in sorted(added))
    for is_special, tokens in groupby(in_order, key=lambda token: bool(token.special)):
        (copy.add_special_tokens if is_special else copy.add_tokens)(list(tokens))
    assert copy.get_added_tokens_decoder() == added, "the library gives added tokens ids in their order"
    return copy


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
        if not _is_panic(error):
            raise
        raise InvalidInputError(
            f"a text of {len(text)} characters must be one that the tokenizer can encode, and it fails: {error}"
        ) from None


def read_ids(encoding: Any) -> NDArray[np.int32]:
    """[T] the ids of an encoding."""
    if len(encoding) <= _CHUNK:
        return np.array(encoding.ids, dtype=np.int32)
    chunks = (encoding.ids[start : start + _CHUNK] for start in range(0, len(encoding.ids), _CHUNK))
    return _concatenate([np.array(chunk, dtype=np.int32) for chunk in chunks], (0,), np.int32)


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


def _is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked: pyo3's exception is no `Exception`, and cannot be imported."""
    return type(error).__name__ == "PanicException"


def _concatenate(chunks: list[NDArray[Any]], empty: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.concatenate(chunks) if chunks else np.empty(empty, dtype=dtype)
