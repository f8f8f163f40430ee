"""The subject of an audit: a tokenizer, a chat template with its options, and a renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.audit.report import Token
from unbroken.rendering.base import Renderer
from unbroken.retokenising.comparison import TemplateTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(TemplateTexts):
    """One template over one tokenizer, with the renderer under audit."""

    name: str
    """A folder, a hub's name, or a template file."""
    is_stand_in: bool = False
    """The tokenizer was made by the audit, as there is no model."""
    options: Mapping[str, Any]
    renderer_name: str = "template"
    renderer: Renderer
    """`template_renderer`, unless a renderer of the package `renderers` is audited."""

    @property
    def renders_reasoning(self) -> bool:
        """Whether the template has a key for reasoning."""
        return self.facts.message_format.reasoning_key is not None

    def find_unread_options(self) -> tuple[str, ...]:
        """Find the options that the template never reads: misspelled, or meant for another model."""
        return tuple(sorted(set(self.options) - self.template_renderer.find_variables()))

    def get_tokens(self, token_ids: Sequence[int]) -> tuple[Token, ...]:
        """The ids, each with its text."""
        return tuple(Token(token_id=int(i), text=self.get_text(int(i))) for i in token_ids)
