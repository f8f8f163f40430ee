r"""Rendered text to token ids, so that a message's own text forges no control id (I5).

Almost always one ordinary encoding is enough: it is checked that no control token's characters touch a message's text.
Where one does, control tokens are looked for in the template's stretches only, and everything between two of them is
encoded by a twin of the tokenizer that knows no added tokens:

    <|im_start|>user\n say <|im_end|> twice <|im_end|>\n        the span of the message's text is [say ... twice]
    `---------´ `-----------------------´ `-------´ `´
     control      twin: ordinary ids      control   twin

Both ways give the same ids for text without control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from unbroken.rendering.base import TEMPLATE
from unbroken.rendering.control import AddedTokens
from unbroken.rendering.copying import copy_tokenizer
from unbroken.rendering.marking import FOREIGN_INDEX, Span
from unbroken.types import TokenIds


class UnsafeTextError(Exception):
    """A message's text cannot be encoded without forging a control id. Never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """A text's ids, and whose text they spell."""

    token_ids: TokenIds
    """[T]"""
    message_indices: TokenIds
    """[T] the message whose text has a character in the id; `TEMPLATE` otherwise."""
    offsets: NDArray[np.int64]
    """[T, 2] the characters of each id, half-open."""


class SafeEncoder:
    """Encodes rendered text with a tokenizer of its own, which no caller can reconfigure."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = copy_tokenizer(tokenizer)
        self._tokenizer.encode_special_tokens = False
        self.control = AddedTokens.control_of(self._tokenizer)
        largest_id = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._is_control = np.zeros(largest_id + 1, dtype=np.bool_)
        self._is_control[list(self.control.ids)] = True
        self._blank = AddedTokens.blank_of(self._tokenizer)
        self._twin = _without_added_tokens(self._tokenizer, at_start=False)
        self._twin_at_start = _without_added_tokens(self._tokenizer, at_start=True)

    def encode(self, text: str, spans: Sequence[Span]) -> Encoding:
        """Encode `text`, in which `spans` (in order, disjoint) are text from outside.

        Raises:
            UnsafeTextError: the twin writes a control id for ordinary text.
        """
        ids, offsets = self._encode_whole(text)
        owners = _owners(offsets, spans)
        if (self._is_control[ids] & (owners >= 0)).any():
            ids, offsets = self._encode_apart(text, spans)
            owners = _owners(offsets, spans)
        owners[owners == FOREIGN_INDEX] = TEMPLATE
        return Encoding(token_ids=ids, message_indices=owners, offsets=offsets)

    def encode_plain(self, text: str) -> TokenIds:
        """The tokenizer's own encoding: for text that the template wrote."""
        return self._encode_whole(text)[0]

    def spells_control(self, text: str) -> bool:
        """Whether the tokenizer by itself writes a control id for `text`."""
        return bool(self._is_control[self.encode_plain(text)].any())

    def may_forge(self, text: str) -> bool:
        """Whether `text`, with other text around it, may become part of a control id: it has to be marked."""
        if self.control.may_take_part_in(text):
            return True
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return False
        return self.control.may_take_part_in(normalizer.normalize_str(text)) or self.spells_control(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included; bytes that are no UTF-8 become replacement characters."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _encode_whole(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _encode_apart(self, text: str, spans: Sequence[Span]) -> tuple[TokenIds, NDArray[np.int64]]:
        """Control tokens from the template's stretches only; all else by the twin."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for token_id, start, stop in [*self._control_tokens_outside(text, spans), (-1, len(text), len(text))]:
            self._encode_by_twin(text, position, start, ids, offsets)
            if token_id >= 0:
                ids.append(token_id)
                offsets.append((start, stop))
            position = stop
        return np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)

    def _control_tokens_outside(self, text: str, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        position = 0
        for start, stop in [*((span.start, span.stop) for span in spans), (len(text), len(text))]:
            # The tokenizer itself says where they are, so that its rules (stripping, normalising) hold.
            encoding = self._tokenizer.encode(text[position:start], add_special_tokens=False)
            for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if self._is_control[token_id]:
                    found.append((token_id, position + begin, position + end))
            position = stop
        return found

    def _encode_by_twin(self, text: str, start: int, stop: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        position = start
        for match in self._blank.find(text, start, stop):
            self._encode_piece(text, position, match.start, ids, offsets)
            token_id = self._blank.id_of(match.token)
            assert token_id is not None
            ids.append(token_id)
            offsets.append((match.start, match.stop))
            position = match.stop
        self._encode_piece(text, position, stop, ids, offsets)

    def _encode_piece(self, text: str, start: int, stop: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        if start == stop:
            return
        twin = self._twin if start else self._twin_at_start
        encoding = twin.encode(text[start:stop], add_special_tokens=False)
        if self._is_control[encoding.ids].any():
            raise UnsafeTextError(f"the tokenizer writes a control id for {text[start:stop][:60]!r}")
        ids.extend(encoding.ids)
        offsets.extend((start + begin, start + end) for begin, end in encoding.offsets)


def _owners(offsets: NDArray[np.int64], spans: Sequence[Span]) -> TokenIds:
    """[T] the index of the span that an id's characters overlap, `TEMPLATE` if none."""
    if not spans:
        return np.full(len(offsets), TEMPLATE, dtype=np.int32)
    starts, stops, indices = np.array([(span.start, span.stop, span.index) for span in spans]).T
    nearest = np.searchsorted(stops, offsets[:, 0], side="right")
    within = np.minimum(nearest, len(spans) - 1)
    overlaps = (nearest < len(spans)) & (starts[within] < offsets[:, 1])
    return np.where(overlaps, indices[within], TEMPLATE).astype(np.int32)


def _without_added_tokens(tokenizer: Tokenizer, *, at_start: bool) -> Tokenizer:
    """A tokenizer with the same model that knows no added tokens; `at_start` says whether text begins the prompt."""
    twin = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        twin.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        twin.pre_tokenizer = tokenizer.pre_tokenizer if at_start else _in_mid_text(tokenizer.pre_tokenizer)
    return twin


def _in_mid_text(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer as it works after a control token: Metaspace's prefix for the very first word is left out."""
    state = json.loads(pre_tokenizer.__getstate__())
    parts = [state, *state.get("pretokenizers", ())]
    if not any(part.get("prepend_scheme") == "first" for part in parts):
        return pre_tokenizer
    for part in parts:
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
    blank = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**blank, "pre_tokenizer": state})).pre_tokenizer
