"""Fields that OpenAI's dialects share, with vLLM's additions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from unbroken.server.http.bodies import Body
from unbroken.server.http.errors import HttpError
from unbroken.server.wire.sampling_fields import SamplingFields
from unbroken.types import FinishReason, SampleResult, StructuredOutput


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    """Add a chunk at the end, with the counts of ids."""


class ResponseFormat(Body):
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
    response_format: ResponseFormat | None = None
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
