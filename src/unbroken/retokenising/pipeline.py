"""The usual pipeline: decode what was sampled, parse it, render the whole conversation, tokenise again.

Nothing is made worse than a careful implementation would do it: messages keep their reasoning and their white space as
the parser found them, and arguments are JSON objects. What differs is what the template and the tokenizer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import ParsedResponse, PartKind
from unbroken.retokenising.causes import Change, Turn, find_changes
from unbroken.retokenising.texts import TemplateTexts
from unbroken.types import TokenIds, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A turn of a conversation, as the pipeline gets it."""

    completion_ids: TokenIds
    parsed: ParsedResponse
    message: Message
    start: int | None
    """Where its ids begin in the sequence; None if they are not there."""
    num_ids: int
    """How many of them are there: a wrong header that ended the turn is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenised:
    """A sequence of ids, and what the usual pipeline makes of it."""

    token_ids: TokenIds
    changes: tuple[Change, ...]
    turns: tuple[Turn, ...]
    """The turns whose ids are in the sequence."""


class UsualPipeline:
    """Passes finished conversations through the usual pipeline of a model's tokenizer and chat template."""

    def __init__(self, texts: TemplateTexts) -> None:
        self._texts = texts

    def retokenise(
        self,
        exact: Sequence[int],
        turns: Sequence[SampledTurn],
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
    ) -> Retokenised | None:
        """Retokenise a conversation that is `exact` up to its last turn; None if the template refuses it.

        `turns` are all of the conversation, in order, and `messages` has an assistant message for each.
        """
        texts = self._texts
        text = texts.render_text(self._make_messages(turns, messages), tools=tools)
        if text is None:
            return None
        # What the template writes between the last turn and a next message is not there yet.
        retokenised = texts.encode(text.rstrip("\n"))
        placed = tuple(_place(turn, turn.start) for turn in turns if turn.start is not None)
        return Retokenised(
            token_ids=token_ids(retokenised),
            turns=placed,
            changes=find_changes(
                exact,
                placed,
                texts.encode(texts.decode(exact)),
                retokenised,
                decode=texts.decode,
                reasoning_end=texts.facts.reasoning_markup[1],
            ),
        )

    def _make_messages(self, turns: Sequence[SampledTurn], messages: Sequence[Message]) -> list[Message]:
        """The conversation up to its last turn, as the pipeline's messages."""
        found = list(messages)
        position = len(found)
        for turn in reversed(turns):
            position = max(i for i in range(position) if found[i]["role"] == "assistant")
            found[position] = self._make_message(turn)
            if turn is turns[-1]:
                del found[position + 1 :]
        return found

    def _make_message(self, turn: SampledTurn) -> Message:
        """The message of a turn. As servers do it, a turn with a call that cannot be read is all content."""
        if not turn.parsed.failures:
            return turn.message
        ids = turn.completion_ids.tolist()
        parts = list(turn.parsed.parts)
        num_reasoning = max((k + 1 for k, part in enumerate(parts) if part.kind is PartKind.REASONING), default=0)
        if num_reasoning and num_reasoning < len(parts) and parts[num_reasoning].kind is PartKind.MARKUP:
            num_reasoning += 1
        kept = [part for part in parts[num_reasoning:] if part.kind is not PartKind.STOP]
        content = self._texts.decode([i for part in kept for i in ids[slice(*part.span)]])
        message: Message = {"role": "assistant", "content": content}
        if turn.parsed.reasoning:
            message["reasoning_content"] = turn.parsed.reasoning
        return message


def _place(turn: SampledTurn, start: int) -> Turn:
    kinds = [PartKind.CONTENT] * len(turn.completion_ids)
    for part in turn.parsed.parts:
        first, last = part.span
        kinds[first:last] = [part.kind] * (last - first)
    return Turn(start=start, stop=start + turn.num_ids, kinds=tuple(kinds[: turn.num_ids]))
