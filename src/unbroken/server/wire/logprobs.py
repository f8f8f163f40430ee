"""Logprobs in the forms that the dialects have: OpenAI's two by text or as `token_id:N`, vLLM's by id."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.types import SampleChunk, SampledSequence, ScoredSequence, TokenIds


def chat_logprobs(codec: TextCodec, sampled: SampledSequence | SampleChunk, *, as_ids: bool) -> dict[str, Any]:
    """The form of chat completions: one entry for each id, stop id included, with the most likely ids beside it."""
    ids, logprobs = sampled.completion_ids.tolist(), sampled.rollout_logprobs.tolist()
    entries = [_entry(codec, token_id, logprob, as_ids=as_ids) for token_id, logprob in zip(ids, logprobs, strict=True)]
    for entry, tops in zip(entries, _tops(sampled), strict=True):
        entry["top_logprobs"] = [_entry(codec, top_id, logprob, as_ids=as_ids) for top_id, logprob in tops]
    return {"content": entries}


def completion_logprobs(
    codec: TextCodec, sampled: SampledSequence | SampleChunk, *, as_ids: bool, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """The form of text completions, parallel lists, and where the text of the next id begins.

    `text_offset` counts the characters of the ids' own texts from `offset` on. A character whose bytes are spread over
    several ids counts once for each of them.
    """
    ids = sampled.completion_ids.tolist()
    texts = [codec.decode([token_id], skip_special_tokens=True) for token_id in ids]
    *offsets, end = accumulate(map(len, texts), initial=offset)
    logprobs = {
        "tokens": [_name(codec, token_id, as_ids=as_ids) for token_id in ids],
        "token_logprobs": sampled.rollout_logprobs,
        "text_offset": offsets,
        "top_logprobs": [
            {_name(codec, top_id, as_ids=as_ids): logprob for top_id, logprob in tops} for tops in _tops(sampled)
        ],
    }
    return logprobs, end


def token_logprobs(sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
    """The form of vLLM's token dialect: ids with their ranks, in `top_logprobs` the sampled id before the others.

    `rank` counts from 1, and is null for an id that is none of the most likely ones that were asked for. `token`,
    `token_id:N`, is how vLLM told ids before 0.32: clients of that time look for it.
    """
    entries = []
    for token_id, logprob, tops in zip(
        sampled.completion_ids.tolist(), sampled.rollout_logprobs.tolist(), _tops(sampled), strict=True
    ):
        ranked = [_ranked(top, value, rank) for rank, (top, value) in enumerate(tops, 1)]
        own = next((entry for entry in ranked if entry["token_id"] == token_id), _ranked(token_id, logprob, None))
        others = [entry for entry in ranked if entry is not own]
        entries.append({**own, "logprob": logprob, "top_logprobs": [own, *others]})
    return {"content": entries}


def prompt_logprobs(codec: TextCodec, ids: TokenIds, scored: ScoredSequence) -> list[dict[str, Any] | None]:
    """The form of vLLM for a prompt: nothing for its first id, then the K most likely ids and the given one, by id.

    `rank` counts from 1; a given id that is none of the K most likely ones has K + 1, whatever its rank.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprob, tops in zip(ids[1:].tolist(), scored.logprobs.tolist(), _tops(scored), strict=True):
        ranked = {top: (value, rank) for rank, (top, value) in enumerate(tops, 1)}
        ranked.setdefault(token_id, (logprob, len(tops) + 1))
        entries.append(
            {
                str(top): {"logprob": value, "rank": rank, "decoded_token": codec.decode([top])}
                for top, (value, rank) in ranked.items()
            }
        )
    return entries


def _tops(sampled: SampledSequence | SampleChunk | ScoredSequence) -> list[list[tuple[int, float]]]:
    """At each position the most likely ids with their logprobs, without ids that are not possible there."""
    tops = sampled.top_logprobs
    if tops is None:
        number = len(sampled.logprobs if isinstance(sampled, ScoredSequence) else sampled.completion_ids)
        return [[] for _ in range(number)]
    return [
        [(top_id, logprob) for top_id, logprob in zip(ids, logprobs, strict=True) if math.isfinite(logprob)]
        for ids, logprobs in zip(tops.token_ids.tolist(), tops.logprobs.tolist(), strict=True)
    ]


def _ranked(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "rank": rank}


def _entry(codec: TextCodec, token_id: int, logprob: float, *, as_ids: bool) -> dict[str, Any]:
    text = codec.decode([token_id])
    # A token that is part of a character has no text, so its bytes cannot be told by it.
    token_bytes = None if "\ufffd" in text else list(text.encode())
    return {"token": f"token_id:{token_id}" if as_ids else text, "logprob": logprob, "bytes": token_bytes}


def _name(codec: TextCodec, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else codec.decode([token_id])
