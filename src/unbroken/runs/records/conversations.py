"""What a step's records say of conversations, made again of their ids by the renderer that the run had.

    ids of a completion   ── parser ──────── message, its calls and their statuses
    ids and limits        ───────────────── finish reason, which limit cut a turn, what status a rollout may have
    messages, before each ── template ────── ids of the prompt, bridge or fork, the message of each id

Worked example: a rollout of two turns has the messages 0 system, 1 user, 2 reply, 3 tool, 4 reply. Messages 0 and 1 are
rendered, which must give the ids of the first prompt; message 3 is bridged to, which must give those between the turns.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from unbroken.counters import Event
from unbroken.ledger.nodes import ForkReason
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.template import TemplateRenderer
from unbroken.reports import shorten
from unbroken.rollout.limits import Limit
from unbroken.rollout.prompts import Prompt, PromptBuilder, attach_given
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus, Turn
from unbroken.runs.config import RolloutConfig
from unbroken.runs.records.paths import cut_path, describe_path
from unbroken.runs.records.record import make_record
from unbroken.types import FinishReason

_Record: TypeAlias = Mapping[str, Any]
_MAX_WAYS = 16
"""Of finding the replies of a rollout among its messages that are tried."""
_ENDED_BY_ENV = frozenset({TrajectoryStatus.COMPLETED.value, TrajectoryStatus.TRUNCATED.value})
"""With a turn, after which it says nothing."""
_OF_REPLY = ("cut_by", "call_statuses", "unread_calls")
_OF_PROMPT = ("bridge", "refusal", "fork", "closing")
"""Keys of a turn that say how its prompt follows from the turn before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationCheck:
    """Compares the records of a run's rollouts with what their ids, and its settings, give again."""

    renderer: TemplateRenderer
    config: RolloutConfig
    context_length: int
    is_of_policies: bool
    """Whether several policies speak, whose rows have messages of their own."""

    def find_differences(self, record: _Record, rollout: Trajectory) -> Iterator[str]:
        """What a record says other than its ids: `rollout` is what was made of it.

        Of an agent's session nothing is compared: its requests say what is read as a call, and what ends a turn.
        """
        has_failed = record["status"] == TrajectoryStatus.FAILED
        if has_failed != (record["error"] is not None):
            yield f": status is {record['status']!r}, and error {_quote(record['error'])}"
        if self.is_of_policies or not _is_session(record):
            yield from self._compare(record, rollout)

    def _compare(self, record: _Record, rollout: Trajectory) -> Iterator[str]:
        turns: list[Turn] = []
        num_sampled = 0
        for number, (turn, recorded) in enumerate(zip(rollout.turns, record["turns"], strict=True)):
            again = self._read_again(turn, recorded, rollout, num_before=num_sampled)
            yield from (f", turn {number}: {found}" for found in self._compare_turn(again, recorded, rollout))
            num_sampled += turn.sequence.num_sampled
            turns.append(again)
        yield from self._compare_status(record, turns[-1].cut_by if turns else None, num_sampled)
        if not self.renderer.mentions("strftime_now"):  # today it writes another date than it did in the run
            for said in _list_conversations(record, rollout, turns):
                yield from said.find_differences(self.renderer)

    def _read_again(self, turn: Turn, recorded: _Record, rollout: Trajectory, *, num_before: int) -> Turn:
        """A turn with the message that its ids say, after so many sampled ids, and the limit that cut it."""
        sequence, prompt_ids = turn.sequence, rollout.tree.token_ids(turn.prompt_end)
        parsed = self.renderer.parse_response(sequence.completion_ids, prompt_ids=prompt_ids, tools=rollout.tools)
        # The loop has chosen the ids of calls: they are taken as they are recorded.
        ids = iter([str(call["id"]) for call in recorded["message"].get("tool_calls") or ()])
        is_ok = [call.status is ToolCallStatus.OK for call in parsed.tool_calls]
        message = parsed.to_message([next(ids, "") if each else "" for each in is_ok])
        cut_by = self._find_cut(turn, len(prompt_ids), num_before) if self._is_cut(turn) else None
        return replace(turn, parsed=parsed, message=message, cut_by=cut_by)

    def _is_cut(self, turn: Turn) -> bool:
        """Whether a turn's last id does not end it. Stop strings are those that the engine has found."""
        if self.config.sampling.stop_strings and turn.sequence.finish_reason is FinishReason.STOP:
            return False
        stops = {*self.config.sampling.stop_token_ids, *self.renderer.get_stop_token_ids()}
        return int(turn.sequence.completion_ids[-1]) not in stops

    def _find_cut(self, turn: Turn, num_prompt_ids: int, num_before: int) -> Limit:
        """The limit that cut a turn. What neither the turn's nor the rollout's has cut, the context has."""
        sequence = turn.sequence
        # The context may be another now (`engine.` may change), so it is asked only whether the turn has filled it.
        has_filled = num_prompt_ids + len(sequence.completion_ids) == self.context_length
        budget = self.config.limits.compute_turn_budget(
            turn_max_tokens=self.config.sampling.max_tokens,
            num_sampled=num_before,
            num_context_left=len(sequence.completion_ids) if has_filled else sys.maxsize,
        )
        return budget.limit if sequence.num_sampled >= budget.max_tokens else Limit.CONTEXT

    def _compare_turn(self, turn: Turn, recorded: _Record, rollout: Trajectory) -> Iterator[str]:
        reason = FinishReason.LENGTH if self._is_cut(turn) else FinishReason.STOP
        if turn.sequence.finish_reason is not reason:
            yield f"finish_reason is {recorded['finish_reason']!r}, and by its last id {reason.value!r}"
        again = _describe_turn(turn, rollout)
        names = sorted(again["message"].keys() | recorded["message"].keys())
        for name, value, own in _find_others(recorded["message"], again["message"], names):
            yield f"{name} of its message is {value}, and by its ids {own}"
        for name, value, own in _find_others(recorded, again, _OF_REPLY):
            yield f"{name} is {value}, and by its ids {own}"

    def _compare_status(self, record: _Record, cut_by: Limit | None, num_sampled: int) -> Iterator[str]:
        """Whether a rollout can have ended as its record says; `cut_by` is of its last turn."""
        counters, limits, num_turns = record["counters"], self.config.limits, len(record["turns"])
        counted = _list_statuses(counters)
        # Rewards come later: a rollout on which no function has an opinion is counted by how it had ended.
        if len(counted) != 1 or record["status"] not in (*counted, TrajectoryStatus.UNSCORED):
            yield f": status is {record['status']!r}, and its counters have {', '.join(counted) or 'none'}"
            return
        has_filled_context = f"{Event.LIMIT}/{Limit.CONTEXT}" in counters  # also by a prompt, which has no turn
        has_used_tokens = num_sampled >= limits.max_tokens or cut_by is Limit.TOKENS
        possible = {
            TrajectoryStatus.COMPLETED: cut_by is None,
            TrajectoryStatus.TRUNCATED: cut_by is Limit.TURN,
            TrajectoryStatus.MAX_TURNS: num_turns == limits.max_turns,
            TrajectoryStatus.MAX_TOKENS: has_filled_context or has_used_tokens,
        }
        if not possible.get(TrajectoryStatus(counted[0]), True):
            yield (
                f": status is {record['status']!r}, and it cannot have ended so with {num_turns} turns, {num_sampled} "
                f"sampled ids, and {cut_by or 'nothing'} that cut the last turn"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A conversation of a rollout: the only one, or that of one of several policies."""

    record: _Record
    rollout: Trajectory
    turns: Mapping[int, Turn]
    """By their numbers in the rollout; messages are read again from ids."""
    rows: Sequence[int]
    places: Sequence[int]
    """Of its messages among all of the record."""

    @property
    def _recorded(self) -> list[_Record]:
        return [self.record["turns"][number] for number in self.turns]

    @property
    def _has_rewrite(self) -> bool:
        """Whether the environment has replaced the messages before a turn: the record has only the last ones."""
        others = self._recorded[1:]
        is_asked_to_extend = [turn["bridge"] or turn["refusal"] is not None for turn in others]
        return not all(is_asked_to_extend) or any(turn["fork"] == ForkReason.REWRITTEN_HISTORY for turn in others)

    def find_differences(self, renderer: TemplateRenderer) -> Iterator[str]:
        """Where ids of its prompts, or the messages that they belong to, are other than the template gives."""
        if self._has_rewrite:
            return
        messages = [self.record["messages"][place] for place in self.places]
        replies = [turn["message"] for turn in self._recorded]
        found = [": its messages do not have the replies of its turns"]
        for number, way in enumerate(itertools.islice(_find_places(messages, replies), _MAX_WAYS)):
            others = [*self._compare(renderer, messages, way)]
            if not others:
                return
            found = found if number else others
        # What an environment said last, and no turn answered, may have replaced what was there before.
        if messages[-1:] == replies[-1:] or self.record["status"] in _ENDED_BY_ENV:
            yield from found

    def _compare(self, renderer: TemplateRenderer, messages: Sequence[Message], way: Sequence[int]) -> Iterator[str]:
        """Compare with the replies at these places of the messages: build the tree as the rollout did."""
        own = list(messages)
        for place, turn in zip(way, self.turns.values(), strict=True):
            own[place] = turn.message  # in the types that it had; a record has text in the place of some
        tree, tools = TokenTree(), self.rollout.tools
        builder = PromptBuilder(renderer, tree)
        last: Turn | None = None
        start = -1
        """The place of the reply before."""
        for (number, turn), place in zip(self.turns.items(), way, strict=True):
            if last is None:
                prompt = builder.render(own[:place], tools=tools, last=None, reason=None)
            else:
                prompt = builder.extend(last, own[start + 1 : place], earlier=own[:start], tools=tools)
            if (found := self._compare_prompt(number, turn, prompt)) is not None:
                yield f", turn {number}: {found}"
                return
            prompt_end = attach_given(tree, prompt.parent, prompt.given)
            end = tree.add_sampled(turn.sequence, parent=prompt_end)
            last, start = replace(turn, prompt_end=prompt_end, end=end), place
        yield from self._compare_rows(tree)

    def _compare_prompt(self, number: int, turn: Turn, prompt: Prompt) -> str | None:
        """What a turn's prompt is other than by its messages."""
        recorded_ids = self.rollout.tree.token_ids(turn.prompt_end).tolist()
        for place, (recorded, again) in enumerate(itertools.zip_longest(recorded_ids, prompt.token_ids.tolist())):
            if recorded != again:
                return f"position {place} of its prompt has the id {recorded}, and by its messages {again}"
        again = _describe_turn(replace(turn, bridge=prompt.bridge, fork=prompt.fork), self.rollout)
        others = _find_others(self.record["turns"][number], again, _OF_PROMPT)
        return next((f"{name} is {value}, and by its messages {own}" for name, value, own in others), None)

    def _compare_rows(self, tree: TokenTree) -> Iterator[str]:
        """Compare which message each id of the rows belongs to."""
        for number, (path, row) in zip(self.rows, tree.rows, strict=False):
            spans = describe_path(cut_path(path, len(row.token_ids)))["message_indices"]
            again = [[start, stop, self.places[place]] for start, stop, place in spans]
            if (recorded := self.record["rows"][number]["message_indices"]) != again:
                yield f", row {number}: message_indices is {_quote(recorded)}, and computed again {_quote(again)}"


def _is_session(record: _Record) -> bool:
    """Whether an agent's session was recorded, of a run of one policy: its rows have messages of their own."""
    return any("messages" in row for row in record["rows"])


def _list_statuses(counters: Mapping[str, int]) -> list[str]:
    """The statuses that were counted when a rollout ended."""
    begin = f"{Event.STATUS}/"
    return [name.removeprefix(begin) for name in counters if name.startswith(begin)]


def _list_conversations(record: _Record, rollout: Trajectory, turns: Sequence[Turn]) -> Iterator[_Said]:
    """The conversations of a rollout: one, or one of each policy that spoke."""
    for policy in dict.fromkeys(turn.policy for turn in turns):
        own = {number: turn for number, turn in enumerate(turns) if turn.policy == policy}
        rows = [number for number, row in enumerate(record["rows"]) if row["turns"][0] in own]
        yield _Said(record=record, rollout=rollout, turns=own, rows=rows, places=_find_messages(record, max(own)))


def _find_messages(record: _Record, last: int) -> Sequence[int]:
    """The places of a conversation's messages, by the number of its last turn: only rows of policies have their own."""
    ended = [row for row in record["rows"] if row["turns"][-1:] == [last] and "messages" in row]
    return ended[-1]["messages"] if ended else range(len(record["messages"]))


def _find_others(recorded: _Record, again: _Record, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The names of values that differ, with both."""
    for name in names:
        if (value := recorded.get(name)) != (own := again.get(name)):
            yield name, _quote(value), _quote(own)


def _find_places(messages: Sequence[Any], replies: Sequence[Any], start: int = 0) -> Iterator[tuple[int, ...]]:
    """Each way to find the replies among the messages, in their order: an example in a prompt may be equal to one."""
    if not replies:
        yield ()
        return
    last = len(messages)
    for reply in reversed(replies):  # the last place that leaves room for those after it: no way ends nowhere
        last = next((place for place in range(last - 1, start - 1, -1) if messages[place] == reply), -1)
        if last < 0:
            return
    for place in range(start, last + 1):
        if messages[place] == replies[0]:
            for rest in _find_places(messages, replies[1:], place + 1):
                yield place, *rest


def _describe_turn(turn: Turn, rollout: Trajectory) -> _Record:
    """A turn as a file of rollouts has it."""
    own = replace(rollout, turns=(turn,), messages=(), tools=(), turn_rewards=(), times=())
    text = json.dumps(make_record("", own, ())["turns"][0], ensure_ascii=False)
    described: _Record = json.loads(text.encode("utf-8", "replace"))
    return described


def _quote(value: Any) -> str:
    return shorten(repr(value), 80, num_last=15)
