"""The added tokens of a tokenizer. Text from outside must never become one of the control tokens among them (I5)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMatch:
    """One added token in a rendered text."""

    token: str
    start: int
    stop: int


class AddedTokens:
    """A set of added tokens, by text and by id.

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
