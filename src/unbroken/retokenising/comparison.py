"""A trajectory as it was sampled, and what the usual pipeline makes of it: decode, parse, render, tokenise again.

Nothing is made worse than a careful implementation would do it: messages keep their reasoning and their white space as
the parser found them, and arguments are JSON objects. What differs is what the template and the tokenizer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unbroken.errors import TemplateError
from unbroken.ledger.nodes import Origin, Path
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import TEMPLATE, ParsedResponse, PartKind
from unbroken.rendering.facts import TemplateFacts
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.changes import Cause, Change, IdOrigin, SampledSpan, find_changes
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import BoolMask, Logprobs, TokenIds, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTexts:
    """Text and ids of a model as most pipelines handle them: one chat template, one tokenizer, no state."""

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

    def get_text(self, token_id: int) -> str:
        """The text of one id."""
        return self.facts.control_tokens.get_text(token_id) or self.decode([token_id])


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
    """The T ids of a conversation as they were sampled and given, and those that the usual pipeline makes of it."""

    token_ids: TokenIds
    origins: tuple[IdOrigin, ...]
    """One for each of `token_ids`."""
    rollout_logprobs: Logprobs | None
    """[T] the sampler's, NaN where nothing was sampled; None if they are not known."""
    retokenised_ids: TokenIds
    changes: tuple[Change, ...]
    turns: tuple[SampledSpan, ...]
    """The turns whose ids are in the sequence: all, unless the rollout forked."""
    num_turns_left_out: int

    @property
    def sampled_mask(self) -> BoolMask:
        """[T] whether an id was sampled."""
        return np.array([origin is IdOrigin.SAMPLED for origin in self.origins], dtype=np.bool_)

    @property
    def differs(self) -> bool:
        """Whether the usual pipeline would train on other ids."""
        return bool(self.changes)

    @property
    def causes(self) -> frozenset[Cause]:
        """All causes of its changes."""
        return frozenset(cause for change in self.changes for cause in change.causes)

    def find_changes(self, cause: Cause | None = None) -> list[Change]:
        """The changes of one cause, or all."""
        return [change for change in self.changes if cause is None or cause in change.causes]

    def count_changed_ids(self, cause: Cause | None = None) -> int:
        """Count the sampled ids that are not there any more, for one cause or for any."""
        gaps = [change.gap.before for change in self.find_changes(cause)]
        return sum(self.origins[start:stop].count(IdOrigin.SAMPLED) for start, stop in gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of rollouts, turns and sampled ids."""

    num_rollouts: int
    num_turns: int
    num_ids: int


def count_compared(rollouts: Sequence[Retokenised]) -> Counts:
    """Count all rollouts with their turns and sampled ids."""
    return Counts(
        num_rollouts=len(rollouts),
        num_turns=sum(len(one.turns) for one in rollouts),
        num_ids=sum(one.origins.count(IdOrigin.SAMPLED) for one in rollouts),
    )


def count_changed(rollouts: Sequence[Retokenised], cause: Cause | None = None) -> Counts:
    """Count the rollouts and turns that changed for one cause or for any, and the sampled ids that are gone."""
    found = [(one, one.find_changes(cause)) for one in rollouts]
    return Counts(
        num_rollouts=sum(bool(changes) for _, changes in found),
        num_turns=sum(any(map(turn.touches, changes)) for one, changes in found for turn in one.turns),
        num_ids=sum(one.count_changed_ids(cause) for one in rollouts),
    )


def compare_trajectory(texts: TemplateTexts, trajectory: Trajectory) -> Retokenised | None:
    """Compare the path to the last turn of a trajectory; None if the template refuses the parsed conversation."""
    path = trajectory.tree.path(trajectory.turns[-1].end)
    places = {segment.node: segment for segment in path.segments if segment.origin is Origin.SAMPLED}
    turns = []
    for turn in trajectory.turns:
        place = places.get(turn.end.node)
        turns.append(
            SampledTurn(
                completion_ids=turn.sequence.completion_ids,
                parsed=turn.parsed,
                message=turn.message,
                start=None if place is None else place.start,
                num_ids=0 if place is None else place.stop - place.start,
            )
        )
    return retokenise(
        texts,
        path.token_ids,
        _find_origins(path),
        turns,
        trajectory.messages,
        tools=trajectory.tools,
        rollout_logprobs=path.rollout_logprobs,
    )


def _find_origins(path: Path) -> tuple[IdOrigin, ...]:
    """Where each id of a path is from."""
    origins = zip(path.origins, path.message_indices.tolist(), path.sampled_mask.tolist(), strict=True)
    return tuple(_find_origin(*each) for each in origins)


def _find_origin(origin: Origin, message_index: int, is_sampled: bool) -> IdOrigin:
    if origin is Origin.SAMPLED and not is_sampled:  # given inside a completion
        return IdOrigin.BRIDGE
    is_text = origin is Origin.BRIDGE and message_index != TEMPLATE
    return IdOrigin.MESSAGE if is_text else IdOrigin(origin.value)


def retokenise(
    texts: TemplateTexts,
    exact: TokenIds,
    origins: Sequence[IdOrigin],
    turns: Sequence[SampledTurn],
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSchema] = (),
    rollout_logprobs: Logprobs | None = None,
) -> Retokenised | None:
    """Pass a conversation, whose ids up to its last turn are `exact`, through the usual pipeline.

    `turns` are all of the conversation, in order, and `messages` has an assistant message for each. None: the template
    refuses it.
    """
    text = texts.render_text(_make_messages(texts, turns, messages), tools=tools)
    if text is None:
        return None
    # What the template writes between the last turn and a next message is not there yet.
    retokenised = texts.encode(text.rstrip("\n"))
    spans = tuple(_make_span(turn, turn.start) for turn in turns if turn.start is not None)
    ids = exact.tolist()
    return Retokenised(
        token_ids=exact,
        origins=tuple(origins),
        rollout_logprobs=rollout_logprobs,
        retokenised_ids=token_ids(retokenised),
        turns=spans,
        num_turns_left_out=len(turns) - len(spans),
        changes=find_changes(
            ids,
            spans,
            texts.encode(texts.decode(ids)),
            retokenised,
            decode=texts.decode,
            reasoning_end=texts.facts.reasoning_markup[1],
        ),
    )


def _make_messages(texts: TemplateTexts, turns: Sequence[SampledTurn], messages: Sequence[Message]) -> list[Message]:
    """The conversation up to its last turn, as the pipeline's messages."""
    found = list(messages)
    position = len(found)
    for turn in reversed(turns):
        position = max(i for i in range(position) if found[i]["role"] == "assistant")
        found[position] = _make_message(texts, turn)
        if turn is turns[-1]:
            del found[position + 1 :]
    return found


def _make_message(texts: TemplateTexts, turn: SampledTurn) -> Message:
    """The message of a turn. As servers do it, a turn with a call that cannot be read is all content."""
    if not turn.parsed.failures:
        return turn.message
    ids = turn.completion_ids.tolist()
    parts = list(turn.parsed.parts)
    num_reasoning = max((k + 1 for k, part in enumerate(parts) if part.kind is PartKind.REASONING), default=0)
    if num_reasoning and num_reasoning < len(parts) and parts[num_reasoning].kind is PartKind.MARKUP:
        num_reasoning += 1
    kept = [part for part in parts[num_reasoning:] if part.kind is not PartKind.STOP]
    content = texts.decode([i for part in kept for i in ids[slice(*part.span)]])
    message: Message = {"role": "assistant", "content": content}
    if turn.parsed.reasoning:
        message["reasoning_content"] = turn.parsed.reasoning
    return message


def _make_span(turn: SampledTurn, start: int) -> SampledSpan:
    kinds = [PartKind.CONTENT] * len(turn.completion_ids)
    for part in turn.parsed.parts:
        first, last = part.span
        kinds[first:last] = [part.kind] * (last - first)
    return SampledSpan(start=start, stop=start + turn.num_ids, kinds=tuple(kinds[: turn.num_ids]))
