"""What the usual pipeline would have made of the branches of a recorded rollout.

The completions are parsed again as they were in the run, from the same ids; so it needs the tokenizer and the chat
template of the run's model, and compares nothing where they are not on this machine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.ledger.nodes import ForkReason
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import ParsedResponse
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.retokenising.changes import CAUSE_WORDS, IdOrigin
from unbroken.retokenising.comparison import Retokenised, SampledTurn, TemplateTexts, retokenise
from unbroken.types import token_ids

MAX_IDS = 32_768
"""Longer sequences are not compared: it takes seconds, and the page waits."""
MAX_ROWS = 32
"""Further branches are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """Where the tokenizer and the template of a model are, and what the template gets."""

    folder: Path
    renderer: str
    """The settings `[renderer]` of the run, as JSON."""


@functools.lru_cache(maxsize=8)
def load_template_texts(source: TemplateSource) -> TemplateTexts | None:
    """Load a tokenizer and its template; None if there is no template that can be used."""
    from unbroken.rendering.loader import load_renderer, load_tokenizer

    folder, renderer = str(source.folder), json.loads(source.renderer)
    options = {name: renderer[name] for name in ("template_kwargs", "parser") if renderer.get(name)}
    try:
        return TemplateTexts(tokenizer=load_tokenizer(folder), template_renderer=load_renderer(folder, **options))
    except Exception:  # of a damaged folder, transformers raises anything
        return None


def retokenise_recorded(shown: Mapping[str, Any], source: TemplateSource) -> dict[str, Any]:
    """Load what `retokenise_trajectory` needs, and call it: in a separate process, as the template is not ours."""
    return retokenise_trajectory(shown, load_template_texts(source))


def retokenise_trajectory(shown: Mapping[str, Any], texts: TemplateTexts | None) -> dict[str, Any]:
    """What a page shows of it: `rows`, for each its ids and each stretch that changed; or why not, as `problem`.

    `shown` is a rollout as the page has it: its record, and the turn of each node.
    """
    rows = shown["record"].get("rows") or []
    if texts is None:
        return _refuse(
            f"The tokenizer and the chat template of {shown.get('model')} are not on this machine, "
            "or have links in their folder: `unbroken view RUN --tokenizer FOLDER` names another."
        )
    if not rows:
        return _refuse("There are no ids.")
    return {"rows": [_try_row(shown, row, texts) for row in rows[:MAX_ROWS]]}


def _try_row(shown: Mapping[str, Any], row: Mapping[str, Any], texts: TemplateTexts) -> dict[str, Any]:
    try:
        return _retokenise_row(shown, row, texts)
    except Exception as error:  # a damaged record, or one of another tokenizer, can fail anywhere
        return _refuse(f"It cannot be compared: {type(error).__name__}: {error}"[:500])


def _retokenise_row(shown: Mapping[str, Any], row: Mapping[str, Any], texts: TemplateTexts) -> dict[str, Any]:
    record, turn_of_node = shown["record"], shown["turn_of_node"]
    last = _find_last_turn(row, turn_of_node)
    if last is None:
        return _refuse("Which turns sampled these ids is not known.")
    if problem := _find_problem(record, row, last):
        return _refuse(problem)
    messages = _get_messages(record, row)
    sampled = _make_turns(record, row, turn_of_node, texts)
    num_replies = sum(message.get("role") == "assistant" for message in messages)
    # A record without messages of its rows also has replies that the policy did not give, such as examples in a prompt.
    if num_replies < len(sampled) or (row.get("messages") is not None and num_replies > len(sampled)):
        return _refuse("The turns and the recorded messages of this branch are not the same.")
    # What follows the last reply was never a prompt: nothing would have been tokenised again.
    end = [each["stop"] for each in row["segments"] if turn_of_node.get(each["node"]) == last][-1]
    exact, origins = token_ids(row["token_ids"][:end]), _find_origins(row)[:end]
    found = retokenise(texts, exact, origins, sampled, messages, tools=_get_tools(record, row))
    if found is None:
        return _refuse("The chat template refuses the conversation as it was parsed.")
    return _describe(found, num_ids=len(exact), tokenizer=texts.tokenizer)


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
    for each in row["segments"]:
        if each["origin"] == "sampled":
            origins[each["start"] : each["stop"]] = [IdOrigin.SAMPLED] * (each["stop"] - each["start"])
    return origins


def _describe(found: Retokenised, *, num_ids: int, tokenizer: Any) -> dict[str, Any]:
    ids = found.retokenised_ids.tolist()
    gaps = [(each.gap.before, each.gap.after, sorted(each.causes)) for each in found.changes]
    return {
        "token_ids": ids, "num_ids": num_ids,
        "num_sampled": found.origins.count(IdOrigin.SAMPLED), "num_changed": found.count_changed_ids(),
        "changes": [{"before": before, "after": after, "causes": causes} for before, after, causes in gaps],
        "cause_words": {cause: CAUSE_WORDS[cause] for cause in sorted(found.causes)},
        "texts": {each: text.text for each, text in _read_token_texts(tokenizer).get_all(set(ids)).items()},
    }  # fmt: skip


def _refuse(problem: str) -> dict[str, Any]:
    return {"problem": problem}


@functools.lru_cache(maxsize=8)  # half a second for a vocabulary of 150,000 ids
def _read_token_texts(tokenizer: Any) -> TokenTexts:
    return TokenTexts(tokenizer.backend_tokenizer)


def _make_turns(
    record: Mapping[str, Any], row: Mapping[str, Any], turn_of_node: Mapping[int, int], texts: TemplateTexts
) -> list[SampledTurn]:
    """The turns of the conversation. Of one that is not in the row the message alone is known.

    Where rows have messages of their own, these are those of the row; else all since the history was last rewritten.
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
