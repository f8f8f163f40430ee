r"""The shadow audit: compares a bridge that was used with the end of the whole conversation, rendered in full.

A template that depends on something outside a certificate's panel (the number of messages modulo 97, a hash of some
text) passes it, and gives a wrong bridge in a real conversation. Only a full rendering finds that, and it costs what
the bridge saves: so one turn in N gets one, off the hot path.

    rendered   ..  call  END  \n  user  hi  END  \n  assistant
    bridge                    \n  user  hi  END  \n  assistant     the same, and an end of a turn before it: a match
    rendered   ..  call  END  \n  7th   user  hi  END  \n  assistant                                    a mismatch

Text before the turn's end is not compared, because the sampled ids are facts, however a template would spell them. Nor
is the text that a bridge wrote to end the reasoning: the comparison then begins with the end of the turn after it.
Images are compared by name and place, because two images of one size have the same ids.

This works with any `Renderer`. A `RevocableRenderer` also says which ids end a turn, so that text between the turn's
end and the bridge is noticed, and a stop id inside the turn, where sampling may have ended too early. It can also
refuse bridges like a wrong one.
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
from unbroken.types.arrays import count_common_prefix


class AuditOutcome(StrEnum):
    """The outcome of an audit. The names are metrics and must not change."""

    MATCH = "match"
    MISMATCH = "mismatch"
    """The template writes something else after this turn: the bridge is wrong."""
    NOT_COMPARABLE = "not_comparable"
    """The template refuses the whole conversation, or the bridge has no end of the turn to compare from."""
    ABANDONED = "abandoned"
    """The rollout ended (a timeout, a cancellation, an error) before the rendering was finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedBridge:
    """A bridge, and the conversation up to the end of its new messages."""

    bridge: Bridge
    messages: Sequence[Message]
    """History, the turn before the bridge, the new messages."""
    num_new: int
    tools: tuple[ToolSchema, ...] = ()

    @property
    def assistant(self) -> Message:
        """The turn before the bridge."""
        return self.messages[-self.num_new - 1]

    @property
    def new_messages(self) -> Sequence[Message]:
        """The messages that the bridge added."""
        return self.messages[-self.num_new :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The outcome, and in `detail` the difference or the reason why there was no comparison."""

    outcome: AuditOutcome
    detail: str = ""


@runtime_checkable
class RevocableRenderer(Protocol):
    """Optional methods of a `Renderer`, for audits."""

    def get_turn_end_ids(self) -> frozenset[int]:
        """All ids that may end an assistant turn, in mid-conversation or as the last turn."""
        ...

    def revoke_bridge(
        self, new_messages: Sequence[Message], *, assistant: Message, tools: Sequence[ToolSchema] = (), detail: str
    ) -> None:
        """Refuse bridges like the one between these messages from now on."""
        ...


def audit_bridge(renderer: Renderer, used: UsedBridge) -> Audit:
    """Render the whole conversation and compare its end with the bridge. May run in any thread; takes milliseconds."""
    try:
        rendered = renderer.render(used.messages, tools=used.tools)
    except (TemplateError, MessagesError) as error:
        return Audit(outcome=AuditOutcome.NOT_COMPARABLE, detail=str(error))
    ends = renderer.get_turn_end_ids() if isinstance(renderer, RevocableRenderer) else None
    expected = _get_ids_to_compare(used.bridge, ends or frozenset(renderer.get_stop_token_ids()))
    if expected is None:
        return Audit(
            outcome=AuditOutcome.NOT_COMPARABLE, detail="the bridge closes the turn without an id that ends one"
        )
    found = rendered.token_ids[max(len(rendered.token_ids) - len(expected), 0) :]
    if not np.array_equal(found, expected):
        return Audit(outcome=AuditOutcome.MISMATCH, detail=_describe_difference(found, expected))
    if (difference := _describe_image_difference(rendered, used.bridge)) is not None:
        return Audit(outcome=AuditOutcome.MISMATCH, detail=difference)
    before = rendered.token_ids[: len(rendered.token_ids) - len(expected)]
    if ends is not None and _follows_turn_end(used.bridge) and not (len(before) and int(before[-1]) in ends):
        last = int(before[-1]) if len(before) else None
        detail = f"the bridge follows id {last} in the whole rendering, which does not end a turn: text comes between"
        return Audit(outcome=AuditOutcome.MISMATCH, detail=detail)
    stop_ids = frozenset(renderer.get_stop_token_ids())
    if ends is not None and (stop := _find_stop_inside(rendered, len(before), used, stop_ids)) is not None:
        detail = f"the template writes the stop id {stop} inside this turn too: sampling may have ended before its end"
        return Audit(outcome=AuditOutcome.MISMATCH, detail=detail)
    return Audit(outcome=AuditOutcome.MATCH)


def _find_stop_inside(rendered: RenderedPrompt, stop: int, used: UsedBridge, stop_ids: frozenset[int]) -> int | None:
    """Find a stop id after the turn's first text and before the id that ends it, at `stop - 1` if the model wrote it.

    The ids of the turn's own text do not count: a model may spell them in any way.
    """
    of_turn = rendered.message_indices[:stop] == len(used.messages) - used.num_new - 1
    if not of_turn.any():
        return None
    start = int(np.argmax(of_turn))
    end = stop - 1 if _follows_turn_end(used.bridge) else stop
    inside = rendered.token_ids[start:end][~of_turn[start:end]]
    found = inside[np.isin(inside, list(stop_ids))]
    return int(found[0]) if len(found) else None


def _get_ids_to_compare(bridge: Bridge, ends: frozenset[int]) -> TokenIds | None:
    """The bridge's ids from the end of the turn on, all of them if it does not write that; None if it is not found."""
    if bridge.closing is Closing.NONE:
        return bridge.bridge_ids
    closing = np.flatnonzero(np.isin(bridge.bridge_ids, list(ends)))
    return bridge.bridge_ids[closing[0] :] if len(closing) else None


def _follows_turn_end(bridge: Bridge) -> bool:
    """Whether the id before the compared ids must end a turn; if not, the compared ids begin with one that does."""
    return bridge.closing is Closing.NONE and bridge.num_taken_back == 0


def _describe_image_difference(rendered: RenderedPrompt, bridge: Bridge) -> str | None:
    shift = len(rendered.token_ids) - len(bridge.bridge_ids)
    expected = tuple(replace(image, offset=image.offset + shift) for image in bridge.images)
    found = rendered.images[len(rendered.images) - len(expected) :]
    if found == expected:
        return None
    names = [[image.sha256[:12] for image in images] for images in (found, expected)]
    return f"the last images are {names[0]} in the whole rendering and {names[1]} in the bridge, or are elsewhere"


def _describe_difference(found: TokenIds, expected: TokenIds) -> str:
    """The first difference, counted from the end."""
    num_equal = count_common_prefix(found[::-1], expected[::-1])
    if num_equal == min(len(found), len(expected)):
        return f"the whole rendering has {len(found)} ids, the bridge alone {len(expected)}"
    place = num_equal + 1
    return (
        f"id {place} from the end of {len(expected)} is {int(found[-place])} in the whole rendering and "
        f"{int(expected[-place])} in the bridge"
    )
