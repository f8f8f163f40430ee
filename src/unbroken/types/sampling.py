"""What an engine is asked for: samples, and updates of its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

from unbroken.errors import SamplingError
from unbroken.types.arrays import MAX_DEPTH, TokenIds, is_deep, is_real, is_text, is_whole, token_ids
from unbroken.types.controls import LogitControls
from unbroken.types.images import ImageSpan, find_misplaced_span

TEMPERATURE_RANGE = (0.01, 100.0)
"""The lowest and highest temperature. Below, logits divided by it are too coarse in float32 for logprobs to agree."""


MAX_STOP_STRINGS = 256
"""All are searched after every id, while the other rows wait."""
MAX_STRUCTURE = 2**20
"""Most characters of a structured output. A grammar of 60 MB would occupy an engine for minutes."""
_MAX_CONTROL_IDS, _MAX_BAD_WORDS = 1024, 128
"""Most ids of a bias or an allowed set, and most bad words (and stop ids with `min_tokens`): vLLM's sampler on a GPU
takes no more."""


class Numerics(StrEnum):
    """How sampler and trainer compute logprobs."""

    FAST = "fast"
    """Each by its fastest kernels: logprobs of the same weights differ by rounding."""
    EXACT = "exact"
    """Logprobs of the same weights have the same bits (`unbroken.exactness`): from an embedded engine, on a CPU, in
    float32. Each row then has its own lane, and a step whose logprobs differ ends the run."""
    AUTO = "auto"
    """Of a run, which chooses one of the two when it begins. Engines have no such numerics, and what is no run (an
    evaluation, a `Trainer` alone) is fast with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A format that the text of a completion must have; exactly one field is set.

    Tokens that would break the format are never sampled; the logprobs are renormalised over the remaining ones.
    """

    regex: str | None = None
    """A regular expression for the whole text."""
    json_schema: str | None = None
    """A JSON schema, as JSON text."""
    structural_tag: str | None = None
    """A structural tag of xgrammar, as JSON text; control tokens in it are given by id."""

    def __post_init__(self) -> None:
        given = [name for name in ("regex", "json_schema", "structural_tag") if getattr(self, name) is not None]
        if len(given) != 1:
            raise SamplingError(
                f"structured_output needs exactly one of regex, json_schema and structural_tag, got {given or 'none'}"
            )
        if not is_text(getattr(self, given[0])):
            raise SamplingError(
                f"structured_output.{given[0]} must be a non-empty string, got {getattr(self, given[0])!r}"
            )
        text = getattr(self, given[0])
        if len(text) > MAX_STRUCTURE:
            raise SamplingError(
                f"structured_output.{given[0]} must have at most {MAX_STRUCTURE} characters, got {len(text)}"
            )
        if given[0] != "regex" and text.count("{") + text.count("[") > MAX_DEPTH and _is_deep_json(text):
            raise SamplingError(f"structured_output.{given[0]} must be nested in at most {MAX_DEPTH} levels, got more")


def _is_deep_json(text: str) -> bool:
    try:
        return is_deep(json.loads(text))
    except RecursionError:
        return True
    except ValueError:
        return False  # the engine says what is wrong


_ELSEWHERE = {
    "its name is max_tokens": "max_new_tokens max_completion_length",
    "its name is stop_strings": "stop stop_sequences",
    "ids that end a completion, besides the template's own, are stop_token_ids": "eos_token_id",
    "temperature 0 is greedy": "do_sample",
    "in a run it is rollouts.group_size": "n num_return_sequences",
    "logprobs of all sampled ids are always returned": "logprobs prompt_logprobs",
    "its name is min_tokens": "min_new_tokens min_length",
    "its name is bad_words_ids, and it takes ids": "bad_words suppress_tokens",
    "its name is logit_bias, of single ids": "sequence_bias",
    "logprobs would be of another distribution than the model's at this temperature": "begin_suppress_tokens "
    "no_repeat_ngram_size logits_processors guidance_scale watermarking watermarking_config typical_p "
    "epsilon_cutoff eta_cutoff top_h penalty_alpha num_beams length_penalty early_stopping diversity_penalty "
    "forced_bos_token_id forced_eos_token_id",
    "in a run it is rollouts.limits.thinking_tokens": "thinking_token_budget",
    "a completion ends with a stop id, a stop string or max_tokens": "ignore_eos max_time repetition_detection",
    "it changes text alone, and completions are ids": "skip_special_tokens spaces_between_special_tokens detokenize "
    "include_stop_str_in_output",
    "a recipe in Python gives it, RolloutConfig(sampling=SamplingParams(...))": "structured_output bad_words_ids",
    "each rollout has one of its own, by the run's seed": "seed",
    "rollouts keep the logprobs of sampled ids alone": "num_top_logprobs",
    "trainer.routing_replay asks for them": "return_routed_experts",
    "rollouts ask for them where top_k, top_p, min_p or a format cuts": "return_kept_ids",
}
"""Why parameters of transformers' `GenerationConfig` and vLLM's `SamplingParams` are not here, and why some that are
here, for requests, are no settings of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Returned logprobs are those of the distribution after all parameters were applied.

    The trainer reproduces all of them: `temperature` by scaling its logits, what changes logits by changing its own
    (`controls`), and top-k, top-p, min-p and a structured output by the ids that they kept (`return_kept_ids`).
    """

    elsewhere: ClassVar[Mapping[str, str]] = {name: why for why, names in _ELSEWHERE.items() for name in names.split()}
    """Parameters that a run's settings are without, and why."""

    max_tokens: int = 512
    """Maximum number of tokens to sample, stop token included; in a rollout, of one turn. Raise it where turns are cut
    (`counters/truncations`)."""
    temperature: float = 1.0
    """How random the sampling is, from 0.01 to 100; or 0 for greedy sampling, with the logprobs of temperature 1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose total probability reaches this."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the highest one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or completion (CTRL, arXiv:1909.05858);
    0.01 to 100. Raise it a little (1.05) where a model repeats itself until turns are cut."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens already in the completion; -2 to 2, as in OpenAI's API and vLLM. Raise
    it where completions of one problem are all alike."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the completion; -2 to 2. Raise it where a model repeats single words."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of an id and a number in [-100, 100], which is added to its logit: `[[1234, -5.0]]`. Give one where a few
    ids are sampled too often or never, such as the one that ends reasoning."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only ids that may be sampled, the ids that end a turn among them; empty: all. Give them where the answer is
    one of a few ids, such as the letters of a choice."""
    min_tokens: int = 0
    """How many ids are sampled before one that ends the turn may be. Raise it where a model ends turns at once."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that are never sampled, each a word as it is encoded, also with the space before it:
    `[[1234], [17, 18]]`. Give them where rollouts write what must never be learned, such as the tags of another
    format."""
    seed: int | None = None
    """Makes the request repeatable on the same engine, however it is batched; each of n completions has its own random
    stream. None draws a new seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion, besides the template's own; the sampled one is kept as its last id."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the completion; the tokens that spell them are kept, like all sampled ones."""
    structured_output: StructuredOutput | None = None
    """A format that the text of each turn must have, by vLLM. Give one where rewards can judge only replies of this
    form, and the model rarely writes it."""
    num_top_logprobs: int = 0
    """How many of the most likely tokens to report at each position, in addition to the sampled one."""
    return_routed_experts: bool = False
    """Return the experts that computed each id (`SampledSequence.routed_experts`), L * K bytes an id; for a model with
    experts in an engine that was started to record them."""
    return_kept_ids: bool = False
    """Return the ids that each id was sampled from (`SampledSequence.kept_ids`), 4 bytes each, if top-k, top-p, min-p
    or a format cuts any. Rollouts of a run do so by themselves."""

    def __post_init__(self) -> None:
        _check_rules(self, _PARAMETER_RULES)
        if len(self.stop_strings) > MAX_STOP_STRINGS or sum(map(len, self.stop_strings)) > 2**16:
            raise SamplingError(
                f"stop_strings must be at most {MAX_STOP_STRINGS} strings of 65536 characters together, got "
                f"{len(self.stop_strings)} of {sum(map(len, self.stop_strings))}"
            )
        if self.logit_bias or self.allowed_token_ids or self.bad_words_ids or self.min_tokens:
            self._check_controls()

    def _check_controls(self) -> None:
        limits = (
            ("logit_bias", self.logit_bias, _MAX_CONTROL_IDS),
            ("allowed_token_ids", self.allowed_token_ids, _MAX_CONTROL_IDS),
            ("bad_words_ids", self.bad_words_ids, _MAX_BAD_WORDS),
            ("stop_token_ids with min_tokens", self.stop_token_ids if self.min_tokens else (), _MAX_BAD_WORDS),
        )
        for name, values, most in limits:
            if len(values) > most:
                raise SamplingError(f"{name} must be at most {most}, which vLLM takes, got {len(values)}")
        banned = {word[0] for word in self.bad_words_ids if len(word) == 1}
        banned |= set(self.stop_token_ids if self.min_tokens else ())
        if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
            raise SamplingError(
                "allowed_token_ids must have an id that bad_words_ids and min_tokens leave possible, got "
                f"{self.allowed_token_ids}"
            )

    @property
    def controls(self) -> LogitControls | None:
        """What changes the logits; None if nothing does."""
        if _get_reshaping(self) == _get_reshaping(_PLAIN):
            return None
        stops = sorted(set(self.stop_token_ids)) if self.min_tokens else ()
        controls = LogitControls(
            stop_token_ids=tuple(stops),
            min_tokens=self.min_tokens if stops else 0,
            **{name: getattr(self, name) for name in _RESHAPING if name != "min_tokens"},
        )
        return None if controls == LogitControls() else controls

    @property
    def changes(self) -> dict[str, Any]:
        """The parameters by which the sampled distribution is not the model's own at temperature 1; empty if it is.

        A structured output may have a million characters, and is only said to be one.
        """
        names = ("temperature", *_TRUNCATING)
        found = {name: value for name in names if (value := getattr(self, name)) != getattr(_PLAIN, name)}
        found = {name: True if name == "structured_output" else value for name, value in found.items()}
        return found if self.controls is None else found | self.controls.to_json()

    @property
    def truncates(self) -> bool:
        """Whether ids are cut from the distribution by their probability or a format; never of greedy sampling."""
        return self.temperature > 0 and _get_truncating(self) != _get_truncating(_PLAIN)

    @property
    def is_plain(self) -> bool:
        """Whether the distribution is the model's at this temperature, neither cut nor changed."""
        return self.controls is None and not self.truncates

    @property
    def truncations(self) -> str:
        """The parameters that do so, with their values."""
        return ", ".join(
            name if name == "structured_output" else f"{name} {value}"
            for name, value in self.changes.items()
            if name in _TRUNCATING
        )


_TRUNCATING = ("top_k", "top_p", "min_p", "structured_output")
"""Parameters that cut ids from the distribution."""
_RESHAPING = (
    *("logit_bias", "allowed_token_ids", "min_tokens", "bad_words_ids"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Parameters that change logits (`LogitControls`)."""
_get_truncating, _get_reshaping = attrgetter(*_TRUNCATING), attrgetter(*_RESHAPING)
"""Their values as a tuple, which is compared with that of the defaults: each turn of a rollout asks ten times."""


def check_reproducible(params: SamplingParams, *, whose: str) -> None:
    """Raise `SamplingError`, which names the parameter, unless logprobs of a model alone are those of the sampler.

    `whose` they are is for the message, such as "TRL's".
    """
    for name in (*_TRUNCATING, *_RESHAPING):
        if getattr(params, name) != getattr(_PLAIN, name):
            raise SamplingError(
                f"sampling.{name} must be {getattr(_PLAIN, name)}, got {getattr(params, name)}: {whose} logprobs would "
                "not be those of the sampled distribution"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A prompt for an engine to continue: ids in, ids out."""

    request_id: str
    """Unique among the running requests, for `Engine.abort`."""
    prompt_ids: TokenIds
    """[T] at least one id."""
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    """Number of independent completions of the prompt."""
    images: tuple[ImageSpan, ...] = ()
    """The images in `prompt_ids`, in order."""
    adapter: str | None = None
    """Name of a LoRA adapter of the engine; None for the model itself."""
    policy_version: int | None = None
    """The only version of the weights that may answer, which the engine's caller checks; None for any."""
    session_id: str | None = None
    """Name of the conversation, whose requests go where its prefix is cached; None leaves that to the engine."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids, name="prompt_ids"))
        if len(self.prompt_ids) == 0:
            raise SamplingError("prompt_ids must have at least one id, got none")
        _check_rules(self, _REQUEST_RULES)
        self._check_images()

    @property
    def image_sha256s(self) -> tuple[str, ...]:
        """SHA-256 of each image, in order."""
        return tuple(span.sha256 for span in self.images)

    def _check_images(self) -> None:
        if (problem := find_misplaced_span(self.images, len(self.prompt_ids), of="prompt_ids")) is not None:
            raise SamplingError(problem)
        for k, span in enumerate(self.images):
            if span.settings != self.images[0].settings:
                raise SamplingError(
                    f"images[{k}] must have the same settings as the other images, {self.images[0].settings}, got "
                    f"{span.settings}: an engine takes one mm_processor_kwargs per prompt"
                )


def _is_natural(value: Any) -> bool:
    """Whether it is an id, or another whole number from 0 on."""
    return is_whole(value, 0)


def _are_ids(values: Any) -> bool:
    return _is_tuple(values, _is_natural)


def _is_word(value: Any) -> bool:
    return _are_ids(value) and len(value) > 0


def _is_bias(values: Any) -> bool:
    def is_pair(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == 2 and _is_natural(value[0]) and is_real(value[1], -100, 100)

    return _is_tuple(values, is_pair) and len({token_id for token_id, _ in values}) == len(values)


def _is_tuple(values: Any, is_member: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple) and all(map(is_member, values))


class InFlight(StrEnum):
    """How running requests continue when new weights come."""

    PAUSE = "pause"
    """They wait while the weights load and continue with the new ones: their ids carry two versions or more."""
    FINISH = "finish"
    """They finish with the old weights; new requests wait for the new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's answer to an update, once it samples with the new weights."""

    policy_version: int
    digest: str | None
    """Checksum of the received weights, if the transport computes one (`Layout.digest`)."""
    seconds: Mapping[str, float]
    """Duration of each part: `receive` (and to stop the requests), `load`, `resume` (and to reset the caches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlacement:
    """The place and dtype of an engine's weights, for a sender that wants to match them."""

    dtype: str | None
    """Of floating-point weights, under torch's name; None if any dtype is taken."""
    device: str
    """The kind of device: `cpu`, `cuda`."""
    gpu_uuids: tuple[str, ...] = ()
    """The GPUs of the workers. A sender over NCCL must use others."""


_Rule: TypeAlias = tuple[str, Any, Callable[[Any], bool], str]
"""A field's name, its default, whether a value of it is right, and what it must be in words."""


def _check_rules(checked: Any, rules: Sequence[_Rule]) -> None:
    """Raise `SamplingError` for the first field that has a wrong value."""
    # Each turn of a rollout has its own parameters, and nearly all of their values are the defaults.
    for name, default, is_right, rule in rules:
        value = getattr(checked, name)
        if value is not default and not is_right(value):
            raise SamplingError(f"{name} must be {rule}, got {value!r}")


def _make_rules(kind: type[Any], *rules: tuple[str, Callable[[Any], bool], str]) -> tuple[_Rule, ...]:
    defaults = {each.name: each.default for each in fields(kind)}
    return tuple((name, defaults[name], is_right, rule) for name, is_right, rule in rules)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_penalty(value: Any) -> bool:
    return is_real(value, -2, 2)


_PARAMETER_RULES = _make_rules(
    SamplingParams,
    ("max_tokens", lambda value: is_whole(value, 1), "a whole number in [1, 2**31)"),
    (
        "temperature",
        lambda value: is_real(value, 0, 0) or is_real(value, *TEMPERATURE_RANGE),
        f"0 or a number in {list(TEMPERATURE_RANGE)}",
    ),
    ("top_k", _is_natural, "a whole number in [0, 2**31), where 0 is off"),
    ("top_p", lambda value: is_real(value, 0, 1) and value != 0, "a number in (0, 1]"),
    ("min_p", lambda value: is_real(value, 0, 1), "a number in [0, 1]"),
    ("repetition_penalty", lambda value: is_real(value, 0.01, 100), "a number in [0.01, 100]"),
    ("presence_penalty", _is_penalty, "a number in [-2, 2]"),
    ("frequency_penalty", _is_penalty, "a number in [-2, 2]"),
    ("logit_bias", _is_bias, "pairs of an id and a number in [-100, 100], no id twice"),
    ("allowed_token_ids", _are_ids, "a tuple of ids in [0, 2**31)"),
    ("min_tokens", _is_natural, "a whole number in [0, 2**31)"),
    ("bad_words_ids", lambda value: _is_tuple(value, _is_word), "a tuple of non-empty tuples of ids"),
    ("seed", lambda value: is_whole(value, 0, 2**63 - 1), "None or a whole number in [0, 2**63)"),
    ("stop_token_ids", _are_ids, "a tuple of ids in [0, 2**31)"),
    ("stop_strings", lambda value: _is_tuple(value, is_text), "a tuple of non-empty strings"),
    ("structured_output", lambda value: isinstance(value, StructuredOutput), "None or a StructuredOutput"),
    ("num_top_logprobs", _is_natural, "a whole number in [0, 2**31)"),
    ("return_routed_experts", _is_bool, "true or false"),
    ("return_kept_ids", _is_bool, "true or false"),
)
_REQUEST_RULES = _make_rules(
    SampleRequest,
    ("request_id", is_text, "a non-empty string"),
    ("n", lambda value: is_whole(value, 1), "a whole number in [1, 2**31)"),
    ("params", lambda value: isinstance(value, SamplingParams), "SamplingParams"),
    ("adapter", is_text, "None or a non-empty string"),
    ("session_id", is_text, "None or a non-empty string"),
)
_PLAIN = SamplingParams()
"""The defaults."""
