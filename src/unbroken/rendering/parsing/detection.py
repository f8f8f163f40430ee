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
    TemplateForms,
    probe_call,
)
from unbroken.rendering.parsing.format import Format
from unbroken.rendering.parsing.formats.hermes import HERMES
from unbroken.rendering.parsing.formats.plain import PLAIN
from unbroken.rendering.parsing.registry import FORMATS

_CHATML = "<|im_start|>"


def find_format(template: ChatTemplate, forms: TemplateForms, source: str) -> Format:
    """The format of the template whose text is `source`."""
    found = known_format(template, forms, source)
    if found is not None:
        return found
    return HERMES if _CHATML in source and not _rendered_call(template, forms) else PLAIN


def known_format(template: ChatTemplate, forms: TemplateForms, source: str) -> Format | None:
    """The format that the template shows; None if it shows none."""
    call = _rendered_call(template, forms)
    for known in FORMATS:
        if any(re.search(sign, call) for sign in known.signs):
            return known
    for known in FORMATS:
        if known.hints and all(hint in (call or source) for hint in known.hints):
            return known
    return None


def _rendered_call(template: ChatTemplate, forms: TemplateForms) -> str:
    """The text of a turn that makes a call, from the user's text on; empty if the template renders none."""
    if not forms.renders_calls:
        return ""
    call = probe_call(PROBE_NAMES[0], "callprob1", {"value": PROBE_ARGUMENT})
    messages: list[Message] = [
        {"role": "user", "content": PROBE_USER},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        text = template.render(forms.conform(messages), tools=PROBE_TOOLS, add_generation_prompt=False)
    except TemplateError:
        return ""
    return text[max(text.rfind(PROBE_USER), 0) :]
