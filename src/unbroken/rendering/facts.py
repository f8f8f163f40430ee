"""What is known about a chat template once it has been probed, for audits, logs and tools."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.rendering.base import Refusal
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.message_format import MessageFormat

__all__ = ["AddedTokens", "TemplateFacts", "TurnEnds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What a `TemplateRenderer` found out about its template; `TemplateRenderer.facts`."""

    source: str
    """The template's text."""
    message_format: MessageFormat
    control_tokens: AddedTokens
    """The tokenizer's."""
    turn_ends: TurnEnds | Refusal
    """What ends an assistant turn, or why that could not be derived."""
    stop_token_ids: tuple[int, ...]
    """Those of the template, of the tokenizer, and those given to the renderer."""
    generation_prompt: str
    """The text that opens an assistant turn; empty where the template shows none by itself."""
    reasoning_markup: tuple[str, str]
    """The texts that open and close reasoning, e.g. `<think>` and `</think>`, which are also the default."""
    parser_name: str
    """The format that completions are read in."""
