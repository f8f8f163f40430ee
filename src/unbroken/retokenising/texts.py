"""Text and ids of one model as most pipelines handle them: one template, one tokenizer, nothing kept between turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.facts import TemplateFacts
from unbroken.rendering.template import TemplateRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTexts:
    """A chat template over a tokenizer."""

    tokenizer: Any
    template_renderer: TemplateRenderer

    @property
    def facts(self) -> TemplateFacts:
        """The facts that the template's own renderer found out."""
        return self.template_renderer.facts

    def render_text(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> str | None:
        """Render a conversation with the template; None if it refuses it."""
        try:
            return self.template_renderer.render_text(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except TemplateError:
            return None

    def encode(self, text: str) -> list[int]:
        """Encode with the tokenizer as it is, which takes the text of a control token for the token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, control tokens included."""
        text: str = self.tokenizer.backend_tokenizer.decode(list(map(int, token_ids)), skip_special_tokens=False)
        return text
