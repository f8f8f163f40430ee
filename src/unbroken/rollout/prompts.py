"""Prompts over a token tree: the ids so far and a bridge, or a fresh rendering that forks where it must.

A prompt is not recorded until its completion is: without one (full context, failure, abort) the tree stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unbroken.counters import Counters, Event
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import BridgeKind, ForkReason, Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import TEMPLATE, Bridge, BridgeOutcome, Closing, Refusal, RefusalReason, Renderer
from unbroken.rollout.trajectory import Turn
from unbroken.types import ImageSpan, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenIds:
    """K >= 0 ids that no engine sampled, to be attached to a tree; arrays are [K]."""

    origin: Origin
    token_ids: TokenIds
    message_indices: TokenIds
    images: tuple[ImageSpan, ...]
    """Offsets count from the first of these ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt for the engine, and how it follows from the recorded ids (as in `Turn`)."""

    parent: Position | None
    """The end of its recorded part; None if nothing of it is recorded."""
    given: GivenIds
    """The ids after it."""
    token_ids: TokenIds
    """[T] all ids."""
    images: tuple[ImageSpan, ...]
    """All images; offsets count from the first of all ids."""
    bridge: BridgeOutcome | None
    fork: ForkReason | None
    continued: BridgeKind | None
    """How the prompt continues an earlier turn; None if it does not."""
    closing: Closing
    """How the previous turn was closed."""


class PromptBuilder:
    """Builds prompts over one tree, which it does not change. Its methods render: call them in a thread."""

    def __init__(self, renderer: Renderer, tree: TokenTree) -> None:
        self._renderer = renderer
        self._tree = tree

    def extend(
        self, turn: Turn, new: Sequence[Message], *, earlier: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Prompt:
        """Build the prompt after `turn` and `new` messages: a bridge, or a fresh rendering if there is none.

        `earlier` are the messages before the turn's own.
        """
        bridge = self._renderer.bridge_to_next_turn(
            self._tree.token_ids(turn.prompt_end),
            turn.sequence.completion_ids,
            new,
            assistant=turn.message,
            tools=tools,
            earlier=earlier,
        )
        if isinstance(bridge, Bridge):
            return self._attach(turn, bridge, num_before=len(earlier) + 1)
        follows_template = bridge.reason is RefusalReason.REWRITES_HISTORY
        reason = ForkReason.TEMPLATE_REWRITES if follows_template else ForkReason.REFUSED_BRIDGE
        messages = [*earlier, turn.message, *new]
        return self.render(messages, tools=tools, last=turn, reason=reason, refusal=bridge)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema],
        last: Turn | None,
        reason: ForkReason | None,
        refusal: Refusal | None = None,
    ) -> Prompt:
        """Render all messages afresh, and split the ids into those that are recorded already and those that are not.

        The prompt continues the `last` turn if it begins with all its ids. Otherwise it forks for this `reason`, or is
        the first prompt of a conversation if `reason` is None.
        """
        rendered = self._renderer.render(list(messages), tools=tools)
        start, num_shared = self._tree.find_longest_prefix(rendered.token_ids, images=rendered.images)
        continues = last is not None and start == last.end
        given = GivenIds(
            origin=Origin.BRIDGE if continues else Origin.PROMPT,
            token_ids=rendered.token_ids[num_shared:],
            message_indices=rendered.message_indices[num_shared:],
            images=tuple(replace(i, offset=i.offset - num_shared) for i in rendered.images if i.offset >= num_shared),
        )
        if last is not None and continues:
            closing = self._get_closing(last)
            return self._build(start, given, bridge=refusal, continues=last, kind=BridgeKind.RENDERED, closing=closing)
        return self._build(start, given, bridge=refusal, fork=reason)

    def _attach(self, turn: Turn, bridge: Bridge, *, num_before: int) -> Prompt:
        """Attach a bridge to a turn, or before its stop id if the model sampled a wrong header."""
        indices = bridge.message_indices
        given = GivenIds(
            origin=Origin.BRIDGE,
            token_ids=bridge.bridge_ids,
            message_indices=np.where(indices == TEMPLATE, TEMPLATE, indices + num_before),
            images=bridge.images,
        )
        parent = self._tree.step_back(turn.end, bridge.num_taken_back)
        if bridge.num_taken_back:
            return self._build(parent, given, bridge=bridge, fork=ForkReason.WRONG_HEADER, closing=bridge.closing)
        return self._build(
            parent, given, bridge=bridge, continues=turn, kind=BridgeKind.DERIVED, closing=bridge.closing
        )

    def _build(
        self,
        parent: Position | None,
        given: GivenIds,
        *,
        bridge: BridgeOutcome | None,
        fork: ForkReason | None = None,
        continues: Turn | None = None,
        kind: BridgeKind | None = None,
        closing: Closing = Closing.NONE,
    ) -> Prompt:
        ids, images = given.token_ids, given.images
        if parent is not None:
            recorded = self._tree.token_ids(parent)
            ids = np.concatenate([recorded, ids])
            shifted = (replace(image, offset=image.offset + len(recorded)) for image in images)
            images = (*self._tree.images(parent), *shifted)
        prompt = Prompt(
            parent=parent,
            given=given,
            token_ids=ids,
            images=images,
            bridge=bridge,
            fork=fork,
            continued=kind,
            closing=closing,
        )
        if continues is not None:
            self._check_prefix(prompt, continues)
        return prompt

    def _check_prefix(self, prompt: Prompt, turn: Turn) -> None:
        so_far = self._tree.token_ids(turn.end)
        if not np.array_equal(prompt.token_ids[: len(so_far)], so_far):
            raise InvariantError("I1: a prompt does not begin with all ids of the turn that it continues")

    def _get_closing(self, turn: Turn) -> Closing:
        """Find how a fresh rendering that continues `turn` has closed it."""
        if turn.sequence.completion_ids[-1] in self._renderer.get_stop_token_ids():
            return Closing.NONE
        return Closing.TRUNCATED if turn.parsed.reasoning_complete else Closing.REASONING


def count_prompt(prompt: Prompt, counters: Counters) -> None:
    """Count how a prompt follows from the recorded ids; for prompts whose completion is recorded."""
    if isinstance(prompt.bridge, Refusal):
        counters.count(Event.REFUSAL, prompt.bridge.reason)
    elif prompt.bridge is not None and prompt.bridge.history is not None:
        counters.count(Event.HISTORY, prompt.bridge.history)
    if prompt.closing is not Closing.NONE:
        counters.count(Event.CLOSING, prompt.closing)
    if prompt.continued is not None:
        counters.count(Event.BRIDGE, prompt.continued)
    if prompt.fork is not None:
        counters.count(Event.FORK, prompt.fork)


def attach_given(tree: TokenTree, parent: Position | None, given: GivenIds) -> Position:
    """Attach given ids to a tree; returns the position after them, or `parent` if `given` is empty."""
    if parent is not None and len(given.token_ids) == 0:
        return parent
    return tree.add_given(
        given.token_ids, given.origin, parent=parent, message_indices=given.message_indices, images=given.images
    )
