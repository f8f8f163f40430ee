"""Gets the chat template to use with a tokenizer."""

from __future__ import annotations

from typing import Any

from unbroken.errors import TemplateError


def get_template_source(tokenizer: Any, chat_template: str | None) -> str:
    """Get the text of `chat_template`, a template or the name of one of the tokenizer's; the tokenizer's own for None.

    Raises:
        TemplateError: the tokenizer has no such template.
    """
    names = sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []
    if chat_template is not None and chat_template not in names and "{" not in chat_template:
        raise TemplateError(
            f"chat_template must be the text of a template or the name of one of the tokenizer's {names}, got "
            f"{chat_template[:80]!r}"
        )
    try:
        source: str = tokenizer.get_chat_template(chat_template)
    except ValueError as error:
        known = f"one of {names}" if names else "the text of a template"
        raise TemplateError(
            f"the tokenizer has no chat template to use: give {known} as chat_template=, or set "
            f"tokenizer.chat_template ({str(error).split('!')[0]})"
        ) from None
    return source
