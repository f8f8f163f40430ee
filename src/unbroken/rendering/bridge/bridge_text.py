r"""The text of a bridge as its certificate knows it, with places for the texts of the new messages.

A certificate's window has sentinels for all text. Between them is the template's own text:

    window      <|im_end|>\n<|im_start|>tool\nNq7New0z<|im_end|>\n<|im_start|>assistant\n
    parts       `-----------------------------´ text 0 `-------------------------------´
    rendered    <|im_end|>\n<|im_start|>tool\n17 C<|im_end|>\n<|im_start|>assistant\n           text 0 is "17 C"

A rendered text that consists of these parts and the messages' own texts, character for character, shows where the text
from outside is, without a second rendering with marks (`encoding.marks`). The names and ids of calls, which some
templates write, are those of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from json.encoder import encode_basestring

from unbroken.rendering.bridge.shapes import ShapeExample
from unbroken.rendering.bridge.window import WindowTurn
from unbroken.rendering.encoding.marks import Span


class _Kind(Enum):
    TEXT = "text"
    NAME = "name"
    CALL_ID = "call id"


@dataclass(frozen=True, slots=True)
class _Place:
    kind: _Kind
    index: int
    """Of the new message, or of the call."""


@dataclass(frozen=True, slots=True)
class BridgeText:
    """The parts of a bridge's text, in order."""

    parts: tuple[str | _Place, ...]

    @classmethod
    def split(cls, text: str, example: ShapeExample) -> BridgeText | None:
        """Split the text of an example; None if its texts, names and ids do not tell its places."""
        places: dict[str, _Place] = {}
        for index, sentinels in enumerate(example.sentinels):
            if len(sentinels) != 1 or example.num_images[index]:
                return None
            places[sentinels[0]] = _Place(_Kind.TEXT, index)
        for index, (name, call_id) in enumerate(example.turn.calls):
            if name in text and name in places:
                return None  # the names of more than two calls are not unique
            places |= {name: _Place(_Kind.NAME, index), call_id: _Place(_Kind.CALL_ID, index)}
        pieces = re.split(f"({'|'.join(map(re.escape, places))})", text) if places else [text]
        return cls(tuple(places.get(piece, piece) for piece in pieces if piece))

    def find_spans(self, rendered: str, start: int, turn: WindowTurn, texts: Sequence[str]) -> list[Span] | None:
        """Find the new messages' `texts` in `rendered[start:]`; None if it is not this text with them in its places.

        A template may trim the texts, and may write them as JSON. White space around a text does not belong to it.
        """
        for spell in _SPELLINGS:
            if (spans := self._match(rendered, start, turn, texts, spell)) is not None:
                return spans
        return None

    def _match(
        self,
        rendered: str,
        position: int,
        turn: WindowTurn,
        texts: Sequence[str],
        spell: Callable[[str], tuple[str, str, str]],
    ) -> list[Span] | None:
        spans: list[Span] = []
        for part in self.parts:
            before, core, after = "", "", ""
            if isinstance(part, str):
                before = part
            elif part.kind is _Kind.TEXT:
                before, core, after = spell(texts[part.index])
            else:
                before = turn.calls[part.index][part.kind is _Kind.CALL_ID]
            if not rendered.startswith(before, position):
                return None
            start = position + len(before)
            if not rendered.startswith(core, start):
                return None
            position = start + len(core)
            if core:
                assert not isinstance(part, str)
                spans.append(Span(start=start, stop=position, index=part.index))
            if not rendered.startswith(after, position):
                return None
            position += len(after)
        return spans if position == len(rendered) else None


def _spell_as_it_is(text: str) -> tuple[str, str, str]:
    """The white space before the text, the text, and the white space after it."""
    core = text.strip()
    start = text.index(core)
    return text[:start], core, text[start + len(core) :]


def _spell_trimmed(text: str) -> tuple[str, str, str]:
    return "", text.strip(), ""


def _spell_as_json(text: str) -> tuple[str, str, str]:
    before, core, after = _spell_as_it_is(text)
    return encode_basestring(before)[1:-1], encode_basestring(core)[1:-1], encode_basestring(after)[1:-1]


def _spell_trimmed_as_json(text: str) -> tuple[str, str, str]:
    return _spell_as_json(text.strip())


_SPELLINGS = (_spell_as_it_is, _spell_trimmed, _spell_as_json, _spell_trimmed_as_json)
