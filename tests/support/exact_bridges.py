"""Whether a bridge is what a fresh rendering of the whole conversation ends with, judged on ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge, Closing
from unbroken.rendering.template import TemplateRenderer


def is_exact(
    renderer: TemplateRenderer, bridge: Bridge, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> bool | None:
    """Compare from the end of the turn on; None if the template refuses the conversation, or nothing closes the turn.

    `messages` are history, turn and new messages. The id before what a bridge adds to a whole turn must end a turn.
    """
    ends = renderer.facts.turn_end_ids
    expected = bridge.bridge_ids
    if bridge.closing is not Closing.NONE:
        closing = np.flatnonzero(np.isin(expected, list(ends)))
        if not len(closing):
            return None
        expected = expected[closing[0] :]
    try:
        rendered = renderer.render(list(messages), tools=tools)
    except (TemplateError, MessagesError):
        return None
    start = len(rendered.token_ids) - len(expected)
    if start < 0 or not np.array_equal(rendered.token_ids[start:], expected):
        return False
    shift = len(rendered.token_ids) - len(bridge.bridge_ids)
    images = tuple(replace(image, offset=image.offset + shift) for image in bridge.images)
    if rendered.images[len(rendered.images) - len(images) :] != images:
        return False
    follows_end = bridge.closing is Closing.NONE and bridge.num_taken_back == 0
    return not follows_end or (start > 0 and int(rendered.token_ids[start - 1]) in ends)
