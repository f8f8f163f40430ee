"""Detects the call format of a chat template's models.

The evidence is a call that the template renders; its source, which may describe how to call, counts only if it renders
none. A template that shows no known format is read without calls, except ChatML that renders no calls: its models are
asked to write the Hermes format.
"""

from __future__ import annotations

import re

from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_NAMES,
    PROBE_TOOLS,
    PROBE_USER,
    MessageFormat,
    probe_call,
)
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats.json_calls.hermes import HERMES
from unbroken.rendering.parsing.formats.plain import PLAIN
from unbroken.rendering.parsing.registry import FORMATS

_CHATML = "<|im_start|>"


def detect_format(template: ChatTemplate, message_format: MessageFormat, source: str) -> CallFormat:
    """Detect the format of a template whose text is `source`."""
    found = find_shown_format(template, message_format, source)
    if found is not None:
        return found
    return HERMES if _CHATML in source and not _render_call(template, message_format) else PLAIN


def find_shown_format(template: ChatTemplate, message_format: MessageFormat, source: str) -> CallFormat | None:
    """Find the format that the template shows; None if it shows none."""
    call = _render_call(template, message_format)
    for known in FORMATS:
        if any(re.search(pattern, call) for pattern in known.call_patterns):
            return known
    for known in FORMATS:
        if known.hints and all(hint in (call or source) for hint in known.hints):
            return known
    return None


def _render_call(template: ChatTemplate, message_format: MessageFormat) -> str:
    """Render a turn with a call, from the user's text on; empty if the template renders no calls."""
    if not message_format.renders_calls:
        return ""
    call = probe_call(PROBE_NAMES[0], "callprob1", {"value": PROBE_ARGUMENT})
    messages: list[Message] = [
        {"role": "user", "content": PROBE_USER},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        text = template.render(message_format.convert(messages), tools=PROBE_TOOLS, add_generation_prompt=False)
    except TemplateError:
        return ""
    return text[max(text.rfind(PROBE_USER), 0) :]
