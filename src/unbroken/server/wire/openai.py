"""What the dialects of OpenAI and vLLM share: sampling fields, stop strings, reasons, counts, versions, logprobs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate
from types import NoneType
from typing import Any

from pydantic import ConfigDict, Field

from unbroken.errors import SamplingError
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.http.bodies import BodyModel, Ids, TextOrTexts
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.fields import STRUCTURED_OUTPUTS, list_asked
from unbroken.types import (
    FinishReason,
    SampleChunk,
    SampledSequence,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    StructuredOutput,
    TokenIds,
)


class StopCutter:
    """Passes text through, piece by piece, up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is certain: with the stop string `END`, the
    pieces `a E`, `N`, `x` come out as `a `, nothing, `ENx`.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def is_active(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop_strings)

    def feed(self, text: str) -> str:
        """Take a piece of text; returns the certain text."""
        if self.found is not None or not self._stop_strings:
            return "" if self.found is not None else text
        self._held += text
        found = [(place, stop) for stop in self._stop_strings if (place := self._held.find(stop)) >= 0]
        if found:
            place, self.found = min(found)
            certain, self._held = self._held[:place], ""
            return certain
        certain_length = len(self._held) - max(_find_overlap(self._held, stop) for stop in self._stop_strings)
        certain, self._held = self._held[:certain_length], self._held[certain_length:]
        return certain

    def finish(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def cut(self, text: str) -> str:
        """Cut a whole text before the first stop string."""
        return self.feed(text) + self.finish()


def _find_overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class _StructuredOutputs(BodyModel):
    """A constraint on the text: `regex`, `json` (a schema) or `json_object`. vLLM's others are refused."""

    model_config = ConfigDict(extra="allow")

    regex: str | None = None
    json_schema: Any = Field(default=None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None

    def to_structured_output(self) -> StructuredOutput | None:
        """Convert for the engine. Raises `HttpError` for an unknown constraint, `SamplingError` for two."""
        STRUCTURED_OUTPUTS.check(self.model_extra, place="structured_outputs")
        schema = '{"type": "object"}' if self.json_object else _to_json_text(self.json_schema)
        if self.regex is None and schema is None:
            return None
        return StructuredOutput(regex=self.regex, json_schema=schema)


class SamplingFields(BodyModel):
    """Null means the default for every field."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 turn it off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """-1 means no seed."""
    stop: TextOrTexts | None = None
    stop_token_ids: Ids | None = None
    """In addition to the ids that end a turn."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in texts; ids always keep it."""
    ignore_eos: bool | None = None
    """Do not stop at the ids that end a turn."""
    structured_outputs: _StructuredOutputs | None = None

    def make_cutter(self) -> StopCutter:
        """Make the cutter of one answer."""
        return StopCutter(() if self.include_stop_str_in_output else self._stop_strings)

    @property
    def _stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def to_params(
        self,
        *,
        end_ids: tuple[int, ...],
        max_tokens: int,
        num_top_logprobs: int,
        structured_output: StructuredOutput | None = None,
    ) -> SamplingParams:
        """Convert for the engine. Raises `SamplingError` for a value out of range.

        `end_ids` end a turn; `structured_output` is a constraint from another field.
        """
        used_end_ids = () if self.ignore_eos else end_ids
        own_output = None if self.structured_outputs is None else self.structured_outputs.to_structured_output()
        if own_output is not None and structured_output is not None:
            raise SamplingError("give either response_format or structured_outputs, not both")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or_default(self.temperature, 1.0),
            top_p=_or_default(self.top_p, 1.0),
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            min_p=_or_default(self.min_p, 0.0),
            repetition_penalty=_or_default(self.repetition_penalty, 1.0),
            presence_penalty=_or_default(self.presence_penalty, 0.0),
            frequency_penalty=_or_default(self.frequency_penalty, 0.0),
            seed=None if self.seed == -1 else self.seed,
            stop_token_ids=tuple(sorted({*used_end_ids, *(self.stop_token_ids or ())})),
            stop_strings=self._stop_strings,
            structured_output=own_output or structured_output,
            num_top_logprobs=num_top_logprobs,
        )


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _to_json_text(schema: Any) -> str | None:
    if not isinstance(schema, (dict, str, NoneType)):
        raise SamplingError(f"structured_outputs.json must be a schema as an object or its text, got {shorten(schema)}")
    return json.dumps(schema) if isinstance(schema, dict) else schema


class StreamOptions(BodyModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    """Add a chunk at the end, with the counts of ids."""


class _ResponseFormat(BodyModel):
    """Type `text`, `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: dict[str, Any] | None = None


class OpenAIFields(SamplingFields):
    """The fields of both chat and text completions."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """The served model, which may be left out, or an adapter."""
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    """Answer with server-sent events and `[DONE]`."""
    stream_options: StreamOptions | None = None
    response_format: _ResponseFormat | None = None
    return_token_ids: bool | None = None
    """From vLLM: the answer has `prompt_token_ids`, and each choice `token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """From vLLM: write a logprob's `token` as `token_id:N`, unique to the id."""

    return_weight_versions: bool | None = None
    """From vLLM 0.33: each choice has `weight_versions`, the versions of the weights that sampled its ids."""

    session_id: str | None = None
    """From vLLM: name of the conversation, for affinity; the header X-Session-ID does the same."""

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint of `response_format`."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return StructuredOutput(json_schema='{"type": "object"}')
        if wanted.type == "json_schema" and wanted.json_schema and isinstance(wanted.json_schema.get("schema"), dict):
            return StructuredOutput(json_schema=json.dumps(wanted.json_schema["schema"]))
        raise HttpError(
            400,
            "response_format must be of type text, json_object, or json_schema with json_schema.schema, got "
            f"type {wanted.type!r}",
            param="response_format",
        )

    def list_ignored_options(self) -> list[str]:
        """The options of the stream that are ignored."""
        return [] if self.stream_options is None else list_asked(self.stream_options.model_extra, "stream_options")

    @property
    def num_choices(self) -> int:
        """`n`, by default 1."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


def format_finish_reason(reason: FinishReason) -> str:
    """OpenAI's word for the reason. An aborted completion is an error, never an answer."""
    if reason is FinishReason.ABORT:
        raise HttpError(503, "the request was aborted in the engine", code="aborted")
    return reason.value


def choose_max_tokens(prompt_length: int, *, wanted: int | None, context_length: int) -> int:
    """Maximum number of ids to sample: `wanted`, or all that fit."""
    return wanted if wanted is not None else max(context_length - prompt_length, 1)


def count_usage(results: Sequence[SampleResult]) -> dict[str, int]:
    """Count the ids of prompts, once each, and of all completions."""
    num_sampled = sum(len(sequence.completion_ids) for result in results for sequence in result.sequences)
    return format_usage(sum(len(result.prompt_ids) for result in results), num_sampled)


def format_usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def list_version_spans(sequence: SampledSequence | SampleChunk) -> list[list[int]]:
    """`[start, stop, policy_version]` for each span of completion ids."""
    return [[span.start, span.stop, span.policy_version] for span in sequence.version_spans]


def format_weight_versions(sequence: SampledSequence | SampleChunk) -> list[dict[str, Any]]:
    """The same as vLLM writes it, whose versions are texts."""
    return [
        {"version": str(version), "start": start, "end": stop} for start, stop, version in list_version_spans(sequence)
    ]


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
