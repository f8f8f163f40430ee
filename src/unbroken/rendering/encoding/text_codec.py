"""Plain encoding and decoding, for text that is not a conversation: raw prompts, and text for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from unbroken.rendering.encoding.calls import encode_text
from unbroken.types import TokenIds, token_ids


class TextCodec:
    """Encodes and decodes with a copy of a transformers fast tokenizer's backend, which no caller can reconfigure."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._longest_token = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def vocab_size(self) -> int:
        """Ids with a text are in [0, vocab_size)."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of `n` ids has at most `n` times as many.

        An exception is text that the tokenizer drops or shortens, such as white space, or accents that it composes.
        """
        return self._longest_token

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
