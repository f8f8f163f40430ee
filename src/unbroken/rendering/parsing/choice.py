"""Chooses the parser of a renderer's completions: the named one, or the one that suits the template best."""

from __future__ import annotations

from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import MessageFormat
from unbroken.rendering.parsing.base import ResponseParser
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.detection import FormatDetector
from unbroken.rendering.parsing.parser import FormatParser
from unbroken.rendering.parsing.reading.id_stream import CompletionTokens
from unbroken.rendering.parsing.registry import get_format
from unbroken.rendering.parsing.response_template import RESPONSE_TEMPLATE, ResponseTemplateParser
from unbroken.rendering.reasoning import ReasoningDelimiters


def choose_parser(
    name: str | None,
    *,
    template: ChatTemplate,
    message_format: MessageFormat,
    source: str,
    response_template: Any,
    reasoning: ReasoningDelimiters | None,
    tokens: CompletionTokens,
) -> ResponseParser:
    """Choose a parser by name.

    Without a name, the first of these that exists:
    1. a format of ours that reads back the calls that the chat template renders, or that its source describes;
    2. the tokenizer's response template, which reads less of each turn, but is certain to be the right format;
    3. the usual format of templates that show none.

    Raises:
        InvalidInputError: there is no such parser, or the tokenizer's response template is missing or broken.
    """
    call_format: CallFormat | None
    if name == RESPONSE_TEMPLATE:
        call_format = None
    elif name is not None:
        call_format = get_format(name)
    else:
        detector = FormatDetector(template, message_format, source, tokens=tokens, reasoning=reasoning)
        call_format = detector.detect() if response_template is None else detector.find_shown()
    if call_format is None:
        if response_template is None:
            raise InvalidInputError(
                f"parser={RESPONSE_TEMPLATE!r} needs a tokenizer with a response_template: set it, or name a format"
            )
        return ResponseTemplateParser(response_template, tokens)
    if reasoning is not None:
        call_format = call_format.with_reasoning(reasoning.opening, reasoning.closing)
    return FormatParser(call_format, tokens)
