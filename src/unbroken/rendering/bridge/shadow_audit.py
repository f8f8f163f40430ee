r"""The shadow audit: a bridge that was used is compared with the end of the whole conversation, rendered in full.

A certificate is evidence from a panel of synthetic histories. A template keyed on something outside that panel (the
number of messages modulo 97, a hash of some text) passes it, and gives a wrong bridge in a real conversation. Only a
full rendering of that conversation can tell, which costs what the bridge saves: so one turn in N gets one, elsewhere.

    rendered   ..  call  END  \n  user  hi  END  \n  assistant
    bridge                    \n  user  hi  END  \n  assistant     the same, and an end of a turn before it: a match
    rendered   ..  call  END  \n  7th   user  hi  END  \n  assistant                                    a mismatch

What stands before the turn's end is not compared: the ids that were sampled are facts, however a template spells them
again. Nor is what a bridge wrote to end a reasoning: the comparison then begins with the end of the turn behind it.
Images are compared by name and place, as ids do not tell two of one size apart.

This works over the `Renderer` protocol alone. A renderer that is a `RevocableRenderer` as well says which ids end a
turn, so that text put between the turn's end and the bridge is seen too, and gives no such bridge again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np

from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge, Closing, RenderedPrompt, Renderer
from unbroken.types import TokenIds


class AuditOutcome(StrEnum):
    """What an audit found. Stable names: they are metrics."""

    MATCH = "match"
    MISMATCH = "mismatch"
    """The template writes something else after this turn: the bridge was wrong."""
    NOT_COMPARABLE = "not_comparable"
    """The template refuses the whole conversation, or it cannot be told where the bridge ends the turn."""
    ABANDONED = "abandoned"
    """The rollout was over (a timeout, a cancellation, an error) before the rendering was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedBridge:
    """A bridge, and the conversation up to the end of its new messages."""

    bridge: Bridge
    messages: Sequence[Message]
    """All of them; the turn that the bridge follows comes before the new ones."""
    num_new: int
    """How many messages at the end the bridge brought."""
    tools: tuple[ToolSchema, ...] = ()

    @property
    def assistant(self) -> Message:
        """The turn that the bridge follows."""
        return self.messages[-self.num_new - 1]

    @property
    def new_messages(self) -> Sequence[Message]:
        """The messages that the bridge brought."""
        return self.messages[-self.num_new :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The outcome, and where and how the two differ or why they cannot be compared."""

    outcome: AuditOutcome
    detail: str = ""


@runtime_checkable
class RevocableRenderer(Protocol):
    """What a `Renderer` may offer to audits beside its own methods."""

    def get_turn_end_ids(self) -> frozenset[int]:
        """Every id that the end of an assistant turn may be rendered with, in mid-conversation or at its end."""
        ...

    def revoke_bridge(
        self, new_messages: Sequence[Message], *, assistant: Message, tools: Sequence[ToolSchema] = (), detail: str
    ) -> None:
        """Refuse from now on what was proven for bridges like the one between these messages."""
        ...


def audit_bridge(renderer: Renderer, used: UsedBridge) -> Audit:
    """Render the whole conversation and compare its end with the bridge. May run in any thread; takes milliseconds."""
    try:
        rendered = renderer.render(used.messages, tools=used.tools)
    except (TemplateError, MessagesError) as error:
        return Audit(outcome=AuditOutcome.NOT_COMPARABLE, detail=str(error))
    ends = renderer.get_turn_end_ids() if isinstance(renderer, RevocableRenderer) else None
    expected = _behind_closing(used.bridge, ends or frozenset(renderer.get_stop_token_ids()))
    if expected is None:
        return Audit(outcome=AuditOutcome.NOT_COMPARABLE, detail="the bridge closes the turn with no id that ends one")
    found = rendered.token_ids[max(len(rendered.token_ids) - len(expected), 0) :]
    if not np.array_equal(found, expected):
        return Audit(outcome=AuditOutcome.MISMATCH, detail=_difference(found, expected))
    if (unlike := _unlike_images(rendered, used.bridge)) is not None:
        return Audit(outcome=AuditOutcome.MISMATCH, detail=unlike)
    before = rendered.token_ids[: len(rendered.token_ids) - len(expected)]
    if ends is not None and _follows_an_end(used.bridge) and not (len(before) and int(before[-1]) in ends):
        last = int(before[-1]) if len(before) else None
        detail = f"the bridge follows id {last} in the whole rendering, which ends no turn: there is text between them"
        return Audit(outcome=AuditOutcome.MISMATCH, detail=detail)
    return Audit(outcome=AuditOutcome.MATCH)


def _behind_closing(bridge: Bridge, ends: frozenset[int]) -> TokenIds | None:
    """The bridge's ids from its own end of the turn on, all of them where it has none; None if that is not found."""
    if bridge.closing is Closing.NONE:
        return bridge.bridge_ids
    closing = np.flatnonzero(np.isin(bridge.bridge_ids, list(ends)))
    return bridge.bridge_ids[closing[0] :] if len(closing) else None


def _follows_an_end(bridge: Bridge) -> bool:
    """Whether the id before the compared ones was an end of the turn: else they begin with one."""
    return bridge.closing is Closing.NONE and bridge.num_taken_back == 0


def _unlike_images(rendered: RenderedPrompt, bridge: Bridge) -> str | None:
    """How the last images of the rendering are not the bridge's, in their places; None if they are."""
    shift = len(rendered.token_ids) - len(bridge.bridge_ids)
    expected = tuple(replace(image, offset=image.offset + shift) for image in bridge.images)
    found = rendered.images[len(rendered.images) - len(expected) :]
    if found == expected:
        return None
    names = [[image.sha256[:12] for image in images] for images in (found, expected)]
    return f"the last images are {names[0]} in the whole rendering and {names[1]} in the bridge, or stand elsewhere"


def _difference(found: TokenIds, expected: TokenIds) -> str:
    """Counted from the end, where the two begin to agree."""
    num_both = min(len(found), len(expected))
    differs = np.flatnonzero(found[::-1][:num_both] != expected[::-1][:num_both])
    if not len(differs):
        return f"the whole rendering has {len(found)} ids, the bridge alone {len(expected)}"
    place = int(differs[0]) + 1
    return (
        f"id {place} from the end of {len(expected)} is {int(found[-place])} in the whole rendering and "
        f"{int(expected[-place])} in the bridge"
    )
