"""Which chat template a tokenizer is rendered with."""

from __future__ import annotations

from typing import Any

from unbroken.errors import TemplateError


def template_source(tokenizer: Any, chat_template: str | None) -> str:
    """The text of `chat_template`, a template or the name of one of the tokenizer's; the tokenizer's own for None.

    Raises:
        TemplateError: there is none.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chat_template is not None and chat_template not in named and "{" not in chat_template:
        raise TemplateError(
            f"chat_template must be the text of a template or the name of one of the tokenizer's {sorted(named)}, got "
            f"{chat_template[:80]!r}"
        )
    try:
        source: str = tokenizer.get_chat_template(chat_template)
    except ValueError as error:
        names = sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []
        known = f"one of {names}" if names else "the text of a template"
        raise TemplateError(
            f"the tokenizer has no chat template to use: give {known} as chat_template=, or set "
            f"tokenizer.chat_template ({str(error).split('!')[0]})"
        ) from None
    return source
