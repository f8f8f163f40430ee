"""What is audited: a tokenizer, a chat template with its options, and the renderer that is to carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Refusal, Renderer
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.turn_ends import TurnEndProbe, TurnEnds
from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import MessageFormat, find_message_format
from unbroken.rendering.template import TemplateRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One template over one tokenizer, ready to be asked."""

    name: str
    """What the user gave: a folder, a hub's name, or a template file."""
    tokenizer: Any
    is_stand_in: bool
    """The tokenizer was made here, as there is no model."""
    source: str
    """The template's text."""
    options: Mapping[str, Any]
    """Variables for the template."""
    renderer_name: str
    renderer: Renderer
    """The renderer under audit."""
    template_renderer: TemplateRenderer
    """The template's own renderer; the same object, unless a renderer of the package is audited."""
    template: ChatTemplate
    """Renders for the audit itself, within limits."""
    message_format: MessageFormat
    control: AddedTokens
    ends: TurnEnds | Refusal

    @classmethod
    def of(
        cls,
        *,
        name: str,
        tokenizer: Any,
        source: str,
        renderer: Renderer,
        template_renderer: TemplateRenderer,
        options: Mapping[str, Any],
        renderer_name: str = "template",
        is_stand_in: bool = False,
    ) -> Subject:
        """Probe the template; see the fields."""
        template = ChatTemplate(source, {**tokenizer.special_tokens_map, **options})
        message_format = find_message_format(template)
        control = AddedTokens.find_control(tokenizer.backend_tokenizer)
        ends: TurnEnds | Refusal
        try:
            ends = TurnEndProbe(template, message_format, control).find()
        except BridgeRefusedError as error:
            ends = error.refusal
        return cls(
            name=name,
            tokenizer=tokenizer,
            is_stand_in=is_stand_in,
            source=source,
            options=dict(options),
            renderer_name=renderer_name,
            renderer=renderer,
            template_renderer=template_renderer,
            template=template,
            message_format=message_format,
            control=control,
            ends=ends,
        )

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), generation_prompt: bool = False
    ) -> str | None:
        """The template's text for a conversation; None if it refuses it."""
        try:
            return self.template.render(
                self.message_format.convert(messages), tools=tools, add_generation_prompt=generation_prompt
            )
        except TemplateError:
            return None

    def find_unread_options(self) -> tuple[str, ...]:
        """The options that the template never reads: misspelled, or meant for another model."""
        return tuple(sorted(set(self.options) - self.template.find_variables()))

    def encode(self, text: str) -> list[int]:
        """The tokenizer as it is, which takes the text of a control token for the token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        text: str = self.tokenizer.backend_tokenizer.decode(list(map(int, token_ids)), skip_special_tokens=False)
        return text

    def texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each id by itself."""
        return tuple(self.control.get_text(int(i)) or self.decode([int(i)]) for i in token_ids)
