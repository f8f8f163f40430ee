"""Compare finished rollouts with the ids that the usual pipeline would have trained on.

The usual pipeline keeps messages: it decodes and parses each completion, renders the whole conversation with the chat
template at the end, and tokenises that. The ids are compared, and their log-probabilities under the same weights.

A stretch of changed ids counts as one: the sum of its log-probabilities against the sum over the sampled ids that it
replaced (0 where ids were inserted). Example: sampled `a b c d`, retokenised `a x d` gives three log-ratios: of `a`, of
`x` against `b c`, and of `d` in a changed context.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

import numpy as np

from unbroken.demo.lookup import tool_schemas
from unbroken.demo.tiny_model import END_OF_TURN
from unbroken.engines.base import Engine
from unbroken.messages import Message
from unbroken.rendering.base import Renderer
from unbroken.rollout.trajectory import Trajectory
from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.types import TokenIds, token_ids

ASSISTANT_HEADER = "<|im_start|>assistant\n"


class Cause(StrEnum):
    """Why a rollout's ids changed; a rollout can have several causes."""

    JSON_STYLE = "json_style"
    """The template writes the JSON of a tool call in a different style from the model."""
    BPE_SPLIT = "bpe_split"
    """The same text, split into other tokens."""
    TRUNCATION = "truncation"
    """A truncated turn got an end-of-turn token that was not sampled."""
    TEXT = "text"
    """The parser or the template changed the text itself (a malformed call, stripped white space)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The difference between rows to train on and the sampled rollouts."""

    share_differ: float
    """Share of rollouts whose row trains on other ids than the engine returned."""
    mismatch: Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenized:
    """The difference between a set of rollouts and their retokenised form."""

    num_rollouts: int
    share_differ: float
    """Share of rollouts in which at least one id changed."""
    mismatch: Mismatch
    causes: dict[str, int]
    """Number of rollouts that differ, by `Cause`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The ids of a finished, linear rollout, and the ids that the usual pipeline makes of it."""

    token_ids: TokenIds
    turns: tuple[tuple[int, int], ...]
    """Ranges of the sampled turns in `token_ids`, [start, stop)."""
    rollout_logprobs: np.ndarray[Any, np.dtype[np.float32]]
    """[T], NaN where nothing was sampled."""
    retokenized_ids: TokenIds
    retokenized_turns: tuple[tuple[int, int], ...]
    causes: frozenset[Cause] = field(default=frozenset())

    @property
    def differs(self) -> bool:
        """Whether the usual pipeline would train on other ids."""
        return not np.array_equal(self.token_ids, self.retokenized_ids)


class UsualPipeline:
    """Decode, parse, render and tokenise a rollout, as most multi-turn training does."""

    def __init__(self, tokenizer: Any, renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._tools = tool_schemas()
        self._header = self._encode(ASSISTANT_HEADER)
        self._end = int(tokenizer.eos_token_id)

    def retokenize(self, trajectory: Trajectory) -> Rollout:
        """Pass a trajectory's turns through the usual pipeline."""
        path = trajectory.tree.path(trajectory.tree.leaves()[-1])
        turns = _ranges(path.sampled_mask)
        completions = [path.token_ids[a:b] for a, b in turns]
        replies = iter([self._usual_message(ids) for ids in completions])
        messages = [next(replies) if m["role"] == "assistant" else m for m in trajectory.messages]
        rendered = self._encode(self._render(messages).removesuffix("\n"))
        retokenized_turns = self._find_turns(rendered)
        causes = frozenset(c for ids in completions for c in self._causes(ids))
        return Rollout(
            token_ids=path.token_ids,
            turns=turns,
            rollout_logprobs=path.rollout_logprobs,
            retokenized_ids=token_ids(rendered),
            retokenized_turns=retokenized_turns,
            causes=causes if rendered != path.token_ids.tolist() else frozenset(),
        )

    def _usual_message(self, completion_ids: TokenIds) -> Message:
        """The message that a server's tool parser returns; a call that does not parse stays in the content."""
        parsed = self._renderer.parse_response(completion_ids)
        if parsed.failures:
            return {"role": "assistant", "content": self._decode(completion_ids).strip()}
        message = parsed.to_message([f"call_{k}" for k in range(len(parsed.tool_calls))])
        message["content"] = parsed.content.strip()
        return message

    def _causes(self, completion_ids: TokenIds) -> list[Cause]:
        causes = []
        if completion_ids[-1] != self._end:
            causes.append(Cause.TRUNCATION)
        text = self._decode(completion_ids)
        body = [int(i) for i in completion_ids if i != self._end]
        if self._encode(text) != body:
            causes.append(Cause.BPE_SPLIT)
        message = self._usual_message(completion_ids)
        written = self._render([{"role": "user", "content": ""}, message]).rsplit(ASSISTANT_HEADER, 1)[1]
        written = written.removesuffix("\n").removesuffix(END_OF_TURN)
        if written != text:
            same_but_spaces = "".join(written.split()) == "".join(text.split())
            causes.append(Cause.JSON_STYLE if message.get("tool_calls") and same_but_spaces else Cause.TEXT)
        return causes

    def _find_turns(self, ids: list[int]) -> tuple[tuple[int, int], ...]:
        turns, position, width = [], 0, len(self._header)
        while position < len(ids):
            if ids[position : position + width] == self._header:
                start = position + width
                stop = ids.index(self._end, start) + 1 if self._end in ids[start:] else len(ids)
                turns.append((start, stop))
                position = stop
            else:
                position += 1
        return tuple(turns)

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(list(messages), tools=self._tools, tokenize=False)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _decode(self, completion_ids: TokenIds) -> str:
        text: str = self._tokenizer.decode([int(i) for i in completion_ids if i != self._end])
        return text


async def compare(rollouts: Sequence[Rollout], engine: Engine) -> Retokenized:
    """Score the retokenised rollouts under the weights that sampled them."""
    written: list[float] = []
    sampled: list[float] = []
    for rollout in rollouts:
        logprobs = (await engine.score(rollout.retokenized_ids)).logprobs
        for after, before in _stretches(rollout, np.concatenate([[np.nan], logprobs])):
            written.append(after)
            sampled.append(before)
    causes = Counter(cause.value for rollout in rollouts for cause in rollout.causes)
    return Retokenized(
        num_rollouts=len(rollouts),
        share_differ=sum(rollout.differs for rollout in rollouts) / len(rollouts),
        mismatch=mismatch(np.asarray(written), np.asarray(sampled)),
        causes={cause.value: causes[cause.value] for cause in Cause},
    )


def changed_positions(rollout: Rollout) -> list[bool]:
    """[T] for each retokenised id, whether it differs from the sampled ids."""
    changed = [True] * len(rollout.retokenized_ids)
    before, after = rollout.token_ids.tolist(), rollout.retokenized_ids.tolist()
    for _, start, size in difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        changed[start : start + size] = [False] * size
    return changed


def _stretches(rollout: Rollout, logprobs: np.ndarray[Any, Any]) -> Iterator[tuple[float, float]]:
    """The summed logprobs (retokenised, sampled) of each unchanged id and each changed stretch of the turns."""
    for (a, b), (c, d) in zip_longest(rollout.turns, rollout.retokenized_turns, fillvalue=(0, 0)):
        before, after = rollout.rollout_logprobs[a:b], logprobs[c:d]
        ids_before, ids_after = rollout.token_ids[a:b].tolist(), rollout.retokenized_ids[c:d].tolist()
        for kind, i, j, k, m in difflib.SequenceMatcher(None, ids_before, ids_after, autojunk=False).get_opcodes():
            if kind == "equal":
                yield from zip(after[k:m].tolist(), before[i:j].tolist(), strict=True)
            else:
                yield float(after[k:m].sum()), float(before[i:j].sum())


def _ranges(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of consecutive True values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))
