"""A conversation and its token record, kept in step: messages become prompts here, completions become messages.

What is counted is what is recorded: a prompt counts when its turn was sampled. Then every prompt after the first is
counted once, as what it is: a bridge (all ids so far, and more) or a fork; with it the refusal that came before and the
closing that it begins with, however its ids were found, and what the template would have done to the history before a
bridge. A prompt that no turn answers (the context is full, the engine
fails or aborts) counts as nothing: the limit or the status says what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unbroken.counters import Counters, Event
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema, check_messages
from unbroken.rendering.base import (
    TEMPLATE,
    Bridge,
    BridgeOutcome,
    Closing,
    ParsedResponse,
    ParsedToolCall,
    Refusal,
    RefusalReason,
    Renderer,
)
from unbroken.rendering.bridge.shadow_audit import AuditOutcome, UsedBridge
from unbroken.rollout.copying import copy_containers
from unbroken.rollout.env import Continue, EnvStart, Reply, Rewrite
from unbroken.rollout.limits import TurnBudget
from unbroken.rollout.trajectory import BridgeKind, ForkReason, Turn
from unbroken.types import FinishReason, ImageSpan, SampledSequence, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine is asked to continue, and how it follows from what was recorded (as in `Turn`)."""

    end: Position
    token_ids: TokenIds
    """[T] all ids up to `end`."""
    images: tuple[ImageSpan, ...]
    bridge: BridgeOutcome | None
    fork: ForkReason | None
    continued: BridgeKind | None
    """How the ids were found that continue the turn before; None where they do not (the first prompt, a fork)."""
    closing: Closing
    """What was given to end the turn before."""


class Conversation:
    """Messages, turns and the token tree of one rollout, which only ever grow together."""

    def __init__(self, renderer: Renderer, counters: Counters) -> None:
        self.tree = TokenTree()
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.tools: tuple[ToolSchema, ...] = ()
        self._renderer = renderer
        self._counters = counters
        self._num_call_ids = 0

    @property
    def num_sampled(self) -> int:
        """Ids sampled in all turns."""
        return sum(len(turn.sequence.completion_ids) for turn in self.turns)

    def hear(self, outcome: EnvStart | Continue | Rewrite) -> None:
        """Take in what the environment says; no ids yet.

        Raises:
            MessagesError: the messages are none, or malformed.
        """
        check_messages(outcome.messages)
        said = copy_containers(list(outcome.messages))
        if isinstance(outcome, Continue):
            self.messages.extend(said)
            for status in outcome.tool_errors:
                self._counters.count(Event.TOOL_ERROR, status)
        else:
            self.messages = said
        if isinstance(outcome, EnvStart):
            self.tools = outcome.tools

    def next_prompt(self, outcome: EnvStart | Continue | Rewrite, *, audit: AuditOutcome | None = None) -> Prompt:
        """The ids to continue after `outcome`, which was heard: the first prompt, a bridge or a fork.

        `audit` is what became of an audit of the last turn's bridge: nothing is put behind a wrong one.
        """
        if not isinstance(outcome, Continue):
            return self._render(ForkReason.REWRITTEN_HISTORY, None)
        if audit is AuditOutcome.MISMATCH:
            return self._render(ForkReason.FAILED_AUDIT, None)
        bridge = self._ask_for_bridge(len(outcome.messages))
        if isinstance(bridge, Refusal):
            follows_template = bridge.reason is RefusalReason.REWRITES_HISTORY
            reason = ForkReason.TEMPLATE_REWRITES if follows_template else ForkReason.REFUSED_BRIDGE
            return self._render(reason, bridge)
        return self._cross(bridge, len(outcome.messages))

    def used_bridge(self, prompt: Prompt, outcome: EnvStart | Continue | Rewrite) -> UsedBridge | None:
        """The bridge that a prompt was made with after `outcome`, for an audit; None if it was made without one."""
        if not isinstance(prompt.bridge, Bridge):
            return None
        return UsedBridge(
            bridge=prompt.bridge, messages=tuple(self.messages), num_new=len(outcome.messages), tools=self.tools
        )

    def record(self, prompt: Prompt, sequence: SampledSequence, budget: TurnBudget) -> Reply:
        """Add a completion, with its parse, to the tree and the messages."""
        end = self.tree.add_sampled(sequence, parent=prompt.end)
        parsed = self._renderer.parse_response(sequence.completion_ids, prompt_ids=prompt.token_ids, tools=self.tools)
        message = parsed.to_message(self._new_call_ids(parsed.tool_calls))
        turn = Turn(
            prompt_end=prompt.end,
            end=end,
            sequence=sequence,
            message=message,
            parsed=parsed,
            bridge=prompt.bridge,
            fork=prompt.fork,
            cut_by=budget.limit if sequence.finish_reason is FinishReason.LENGTH else None,
        )
        self._count_prompt(prompt)
        self.turns.append(turn)
        self.messages.append(message)
        if turn.cut_by is not None:
            self._counters.count(Event.TRUNCATION, turn.cut_by)
        for failure in parsed.failures:
            self._counters.count(Event.PARSE_FAILURE, failure.status)
        return Reply(message=copy_containers(message), parsed=_copy_parse(parsed), finish_reason=sequence.finish_reason)

    def _count_prompt(self, prompt: Prompt) -> None:
        if isinstance(prompt.bridge, Refusal):
            self._counters.count(Event.REFUSAL, prompt.bridge.reason)
        elif prompt.bridge is not None and prompt.bridge.history is not None:
            self._counters.count(Event.HISTORY, prompt.bridge.history)
        if prompt.closing is not Closing.NONE:
            self._counters.count(Event.CLOSING, prompt.closing)
        if prompt.continued is not None:
            self._counters.count(Event.BRIDGE, prompt.continued)
        if prompt.fork is not None:
            self._counters.count(Event.FORK, prompt.fork)

    def _ask_for_bridge(self, num_new: int) -> BridgeOutcome:
        turn = self.turns[-1]
        return self._renderer.bridge_to_next_turn(
            self.tree.token_ids(turn.prompt_end),
            turn.sequence.completion_ids,
            self.messages[-num_new:],
            assistant=turn.message,
            tools=self.tools,
            earlier=self.messages[: -num_new - 1],
        )

    def _cross(self, bridge: Bridge, num_new: int) -> Prompt:
        """Attach a bridge behind the last turn, or before its stop id where that is the wrong header."""
        last = self.turns[-1].end
        indices = bridge.message_indices
        end = self.tree.add_given(
            bridge.bridge_ids,
            Origin.BRIDGE,
            parent=self.tree.step_back(last, bridge.num_taken_back),
            message_indices=np.where(indices == TEMPLATE, TEMPLATE, indices + len(self.messages) - num_new),
            images=bridge.images,
        )
        if bridge.num_taken_back:
            return self._prompt(end, bridge, fork=ForkReason.WRONG_HEADER, closing=bridge.closing)
        return self._prompt(end, bridge, continued=BridgeKind.DERIVED, closing=bridge.closing)

    def _render(self, reason: ForkReason, bridge: BridgeOutcome | None) -> Prompt:
        """Render all messages afresh, and attach what is not recorded yet to what is."""
        rendered = self._renderer.render(self.messages, tools=self.tools)
        last = self.turns[-1].end if self.turns else None
        start, num_shared = self.tree.longest_prefix(rendered.token_ids, images=rendered.images)
        extends = start == last
        ids = rendered.token_ids[num_shared:]
        if start is not None and len(ids) == 0:
            end = start
        else:
            end = self.tree.add_given(
                ids,
                Origin.BRIDGE if extends and last is not None else Origin.PROMPT,
                parent=start,
                message_indices=rendered.message_indices[num_shared:],
                images=[replace(i, offset=i.offset - num_shared) for i in rendered.images if i.offset >= num_shared],
            )
        if last is None:
            return self._prompt(end, bridge)
        if not extends:
            return self._prompt(end, bridge, fork=reason)
        return self._prompt(end, bridge, continued=BridgeKind.RENDERED, closing=self._closing_of(self.turns[-1]))

    def _prompt(
        self,
        end: Position,
        bridge: BridgeOutcome | None,
        *,
        fork: ForkReason | None = None,
        continued: BridgeKind | None = None,
        closing: Closing = Closing.NONE,
    ) -> Prompt:
        prompt_ids = self.tree.token_ids(end)
        if continued is not None:
            self._check_prefix(prompt_ids)
        return Prompt(
            end=end,
            token_ids=prompt_ids,
            images=self.tree.images(end),
            bridge=bridge,
            fork=fork,
            continued=continued,
            closing=closing,
        )

    def _closing_of(self, turn: Turn) -> Closing:
        """What a fresh rendering that continues `turn` begins with: its end, if the turn did not bring one along."""
        if turn.sequence.completion_ids[-1] in self._renderer.get_stop_token_ids():
            return Closing.NONE
        return Closing.TRUNCATED if turn.parsed.reasoning_complete else Closing.REASONING

    def _check_prefix(self, prompt_ids: TokenIds) -> None:
        """I1, checked where it is relied on."""
        so_far = self.tree.token_ids(self.turns[-1].end)
        if not np.array_equal(prompt_ids[: len(so_far)], so_far):
            raise InvariantError(f"I1: the prompt of turn {len(self.turns)} does not begin with all ids so far")

    def _new_call_ids(self, calls: Sequence[ParsedToolCall]) -> list[str]:
        """One id for each call that no other call of the conversation has.

        The id that the model wrote, where it wrote a free one; else nine letters and digits, which the strictest
        templates ask for.
        """
        taken = {call.get("id") for message in self.messages for call in message.get("tool_calls") or ()}
        own = {call.call_id for call in calls}
        ids: list[str] = []
        for call in calls:
            call_id = call.call_id
            while not call_id or call_id in taken:
                call_id = f"call{self._num_call_ids:05d}"
                self._num_call_ids += 1
                if call_id in own:
                    call_id = ""  # a call of this turn may have written just that
            taken.add(call_id)
            ids.append(call_id)
        return ids


def _copy_parse(parsed: ParsedResponse) -> ParsedResponse:
    calls = tuple(replace(call, arguments=copy_containers(call.arguments)) for call in parsed.tool_calls)
    return replace(parsed, tool_calls=calls)
