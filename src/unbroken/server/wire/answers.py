"""Answers of Responses that are kept in memory, for requests that name an earlier one instead of sending it again.

    answer resp_a                       kept: its input items, then its output items
    previous_response_id: resp_a        the request's items follow these
    item_reference msg_a_1              stands for output item 1 of resp_a
    conversation: conv_b                what the last answer of the conversation has kept

A session has all of it on disk: an answer that is not here is looked for there (`TurnOpener.recall`), and a
conversation only there, as another gateway may have added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.images.lru_cache import LruCache
from unbroken.server.wire.responses import Item

MAX_BYTES = 64 * 2**20
"""Of the bodies and answers that are kept; the oldest are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    items: tuple[Item, ...]
    num_bytes: int


class KeptAnswers:
    """The last answers of a server. A session's are found with its own key only."""

    def __init__(self) -> None:
        self._kept: LruCache[tuple[str | None, str], _Kept] = LruCache(MAX_BYTES, lambda kept: kept.num_bytes)

    def keep(self, owner: str | None, name: str, items: Sequence[Item], *, num_bytes: int) -> None:
        """Keep the items of an answer or conversation; `owner` is the session, `num_bytes` what they count."""
        self._kept.put((owner, name), _Kept(items=tuple(items), num_bytes=num_bytes + 1000))

    def find(self, owner: str | None, name: str) -> Sequence[Item] | None:
        """The items of an answer or conversation; None if it is not kept, or not any more."""
        kept = self._kept.get((owner, name))
        return None if kept is None else kept.items
