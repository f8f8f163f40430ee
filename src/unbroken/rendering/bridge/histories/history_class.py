"""History classes: what a certificate may assume about the messages before the turn, because they are known.

    class            assumption                                    templates that need one
    ANY              none                                          nearly none
    without          these texts are nowhere in it                 `/no_think` switches the reasoning off (SmolLM3)
    has_results      a tool message is, or is not, in it           DeepSeek-V3 opens the first result in its own way
    has_system       it begins with a system message               Bielik counts messages from the first question
    ends_in_result   its last message is a tool message            the same
    is_regular       its messages come in the usual order          some merge two assistant messages in a row
    counted          its number of calls, say, is in the bridge    Cohere numbers the calls of a conversation

`history_facts` finds the classes of a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from unbroken.messages import Message, iterate_strings

_USUAL_ROLES = frozenset({"system", "user", "assistant", "tool"})
_USUAL_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
RESULT_LETTERS = frozenset("tp")
"""Letters of a tool message in a spelling; see `panel`."""


class Counted(StrEnum):
    """What a template may count through a conversation, to write the number into a bridge."""

    CALLS = "calls"
    MESSAGES = "messages"
    USERS = "user messages"
    RESULTS = "tool messages"
    TURNS = "assistant messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryClass:
    """The histories that a certificate covers. None is any value."""

    without: frozenset[str] = frozenset()
    """Texts that neither the history nor the turn contains, in lower case."""
    has_results: bool | None = None
    has_system: bool | None = None
    """Whether it begins with a system message; if not, it has none at all."""
    ends_in_result: bool | None = None
    is_regular: bool | None = None
    """Whether the messages come in the usual order, with all calls answered and without unusual roles and keys."""
    counted: Counted | None = None
    """What the numbers in the bridge count; None if it has none."""

    def __str__(self) -> str:
        words = [f"without {text!r}" for text in sorted(self.without)]
        names = {"tool messages": self.has_results, "a system message": self.has_system}
        words += [f"{'with' if value else 'without'} {name}" for name, value in names.items() if value is not None]
        if self.ends_in_result is not None:
            words.append(f"{'' if self.ends_in_result else 'not '}ending in a tool message")
        if self.is_regular is not None:
            words.append("regular" if self.is_regular else "irregular")
        if self.counted is not None:
            words.append(f"counting {self.counted.value}")
        return ", ".join(words) or "any"

    def includes_spelling(self, spelling: str) -> bool:
        """Whether a history of the panel belongs to the class, whatever its texts are."""
        return (
            self.has_results in (None, not RESULT_LETTERS.isdisjoint(spelling))
            and self.has_system in (None, spelling[0] == "s" if self.has_system else "s" in spelling)
            and self.ends_in_result in (None, spelling[-1:] in RESULT_LETTERS)
        )

    def adapt(self, spelling: str, result: str) -> str:
        """The spelling, changed as little as it takes to belong to the class; `result` spells a turn and its result."""
        if self.has_system is not None:
            spelling = f"s{spelling.lstrip('s')}" if self.has_system else spelling.replace("s", "") or "u"
        if self.has_results and RESULT_LETTERS.isdisjoint(spelling):
            spelling = spelling.replace("u", f"u{result}", 1)
        if self.ends_in_result and spelling[-1] not in RESULT_LETTERS:
            spelling += result
        if self.ends_in_result is False and spelling[-1] in RESULT_LETTERS:
            spelling += "au"
        return spelling

    def includes(self, messages: Sequence[Message]) -> bool:
        """Whether a history belongs to the class."""
        roles = [message["role"] for message in messages]
        return (
            self.has_results in (None, "tool" in roles)
            and self.has_system in (None, find_system(messages[0], has_any="system" in roles))
            and self.ends_in_result in (None, roles[-1] == "tool")
            and self.is_regular in (None, is_regular(messages))
            and not self.excludes_any(text for message in messages for text in iterate_texts(message))
        )

    def excludes_any(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts contains one that is excluded."""
        return bool(self.without) and any(excluded in text.lower() for text in texts for excluded in self.without)

    def get_prefix_spelling(self, *, renders_calls: bool, is_longer: bool = False) -> str:
        """The shortest history of the class, or a longer one that has more of everything that may be counted."""
        result = "ct" if renders_calls else "at"
        start = (
            f"u{'dttau' if renders_calls else 'attau'}{result}au"
            if is_longer and self.has_results is not False
            else ("uauauau" if is_longer else "u")
        )
        return self.adapt(start, result)


ANY_HISTORY = HistoryClass()


@dataclass(frozen=True, slots=True)
class Regularity:
    """Whether a history is regular so far, and the calls that must be answered next."""

    is_regular: bool = True
    role: str = ""
    """Of the last message."""
    unanswered: tuple[str, ...] = ()
    has_question: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the history is regular, as it is, when a turn follows."""
        return self.is_regular and self.has_question and not self.unanswered and self.role != "assistant"

    def add(self, message: Message) -> Regularity:
        """The state after one more message."""
        role, unanswered = message["role"], self.unanswered
        calls = message.get("tool_calls") or ()
        is_usual = role in _USUAL_ROLES and _USUAL_KEYS.issuperset(message)
        if role == "system":
            is_usual = is_usual and self.role != "system"
        if role == "tool":
            is_next = bool(unanswered) and message.get("tool_call_id") == unanswered[0]
            is_usual = is_usual and (is_next or (self.role == "assistant" and not unanswered))
            unanswered = unanswered[1:]
        else:
            is_usual = is_usual and not unanswered
            if role == "assistant":
                is_usual = is_usual and self.has_question and self.role != role
            unanswered = tuple(str(call.get("id")) for call in calls)
        return Regularity(
            is_regular=self.is_regular and is_usual,
            role=role,
            unanswered=unanswered,
            has_question=self.has_question or role == "user",
        )


def find_system(first: Message, *, has_any: bool) -> bool | None:
    """Whether a history begins with a system message; None if it has one elsewhere only."""
    return True if first["role"] == "system" else (None if has_any else False)


def is_regular(messages: Sequence[Message]) -> bool:
    """Whether the messages come in the usual order, with all calls answered and without unusual roles and keys."""
    order = Regularity()
    for message in messages:
        order = order.add(message)
    return order.is_complete


def iterate_texts(message: Message) -> Iterator[str]:
    """All strings of a message but its role."""
    return iterate_strings({key: value for key, value in message.items() if key != "role"})


def count_messages(messages: Sequence[Message], counted: Counted) -> int:
    """Count in a short history."""
    if counted is Counted.CALLS:
        return sum(len(message.get("tool_calls") or ()) for message in messages)
    role = {Counted.USERS: "user", Counted.RESULTS: "tool", Counted.TURNS: "assistant"}.get(counted)
    return sum(role in (None, message["role"]) for message in messages)
