"""The subject of an audit: a tokenizer, a chat template with its options, and a renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.audit.report import Token
from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Renderer
from unbroken.rendering.facts import TemplateFacts
from unbroken.rendering.template import TemplateRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One template over one tokenizer, with the renderer under audit."""

    name: str
    """A folder, a hub's name, or a template file."""
    tokenizer: Any
    is_stand_in: bool = False
    """The tokenizer was made by the audit, as there is no model."""
    options: Mapping[str, Any]
    renderer_name: str = "template"
    renderer: Renderer
    template_renderer: TemplateRenderer
    """The template's own renderer; the same object, unless a renderer of the package `renderers` is audited."""

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

    def find_unread_options(self) -> tuple[str, ...]:
        """Find the options that the template never reads: misspelled, or meant for another model."""
        return tuple(sorted(set(self.options) - self.template_renderer.find_variables()))

    def encode(self, text: str) -> list[int]:
        """Encode with the tokenizer as it is, which takes the text of a control token for the token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, control tokens included."""
        text: str = self.tokenizer.backend_tokenizer.decode(list(map(int, token_ids)), skip_special_tokens=False)
        return text

    def get_tokens(self, token_ids: Sequence[int]) -> tuple[Token, ...]:
        """The ids, each with its text."""
        control = self.facts.control_tokens
        return tuple(Token(token_id=int(i), text=control.get_text(int(i)) or self.decode([int(i)])) for i in token_ids)
