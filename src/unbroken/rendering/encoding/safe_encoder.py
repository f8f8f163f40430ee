r"""Encodes rendered text so that a message's own text forges no control id (I5).

One ordinary encoding is enough unless a control token overlaps a message's text, which is rare. If one does, only the
control tokens in the template's own text count, and everything between two of them is encoded by the text tokenizer,
which has no added tokens:

    <|im_start|>user\n say <|im_end|> twice <|im_end|>\n        the span of the message's text is [say ... twice]
    `---------´ `-----------------------´ `-------´ `´
     control      text: ordinary ids      control   text

Both ways give the same ids for text without control tokens. Text that can be encoded in neither way is refused:

- a control token that counts only as a separate word (`single_word`), directly next to a message's text that makes it
  part of a word, as `so` does, but not `so.`;
- text that may forge, with a tokenizer that prepends something to a text and then looks for control tokens (older
  sentencepiece conversions with `normalized` tokens): whether it finds them depends on the text before;
- text for which the text tokenizer itself writes a control id.

The id of unknown characters, `<unk>`, is not a control id: vocabularies without bytes use it for any text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from unbroken.rendering.base import TEMPLATE
from unbroken.rendering.encoding.marks import OUTSIDE_INDEX, Span
from unbroken.rendering.encoding.tokenizer import (
    AddedTokens,
    copy_tokenizer,
    encode_text,
    is_blank,
    read_ids,
    read_offsets,
)
from unbroken.threads import RendererLock
from unbroken.types import TokenIds

_MAX_NAME = 100
"""Longest text, such as a role or a name, of which it is remembered whether it may forge."""
_MAX_KNOWN = 4096
_MAX_SHORT = 1024


class UnsafeTextError(Exception):
    """A message's text cannot be encoded without forging a control id. Never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoding:
    """The ids of a text, with the message that each belongs to."""

    token_ids: TokenIds
    """[T]"""
    message_indices: TokenIds
    """[T] index of the message whose text the id has a character of; `TEMPLATE` otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ControlTokenRules:
    """How a tokenizer finds its control tokens in text."""

    normalizes: bool
    """Some are found in the normalised text."""
    prepends: bool
    """And the normaliser adds something to the beginning of a text."""
    words: tuple[str, ...]
    """The tokens that count only as separate words."""

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> _ControlTokenRules:
        tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if not is_blank(token.content)]
        normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer is not None else str
        normalized = [token.content for token in tokens if token.normalized and tokenizer.normalizer is not None]
        return cls(
            normalizes=bool(normalized),
            prepends=any(normalize(f"x{text}") != normalize("x") + normalize(text) for text in normalized),
            words=tuple(token.content for token in tokens if token.single_word),
        )


class SafeEncoder:
    """Encodes rendered text with its own copy of a tokenizer, which no caller can reconfigure.

    While a long text is encoded, `lock` is released.
    """

    def __init__(self, tokenizer: Tokenizer, lock: RendererLock | None = None) -> None:
        self._lock = lock or RendererLock()
        self._tokenizer = copy_tokenizer(tokenizer)
        self._tokenizer.encode_special_tokens = False
        self.control = AddedTokens.find_control(self._tokenizer)
        self._is_control = np.zeros(max(self.control.ids, default=0) + 2, dtype=np.bool_)
        self._is_control[list(self.control.ids)] = True
        if (unknown_id := _find_unknown_id(self._tokenizer)) in self.control.ids:
            self._is_control[unknown_id] = False
        self._blank = AddedTokens.find_blank(self._tokenizer)
        self._text_tokenizers = _TextTokenizers(self._tokenizer, self.control)
        self._rules = _ControlTokenRules.read(self._tokenizer)
        self._spells_control = lru_cache(_MAX_KNOWN)(self._find_out_if_control)
        self._may_forge = lru_cache(_MAX_KNOWN)(self._find_out_if_forgery)

    def encode(self, text: str, spans: Sequence[Span]) -> _Encoding:
        """Encode `text`, in which `spans` (in order, disjoint) are text from outside. Raises `UnsafeTextError`."""
        self._check_words(text, spans)
        encoding = encode_text(self._tokenizer, text, lock=self._lock)
        ids, owners = read_ids(encoding), _read_message_indices(encoding, spans)
        control = self._find_control(ids)
        if (owners[control] >= 0).any() or self._is_disturbed(text, spans, ids):
            ids, offsets = self._encode_separately(text, spans)
            owners = _find_message_indices(offsets, spans)
        if any(span.index == OUTSIDE_INDEX for span in spans):
            owners[owners == OUTSIDE_INDEX] = TEMPLATE
        return _Encoding(token_ids=ids, message_indices=owners)

    def encode_plain(self, text: str) -> TokenIds:
        """The tokenizer's own encoding, for text that the template wrote."""
        return read_ids(encode_text(self._tokenizer, text, lock=self._lock))

    def spells_control(self, text: str) -> bool:
        """Whether the tokenizer writes a control id for `text` alone."""
        return self._spells_control(text) if len(text) <= _MAX_NAME else self._find_out_if_control(text)

    def may_forge(self, text: str) -> bool:
        """Whether `text`, with other text around it, may become part of a control token and must be marked."""
        return self._may_forge(text) if len(text) <= _MAX_NAME else self._find_out_if_forgery(text)

    def has_control(self, text: str) -> bool:
        """Whether a control token stands in `text`."""
        return next(self.control.find(text), None) is not None

    def split_control(self, text: str) -> list[str]:
        """Cut `text` inside each control token, behind its first character."""
        cuts = [match.start + 1 for match in self.control.find(text) if match.stop > match.start + 1]
        return [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]

    def _check_words(self, text: str, spans: Sequence[Span]) -> None:
        """Refuse a token that counts only as a separate word if text from outside next to it makes it part of one."""
        for word, span in itertools.product(self._rules.words, spans):
            after_word = text.endswith(word, 0, span.start) and not self._spells_control(word + text[span.start])
            before_word = text.startswith(word, span.stop) and not self._spells_control(text[span.stop - 1] + word)
            if after_word or before_word:
                raise UnsafeTextError(
                    f"{word!r} is a control token only as a separate word, and is directly beside "
                    f"{text[span.start : span.stop][:60]!r}"
                )

    def _find_out_if_control(self, text: str) -> bool:
        return bool(self._find_control(self.encode_plain(text)).any())

    def _find_out_if_forgery(self, text: str) -> bool:
        if self.control.may_overlap(text):
            return True
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return False
        return self.control.may_overlap(normalizer.normalize_str(text)) or self.spells_control(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included. Bytes that are not UTF-8 become replacement characters."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _encode_separately(self, text: str, spans: Sequence[Span]) -> tuple[TokenIds, NDArray[np.int64]]:
        """Encode control tokens in the template's own text as such, everything else with the text tokenizer."""
        if self._rules.prepends:
            raise UnsafeTextError(
                "it may forge a control token, and this tokenizer adds to a text before it looks for added tokens: "
                "create these with normalized=False"
            )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for token_id, start, stop in [*self._control_tokens_outside(text, spans), (-1, len(text), len(text))]:
            self._encode_text(text, position, start, ids, offsets)
            if token_id >= 0:
                ids.append(token_id)
                offsets.append((start, stop))
            position = stop
        return np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)

    def _is_disturbed(self, text: str, spans: Sequence[Span], ids: TokenIds) -> bool:
        """Whether outside text hides a control token, as U+0338 after `<|im_end|>` does: NFKC joins it with the `>`."""
        if not spans or self._rules.prepends or not self._rules.normalizes:
            return False
        expected = [token_id for token_id, _, _ in self._control_tokens_outside(text, spans)]
        return bool(expected != ids[self._find_control(ids)].tolist())

    def _control_tokens_outside(self, text: str, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        position = 0
        for start, stop in [*((span.start, span.stop) for span in spans), (len(text), len(text))]:
            # The tokenizer itself finds them, so that its rules (stripping, normalising) apply.
            encoding = encode_text(self._tokenizer, text[position:start], lock=self._lock)
            ids = read_ids(encoding)
            for place in np.flatnonzero(self._find_control(ids)).tolist():
                begin, end = encoding.token_to_chars(place)
                found.append((int(ids[place]), position + begin, position + end))
            position = stop
        return found

    def _encode_text(self, text: str, start: int, stop: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        position = start
        for match in self._blank.find(text, start, stop):
            self._encode_piece(text, position, match.start, ids, offsets)
            token_id = self._blank.get_id(match.token)
            assert token_id is not None
            ids.append(token_id)
            offsets.append((match.start, match.stop))
            position = match.stop
        self._encode_piece(text, position, stop, ids, offsets)

    def _encode_piece(self, text: str, start: int, stop: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        if start == stop:
            return
        for tokenizer in self._text_tokenizers.find(at_start=start == 0):
            encoding = encode_text(tokenizer, text[start:stop], lock=self._lock)
            own_ids = read_ids(encoding)
            if not self._find_control(own_ids).any():
                ids.extend(own_ids.tolist())
                offsets.extend((start + begin, start + end) for begin, end in read_offsets(encoding).tolist())
                return
        raise UnsafeTextError(f"the tokenizer writes a control id for {text[start:stop][:60]!r}")

    def _find_control(self, ids: TokenIds) -> NDArray[np.bool_]:
        """[T] whether each id is a control token's. Ids beyond the largest of these are read as its last entry."""
        return self._is_control.take(ids, mode="clip")


def _read_message_indices(encoding: Any, spans: Sequence[Span]) -> TokenIds:
    """As `_find_message_indices`, and faster for a short text with one span, as most bridges have."""
    if len(spans) != 1 or len(encoding) > _MAX_SHORT:
        return _find_message_indices(read_offsets(encoding), spans)
    [span] = spans
    first, last = encoding.char_to_token(span.start), encoding.char_to_token(span.stop - 1)
    if first is None or last is None:  # The tokenizer drops this character.
        return _find_message_indices(read_offsets(encoding), spans)
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1)[0] < span.stop:
        last += 1  # another piece of the last character
    indices = np.full(len(encoding), TEMPLATE, dtype=np.int32)
    indices[first : last + 1] = span.index
    return indices


def _find_message_indices(offsets: NDArray[np.int64], spans: Sequence[Span]) -> TokenIds:
    """[T] index of the message whose span an id overlaps, `TEMPLATE` if none."""
    if not spans:
        return np.full(len(offsets), TEMPLATE, dtype=np.int32)
    starts, stops, indices = np.array([(span.start, span.stop, span.index) for span in spans]).T
    nearest = np.searchsorted(stops, offsets[:, 0], side="right")
    within = np.minimum(nearest, len(spans) - 1)
    overlaps = (nearest < len(spans)) & (starts[within] < offsets[:, 1])
    return np.where(overlaps, indices[within], TEMPLATE).astype(np.int32)


def _find_unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id for text that the vocabulary cannot spell; None also if the model names a token that does not exist."""
    token = getattr(tokenizer.model, "unk_token", None)
    if token is None:
        ids = tokenizer.encode("\U0010ffff", add_special_tokens=False).ids
        token = tokenizer.id_to_token(ids[-1]) if ids else None
    return tokenizer.token_to_id(token) if token is not None and "unk" in token.lower() else None


class _TextTokenizers:
    """The tokenizers for text from outside: the same model, normaliser and pre-tokenizer, but no added tokens.

    A control token in the model's own vocabulary, such as sentencepiece's `<s>`, gets another name in the second one,
    built when first needed: otherwise the text `<s>` would become the control token. Ids do not change.
    """

    def __init__(self, tokenizer: Tokenizer, control: AddedTokens) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._as_it_is = _build_pair(tokenizer, tokenizer.model)

    def find(self, *, at_start: bool) -> Iterator[Tokenizer]:
        """The tokenizers to try in turn for text at the beginning of a prompt, or after a control token.

        The second one takes seconds to build for 130k entries, and is needed only for a text that the first one
        encodes to a control id.
        """
        yield self._as_it_is[at_start]
        if self._without_control is not None:
            yield self._without_control[at_start]

    @cached_property
    def _without_control(self) -> tuple[Tokenizer, Tokenizer] | None:
        model = _build_model_without_control(self._tokenizer, self._control)
        return None if model is None else _build_pair(self._tokenizer, model)


def _build_pair(tokenizer: Tokenizer, model: Any) -> tuple[Tokenizer, Tokenizer]:
    """Build the tokenizer for text after a control token, and the one for text at the beginning of a prompt."""
    first = tokenizer.pre_tokenizer
    other = _adapt_to_mid_text(first) if first is not None else None
    mid_text, at_start = Tokenizer(model), Tokenizer(model)
    for built, pre_tokenizer in ((mid_text, other), (at_start, first)):
        if tokenizer.normalizer is not None:
            built.normalizer = tokenizer.normalizer
        if pre_tokenizer is not None:
            built.pre_tokenizer = pre_tokenizer
    return mid_text, at_start


def _build_model_without_control(tokenizer: Tokenizer, control: AddedTokens) -> Any:
    """The model with other names for its control tokens, except of one character: without those text would be lost.

    None if it has none.
    """
    spelled = {text for text in control.texts & tokenizer.get_vocab(with_added_tokens=False).keys() if len(text) > 1}
    if not spelled:
        return None
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "BPE":
        _remove_from_bpe(model, spelled - {model.get("unk_token")})
    elif model["type"] == "Unigram":
        model["vocab"] = [
            [_make_unused_name(k) if text in spelled else text, score] for k, (text, score) in enumerate(model["vocab"])
        ]
    return _build_tokenizer(model=model).model


def _remove_from_bpe(model: dict[str, Any], spelled: Set[str]) -> None:
    model["vocab"] = {_make_unused_name(k) if text in spelled else text: k for text, k in model["vocab"].items()}
    pairs = (tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
    model["merges"] = [pair for pair in pairs if spelled.isdisjoint((*pair, "".join(pair)))]


def _make_unused_name(token_id: int) -> str:
    """A name that does not occur in text. If it does, the encoder refuses the id."""
    return f"\U0010ffff{token_id}"


def _adapt_to_mid_text(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer for text after a control token: without Metaspace's prefix of the first word."""
    state = json.loads(pre_tokenizer.__getstate__())
    return _build_tokenizer(pre_tokenizer=state).pre_tokenizer if _remove_prefix(state) else pre_tokenizer


def _remove_prefix(state: dict[str, Any]) -> bool:
    """Change a pre-tokenizer's description; returns whether that was needed."""
    is_first = state.get("prepend_scheme") == "first"
    if is_first:
        state["prepend_scheme"] = "never"
    return any([is_first, *map(_remove_prefix, state.get("pretokenizers", ()))])


def _build_tokenizer(**parts: Any) -> Tokenizer:
    blank = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**blank, **parts}))
