"""Which format a chat template's models write, found from what the template renders and says.

A call that the template renders is the evidence; its source, which may tell the model how to call, counts only where it
renders none. A template that shows no known format gets no calls, but for ChatML without calls of its own, whose models
are asked for the Hermes form.
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
from unbroken.rendering.parsing.formats.hermes import HERMES
from unbroken.rendering.parsing.formats.plain import PLAIN
from unbroken.rendering.parsing.registry import FORMATS

_CHATML = "<|im_start|>"


def find_format(template: ChatTemplate, message_format: MessageFormat, source: str) -> CallFormat:
    """The format of the template whose text is `source`."""
    found = find_shown_format(template, message_format, source)
    if found is not None:
        return found
    return HERMES if _CHATML in source and not _rendered_call(template, message_format) else PLAIN


def find_shown_format(template: ChatTemplate, message_format: MessageFormat, source: str) -> CallFormat | None:
    """The format that the template shows; None if it shows none."""
    call = _rendered_call(template, message_format)
    for known in FORMATS:
        if any(re.search(sign, call) for sign in known.call_patterns):
            return known
    for known in FORMATS:
        if known.hints and all(hint in (call or source) for hint in known.hints):
            return known
    return None


def _rendered_call(template: ChatTemplate, message_format: MessageFormat) -> str:
    """The text of a turn that makes a call, from the user's text on; empty if the template renders none."""
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
