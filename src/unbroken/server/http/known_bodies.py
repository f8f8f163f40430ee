"""Reads a session's bodies from where they are new: an agent sends its whole conversation again, byte for byte.

    known    {"model":"m","messages":[{..},{..}        the bytes up to the end of an item, and these items, parsed
    body     {"model":"m","messages":[{..},{..},{..},{..}],"tools":[..]}
    parsed   {"model":"m","messages":["4f9c..",{..},{..}],"tools":[..]}     with a random text for the known items

What stands before and after a value means the same whatever the value is, so that both parse alike but for the list's
first items. On any doubt the body is read as a whole: other bytes, no JSON, a list that does not begin with the random
text (its key came twice), limits that may be reached.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

import orjson

from unbroken.errors import InvalidInputError
from unbroken.images.lru_cache import LruCache
from unbroken.types.arrays import is_deep
from unbroken.untrusted import bound_values, count_opened, parse_exactly

_LISTS = (b'"messages"', b'"input"', b'"contents"')
"""The keys of conversations in the dialects' bodies."""
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_BEGINNING = re.compile(rb"\s*:\s*\[")
_MIN_BYTES = 2**15
"""Shorter bodies are read as fast as a whole."""
_MAX_BYTES = 2**26
_NUM_ENDS = 5
"""Agents change the last messages (marks for caches): so many items from the last on are tried as the known end."""
_STAND_IN = secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The beginning of a body, up to the last item of its conversation."""

    name: str
    raw: bytes
    start: int
    """Where in `raw` the first item begins."""
    ends: tuple[int, ...]
    """The ends of the last items."""
    items: list[Any]
    """All of them, parsed. They are shared by all bodies that begin with them, and never changed."""
    num_values: int
    """As of `untrusted.bound_values`."""

    def cut_to_beginning(self, body: bytes) -> _Known | None:
        """What of it a body begins with, up to the end of one of the last items; None if that is less."""
        for num_cut, end in enumerate(reversed(self.ends)):
            if body.startswith(self.raw[:end]):
                return self._cut(num_cut)
        return None

    def _cut(self, number: int) -> _Known:
        """The beginning without the last `number` items."""
        if number == 0:
            return self
        ends = self.ends[:-number]
        return replace(self, raw=self.raw[: ends[-1]], ends=ends, items=self.items[:-number])


class KnownBodies:
    """What each session's last body began with; of all together at most 64 MiB."""

    def __init__(self) -> None:
        self._known: LruCache[str, _Known] = LruCache(_MAX_BYTES, lambda known: len(known.raw))

    def parse(self, session_id: str, body: bytes, *, max_values: int) -> Any:
        """The value of a body that begins like the session's last one; None if it must be read as a whole.

        The value has at most `max_values` lists, objects and texts, and is not nested too deeply.
        """
        if len(body) < _MIN_BYTES or (known := self._known.get(session_id)) is None:
            return None
        if (known := known.cut_to_beginning(body)) is None:
            return None
        short = _stand_in(body, known.start, known.ends[-1])
        try:
            value = parse_exactly(short, orjson.loads)
        except (orjson.JSONDecodeError, InvalidInputError):
            return None
        items = value.get(known.name) if isinstance(value, dict) else None
        is_small = known.num_values + bound_values(short, count_opened(short)) <= max_values
        if not isinstance(items, list) or items[:1] != [_STAND_IN] or not is_small or is_deep(value):
            return None
        value[known.name] = [*known.items, *items[1:]]
        self._learn(session_id, body, value, known)
        return value

    def learn(self, session_id: str, body: bytes, value: Any) -> None:
        """Learn how a body begins that was read as a whole."""
        if len(body) < _MIN_BYTES or not isinstance(value, dict) or (found := _find_list(body)) is None:
            return
        name, start = found
        nothing = _Known(name=name, raw=body[:start], start=start, ends=(), items=[], num_values=0)
        self._learn(session_id, body, value, nothing)

    def forget(self, session_id: str) -> None:
        """Forget a session that was deleted."""
        self._known.remove(session_id)

    def _learn(self, session_id: str, body: bytes, value: dict[str, Any], known: _Known) -> None:
        """Remember the beginning of a body, of whose list the first items are known."""
        ends = _find_ends(body, len(known.raw))
        items = value.get(known.name)
        if not isinstance(items, list) or len(known.items) + len(ends) != len(items):
            return  # an item is neither object nor list
        ends = (*known.ends, *ends)[-_NUM_ENDS:]
        # If the key comes twice, the list that counts is another one.
        if not ends or orjson.loads(_stand_in(body, known.start, ends[-1])).get(known.name) != [_STAND_IN]:
            return
        new = body[len(known.raw) : ends[-1]]
        self._known.put(
            session_id,
            replace(
                known,
                raw=body[: ends[-1]],
                ends=ends,
                items=list(items),
                num_values=known.num_values + bound_values(new, count_opened(new)),
            ),
        )


def _stand_in(body: bytes, start: int, stop: int) -> bytes:
    """The body with a random text for these items."""
    return b'%b"%b"%b' % (body[:start], _STAND_IN.encode(), body[stop:])


def _find_list(body: bytes) -> tuple[str, int] | None:
    """The key of the conversation, and where its first item may begin; None without one."""
    depth = 0
    for match in _TOKEN.finditer(body):
        token = match.group()
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth -= 1
        elif depth == 1 and token in _LISTS and (begun := _BEGINNING.match(body, match.end())) is not None:
            return token[1:-1].decode(), begun.end()
    return None


def _find_ends(body: bytes, position: int) -> tuple[int, ...]:
    """The ends of the lists and objects that are items of the list which `position` is in, from there on."""
    depth = 0
    ends: list[int] = []
    for match in _TOKEN.finditer(body, position):
        token = match.group()
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth -= 1
            if depth < 0:
                break
            if depth == 0:
                ends.append(match.end())
    return tuple(ends)
