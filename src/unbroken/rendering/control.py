"""Control tokens: the added tokens of a tokenizer, which text from outside must never become (I5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMatch:
    """One control token in a rendered text."""

    token: str
    start: int
    stop: int


class ControlTokens:
    """The control tokens by text and by id.

    An added token that is only white space (some tokenizers have them for runs of spaces) is ordinary text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def of(cls, tokenizer: Any) -> ControlTokens:
        """The control tokens of a `tokenizers.Tokenizer`."""
        added = tokenizer.get_added_tokens_decoder()
        return cls({token.content: token_id for token_id, token in added.items() if token.content.strip()})

    def id_of(self, text: str) -> int | None:
        """The id of a control token, None if `text` is not one."""
        return self._ids.get(text)

    def text_of(self, token_id: int) -> str | None:
        """The text of a control token, None if the id is an ordinary one."""
        return self._texts.get(token_id)

    @property
    def ids(self) -> frozenset[int]:
        """All control ids."""
        return frozenset(self._texts)

    @property
    def texts(self) -> frozenset[str]:
        """All control tokens as text."""
        return frozenset(self._ids)

    def occurs_in(self, text: str) -> bool:
        """Whether `text` contains the text of a control token."""
        return self._pattern.search(text) is not None

    def find(self, text: str, start: int = 0, stop: int | None = None) -> Iterator[ControlMatch]:
        """The control tokens in `text[start:stop]`, left to right."""
        for match in self._pattern.finditer(text, start, len(text) if stop is None else stop):
            yield ControlMatch(token=match.group(), start=match.start(), stop=match.end())

    def may_take_part_in(self, text: str) -> bool:
        """Whether a control token may lie in `text` or across one of its borders. Errs on the safe side."""
        if self.occurs_in(text):
            return True
        core = text.strip()
        return (
            any(
                core in token
                or any(core.endswith(token[:k]) or core.startswith(token[k:]) for k in range(1, len(token)))
                for token in self._ids
            )
            if core
            else False
        )
