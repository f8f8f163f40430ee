"""Facts about a chat template with its tokenizer, found by probing it with synthetic messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from unbroken.errors import InvalidInputError
from unbroken.rendering.base import Refusal
from unbroken.rendering.bridge.turn_ends import BridgeRefusedError, TurnEndProbe, TurnEnds
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.tokenizer import AddedTokens, TokenizerFacts, TokenMatch
from unbroken.rendering.message_format import (
    MessageFormat,
    ReasoningDelimiters,
    find_message_format,
    find_reasoning_delimiters,
    find_reasoning_markup,
)

__all__ = ["AddedTokens", "TemplateFacts", "TokenMatch", "TurnEnds", "probe_template"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What probing found out about a template with its tokenizer: `TemplateRenderer.facts`."""

    source: str
    message_format: MessageFormat
    control_tokens: AddedTokens
    turn_ends: TurnEnds | Refusal
    """The tokens that end an assistant turn, or why they could not be derived."""
    turn_end_ids: frozenset[int]
    """All ids that may end an assistant turn in a rendering."""
    stop_token_ids: tuple[int, ...]
    """Those of the template and the tokenizer, and those given to the renderer, if none stands inside a turn."""
    without_stop: str
    """The kinds of turns that none of these ends, such as "text"; empty if each ends."""
    generation_prompt: str
    """The text that opens an assistant turn; empty if the template does not write one on its own."""
    reasoning: ReasoningDelimiters | None
    """None unless control tokens delimit reasoning."""
    reasoning_markup: tuple[str, str]
    """The texts that open and close reasoning; `<think>` and `</think>` by default."""

    @property
    def turn_end_tokens(self) -> Collection[str]:
        """The tokens that end an assistant turn; none if they could not be derived."""
        return self.turn_ends.tokens if isinstance(self.turn_ends, TurnEnds) else ()

    @property
    def num_stop_ids(self) -> int:
        """How many ids may stand at the end of a completion, at least 1."""
        return max(len(self.turn_ends.sequence), 1) if isinstance(self.turn_ends, TurnEnds) else 1


def probe_template(
    template: ChatTemplate, tokenizer: TokenizerFacts, control: AddedTokens, stop_token_ids: Sequence[int]
) -> TemplateFacts:
    """Probe a template. `stop_token_ids` are more ids that end a turn; those that stand inside one are left out.

    Raises:
        InvalidInputError: a stop id is not in the vocabulary.
    """
    message_format = find_message_format(template)
    probe = TurnEndProbe(template, message_format, control)
    ends = _find_turn_ends(probe)
    others = _collect_other_ids(tokenizer, stop_token_ids) - _get_ids(control, probe.tokens_inside)
    stops = others | _get_ids(control, ends.stops if isinstance(ends, TurnEnds) else ())
    kinds = ends.without_stop if isinstance(ends, TurnEnds) else ()
    return TemplateFacts(
        source=template.source,
        message_format=message_format,
        control_tokens=control,
        turn_ends=ends,
        turn_end_ids=_get_ids(control, ends.tokens if isinstance(ends, TurnEnds) else ()),
        stop_token_ids=tuple(sorted(stops)),
        without_stop="" if others else ", ".join(kinds) or ("" if stops else "any kind"),
        generation_prompt=probe.find_generation_prompt(),
        reasoning=find_reasoning_delimiters(template, message_format, control),
        reasoning_markup=find_reasoning_markup(template, message_format, control),
    )


def _find_turn_ends(probe: TurnEndProbe) -> TurnEnds | Refusal:
    try:
        return probe.find_turn_ends()
    except BridgeRefusedError as error:
        return error.refusal


def _get_ids(control: AddedTokens, tokens: Iterable[str]) -> frozenset[int]:
    return frozenset(i for token in tokens if (i := control.get_id(token)) is not None)


def _collect_other_ids(tokenizer: TokenizerFacts, given: Sequence[int]) -> frozenset[int]:
    """Collect the ids that end a turn by the word of the tokenizer or the caller."""
    for token_id in given:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidInputError(
                f"stop_token_ids must lie in the vocabulary [0, {tokenizer.vocab_size}), got {token_id}"
            )
    return frozenset([*given, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])
