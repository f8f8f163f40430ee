"""Recorded rollouts, as files and stores have them, passed through the usual pipeline: each, and a summary of many.

The completions are parsed again as they were in the run, from the same ids; so it needs the tokenizer and the chat
template of the run's model. In a summary a rollout is compared up to its last turn. Turns that a fork left behind are
in rows of their own, and only counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, SamplingError
from unbroken.ledger.nodes import ForkReason
from unbroken.messages import Message, ToolSchema
from unbroken.progress import advance, begin
from unbroken.rendering.base import ParsedResponse
from unbroken.retokenising.changes import Cause, IdOrigin
from unbroken.retokenising.comparison import (
    Counts,
    Retokenised,
    SampledTurn,
    TemplateTexts,
    count_changed,
    count_compared,
    retokenise,
)
from unbroken.retokenising.ratios import Ratios, score_rollouts
from unbroken.training.metrics.mismatch import Mismatch
from unbroken.types import Logprobs, token_ids

MAX_IDS = 32_768
"""Longer sequences are not compared: it takes seconds."""


def _retokenise_record(record: Mapping[str, Any], texts: TemplateTexts) -> Retokenised | str:
    """Compare the branch of a rollout's last turn; returns why not, as a sentence, if it cannot be."""
    rows = record.get("rows") or []
    turn_of_node = match_turns(rows, record["turns"])
    found = [(turn, row) for row in rows if (turn := _find_last_turn(row, turn_of_node)) is not None]
    if not found:
        return "It has no sampled ids." if not rows else "Which turns sampled these ids is not known."
    _, row = max(found, key=lambda pair: pair[0])
    return retokenise_row(record, row, turn_of_node, texts)


def retokenise_row(
    record: Mapping[str, Any], row: Mapping[str, Any], turn_of_node: Mapping[int, int], texts: TemplateTexts
) -> Retokenised | str:
    """Compare one branch of a recorded rollout; returns why not, as a sentence, if it cannot be.

    `turn_of_node` is the turn that sampled each node (`match_turns`). A damaged record may raise anything.
    """
    last = _find_last_turn(row, turn_of_node)
    if last is None:
        return "Which turns sampled these ids is not known."
    if problem := _find_problem(record, row, last):
        return problem
    messages = _get_messages(record, row)
    sampled = _make_turns(record, row, turn_of_node, texts)
    num_replies = sum(message.get("role") == "assistant" for message in messages)
    # A record without messages of its rows also has replies that the policy did not give, such as examples in a prompt.
    if num_replies < len(sampled) or (row.get("messages") is not None and num_replies > len(sampled)):
        return "The turns and the recorded messages of this branch are not the same."
    # What follows the last reply was never a prompt: nothing would have been tokenised again.
    end = [each["stop"] for each in row["segments"] if turn_of_node.get(each["node"]) == last][-1]
    exact, origins = token_ids(row["token_ids"][:end]), _find_origins(row)[:end]
    found = retokenise(
        texts,
        exact,
        origins,
        sampled,
        messages,
        tools=_get_tools(record, row),
        rollout_logprobs=_read_logprobs(row, end),
    )
    return "The chat template refuses the conversation as it was parsed." if found is None else found


def _find_last_turn(row: Mapping[str, Any], turn_of_node: Mapping[int, int]) -> int | None:
    """The number of the last turn that sampled ids of a row; None if it is not known of all of them."""
    turns = {turn_of_node.get(each["node"]) for each in row["segments"] if each["origin"] == "sampled"}
    known = [turn for turn in turns if turn is not None]
    return max(known, default=None) if len(known) == len(turns) else None


def _find_problem(record: Mapping[str, Any], row: Mapping[str, Any], last_turn: int) -> str:
    """Why a row is not compared; "" if it is."""
    if row.get("messages") is None and last_turn != len(record["turns"]) - 1:
        return "Of branches before the last one the messages were not recorded."
    if row["images"]:
        return "Branches with images are not compared: their ids depend on the image processor."
    if len(row["token_ids"]) > MAX_IDS:
        return f"Only branches of up to {MAX_IDS} ids are compared, and this has {len(row['token_ids'])}."
    return ""


def _get_messages(record: Mapping[str, Any], row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row: all of the record's, where rows do not name their own."""
    messages: list[Message] = list(record.get("messages") or [])
    own = row.get("messages")
    return messages if own is None else [messages[index] for index in own]


def _find_origins(row: Mapping[str, Any]) -> list[IdOrigin]:
    """What made each id of a row, [num_ids]."""
    origins = [IdOrigin.PROMPT] * len(row["token_ids"])
    for start, stop, _ in row["policy_versions"]:  # a segment of sampled ids may have given ones inside
        origins[start:stop] = [IdOrigin.SAMPLED] * (stop - start)
    return origins


def _read_logprobs(row: Mapping[str, Any], end: int) -> Logprobs | None:
    """[end] the sampler's logprobs, NaN where nothing was sampled; None if they are not recorded."""
    given = row.get("rollout_logprobs")
    mask = np.array([origin is IdOrigin.SAMPLED for origin in _find_origins(row)], dtype=np.bool_)
    if given is None or len(given) != mask.sum() or None in given:
        return None
    logprobs = np.full(len(mask), np.nan, np.float32)
    logprobs[mask] = given
    return logprobs[:end]


def match_turns(rows: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The turn that sampled each node. Nodes get their numbers in the order of the turns; not all are in rows.

    Where turns are not in rows, a node has a turn only if its length leaves no other.
    """
    lengths: dict[int, int] = {}
    for row in rows:
        for segment in row["segments"]:
            if segment["origin"] == "sampled":
                node, length = segment["node"], segment["stop"] - segment["start"]
                lengths[node] = max(length, lengths.get(node, 0))
    numbered = [(number, length) for number, turn in enumerate(turns) if (length := _count_ids(turn))]
    nodes = sorted(lengths.items())
    if len(numbered) == len(nodes):
        return {node: number for (node, _), (number, _) in zip(nodes, numbered, strict=True)}
    first, last = _match_lengths(nodes, numbered), _match_lengths(nodes[::-1], numbered[::-1])
    return {node: number for node, number in first.items() if last.get(node) == number}


def _count_ids(turn: Mapping[str, Any]) -> int:
    """The ids of a turn's completion, with those that were given inside it."""
    number: int = turn["num_sampled"] + turn.get("num_given", 0)
    return number


def _match_lengths(nodes: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Match nodes and turns of the same length in this order, each as early as possible; {} if a node is left."""
    matched, rest = {}, iter(turns)
    for node, length in nodes:
        found = next((number for number, of_turn in rest if of_turn == length), None)
        if found is None:
            return {}
        matched[node] = found
    return matched


def _make_turns(
    record: Mapping[str, Any], row: Mapping[str, Any], turn_of_node: Mapping[int, int], texts: TemplateTexts
) -> list[SampledTurn]:
    """The turns of the conversation. Of one that is not in the row the message alone is known.

    Where rows have messages, these are those of the row; else all since the history was last rewritten.
    """
    turns = record["turns"]
    places = {turn_of_node.get(segment["node"]): segment for segment in row["segments"]}
    if row.get("messages") is not None:
        numbers = [number for number in range(len(turns)) if number in places]
    else:
        rewritten = [n for n, turn in enumerate(turns) if turn.get("fork") == ForkReason.REWRITTEN_HISTORY]
        numbers = list(range(rewritten[-1] if rewritten else 0, len(turns)))
    return [_make_turn(record, row, turns[number]["message"], places.get(number), texts) for number in numbers]


def _make_turn(
    record: Mapping[str, Any],
    row: Mapping[str, Any],
    message: Message,
    segment: Mapping[str, Any] | None,
    texts: TemplateTexts,
) -> SampledTurn:
    """A turn whose ids are a segment of the row; without one it has none."""
    if segment is None:
        nothing = ParsedResponse(content="")
        return SampledTurn(completion_ids=token_ids([]), parsed=nothing, message=message, start=None, num_ids=0)
    start, ids = segment["start"], token_ids(row["token_ids"][segment["start"] : segment["stop"]])
    parsed = _parse(record, row, start, ids, texts)
    return SampledTurn(completion_ids=ids, parsed=parsed, message=message, start=start, num_ids=len(ids))


def _parse(
    record: Mapping[str, Any], row: Mapping[str, Any], start: int, completion_ids: Any, texts: TemplateTexts
) -> ParsedResponse:
    if not len(completion_ids):
        return ParsedResponse(content="")
    return texts.template_renderer.parse_response(
        completion_ids, prompt_ids=token_ids(row["token_ids"][:start]), tools=_get_tools(record, row)
    )


def _get_tools(record: Mapping[str, Any], row: Mapping[str, Any]) -> Sequence[ToolSchema]:
    """The tools of a row: a session's branches have their own, as they may be of several agents."""
    tools: Sequence[ToolSchema] = row.get("tools", record.get("tools")) or ()
    return tools


async def summarize_retokenised(
    records: Iterable[Mapping[str, Any]], texts: TemplateTexts, engine: Engine, *, temperature: float
) -> dict[str, Any]:
    """Compare recorded rollouts, and score both forms with the weights that sampled them, if the engine can.

    Returns plain values (docs/drift.md). Raises `EngineError` if the engine fails.
    """
    rollouts: list[Retokenised] = []
    left_out: Counter[str] = Counter()
    for record in records:
        found = await asyncio.to_thread(_retokenise_record, record, texts)
        if isinstance(found, str):
            left_out[found] += 1
        else:
            rollouts.append(found)
        advance()
    ratios, why_none = await _score_known(rollouts, engine, temperature)
    whole = count_compared(rollouts)
    return {
        "compared": asdict(whole),
        "changed": _describe_counts(count_changed(rollouts), whole),
        "causes": {cause.value: _describe_counts(count_changed(rollouts, cause), whole) for cause in Cause},
        "left_out": dict(left_out),
        "num_turns_left_out": sum(each.num_turns_left_out for each in rollouts),
        "exact": _describe_mismatch(ratios.exact),
        "retokenised": _describe_mismatch(ratios.retokenised),
        "num_unscored": ratios.num_unscored,
        "why_unscored": why_none,
    }


async def _score_known(rollouts: list[Retokenised], engine: Engine, temperature: float) -> tuple[Ratios, str | None]:
    """The ratios, or why there are none."""
    known = [each for each in rollouts if each.rollout_logprobs is not None]
    begin("scoring both forms", total=len(known) + sum(each.differs for each in known), unit="sequences")
    if not known:
        return Ratios(num_unscored=len(rollouts)), "no rollout was compared with its logprobs"
    try:
        # Greedy ids have the logprobs of temperature 1.
        ratios = await score_rollouts(known, engine, temperature=temperature or 1.0)
    except (InvalidInputError, SamplingError) as error:  # an engine that does not score, or not at this temperature
        return Ratios(num_unscored=len(rollouts)), str(error)
    num_unscored = ratios.num_unscored + len(rollouts) - len(known)
    return Ratios(exact=ratios.exact, retokenised=ratios.retokenised, num_unscored=num_unscored), None


def _describe_counts(counts: Counts, whole: Counts) -> dict[str, Any]:
    return {
        **asdict(counts),
        "share_of_rollouts": _divide(counts.num_rollouts, whole.num_rollouts),
        "share_of_turns": _divide(counts.num_turns, whole.num_turns),
        "share_of_ids": _divide(counts.num_ids, whole.num_ids),
    }


def _describe_mismatch(found: Mismatch | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _divide(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
