"""Plain encoding and decoding: raw prompts, and text for people to read, whole, as it comes, or id by id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.tokenizer import TokenizerFacts, copy_tokenizer, encode_text
from unbroken.types import TokenIds, token_ids
from unbroken.untrusted import MAX_TOKENIZER_BYTES, read_text

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TextCodec:
    """Encodes and decodes with a copy of a tokenizer, which no caller can reconfigure."""

    def __init__(self, tokenizer: Any) -> None:
        """Copy a fast tokenizer of transformers, or `TokenizerFacts`; raises `InvalidInputError` for any other."""
        self._tokenizer = copy_tokenizer(TokenizerFacts.of(tokenizer).backend)

    @property
    def vocab_size(self) -> int:
        """Ids with a text are in [0, vocab_size)."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of `n` ids has at most `n` times as many.

        An exception is text that the tokenizer drops or shortens, such as white space, or accents that it composes.
        """
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Encode text; control tokens in `text` become control ids. `InvalidInputError` if the tokenizer fails."""
        return token_ids(encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: TokenIds | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode ids; bytes that are not UTF-8 become replacement characters."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
        return text

    def open_stream(self, *, skip_special_tokens: bool = False) -> TextStream:
        """Open a stream that decodes ids as they come."""
        return TextStream(self._tokenizer, skip_special_tokens=skip_special_tokens)


class TextStream:
    """Decodes ids that come one after the other; a character appears when it is complete."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._text = ""
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def feed(self, ids: TokenIds | Sequence[int]) -> str:
        """Take more ids and return the text that is complete now."""
        pieces = []
        for token_id in ids:
            self._ids.append(int(token_id))
            pieces.append(self._stream.step(self._tokenizer, int(token_id)) or "")
        text = "".join(pieces)
        self._text += text
        return text

    def finish(self) -> str:
        """Return the held-back bytes that are not UTF-8, as replacement characters."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenText:
    """What one id stands for."""

    text: str
    """Bytes that are no UTF-8 by themselves are replacement characters."""
    data: bytes
    """In UTF-8; a part of a character where an id has no more."""


class TokenTexts:
    """The texts of a tokenizer's ids.

    Worked example with byte-level BPE: the id of `Ġthe` has the text " the"; that of `Ã`, the first byte of "é", has
    the data C3 and the text U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        state = json.loads(tokenizer.to_str())
        self._added = {int(each["id"]): str(each["content"]) for each in state.get("added_tokens") or ()}
        kinds = set(_find_types(state.get("decoder")))
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._has_spaces = "Metaspace" in kinds or _SPACE in json.dumps(state.get("decoder"), ensure_ascii=False)
        self._has_bytes = "ByteFallback" in kinds

    @classmethod
    def load(cls, file: Path) -> TokenTexts:
        """Load a `tokenizer.json`.

        Raises:
            InvalidInputError: it is not one.
        """
        try:
            return cls(Tokenizer.from_str(read_text(file, max_bytes=MAX_TOKENIZER_BYTES)))
        except Exception as error:  # tokenizers raises nothing more specific
            raise InvalidInputError(f"{file} must be a tokenizer.json: {error}") from None

    def get(self, token_id: int) -> _TokenText | None:
        """The text of an id; None if the tokenizer has no such id."""
        if (added := self._added.get(token_id)) is not None:
            return _TokenText(text=added, data=added.encode())
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        data = self._find_bytes(token_id, piece)
        return _TokenText(text=data.decode("utf-8", "replace"), data=data)

    def get_all(self, token_ids: Iterable[int]) -> dict[int, _TokenText]:
        """The texts of those ids that have one."""
        found = ((token_id, self.get(token_id)) for token_id in sorted(set(token_ids)))
        return {token_id: text for token_id, text in found if text is not None}

    def _find_bytes(self, token_id: int, piece: str) -> bytes:
        if self._alphabet is not None:
            if all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
            return piece.encode()
        if self._has_bytes and (match := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(match[1], 16)])
        if self._has_spaces:
            return piece.replace(_SPACE, " ").encode()
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _find_types(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value["type"]
        for item in value.values():
            yield from _find_types(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_types(item)


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2), printable ones for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
