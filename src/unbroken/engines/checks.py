"""Checks that all engines share, so that a mistake has the same message everywhere."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.engines.base import Engine, PausableEngine, ScoringEngine, UpdatableEngine
from unbroken.errors import ContextOverflowError, EngineError, IncompleteWeightsError, InvalidInputError, SamplingError
from unbroken.types import TEMPERATURE_RANGE, ImageSpan, InFlight, Numerics, SampleRequest, TokenIds, is_real, is_whole
from unbroken.weights.sources import WeightSource


def check_request(request: SampleRequest, *, vocab_size: int, context_length: int) -> None:
    """Raise `ContextOverflowError` if the prompt fills the context, `SamplingError` for ids outside the vocabulary."""
    check_vocabulary(request.prompt_ids, vocab_size=vocab_size, name="prompt_ids")
    if len(request.params.stop_token_ids) > vocab_size:
        raise SamplingError(
            f"stop_token_ids must be at most {vocab_size} ids, as many as the vocabulary has, got "
            f"{len(request.params.stop_token_ids)}"
        )
    for stop_id in request.params.stop_token_ids:
        if stop_id >= vocab_size:
            raise SamplingError(
                f"stop_token_ids must lie in [0, {vocab_size}), got {stop_id}: the model can never sample it, "
                "so it belongs to another tokenizer"
            )
    controls = request.params.controls
    if controls is not None and controls.largest_id >= vocab_size:
        raise SamplingError(
            f"logit_bias, allowed_token_ids and bad_words_ids must name ids in [0, {vocab_size}), got "
            f"{controls.largest_id}: it belongs to another tokenizer"
        )
    if len(request.prompt_ids) >= context_length:
        raise ContextOverflowError(num_prompt_tokens=len(request.prompt_ids), context_length=context_length)


def check_images(images: Sequence[ImageSpan], *, max_images: int | None) -> None:
    """Raise `SamplingError` for more images than the engine takes.

    `max_images` is 0 for a text model, None where only the context limits them. A placeholder id outside of the images
    is text: the model may have sampled it.
    """
    if not images:
        return
    if max_images == 0:
        raise SamplingError(f"this engine takes no images, got {len(images)}: its model reads text only")
    if max_images is not None and len(images) > max_images:
        raise SamplingError(f"images must be at most {max_images} for one prompt of this engine, got {len(images)}")


def check_unused(request_id: str, in_flight: Container[str]) -> None:
    """Raise `SamplingError` for the id of another request in flight."""
    if request_id in in_flight:
        raise SamplingError(f"request_id {request_id!r} is in use: ids must be unique among requests in flight")


def check_scorable(token_ids: TokenIds, *, temperature: float, vocab_size: int, context_length: int) -> None:
    """Raise `SamplingError` for no or too many ids, one outside the vocabulary, or a temperature out of range."""
    check_vocabulary(token_ids, vocab_size=vocab_size, name="token_ids")
    if not 1 <= len(token_ids) <= context_length:
        raise SamplingError(f"token_ids must hold 1 to {context_length} ids (the context), got {len(token_ids)}")
    if not is_real(temperature, *TEMPERATURE_RANGE):
        raise SamplingError(f"temperature must be a number in {list(TEMPERATURE_RANGE)} to score, got {temperature!r}")


def check_top_logprobs(num_top_logprobs: int, *, maximum: int) -> None:
    """Raise `SamplingError` unless it is a whole number up to `maximum`."""
    if not is_whole(num_top_logprobs, 0, maximum):
        raise SamplingError(f"num_top_logprobs must be a whole number in [0, {maximum}], got {num_top_logprobs!r}")


def check_routing(request: SampleRequest, *, is_recorded: bool, option: str) -> None:
    """Raise `SamplingError` if a request wants experts that the engine does not record; `option` makes it do so."""
    if request.params.return_routed_experts and not is_recorded:
        raise SamplingError(
            f"return_routed_experts needs an engine that records them, and this one was started without {option} "
            f"({request.request_id})"
        )


def check_kept_ids(request: SampleRequest, *, is_recorded: bool, needs: str) -> None:
    """Raise `SamplingError` if a request wants the ids that it samples from, and the engine cannot say them; `needs`
    says what it takes.
    """
    params = request.params
    if params.return_kept_ids and params.truncates and not is_recorded:
        raise SamplingError(
            f"return_kept_ids with {params.truncations} needs {needs}: without the ids that were kept, the trainer's "
            f"logprobs would be of another distribution ({request.request_id})"
        )


def check_vocabulary(token_ids: NDArray[Any], *, vocab_size: int, name: str) -> None:
    """Raise `SamplingError` for an id, in an array of any shape, that the model has no embedding for."""
    if token_ids.size and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab_size):
        where = np.argwhere((token_ids < 0) | (token_ids >= vocab_size))[0].tolist()
        raise SamplingError(
            f"{name} must lie in [0, {vocab_size}), got {token_ids[tuple(where)]} at position "
            f"{', '.join(map(str, where))}: tokenizer and model do not belong together"
        )


def check_source(source: WeightSource, accepted: Collection[type[WeightSource]]) -> None:
    """Raise `SamplingError` for a kind of source that the engine does not take."""
    if type(source) not in accepted:
        names = ", ".join(sorted(kind.__name__ for kind in accepted))
        raise SamplingError(f"source must be one of {names} for this engine, got {type(source).__name__}")


def check_can_finish(in_flight: InFlight, *, paused: bool) -> None:
    """Raise `SamplingError` if requests shall finish before an update although a pause stops them."""
    if paused and in_flight is InFlight.FINISH:
        raise SamplingError("in_flight must be 'pause' while the engine is paused, got 'finish': resume it first")


def check_same_kind(*, is_adapter: bool, had_adapter: bool, policy_version: int, changed: bool) -> None:
    """Raise `SamplingError` if an adapter follows whole weights or the other way round.

    An adapter adds to the weights that the engine was started with; `changed` says that it has others. `had_adapter`
    says that its policy has an adapter.
    """
    if is_adapter and changed:
        raise SamplingError(
            "an adapter is added to the weights that the engine was started with, which the whole weights of policy "
            f"version {policy_version} have replaced: start the engine again, or publish merged weights"
        )
    if had_adapter and not is_adapter:
        raise SamplingError(
            f"the engine has the adapter of policy version {policy_version}, and whole weights came: start the engine "
            "again, or publish adapters"
        )


def check_awake(asleep: bool) -> None:
    """Raise `EngineError` if the engine sleeps or is about to."""
    if asleep:
        raise EngineError("the engine sleeps while the trainer has its memory: new weights wake it (update_weights)")


def check_complete(incomplete: str | None) -> None:
    """Raise `IncompleteWeightsError` if there is a reason why the weights are neither the old nor the new ones."""
    if incomplete is not None:
        raise IncompleteWeightsError(
            f"{incomplete}. The weights are neither the old nor the new ones, and nothing is sampled with them: "
            "publish a whole version"
        )


def check_not_paused(paused: bool) -> None:
    """Raise `EngineError` if an engine that is to sleep is paused: its requests would never finish."""
    if paused:
        raise EngineError("a paused engine does not sleep: resume it, and its requests can finish first")


def describe_numerics(engine: Engine) -> tuple[Numerics, int]:
    """How an engine computes logprobs, and over how many GPUs it cuts its sums: fast, on one, if it does not say."""
    return getattr(engine, "numerics", Numerics.FAST), getattr(engine, "tensor_parallel_size", 1)


def require_scoring(engine: Engine) -> ScoringEngine:
    """The engine, if it scores; otherwise `InvalidInputError`."""
    if not isinstance(engine, ScoringEngine):
        raise InvalidInputError(f"{type(engine).__name__} cannot score given ids")
    return engine


def require_pausable(engine: Engine) -> PausableEngine:
    """The engine, if it can be paused; otherwise `InvalidInputError`."""
    if not isinstance(engine, PausableEngine):
        raise InvalidInputError(f"{type(engine).__name__} cannot pause, and has no cache to drop")
    return engine


def require_updatable(engine: Engine) -> UpdatableEngine:
    """The engine, if it takes new weights; otherwise `InvalidInputError`."""
    if not isinstance(engine, UpdatableEngine):
        raise InvalidInputError(f"{type(engine).__name__} takes no new weights")
    return engine
