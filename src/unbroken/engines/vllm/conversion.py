"""Converts our parameters to vLLM's, and its outputs to ours.

Logprobs come in vLLM's flat form, whose lists become arrays at once: a dict per position would cost more than sampling
from a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from unbroken.engines.vllm.calls import translate_errors
from unbroken.errors import EngineError
from unbroken.types import (
    FinishReason,
    KeptIds,
    Logprobs,
    RoutedExperts,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    TokenIds,
    TopLogprobs,
    VersionSpan,
    routed_experts,
    token_ids,
)

_NO_LOGPROBS = np.zeros(0, dtype=np.float32)


def make_sampling_params(request: SampleRequest, kind: RequestOutputKind, *, num_logprobs: int) -> VllmSamplingParams:
    """Make vLLM's parameters for a request; `SamplingError` if vLLM refuses them.

    `num_logprobs` is how many of the most likely ids it gives at each position (`count_logprobs`).
    """
    params = request.params
    form = params.structured_output
    # Structured output needs the model's end of text: after the end of the form no other id may be sampled.
    kind_of_params = _PlainParams if form is None else VllmSamplingParams
    with translate_errors():
        converted = kind_of_params(
            n=request.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias) or None,
            allowed_token_ids=list(params.allowed_token_ids) or None,
            min_tokens=min(params.min_tokens, params.max_tokens),  # vLLM refuses more, which means the same
            seed=params.seed,
            stop=list(params.stop_strings) or None,
            stop_token_ids=list(params.stop_token_ids) or None,
            ignore_eos=form is None,
            include_stop_str_in_output=True,
            detokenize=bool(params.stop_strings),
            logprobs=num_logprobs,
            flat_logprobs=True,
            structured_outputs=None
            if form is None
            else StructuredOutputsParams(regex=form.regex, json=form.json_schema, structural_tag=form.structural_tag),
            output_kind=kind,
            skip_clone=True,
        )
    if params.bad_words_ids:  # vLLM takes texts, which it encodes in two ways of its own; here it keeps their ids
        converted._bad_words_token_ids = [list(word) for word in params.bad_words_ids]
    return converted


class _PlainParams(VllmSamplingParams):  # type: ignore[misc]  # vLLM has no types
    """Parameters under which the model's own end of text is an id as any other, unless the request names it."""

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
        """VLLM would forbid ends of text of the model before `min_tokens` too, and the trainer would not know of it."""
        super().update_from_generation_config({}, None)


def count_logprobs(params: SamplingParams, *, maximum: int) -> int:
    """How many of the most likely ids to ask for at each position, at most `maximum`: with kept ids so many that one of
    them was cut, also where some ids are as likely as the last that top-k keeps, which vLLM keeps too.
    """
    if not (params.return_kept_ids and params.truncates):
        return params.num_top_logprobs
    wanted = params.top_k + params.top_k // 2 + 16 if params.top_k else maximum
    return min(max(params.num_top_logprobs, wanted), maximum)


def make_scoring_params(*, temperature: float, num_top_logprobs: int) -> VllmSamplingParams:
    """Make vLLM's parameters for the logprobs of a prompt; the one sampled id is dropped."""
    return VllmSamplingParams(
        max_tokens=1,
        temperature=temperature,
        prompt_logprobs=num_top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def convert_result(
    output: RequestOutput | None, request: SampleRequest, policy_version: int | None = None, *, vocab_size: int = 0
) -> SampleResult:
    """Convert the output of a finished request; None is a request that was aborted before its first id.

    `policy_version` is that of all ids, instead of those that vLLM reports; `vocab_size` is that of the model's logits.
    """
    if output is None:
        return SampleResult(
            prompt_ids=request.prompt_ids,
            sequences=(SampledSequence.aborted(request.params),) * request.n,
            image_sha256s=request.image_sha256s,
        )
    queue_s = _read_queue_s(output) if request.n == 1 else None  # of several, vLLM keeps one completion's times
    done = {
        completion.index: _sequence(completion, request, policy_version, queue_s, vocab_size)
        for completion in output.outputs
    }
    if len(done) < request.n:
        done = dict.fromkeys(range(request.n), SampledSequence.aborted(request.params)) | done
    return SampleResult(
        prompt_ids=_read_prompt(output, request),
        sequences=tuple(done[index] for index in range(request.n)),
        image_sha256s=request.image_sha256s,
    )


def check_prompt(output: RequestOutput, request: SampleRequest) -> None:
    """Raise `EchoError` unless the prompt of an output is that of `request` (I3)."""
    prompt_ids = _read_prompt(output, request)
    SampleResult(prompt_ids=prompt_ids, sequences=(), image_sha256s=request.image_sha256s).check_prompt(request)


def _read_prompt(output: RequestOutput, request: SampleRequest) -> TokenIds:
    """The prompt that vLLM reports. That of the request, if they are equal, need not be made and checked again."""
    if output.prompt_token_ids == request.prompt_ids.tolist():
        return request.prompt_ids
    return token_ids(output.prompt_token_ids)


def convert_chunk(
    output: RequestOutput,
    completion: CompletionOutput,
    request: SampleRequest,
    policy_version: int | None = None,
    *,
    vocab_size: int = 0,
) -> SampleChunk:
    """Convert what a completion of an `output` sampled since its last one; the rest as in `convert_result`."""
    logprobs, tops = _read_logprobs(completion.logprobs, request.params.num_top_logprobs)
    kept = _read_kept(completion.logprobs, request, vocab_size=vocab_size)
    ended = completion.finish_reason is not None
    return SampleChunk(
        index=completion.index,
        completion_ids=token_ids(completion.token_ids),
        rollout_logprobs=logprobs,
        top_logprobs=tops,
        kept_ids=kept,
        finish_reason=_finish_reason(completion) if ended else None,
        version_spans=_version_spans(completion, policy_version) if ended else (),
        routed_experts=_read_routing(completion, request) if ended else None,
        queue_s=_read_queue_s(output) if ended else None,
    )


def convert_scores(output: RequestOutput | None, num_ids: int, num_top_logprobs: int) -> ScoredSequence:
    """Convert the logprobs of a prompt of `num_ids` ids (the first has none); `EngineError` if vLLM gave none."""
    flat = None if output is None else output.prompt_logprobs
    if flat is None or len(flat) != num_ids:
        raise EngineError(
            f"vLLM gave {'no logprobs' if flat is None else f'{len(flat)} logprobs'} for {num_ids} ids to score: "
            "the request was aborted"
        )
    logprobs, tops = _read_logprobs(flat, num_top_logprobs, skip=1)
    return ScoredSequence(logprobs=logprobs, top_logprobs=tops)


def make_empty_scores(num_top_logprobs: int) -> ScoredSequence:
    """Make the score of a single id, which has no logprob."""
    return ScoredSequence(logprobs=_NO_LOGPROBS, top_logprobs=TopLogprobs.empty(num_top_logprobs))


def _sequence(
    completion: CompletionOutput,
    request: SampleRequest,
    policy_version: int | None,
    queue_s: float | None,
    vocab_size: int,
) -> SampledSequence:
    logprobs, tops = _read_logprobs(completion.logprobs, request.params.num_top_logprobs)
    return SampledSequence(
        completion_ids=token_ids(completion.token_ids),
        rollout_logprobs=logprobs,
        finish_reason=_finish_reason(completion),
        version_spans=_version_spans(completion, policy_version),
        temperature=request.params.temperature or 1.0,
        controls=request.params.controls,
        top_logprobs=tops,
        routed_experts=_read_routing(completion, request),
        kept_ids=_read_kept(completion.logprobs, request, vocab_size=vocab_size),
        queue_s=queue_s,
    )


def _read_queue_s(output: RequestOutput) -> float | None:
    """How long the request was in vLLM's queue; None if vLLM keeps no statistics, or it never left the queue."""
    times = output.metrics
    if times is None or not times.queued_ts or not times.scheduled_ts:
        return None
    return max(float(times.scheduled_ts - times.queued_ts), 0.0)


def _read_routing(completion: CompletionOutput, request: SampleRequest) -> RoutedExperts | None:
    """VLLM's experts [T - 1, L, K] of prompt and completion, which it has for every request if it records them."""
    if not request.params.return_routed_experts or completion.finish_reason == FinishReason.ABORT.value:
        return None
    if completion.routed_experts is None:
        raise EngineError(f"vLLM returned no routed_experts for {request.request_id!r}, though it records them")
    return routed_experts(completion.routed_experts)


def _read_kept(flat: Any, request: SampleRequest, *, vocab_size: int) -> KeptIds | None:
    """What was sampled from: the ids that have a finite logprob, which is that after all parameters."""
    if not (request.params.return_kept_ids and request.params.truncates):
        return None
    if flat is None or not len(flat):
        return KeptIds.whole(0)
    tops = _read_tops(flat)
    return KeptIds.of_top(tops.token_ids, tops.logprobs, vocab_size=vocab_size, of=request.params.truncations)


def _finish_reason(completion: CompletionOutput) -> FinishReason:
    try:
        return FinishReason(completion.finish_reason)
    except ValueError:
        raise EngineError(
            f"vLLM ended a completion with finish_reason {completion.finish_reason!r} ({completion.stop_reason!r})"
        ) from None


def _version_spans(completion: CompletionOutput, policy_version: int | None) -> tuple[VersionSpan, ...]:
    spans = completion.weight_versions or ()
    if spans and policy_version is not None:
        return (VersionSpan(start=spans[0].start, stop=spans[-1].end, policy_version=policy_version),)
    return tuple(VersionSpan(start=span.start, stop=span.end, policy_version=int(span.version)) for span in spans)


def _read_logprobs(flat: Any, number: int, *, skip: int = 0) -> tuple[Logprobs, TopLogprobs | None]:
    """Read flat logprobs from position `skip` on: of the id itself, and of the `number` most likely ids."""
    if flat is None or len(flat) <= skip:
        return _NO_LOGPROBS, TopLogprobs.empty(number)
    sampled = np.asarray(flat.logprobs, dtype=np.float32)
    if len(flat.logprobs) != len(flat) or skip:  # at each position others stand behind it
        sampled = sampled[np.asarray(flat.start_indices)[skip:]]
    if not number:
        return sampled, None
    tops = _read_tops(flat, skip=skip)
    return sampled, TopLogprobs(token_ids=tops.token_ids[:, :number], logprobs=tops.logprobs[:, :number])


def _read_tops(flat: Any, *, skip: int = 0) -> TopLogprobs:
    """The most likely ids at each position from `skip` on, most likely first.

    They stand behind the id itself, which is among them a second time if it is one of them. Where vLLM has joined the
    outputs of several steps it is not (`FlatLogprobs.extend` goes through a dictionary), and is put back here.
    """
    starts, ends = np.asarray(flat.start_indices)[skip:], np.asarray(flat.end_indices)[skip:]
    ids, logprobs = np.asarray(flat.token_ids, dtype=np.int32), np.asarray(flat.logprobs, dtype=np.float32)
    width = int((ends - starts).max())
    where = starts[:, None] + np.minimum(np.arange(1, width), (ends - starts)[:, None] - 1)
    for row in np.flatnonzero(ends - starts < width):
        others = np.arange(starts[row] + 1, ends[row])
        place = int((logprobs[others] > logprobs[starts[row]]).sum())
        where[row] = np.insert(others, place, starts[row])
    return TopLogprobs(token_ids=ids[where], logprobs=logprobs[where])
