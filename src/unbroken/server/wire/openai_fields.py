"""The fields that OpenAI's dialects share, vLLM's additions among them. Tolerant: unknown keys and nulls are fine.

A key that is known to change what is sampled, and that this server cannot follow, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from unbroken.server.http.bodies import Body
from unbroken.server.http.errors import HttpError
from unbroken.server.wire.sampling_fields import SamplingFields, refuse_unknown
from unbroken.types import FinishReason, SampleResult, StructuredOutput

_NOT_FOLLOWED = frozenset(
    {
        "allowed_token_ids", "audio", "bad_words", "chat_template", "content_parts", "continue_final_message",
        "documents", "echo", "features", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "images", "logit_bias", "logits_processors", "min_tokens", "mm_processor_kwargs", "prediction",
        "prompt_embeds", "prompt_logprobs", "suffix", "thinking_token_budget", "truncate_prompt_tokens",
        "use_beam_search", "web_search_options",
    }
)  # fmt: skip
"""Keys of OpenAI's and vLLM's that would change the prompt, what is sampled, or what the answer holds."""


class StreamOptions(Body):
    """What a stream tells beside its chunks."""

    include_usage: bool | None = None
    """One more chunk at the end, with the counts of ids."""


class ResponseFormat(Body):
    """`text`, `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: dict[str, Any] | None = None


class OpenAIFields(SamplingFields):
    """What chat and text completions take alike."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """The served model's name, or nothing."""
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    """Server-sent events, `[DONE]` at the end."""
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    """vLLM's: the answer carries `prompt_token_ids` and each choice's `token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: a logprob's `token` is written `token_id:N`, which no two ids share."""

    def check_followed(self) -> None:
        """Raise `SamplingError` for a key that this server cannot follow."""
        extra = self.model_extra or {}
        known = {name: value for name, value in extra.items() if name in _NOT_FOLLOWED}
        refuse_unknown(known, "some keys are not supported and must be absent")

    @property
    def form(self) -> StructuredOutput | None:
        """What `response_format` asks for."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return StructuredOutput(json_schema='{"type": "object"}')
        if form.type == "json_schema" and form.json_schema and isinstance(form.json_schema.get("schema"), dict):
            return StructuredOutput(json_schema=json.dumps(form.json_schema["schema"]))
        raise HttpError(
            400,
            "response_format must be of type text, json_object, or json_schema with json_schema.schema, got "
            f"type {form.type!r}",
            param="response_format",
        )

    @property
    def num_choices(self) -> int:
        """`n`."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


def finish_reason(reason: FinishReason) -> str:
    """One of OpenAI's words: an aborted completion is an error, never an answer."""
    if reason is FinishReason.ABORT:
        raise HttpError(503, "the request was aborted in the engine", code="aborted")
    return reason.value


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
