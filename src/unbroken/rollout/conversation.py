"""A conversation and its token record: turns messages into prompts, and completions into messages.

Every prompt after the first is counted once, as a bridge (all ids so far, and more) or as a fork, together with the
refusal that led to it, the closing that it begins with, and the template's effect on the history. It is counted when
its turn was sampled; without a completion (full context, failure, abort), only the limit or the status is counted.
"""

from __future__ import annotations

import functools
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
from unbroken.rollout.cutting import CutReason, cut_tool_result
from unbroken.rollout.env import Continue, EnvStart, Reply, Rewrite
from unbroken.rollout.limits import TurnBudget
from unbroken.rollout.threads import run_in_renderer_thread
from unbroken.rollout.trajectory import BridgeKind, ForkReason, Turn
from unbroken.types import FinishReason, ImageSpan, SampledSequence, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt for the engine, and how it follows from the recorded ids (as in `Turn`)."""

    end: Position
    token_ids: TokenIds
    """[T] all ids up to `end`."""
    images: tuple[ImageSpan, ...]
    bridge: BridgeOutcome | None
    fork: ForkReason | None
    continued: BridgeKind | None
    """How the prompt continues the previous turn; None for the first prompt and a fork."""
    closing: Closing
    """How the previous turn was closed."""


class Conversation:
    """Messages, turns and the token tree of one rollout. Turns and tree only grow.

    The renderer works in threads, on messages and ids that do not change; this object changes in the event loop only.
    """

    def __init__(self, renderer: Renderer, counters: Counters, *, max_result_chars: int | None = None) -> None:
        self.tree = TokenTree()
        self.turns: list[Turn] = []
        self.turn_rewards: list[float | None] = []
        self.messages: list[Message] = []
        self.tools: tuple[ToolSchema, ...] = ()
        self._renderer = renderer
        self._counters = counters
        self._max_result_chars = max_result_chars
        self._num_call_ids = 0

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled in all turns."""
        return sum(len(turn.sequence.completion_ids) for turn in self.turns)

    def add_messages(self, outcome: EnvStart | Continue | Rewrite) -> None:
        """Record the messages of the environment, but no ids yet; `MessagesError` if they are empty or malformed.

        Tool results are cut to `max_result_chars`, except those of the episode's first messages.
        """
        check_messages(outcome.messages)
        messages = copy_containers(list(outcome.messages))
        if not isinstance(outcome, EnvStart):
            num_cut = sum(cut_tool_result(message, self._max_result_chars) for message in messages)
            self._counters.count(Event.CUT, CutReason.TOOL_RESULT, num_cut)
        if isinstance(outcome, Continue):
            self.messages.extend(messages)
            for status in outcome.tool_errors:
                self._counters.count(Event.TOOL_ERROR, status)
        else:
            self.messages = messages
        if isinstance(outcome, EnvStart):
            self.tools = outcome.tools

    async def build_next_prompt(
        self, outcome: EnvStart | Continue | Rewrite, *, audit: AuditOutcome | None = None
    ) -> Prompt:
        """Build the prompt after `outcome`, whose messages were added: the first prompt, a bridge or a fork.

        If the `audit` of the last turn's bridge found it wrong, that turn is not continued.
        """
        if not isinstance(outcome, Continue):
            return await self._render_afresh(ForkReason.REWRITTEN_HISTORY, None)
        if audit is AuditOutcome.MISMATCH:
            return await self._render_afresh(ForkReason.FAILED_AUDIT, None)
        bridge = await self._request_bridge(len(outcome.messages))
        if isinstance(bridge, Refusal):
            follows_template = bridge.reason is RefusalReason.REWRITES_HISTORY
            reason = ForkReason.TEMPLATE_REWRITES if follows_template else ForkReason.REFUSED_BRIDGE
            return await self._render_afresh(reason, bridge)
        return self._attach_bridge(bridge, len(outcome.messages))

    def get_used_bridge(self, prompt: Prompt, outcome: EnvStart | Continue | Rewrite) -> UsedBridge | None:
        """Get the bridge in a prompt after `outcome`, for an audit; None if there is no bridge."""
        if not isinstance(prompt.bridge, Bridge):
            return None
        return UsedBridge(
            bridge=prompt.bridge, messages=tuple(self.messages), num_new=len(outcome.messages), tools=self.tools
        )

    async def record(self, prompt: Prompt, sequence: SampledSequence, budget: TurnBudget) -> Reply:
        """Parse a completion and add it to the tree, the turns and the messages."""
        parse = functools.partial(self._renderer.parse_response, sequence.completion_ids)
        parsed = await run_in_renderer_thread(
            self._renderer, functools.partial(parse, prompt_ids=prompt.token_ids, tools=self.tools)
        )
        end = self.tree.add_sampled(sequence, parent=prompt.end)
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
        self.turn_rewards.append(None)
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

    async def _request_bridge(self, num_new: int) -> BridgeOutcome:
        turn = self.turns[-1]
        return await run_in_renderer_thread(
            self._renderer,
            functools.partial(
                self._renderer.bridge_to_next_turn,
                self.tree.token_ids(turn.prompt_end),
                turn.sequence.completion_ids,
                self.messages[-num_new:],
                assistant=turn.message,
                tools=self.tools,
                earlier=self.messages[: -num_new - 1],
            ),
        )

    def _attach_bridge(self, bridge: Bridge, num_new: int) -> Prompt:
        """Attach a bridge to the last turn, or before its stop id if that is the wrong header."""
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
            return self._build_prompt(end, bridge, fork=ForkReason.WRONG_HEADER, closing=bridge.closing)
        return self._build_prompt(end, bridge, continued=BridgeKind.DERIVED, closing=bridge.closing)

    async def _render_afresh(self, reason: ForkReason, bridge: BridgeOutcome | None) -> Prompt:
        """Render all messages afresh, and attach the ids that are not recorded yet to those that are."""
        rendered = await run_in_renderer_thread(
            self._renderer, functools.partial(self._renderer.render, list(self.messages), tools=self.tools)
        )
        last = self.turns[-1].end if self.turns else None
        start, num_shared = self.tree.find_longest_prefix(rendered.token_ids, images=rendered.images)
        continues = start == last
        ids = rendered.token_ids[num_shared:]
        if start is not None and len(ids) == 0:
            end = start
        else:
            end = self.tree.add_given(
                ids,
                Origin.BRIDGE if continues and last is not None else Origin.PROMPT,
                parent=start,
                message_indices=rendered.message_indices[num_shared:],
                images=[replace(i, offset=i.offset - num_shared) for i in rendered.images if i.offset >= num_shared],
            )
        if last is None:
            return self._build_prompt(end, bridge)
        if not continues:
            return self._build_prompt(end, bridge, fork=reason)
        return self._build_prompt(end, bridge, continued=BridgeKind.RENDERED, closing=self._get_closing(self.turns[-1]))

    def _build_prompt(
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

    def _get_closing(self, turn: Turn) -> Closing:
        """Get how a fresh rendering that continues `turn` closes it."""
        if turn.sequence.completion_ids[-1] in self._renderer.get_stop_token_ids():
            return Closing.NONE
        return Closing.TRUNCATED if turn.parsed.reasoning_complete else Closing.REASONING

    def _check_prefix(self, prompt_ids: TokenIds) -> None:
        so_far = self.tree.token_ids(self.turns[-1].end)
        if not np.array_equal(prompt_ids[: len(so_far)], so_far):
            raise InvariantError(f"I1: the prompt of turn {len(self.turns)} does not begin with all ids so far")

    def _new_call_ids(self, calls: Sequence[ParsedToolCall]) -> list[str]:
        """Choose a unique id for each call: the model's if unused, else nine characters, as some templates demand."""
        taken = {call.get("id") for message in self.messages for call in message.get("tool_calls") or ()}
        own = {call.call_id for call in calls}
        ids: list[str] = []
        for call in calls:
            call_id = call.call_id
            while not call_id or call_id in taken:
                call_id = f"call{self._num_call_ids:05d}"
                self._num_call_ids += 1
                if call_id in own:
                    call_id = ""  # another call of this turn has that id
            taken.add(call_id)
            ids.append(call_id)
        return ids


def _copy_parse(parsed: ParsedResponse) -> ParsedResponse:
    calls = tuple(replace(call, arguments=copy_containers(call.arguments)) for call in parsed.tool_calls)
    return replace(parsed, tool_calls=calls)
