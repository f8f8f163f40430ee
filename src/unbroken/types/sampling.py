"""What an engine is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import SamplingError
from unbroken.types.arrays import TokenIds, check_rules, is_real, is_text, is_whole, token_ids
from unbroken.types.images import ImageSpan, find_misplaced_span

TEMPERATURE_RANGE = (0.01, 100.0)
"""Least and greatest temperature to sample or score at: below, float32 logits divided by it are too coarse to agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text of a completion must be; exactly one of the fields is given.

    Ids that would break it are never sampled, so the logprobs are those of what was left.
    """

    regex: str | None = None
    """A regular expression for the whole text."""
    json_schema: str | None = None
    """A JSON schema, as JSON text."""

    def __post_init__(self) -> None:
        given = [name for name in ("regex", "json_schema") if getattr(self, name) is not None]
        if len(given) != 1:
            raise SamplingError(f"structured_output needs exactly one of regex and json_schema, got {given or 'none'}")
        if not is_text(getattr(self, given[0])):
            raise SamplingError(
                f"structured_output.{given[0]} must be a non-empty string, got {getattr(self, given[0])!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. The logprobs that come back are those of the distribution after all of it was applied.

    Only `temperature` can be followed by the trainer, which scales its logits the same way. With top-k, top-p, min-p or
    penalties the sampled distribution is not the trainer's, and the ratio between them is not 1 at equal weights.
    """

    max_tokens: int = 512
    """Most ids to sample, stop id included."""
    temperature: float = 1.0
    """0, which takes the most likely id and has the logprobs of temperature 1, or within `TEMPERATURE_RANGE`."""
    top_k: int = 0
    """Keep the k most likely ids; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely ids whose mass reaches this."""
    min_p: float = 0.0
    """Keep ids at least this times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids seen in prompt or completion (CTRL, arXiv:1909.05858).
    0.01 to 100."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of ids already in the completion; -100 to 100."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the completion; -100 to 100."""
    seed: int | None = None
    """Makes the request repeatable on the same engine, however it was batched; completion i of n is sampled from its
    own stream. None draws a fresh seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion; the sampled one is kept as its last id."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the completion; the ids that spell them are kept, as all that was sampled is."""
    structured_output: StructuredOutput | None = None
    """A form that the text must have; not every engine can force one."""
    num_top_logprobs: int = 0
    """How many of the most likely ids to report at each position, beside the sampled one."""

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", is_whole(self.max_tokens, 1), "a whole number in [1, 2**31)"),
            ("temperature", self._has_temperature(), f"0 or a number in {list(TEMPERATURE_RANGE)}"),
            ("top_k", is_whole(self.top_k, 0), "a whole number in [0, 2**31), where 0 is off"),
            ("top_p", is_real(self.top_p, 0, 1) and self.top_p != 0, "a number in (0, 1]"),
            ("min_p", is_real(self.min_p, 0, 1), "a number in [0, 1]"),
            ("repetition_penalty", is_real(self.repetition_penalty, 0.01, 100), "a number in [0.01, 100]"),
            ("presence_penalty", is_real(self.presence_penalty, -100, 100), "a number in [-100, 100]"),
            ("frequency_penalty", is_real(self.frequency_penalty, -100, 100), "a number in [-100, 100]"),
            ("seed", self.seed is None or is_whole(self.seed, 0, 2**63 - 1), "None or a whole number in [0, 2**63)"),
            ("stop_token_ids", _is_tuple(self.stop_token_ids, _is_id), "a tuple of ids in [0, 2**31)"),
            ("stop_strings", _is_tuple(self.stop_strings, is_text), "a tuple of non-empty strings"),
            (
                "structured_output",
                self.structured_output is None or isinstance(self.structured_output, StructuredOutput),
                "None or a StructuredOutput",
            ),
            ("num_top_logprobs", is_whole(self.num_top_logprobs, 0), "a whole number in [0, 2**31)"),
        )
        check_rules(self, rules)

    def _has_temperature(self) -> bool:
        return is_real(self.temperature, 0, 0) or is_real(self.temperature, *TEMPERATURE_RANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What an engine is asked to continue: ids in, ids out."""

    request_id: str
    """Unique among the requests in flight; what `Engine.abort` takes."""
    prompt_ids: TokenIds
    """[T] at least one id."""
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    """Independent completions of the same prompt."""
    images: tuple[ImageSpan, ...] = ()
    """The images whose placeholders stand in `prompt_ids`, in order."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine has; None is the model itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids, name="prompt_ids"))
        if len(self.prompt_ids) == 0:
            raise SamplingError("prompt_ids must hold at least one id, got none")
        rules = (
            ("request_id", is_text(self.request_id), "a non-empty string"),
            ("n", is_whole(self.n, 1), "a whole number in [1, 2**31)"),
            ("params", isinstance(self.params, SamplingParams), "SamplingParams"),
            ("adapter", self.adapter is None or is_text(self.adapter), "None or a non-empty string"),
        )
        check_rules(self, rules)
        self._check_images()

    @property
    def image_sha256s(self) -> tuple[str, ...]:
        """The names of the images, in order."""
        return tuple(span.sha256 for span in self.images)

    def _check_images(self) -> None:
        if (told := find_misplaced_span(self.images, len(self.prompt_ids), of="prompt_ids")) is not None:
            raise SamplingError(told)
        for k, span in enumerate(self.images):
            if span.settings != self.images[0].settings:
                raise SamplingError(
                    f"images[{k}] must have the settings of the others, {self.images[0].settings}, got "
                    f"{span.settings}: an engine takes one mm_processor_kwargs for a prompt"
                )


def _is_id(value: Any) -> bool:
    return is_whole(value, 0)


def _is_tuple(values: Any, is_member: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple) and all(map(is_member, values))
