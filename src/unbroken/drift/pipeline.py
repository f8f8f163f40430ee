"""The usual pipeline: decode what was sampled, parse it, render the whole conversation, tokenise again.

Nothing is made worse than a careful implementation would do it: messages keep their reasoning and their white space as
the parser found them, and arguments are JSON objects. What differs is what the template and the tokenizer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.audit.subject import Subject
from unbroken.drift.causes import Cause, Change, Turn, find_changes
from unbroken.ledger.nodes import Origin, Path
from unbroken.messages import Message
from unbroken.rendering.base import PartKind
from unbroken.rollout.trajectory import Trajectory
from unbroken.rollout.trajectory import Turn as SampledTurn
from unbroken.types import TokenIds, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRollout:
    """The ids of a rollout, and those that the usual pipeline makes of it."""

    path: Path
    """What was sampled, and what was given between."""
    turns: tuple[Turn, ...]
    """The turns whose sampled ids are on the path: all, unless the rollout forked."""
    num_turns_left_out: int
    retokenised_ids: TokenIds
    changes: tuple[Change, ...]

    @property
    def differs(self) -> bool:
        """Whether the usual pipeline would train on other ids."""
        return bool(self.changes)

    @property
    def causes(self) -> frozenset[Cause]:
        """All causes of its changes."""
        return frozenset(cause for change in self.changes for cause in change.causes)

    def find_changes(self, turn: Turn) -> list[Change]:
        """The changes of one turn."""
        return [change for change in self.changes if turn.touches(change.gap)]

    def count_changed_ids(self, cause: Cause | None = None) -> int:
        """Count the sampled ids that are not there any more, for one cause or for any."""
        mask = self.path.sampled_mask
        changes = [change for change in self.changes if cause is None or cause in change.causes]
        return sum(int(mask[slice(*change.gap.before)].sum()) for change in changes)


class UsualPipeline:
    """Passes finished rollouts through the usual pipeline of a model's tokenizer and chat template."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def compare(self, trajectory: Trajectory) -> ComparedRollout | None:
        """Compare a rollout of one turn or more; None if the template refuses the parsed conversation."""
        path = trajectory.tree.path(trajectory.turns[-1].end)
        text = self._subject.render_text(self._make_messages(trajectory), tools=trajectory.tools)
        if text is None:
            return None
        exact = path.token_ids.tolist()
        # What the template writes between the last turn and a next message is not there yet.
        retokenised = self._subject.encode(text.rstrip("\n"))
        turns = _find_turns(path, trajectory.turns)
        return ComparedRollout(
            path=path,
            turns=turns,
            num_turns_left_out=len(trajectory.turns) - len(turns),
            retokenised_ids=token_ids(retokenised),
            changes=find_changes(
                exact,
                turns,
                self._subject.encode(self._subject.decode(exact)),
                retokenised,
                decode=self._subject.decode,
                reasoning_end=self._subject.facts.reasoning_markup[1],
            ),
        )

    def _make_messages(self, trajectory: Trajectory) -> list[Message]:
        """The conversation up to its last turn, as the pipeline's messages."""
        messages = list(trajectory.messages)
        position = len(messages)
        for turn in reversed(trajectory.turns):
            position = max(i for i in range(position) if messages[i]["role"] == "assistant")
            messages[position] = self._make_message(turn)
            if turn is trajectory.turns[-1]:
                del messages[position + 1 :]
        return messages

    def _make_message(self, turn: SampledTurn) -> Message:
        """The message of a turn. As servers do it, a turn with a call that cannot be read is all content."""
        if not turn.parsed.failures:
            return turn.message
        ids = turn.sequence.completion_ids.tolist()
        parts = list(turn.parsed.parts)
        num_reasoning = max((k + 1 for k, part in enumerate(parts) if part.kind is PartKind.REASONING), default=0)
        if num_reasoning and num_reasoning < len(parts) and parts[num_reasoning].kind is PartKind.MARKUP:
            num_reasoning += 1
        kept = [part for part in parts[num_reasoning:] if part.kind is not PartKind.STOP]
        content = self._subject.decode([i for part in kept for i in ids[slice(*part.span)]])
        message: Message = {"role": "assistant", "content": content}
        if turn.parsed.reasoning:
            message["reasoning_content"] = turn.parsed.reasoning
        return message


def _find_turns(path: Path, sampled: Sequence[SampledTurn]) -> tuple[Turn, ...]:
    """The turns on a path. One that a wrong header ended is there without it."""
    by_node = {turn.end.node: turn for turn in sampled}
    turns = []
    for segment in path.segments:
        if segment.origin is Origin.SAMPLED:
            kinds = [PartKind.CONTENT] * len(by_node[segment.node].sequence.completion_ids)
            for part in by_node[segment.node].parsed.parts:
                start, stop = part.span
                kinds[start:stop] = [part.kind] * (stop - start)
            num_ids = segment.stop - segment.start
            turns.append(Turn(start=segment.start, stop=segment.stop, kinds=tuple(kinds[:num_ids])))
    return tuple(turns)
