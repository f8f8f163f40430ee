"""Finds the delimiters of a template's reasoning by probing it, needed to close reasoning that was cut (I7)."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import PROBE_CONTENT, PROBE_REASONING, PROBE_USER, MessageFormat

_USUAL_MARKUP = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelimiters:
    """The texts around reasoning, e.g. `<think>` and `</think>`."""

    opening: str
    closing: str
    close_text: str
    """All text between reasoning and answer, e.g. `\\n</think>\\n\\n`."""


def find_reasoning_delimiters(
    template: ChatTemplate, message_format: MessageFormat, control: AddedTokens
) -> ReasoningDelimiters | None:
    """Find the control token that opens reasoning and the one that closes it; None unless both do only that.

    A channel marker that opens every kind of text, such as gpt-oss's, does not delimit reasoning.
    """
    text = _render_probe(template, message_format)
    reasoning, content = text.find(PROBE_REASONING), text.find(PROBE_CONTENT)
    if not 0 <= reasoning < content:
        return None
    end = reasoning + len(PROBE_REASONING)
    opening = list(control.find(text, 0, reasoning))
    closing = list(control.find(text, end, content))
    if not opening or len(closing) != 1 or text[opening[-1].stop : reasoning].strip():
        return None
    tokens = [match.token for match in control.find(text)]
    if tokens.count(opening[-1].token) != 1 or tokens.count(closing[0].token) != 1:
        return None
    return ReasoningDelimiters(opening=opening[-1].token, closing=closing[0].token, close_text=text[end:content])


def find_reasoning_markup(
    template: ChatTemplate, message_format: MessageFormat, control: AddedTokens
) -> tuple[str, str]:
    r"""Find the texts that open and close reasoning, of any number of tokens: `<|channel>thought` and `<channel|>`.

    `<think>` and `</think>` if the template does not render reasoning, or opens other texts in the same way.
    """
    text = _render_probe(template, message_format)
    reasoning = text.find(PROBE_REASONING)
    before = list(control.find(text, 0, max(reasoning, 0)))
    after = next(control.find(text, reasoning + len(PROBE_REASONING)), None) if reasoning >= 0 else None
    if not before or after is None:
        return _USUAL_MARKUP
    opening = text[before[-1].start : reasoning].strip()
    return (opening, after.token) if text.count(opening) == 1 else _USUAL_MARKUP


def _render_probe(template: ChatTemplate, message_format: MessageFormat) -> str:
    """Render a turn with reasoning and content, from the user's text on; empty if the template cannot."""
    if message_format.reasoning_key is None:
        return ""
    messages: list[Message] = [
        {"role": "user", "content": PROBE_USER},
        {"role": "assistant", "content": PROBE_CONTENT, "reasoning_content": PROBE_REASONING},
    ]
    try:
        text = template.render(message_format.convert(messages), add_generation_prompt=False)
    except TemplateError:
        return ""
    return text[max(text.rfind(PROBE_USER), 0) :]
