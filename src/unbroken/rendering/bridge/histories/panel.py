"""The panel: synthetic histories after which a bridge must always be the same.

A history is spelled with one letter for each message:

    s system      a assistant text               c one call          t the next call's result
    u user        r assistant text, reasoned     d two calls         b a very long user message
    e empty user  x one call beside text         q one call, reasoned
                  m seven calls

and, for models that take images:

    i user, an image before the text             o user, an image and no text
    w user, two images inside the text           p the next call's result, an image after its text
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unbroken.messages import ContentPart, Message
from unbroken.rendering.bridge.histories.history_class import RESULT_LETTERS, HistoryClass
from unbroken.rendering.message_format import PROBE_NAMES, probe_call

HISTORY_TEXT, HISTORY_REASONING, HISTORY_ARGUMENT = "Hq7Text", "Hq7Reasoning", "Hq7Argument"
_CALL_LETTERS = frozenset("cdmqx")
_ROLES = {"s": "system", **dict.fromkeys("ubeiow", "user"), **dict.fromkeys("tp", "tool")}
MAX_COUNT = 1000
"""A template that counts to more is refused."""
_MAX_LISTED_REPEATS = 8
_MAX_EXACT_LENGTH = 40
MAX_TEXT_LENGTH = 1_000_000

_CHATS = (
    "u", "su", "e", "eae", "uu", "suu", "uau", "suau", "uru", "sururu", "usu", "b", "sbab",
    *("u" + "au" * k for k in range(2, _MAX_LISTED_REPEATS + 1)),
    *("su" + "au" * k for k in range(2, _MAX_LISTED_REPEATS + 1)),
    "su" + "au" * 20,
)  # fmt: skip
_IRREGULAR = ("s", "a", "au", "sau", "ua", "uaa", "uaau", "suaauau", "uat", "uatau", "suatatau", "uta")
_IRREGULAR_CALLS = ("um", "umu", "uma", "uc", "ucta", "umttu")
_TOOL_CYCLES = (
    "udtt", "sudttau", "udttauctau", "uqtqt", "suqtru", "uxt", "uctu", "sudttdtt", "ucu", "ucuau",
    *("u" + "ct" * k for k in range(1, _MAX_LISTED_REPEATS + 1)),
    *("su" + "ct" * k + "au" for k in range(1, _MAX_LISTED_REPEATS + 1)),
)  # fmt: skip
_RESULTS_OF_TEXT = ("uat", "suat", "suatatau")
_IMAGES = (
    "i", "si", "o", "w", "ii", "iau", "uai", "iai", "siauai", "oaoao", "waiau",
    *("i" + "ai" * k for k in (3, 8)),
)  # fmt: skip
_IMAGES_AND_CALLS = (
    "ict", "ucp", "icp", "sucpau", "ucpcp", "udpp", "udtp", "ictau", "iqp",
    *("i" + "cp" * k for k in (3, 8)),
)  # fmt: skip
_IMAGES_AND_RESULTS = ("iat", "uap", "siapau")
_EFFECTS = ("u", "su", "uau", "uru", "sururu")
_EFFECTS_OF_CALLS = ("uqt", "uqtqt", "suqtru", "udttau")
_EFFECTS_OF_IMAGES = ("i", "siai")
_IMAGE_LETTERS = frozenset("iowp")


class HistoryPanel:
    """The histories of one class that suit a template. At its `counts` and `lengths`, its output may change."""

    def __init__(
        self,
        *,
        renders_calls: bool,
        counts: Sequence[int],
        lengths: Sequence[int],
        history_class: HistoryClass,
        with_images: bool = False,
    ) -> None:
        self._renders_calls = renders_calls
        self._with_images = with_images
        self._counts = counts
        self._all_lengths = lengths
        self._history_class = history_class
        self._result = "ct" if renders_calls else "at"
        self.long_text = max([1500, *self._lengths()]) + 20
        """The length of a very long message: more than any constant that the template may compare it with."""
        cycle = "suctau" if renders_calls and history_class.has_results is not False else "suau"
        self.all_roles = self._in_class(cycle)
        self.short_histories = (self._in_class("u"), self._in_class("su"), self.all_roles)
        """For checks with many texts."""
        self.long_history = self._in_class(f"{cycle}{cycle[1:] * 3}")

    def histories(self) -> tuple[str, ...]:
        """All histories for the first comparison, roughly the shortest first."""
        with_results = _TOOL_CYCLES if self._renders_calls else _RESULTS_OF_TEXT
        images = _IMAGES_AND_CALLS if self._renders_calls else _IMAGES_AND_RESULTS
        irregular = () if self._history_class.is_regular else _IRREGULAR
        if self._renders_calls and not self._history_class.is_regular:
            with_results = (*with_results, *_IRREGULAR_CALLS)
        return self._all_in_class((*_CHATS, *irregular), with_results, (*_IMAGES, *images))

    def histories_of_texts(self) -> Iterator[tuple[str, str, str]]:
        """Spellings with a role, and a text of this role: none, blank, long, or one of a length near a constant."""
        chat = self.all_roles
        for role in ("system", "user", "assistant", "tool"):
            if role == "tool" and RESULT_LETTERS.isdisjoint(chat):
                continue
            texts = ["", "\n", *(self.texts_near_constants() if self._all_lengths else ())]
            yield from ((chat, role, text) for text in texts)

    def histories_for_effect(self) -> tuple[str, ...]:
        """The few histories that show the effect of new messages on everything before them."""
        with_results = _EFFECTS_OF_CALLS if self._renders_calls else _RESULTS_OF_TEXT
        return self._all_in_class(_EFFECTS, with_results, _EFFECTS_OF_IMAGES)

    def histories_near_constants(self) -> Iterator[str]:
        """Histories whose number of messages, questions, results or images is close to a constant."""
        integers = self._counts
        exchanges = {k for n in integers for k in (*range(n - 4, n + 3), *range((n - 9) // 2, (n + 5) // 2))}
        yield from (self._in_class("u" + "asu" * k) for k in _in_bounds(set(integers)))
        yield from (self._in_class(start + "au" * k) for k in _in_bounds(exchanges) for start in ("u", "su"))
        if self._renders_calls and self._history_class.has_results is not False:
            yield from (
                self._in_class("u" + "dtt" * k) for k in _in_bounds({n // 2 + k for n in integers for k in (0, 1)})
            )
            yield from (
                self._in_class("u" + "ct" * k) for k in _in_bounds({k for n in integers for k in range(n - 2, n + 3)})
            )
        lengths = {k for n in integers if n <= _MAX_EXACT_LENGTH for k in range(n - 6, n + 2)}
        yield from (spelling for length in sorted(lengths) for spelling in self._of_length(length))
        if self._with_images and not self._history_class.has_results:
            yield from (
                self._in_class("i" * k + "au") for k in _in_bounds({k for n in integers for k in range(n - 2, n + 3)})
            )

    def _of_length(self, length: int) -> Iterator[str]:
        """Histories of the class with just so many messages."""
        starts = ("u", "su", "uct", "udtt", "suct", "sudtt") if self._renders_calls else ("u", "su", "uatau", "suatau")
        for start in starts:
            for exchange in ("au", "ct") if self._renders_calls else ("au",):
                spelling = start + exchange * ((length - len(start)) // 2)
                if len(spelling) == length and self._history_class.includes_spelling(spelling):
                    yield spelling

    def _in_class(self, chat: str) -> str:
        return self._history_class.adapt(chat, self._result)

    def _all_in_class(
        self, chats: Sequence[str], with_results: Sequence[str], with_images: Sequence[str]
    ) -> tuple[str, ...]:
        images = with_images if self._with_images else ()
        spellings = dict.fromkeys([*map(self._in_class, chats), *with_results, *map(self._in_class, images)])
        return tuple(filter(self._history_class.includes_spelling, spellings))

    def texts_near_constants(self) -> Iterator[str]:
        """A very short text, a very long one, and texts with lengths close to a constant."""
        yield "~"
        yield "~" * self.long_text
        yield from ("~" * k for k in sorted({k for n in self._lengths() for k in (n - 1, n, n + 1)}))

    def _lengths(self) -> list[int]:
        return [n for n in self._all_lengths if n <= MAX_TEXT_LENGTH]


def _in_bounds(numbers: set[int]) -> list[int]:
    return sorted(k for k in numbers if _MAX_LISTED_REPEATS < k <= MAX_COUNT)


def build_history(
    spelling: str,
    *,
    long_text: int = 0,
    texts: Mapping[str, str] | None = None,
    call_id_prefix: str = "hist",
    text: str = HISTORY_TEXT,
    argument: str = HISTORY_ARGUMENT,
    names: Sequence[str] = PROBE_NAMES,
) -> list[Message]:
    """Build the messages of a spelling; `texts` replaces the text of a role, and calls alternate between `names`."""
    messages: list[Message] = []
    num_calls = num_answered = 0
    for letter in spelling:
        role = _ROLES.get(letter, "assistant")
        own_text = (texts or {}).get(role, text)
        message: Message = {"role": role, "content": own_text}
        if letter in _IMAGE_LETTERS:
            message["content"] = _build_parts(letter, own_text)
        if letter == "b":
            message["content"] = "Hq7 long " * (long_text // 9 + 1)
        if letter == "e":
            message["content"] = ""
        if letter in "rq":
            message["reasoning_content"] = HISTORY_REASONING
        if letter in _CALL_LETTERS:
            message["content"] = message["content"] if letter == "x" else ""
            ids = range(num_calls, num_calls + {"d": 2, "m": 7}.get(letter, 1))
            message["tool_calls"] = [
                probe_call(names[k % 2], f"{call_id_prefix}{k:05d}", {"value": argument}) for k in ids
            ]
            num_calls = ids.stop
        if letter in RESULT_LETTERS:
            message |= {"tool_call_id": f"{call_id_prefix}{num_answered:05d}", "name": names[num_answered % 2]}
            num_answered += 1
        messages.append(message)
    return messages


def _build_parts(letter: str, text: str) -> list[ContentPart]:
    words: ContentPart = {"type": "text", "text": text}
    image: ContentPart = {"type": "image"}
    return {"i": [image, words], "o": [image], "w": [words, image, image, words], "p": [words, image]}[letter]
