"""Sampling parameters under OpenAI's and vLLM's names, which three dialects share."""

from __future__ import annotations

import json
from types import NoneType
from typing import Any

from pydantic import ConfigDict, Field

from unbroken.errors import SamplingError
from unbroken.server.http.bodies import Body, Ids, TextOrTexts
from unbroken.server.http.errors import shorten
from unbroken.server.wire.fields import STRUCTURED_OUTPUTS
from unbroken.server.wire.stop_text import StopCutter
from unbroken.types import SamplingParams, StructuredOutput


class StructuredOutputs(Body):
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


class SamplingFields(Body):
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
    structured_outputs: StructuredOutputs | None = None

    def make_cutter(self) -> StopCutter:
        """Make the cutter of one text of the answer."""
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
