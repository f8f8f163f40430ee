"""Logprobs in the two forms that OpenAI's dialects have. A token is told by its text, or as `token_id:N`."""

from __future__ import annotations

from typing import Any

from unbroken.rendering.codec import TextCodec
from unbroken.types import SampleChunk, SampledSequence


def chat_logprobs(codec: TextCodec, sampled: SampledSequence | SampleChunk, *, as_ids: bool) -> dict[str, Any]:
    """The form of chat completions: one entry for each id, stop id included, with the most likely ids beside it."""
    tops = sampled.top_logprobs
    entries = []
    for position, (token_id, logprob) in enumerate(
        zip(sampled.completion_ids.tolist(), sampled.rollout_logprobs.tolist(), strict=True)
    ):
        entry = _entry(codec, token_id, logprob, as_ids=as_ids)
        entry["top_logprobs"] = (
            []
            if tops is None
            else [
                _entry(codec, top_id, top_logprob, as_ids=as_ids)
                for top_id, top_logprob in zip(
                    tops.token_ids[position].tolist(), tops.logprobs[position].tolist(), strict=True
                )
            ]
        )
        entries.append(entry)
    return {"content": entries}


def completion_logprobs(codec: TextCodec, sampled: SampledSequence | SampleChunk, *, as_ids: bool) -> dict[str, Any]:
    """The form of text completions: parallel lists."""
    names = [_name(codec, token_id, as_ids=as_ids) for token_id in sampled.completion_ids.tolist()]
    tops = sampled.top_logprobs
    offsets, position = [], 0
    for token_id in sampled.completion_ids.tolist():
        offsets.append(position)
        position += len(codec.decode([token_id], skip_special_tokens=True))
    return {
        "tokens": names,
        "token_logprobs": sampled.rollout_logprobs,
        "text_offset": offsets,
        "top_logprobs": None
        if tops is None
        else [
            {_name(codec, i, as_ids=as_ids): logprob for i, logprob in zip(ids, logprobs, strict=True)}
            for ids, logprobs in zip(tops.token_ids.tolist(), tops.logprobs.tolist(), strict=True)
        ],
    }


def _entry(codec: TextCodec, token_id: int, logprob: float, *, as_ids: bool) -> dict[str, Any]:
    text = codec.decode([token_id])
    name = f"token_id:{token_id}" if as_ids else text
    return {"token": name, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _name(codec: TextCodec, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else codec.decode([token_id])
