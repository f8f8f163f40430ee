"""The fields that OpenAI's dialects share, vLLM's additions among them. Tolerant: unknown keys and nulls are fine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from unbroken.server.problems import HttpError
from unbroken.server.routes.native import Id
from unbroken.types import SampleResult, SamplingParams, StructuredOutput


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, with the counts of ids."""

    include_usage: bool | None = None


class ResponseFormat(BaseModel):
    """`text`, `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: dict[str, Any] | None = None


class OpenAIFields(BaseModel):
    """What chat and text completions take alike."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """vLLM's: the answer carries `prompt_token_ids` and each choice's `token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: a logprob's `token` is written `token_id:N`, which no two ids share."""

    def params(self, *, stop_token_ids: tuple[int, ...], max_tokens: int, num_top_logprobs: int) -> SamplingParams:
        """What the engine takes; `stop_token_ids` are the turn's own ends.

        Raises:
            HttpError: a field that this server does not know how to follow.
            SamplingError: a value out of range.
        """
        if self.logit_bias:
            raise HttpError(
                400, "logit_bias is not supported: the logprobs would be of another policy", param="logit_bias"
            )
        stop = self.stop or ()
        own_stops = () if self.ignore_eos else stop_token_ids
        top_k = self.top_k or 0
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_given(self.temperature, 1.0),
            top_p=_given(self.top_p, 1.0),
            top_k=0 if top_k == -1 else top_k,
            min_p=_given(self.min_p, 0.0),
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            seed=self.seed,
            stop_token_ids=tuple(sorted({*own_stops, *(self.stop_token_ids or ())})),
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            structured_output=_structured_output(self.response_format),
            num_top_logprobs=num_top_logprobs,
        )

    @property
    def num_choices(self) -> int:
        """`n`."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


def room_for(prompt_length: int, *, wanted: int | None, context_length: int) -> int:
    """How many ids to sample at most: `wanted`, or all that fit."""
    return wanted if wanted is not None else max(context_length - prompt_length, 1)


def usage_of_results(results: Sequence[SampleResult]) -> dict[str, int]:
    """Counts of ids: prompts once each, all completions."""
    num_sampled = sum(len(sequence.completion_ids) for result in results for sequence in result.sequences)
    return usage_object(sum(len(result.prompt_ids) for result in results), num_sampled)


def usage_object(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _structured_output(form: ResponseFormat | None) -> StructuredOutput | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutput(json_schema='{"type": "object"}')
    if form.type == "json_schema" and form.json_schema and isinstance(form.json_schema.get("schema"), dict):
        return StructuredOutput(json_schema=json.dumps(form.json_schema["schema"]))
    raise HttpError(
        400,
        "response_format must be of type text, json_object, or json_schema with json_schema.schema, got "
        f"{form.model_dump(exclude_none=True)!r}",
        param="response_format",
    )
