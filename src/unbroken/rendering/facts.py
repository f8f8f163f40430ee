"""Facts about a chat template, found by probing it, for audits, logs and tools."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.rendering.base import Refusal
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.message_format import MessageFormat

__all__ = ["AddedTokens", "TemplateFacts", "TurnEnds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """The facts that a `TemplateRenderer` found out about its template: `TemplateRenderer.facts`."""

    source: str
    message_format: MessageFormat
    control_tokens: AddedTokens
    turn_ends: TurnEnds | Refusal
    """The tokens that end an assistant turn, or why they could not be derived."""
    turn_end_ids: frozenset[int]
    """All ids that may end an assistant turn in a rendering."""
    stop_token_ids: tuple[int, ...]
    """Those of the template and the tokenizer, and those given to the renderer."""
    generation_prompt: str
    """The text that opens an assistant turn; empty if the template does not write one on its own."""
    reasoning_markup: tuple[str, str]
    """The texts that open and close reasoning; `<think>` and `</think>` by default."""
    parser_name: str
    """The format of completions."""
