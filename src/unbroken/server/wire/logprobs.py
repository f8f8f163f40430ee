"""Logprobs in the dialects' forms: OpenAI's two by text or as `token_id:N`, vLLM's by id."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.types import SampleChunk, SampledSequence, ScoredSequence, TokenIds


def format_chat_logprobs(codec: TextCodec, sampled: SampledSequence | SampleChunk, *, as_ids: bool) -> dict[str, Any]:
    """Format as chat completions do: one entry per id, stop id included, with the most likely ids there."""
    ids, logprobs = sampled.completion_ids.tolist(), sampled.rollout_logprobs.tolist()
    entries = [
        _format_entry(codec, token_id, logprob, as_ids=as_ids) for token_id, logprob in zip(ids, logprobs, strict=True)
    ]
    for entry, tops in zip(entries, _list_tops(sampled), strict=True):
        entry["top_logprobs"] = [_format_entry(codec, top_id, logprob, as_ids=as_ids) for top_id, logprob in tops]
    return {"content": entries}


def format_completion_logprobs(
    codec: TextCodec, sampled: SampledSequence | SampleChunk, *, as_ids: bool, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """Format as text completions do, in parallel lists. Also returns the text offset of the next id.

    `text_offset` counts the characters of the ids' own texts, from `offset` on. A character whose bytes are spread over
    several ids counts once for each of them.
    """
    ids = sampled.completion_ids.tolist()
    texts = [codec.decode([token_id], skip_special_tokens=True) for token_id in ids]
    *offsets, end = accumulate(map(len, texts), initial=offset)
    logprobs = {
        "tokens": [_format_name(codec, token_id, as_ids=as_ids) for token_id in ids],
        "token_logprobs": sampled.rollout_logprobs,
        "text_offset": offsets,
        "top_logprobs": [
            {_format_name(codec, top_id, as_ids=as_ids): logprob for top_id, logprob in tops}
            for tops in _list_tops(sampled)
        ],
    }
    return logprobs, end


def format_token_logprobs(sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
    """Format as vLLM's token dialect does: ids with their ranks; `top_logprobs` begins with the sampled id.

    `rank` counts from 1; null if the id is not among the most likely ones requested. `token` is `token_id:N`, vLLM's
    form before 0.32, which older clients look for.
    """
    entries = []
    for token_id, logprob, tops in zip(
        sampled.completion_ids.tolist(), sampled.rollout_logprobs.tolist(), _list_tops(sampled), strict=True
    ):
        ranked = [_format_ranked(top, value, rank) for rank, (top, value) in enumerate(tops, 1)]
        own = next(
            (entry for entry in ranked if entry["token_id"] == token_id), _format_ranked(token_id, logprob, None)
        )
        others = [entry for entry in ranked if entry is not own]
        entries.append({**own, "logprob": logprob, "top_logprobs": [own, *others]})
    return {"content": entries}


def format_prompt_logprobs(codec: TextCodec, ids: TokenIds, scored: ScoredSequence) -> list[dict[str, Any] | None]:
    """Format as vLLM does for a prompt: null for its first id, then the K most likely ids and the prompt's own, by id.

    `rank` counts from 1. A prompt id that is not among the K most likely ones has the rank K + 1.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprob, tops in zip(ids[1:].tolist(), scored.logprobs.tolist(), _list_tops(scored), strict=True):
        ranked = {top: (value, rank) for rank, (top, value) in enumerate(tops, 1)}
        ranked.setdefault(token_id, (logprob, len(tops) + 1))
        entries.append(
            {
                str(top): {"logprob": value, "rank": rank, "decoded_token": codec.decode([top])}
                for top, (value, rank) in ranked.items()
            }
        )
    return entries


def _list_tops(sampled: SampledSequence | SampleChunk | ScoredSequence) -> list[list[tuple[int, float]]]:
    """The most likely ids with their logprobs at each position, without impossible ids (logprob minus infinity)."""
    tops = sampled.top_logprobs
    if tops is None:
        number = len(sampled.logprobs if isinstance(sampled, ScoredSequence) else sampled.completion_ids)
        return [[] for _ in range(number)]
    return [
        [(top_id, logprob) for top_id, logprob in zip(ids, logprobs, strict=True) if math.isfinite(logprob)]
        for ids, logprobs in zip(tops.token_ids.tolist(), tops.logprobs.tolist(), strict=True)
    ]


def _format_ranked(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "rank": rank}


def _format_entry(codec: TextCodec, token_id: int, logprob: float, *, as_ids: bool) -> dict[str, Any]:
    text = codec.decode([token_id])
    # A token that is only a part of a character has no text, so its bytes are unknown.
    token_bytes = None if "\ufffd" in text else list(text.encode())
    return {"token": f"token_id:{token_id}" if as_ids else text, "logprob": logprob, "bytes": token_bytes}


def _format_name(codec: TextCodec, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else codec.decode([token_id])
