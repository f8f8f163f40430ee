"""Which parser reads a renderer's completions: the one that was named, or the one that reads most of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import MessageFormat
from unbroken.rendering.parsing.base import ResponseParser
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.detection import find_format, find_shown_format
from unbroken.rendering.parsing.parser import FormatParser
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
    control: AddedTokens,
    decode: Callable[[Sequence[int]], str],
    stop_token_ids: Collection[int],
    num_stop_ids: int,
) -> ResponseParser:
    """The parser of this name.

    If none is given, the first that there is of:
    1. a format of ours that the chat template shows, in a call that it renders or in what it says;
    2. the tokenizer's response template, which reads less of each turn but describes the format for certain;
    3. the usual format of templates that show none.

    Raises:
        InvalidInputError: there is no such parser, or the tokenizer's response template is missing or broken.
    """
    form = _format_of(name, template, message_format, source, has_response_template=response_template is not None)
    if form is None:
        if response_template is None:
            raise InvalidInputError(
                f"parser={RESPONSE_TEMPLATE!r} needs a tokenizer that has a response_template: set it, or name a format"
            )
        return ResponseTemplateParser(
            response_template,
            control=control,
            decode=decode,
            stop_token_ids=stop_token_ids,
            num_stop_ids=num_stop_ids,
        )
    if reasoning is not None:
        form = form.with_reasoning(reasoning.opening, reasoning.closing)
    return FormatParser(form, control=control, decode=decode, stop_token_ids=stop_token_ids, num_stop_ids=num_stop_ids)


def _format_of(
    name: str | None, template: ChatTemplate, message_format: MessageFormat, source: str, *, has_response_template: bool
) -> CallFormat | None:
    """The format; None stands for the tokenizer's response template."""
    if name == RESPONSE_TEMPLATE:
        return None
    if name is not None:
        return get_format(name)
    return (
        find_shown_format(template, message_format, source)
        if has_response_template
        else find_format(template, message_format, source)
    )
