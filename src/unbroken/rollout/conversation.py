"""A conversation and its token record: turns messages into prompts, and completions into messages.

Every prompt after the first is counted once, as a bridge (all ids so far, and more) or as a fork, together with the
refusal that led to it, the closing that it begins with, and the template's effect on the history. It is counted when
its turn was sampled; without a completion (full context, failure, abort), only the limit or the status is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from unbroken.counters import Counters, Event
from unbroken.ledger.nodes import ForkReason
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema, check_messages
from unbroken.rendering.base import (
    ParsedResponse,
    ParsedToolCall,
    Renderer,
)
from unbroken.rollout.copying import copy_containers
from unbroken.rollout.env import Continue, EnvStart, Reply, Rewrite
from unbroken.rollout.limits import TurnBudget
from unbroken.rollout.prompts import Prompt, PromptBuilder, attach_given, count_prompt
from unbroken.rollout.threads import run_in_renderer_thread
from unbroken.rollout.trajectory import Turn
from unbroken.types import FinishReason, SampledSequence


class CutReason(StrEnum):
    """What was cut. The names are metrics and must stay stable."""

    TOOL_RESULT = "tool_result"
    """By `Limits.max_result_chars`."""


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
        self._prompts = PromptBuilder(renderer, self.tree)
        self._counters = counters
        self._max_result_chars = max_result_chars
        self._num_call_ids = 0

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled in all turns."""
        return self.tree.num_sampled

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

    async def build_next_prompt(self, outcome: EnvStart | Continue | Rewrite) -> Prompt:
        """Build the prompt after `outcome`, whose messages were added: the first prompt, a bridge or a fork."""
        return await run_in_renderer_thread(self._renderer, functools.partial(self._build_next_prompt, outcome))

    def _build_next_prompt(self, outcome: EnvStart | Continue | Rewrite) -> Prompt:
        last = self.turns[-1] if self.turns else None
        if last is not None and isinstance(outcome, Continue):
            num_new = len(outcome.messages)
            return self._prompts.extend(
                last, self.messages[-num_new:], earlier=self.messages[: -num_new - 1], tools=self.tools
            )
        reason = None if last is None else ForkReason.REWRITTEN_HISTORY
        return self._prompts.render(self.messages, tools=self.tools, last=last, reason=reason)

    async def record(self, prompt: Prompt, sequence: SampledSequence, budget: TurnBudget) -> Reply:
        """Parse a completion and add it to the tree, the turns and the messages."""
        parse = functools.partial(self._renderer.parse_response, sequence.completion_ids)
        parsed = await run_in_renderer_thread(
            self._renderer, functools.partial(parse, prompt_ids=prompt.token_ids, tools=self.tools)
        )
        prompt_end = attach_given(self.tree, prompt.parent, prompt.given)
        end = self.tree.add_sampled(sequence, parent=prompt_end)
        sequence = replace(sequence, routed_experts=None)  # those of all turns before too; the tree has them once
        message = parsed.to_message(self._new_call_ids(parsed.tool_calls))
        turn = Turn(
            prompt_end=prompt_end,
            end=end,
            sequence=sequence,
            message=message,
            parsed=parsed,
            bridge=prompt.bridge,
            fork=prompt.fork,
            cut_by=budget.limit if sequence.finish_reason is FinishReason.LENGTH else None,
        )
        count_prompt(prompt, self._counters)
        self.turns.append(turn)
        self.turn_rewards.append(None)
        self.messages.append(message)
        if turn.cut_by is not None:
            self._counters.count(Event.TRUNCATION, turn.cut_by)
        for failure in parsed.failures:
            self._counters.count(Event.PARSE_FAILURE, failure.status)
        return Reply(message=copy_containers(message), parsed=_copy_parse(parsed), finish_reason=sequence.finish_reason)

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


def cut_tool_result(message: Message, max_chars: int | None) -> bool:
    """Cut the text of a tool message to `max_chars` characters, in place; returns whether that was needed.

    The message must be well-formed, and `max_chars` None cuts nothing. Text parts are cut one after the other, until
    the rest of them has no room; images stay. Other messages stay as they are.
    """
    if max_chars is None or message["role"] != "tool":
        return False
    content = message["content"]
    if isinstance(content, str):
        message["content"] = cut_text(content, max_chars)
        return len(content) > max_chars
    num_left = max_chars
    is_cut = False
    for part in content or ():
        if part["type"] == "text":
            num_chars = len(part["text"])
            part["text"] = cut_text(part["text"], num_left)
            is_cut |= num_chars > num_left
            num_left = max(num_left - num_chars, 0)
    return is_cut


def cut_text(text: str, max_chars: int) -> str:
    r"""Keep the first and the last characters of a text, `max_chars` in all, with a mark between them if any is cut.

    cut_text("abcdefghij", 4)    # "ab\n[... 6 of 10 characters were cut ...]\nij"
    """
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text
    num_first = max_chars - max_chars // 2
    mark = f"\n[... {num_cut} of {len(text)} characters were cut ...]\n"
    return f"{text[:num_first]}{mark}{text[num_first + num_cut :]}"
