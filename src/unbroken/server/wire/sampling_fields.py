"""How to sample, in the names that vLLM added to OpenAI's: three dialects take these fields alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any

from pydantic import ConfigDict, Field

from unbroken.errors import SamplingError
from unbroken.server.http.bodies import Body, Ids, TextOrTexts
from unbroken.server.http.errors import shorten
from unbroken.server.wire.stop_text import StopCutter
from unbroken.types import SamplingParams, StructuredOutput

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
"""What asks for nothing: vLLM's defaults of the fields that are refused."""


class StructuredOutputs(Body):
    """A form that the text must have: `regex`, `json` (a schema), or `json_object`. vLLM's other forms are refused."""

    model_config = ConfigDict(extra="allow")

    regex: str | None = None
    json_schema: Any = Field(default=None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None

    def form(self) -> StructuredOutput | None:
        """What the engine takes. Raises `SamplingError` for a form that is not known, or for two."""
        refuse_unknown(self.model_extra or {}, "structured_outputs takes regex, json or json_object")
        schema = '{"type": "object"}' if self.json_object else _json_text(self.json_schema)
        if self.regex is None and schema is None:
            return None
        return StructuredOutput(regex=self.regex, json_schema=schema)


class SamplingFields(Body):
    """Null is the default everywhere."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 keep all ids."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """-1 is none."""
    stop: TextOrTexts | None = None
    stop_token_ids: Ids | None = None
    """Beside the ids that end a turn."""
    include_stop_str_in_output: bool | None = None
    """Let texts end with the stop string; ids always keep it."""
    ignore_eos: bool | None = None
    """Do not stop at the ids that end a turn."""
    structured_outputs: StructuredOutputs | None = None

    def cutter(self) -> StopCutter:
        """A new one for one text of the answer."""
        return StopCutter(() if self.include_stop_str_in_output else self._stop_strings)

    @property
    def _stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(
        self,
        *,
        end_ids: tuple[int, ...],
        max_tokens: int,
        num_top_logprobs: int,
        form: StructuredOutput | None = None,
    ) -> SamplingParams:
        """What the engine takes.

        Args:
            end_ids: the ids that end a turn.
            max_tokens: most ids to sample.
            num_top_logprobs: how many of the most likely ids to report.
            form: a structured output that another field asked for.

        Raises:
            SamplingError: a value out of range.
        """
        own_ends = () if self.ignore_eos else end_ids
        own_form = None if self.structured_outputs is None else self.structured_outputs.form()
        if own_form is not None and form is not None:
            raise SamplingError("give either response_format or structured_outputs, not both")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_given(self.temperature, 1.0),
            top_p=_given(self.top_p, 1.0),
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            min_p=_given(self.min_p, 0.0),
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            seed=None if self.seed == -1 else self.seed,
            stop_token_ids=tuple(sorted({*own_ends, *(self.stop_token_ids or ())})),
            stop_strings=self._stop_strings,
            structured_output=own_form or form,
            num_top_logprobs=num_top_logprobs,
        )


def refuse_unknown(extra: Mapping[str, Any], rule: str) -> None:
    """Raise `SamplingError` with `rule` for keys that ask for something; nulls and empty values ask for nothing."""
    if asked := sorted(name for name, value in extra.items() if value not in _NOTHING):
        given = ", ".join(f"{shorten(name)[1:-1]}={shorten(extra[name])}" for name in asked[:3])
        given += f" and {len(asked) - 3} more" if len(asked) > 3 else ""
        raise SamplingError(f"{rule}, got {given}: this server samples exactly as asked, and cannot follow that")


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _json_text(schema: Any) -> str | None:
    if not isinstance(schema, (dict, str, NoneType)):
        raise SamplingError(f"structured_outputs.json must be a schema as an object or its text, got {shorten(schema)}")
    return json.dumps(schema) if isinstance(schema, dict) else schema
