"""Instructions in roles that a template does not write.

Agents send instructions as `developer` messages, as several system messages, and between the turns. Many templates
leave such messages out, or refuse them:

    developer, user             Qwen3 and others leave it out       ->  system, user
    system, system, user        Qwen3.5 refuses it                  ->  system (both texts), user
    system, user, system        Qwen3.5 refuses it                  ->  system, user, user

What the template writes stays as it is. A change depends on the roles alone, so a conversation that grows keeps its
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unbroken.counters import Counters, Event
from unbroken.messages import Message, get_text

_INSTRUCTIONS = ("system", "developer")
_MAX_TRIED = 4
"""How many messages in a row are tried: more of the same are written like these."""
WritesRoles = Callable[[tuple[str, ...]], bool]
"""Whether a template writes the text of every message of a conversation with these roles."""


def adapt_roles(messages: Sequence[Message], *, writes: WritesRoles, events: Counters) -> Sequence[Message]:
    """Give instructions a role and a place in which the template writes them; each change is counted.

    Messages that are malformed pass unchanged: rendering refuses them.
    """
    if not needs_adapting(messages):
        return messages
    num_leading = next((k for k, one in enumerate(messages) if not _is_instruction(one)), len(messages))
    leading = _adapt_leading(messages[:num_leading], writes, events)
    begin = tuple(message["role"] for message in leading[:1])
    later = [_adapt_later(message, begin, writes, events) for message in messages[num_leading:]]
    return [*leading, *later]


def needs_adapting(messages: Sequence[Message]) -> bool:
    """Whether there are instructions besides a system message at the beginning."""
    return any(
        message.get("role") in _INSTRUCTIONS and (k > 0 or message["role"] != "system") and _is_instruction(message)
        for k, message in enumerate(messages)
    )


def _adapt_leading(messages: Sequence[Message], writes: WritesRoles, events: Counters) -> list[Message]:
    roles = tuple(message["role"] for message in messages[:_MAX_TRIED])
    if roles in ((), ("system",)) or writes((*roles, "user")):
        return list(messages)
    if "developer" in roles:
        events.count(Event.ADAPTED_ROLE, "developer_as_system")
    as_system = [_with_role(message, "system") for message in messages]
    if len(messages) == 1 or writes((*(["system"] * len(roles)), "user")):
        return as_system
    events.count(Event.ADAPTED_ROLE, "joined_system")
    joined: Message = {**as_system[0], "content": "\n\n".join(get_text(one.get("content")) for one in messages)}
    return [joined]


def _adapt_later(message: Message, begin: tuple[str, ...], writes: WritesRoles, events: Counters) -> Message:
    if not _is_instruction(message) or writes((*begin, "user", message["role"])):
        return message
    if message["role"] == "developer" and writes((*begin, "user", "system")):
        events.count(Event.ADAPTED_ROLE, "developer_as_system")
        return _with_role(message, "system")
    events.count(Event.ADAPTED_ROLE, "system_as_user")
    return _with_role(message, "user")


def _is_instruction(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    is_text = isinstance(content, str) or (
        isinstance(content, list)
        and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    )
    return is_text and message.get("role") in _INSTRUCTIONS


def _with_role(message: Message, role: str) -> Message:
    return {**message, "role": role}
