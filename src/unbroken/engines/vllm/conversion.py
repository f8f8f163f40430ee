"""From our parameters to vLLM's, and from its outputs to ours.

Logprobs come in vLLM's flat form, whose lists become arrays at once: a dict per position would cost more than sampling
a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from unbroken.engines.vllm.failures import translate_errors
from unbroken.errors import EngineError
from unbroken.types import (
    FinishReason,
    Logprobs,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    ScoredSequence,
    TopLogprobs,
    VersionSpan,
    token_ids,
)

_NO_IDS = token_ids([])
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)


def sampling_params(request: SampleRequest, kind: RequestOutputKind) -> VllmSamplingParams:
    """The parameters of vLLM for `request`.

    Raises:
        SamplingError: vLLM refuses them.
    """
    params = request.params
    form = params.structured_output
    with translate_errors():
        return VllmSamplingParams(
            n=request.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            stop=list(params.stop_strings) or None,
            stop_token_ids=list(params.stop_token_ids) or None,
            # The model's own end of text is a stop id like any other: it stops where it is asked for. Only a forced
            # form needs it, because after its end nothing else may be sampled.
            ignore_eos=form is None,
            include_stop_str_in_output=True,
            detokenize=bool(params.stop_strings),
            logprobs=params.num_top_logprobs,
            flat_logprobs=True,
            structured_outputs=None
            if form is None
            else StructuredOutputsParams(regex=form.regex, json=form.json_schema),
            output_kind=kind,
            skip_clone=True,
        )


def scoring_params(*, temperature: float, num_top_logprobs: int) -> VllmSamplingParams:
    """The same for the logprobs of a prompt; it samples one id, which is thrown away."""
    return VllmSamplingParams(
        max_tokens=1,
        temperature=temperature,
        prompt_logprobs=num_top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def sample_result(output: RequestOutput | None, request: SampleRequest) -> SampleResult:
    """What a finished request sampled; None is a request that was aborted before its first id."""
    if output is None:
        return SampleResult(
            prompt_ids=request.prompt_ids,
            sequences=(SampledSequence.aborted(request.params),) * request.n,
            image_sha256s=request.image_sha256s,
        )
    done = {completion.index: _sequence(completion, request) for completion in output.outputs}
    none = SampledSequence.aborted(request.params)
    return SampleResult(
        prompt_ids=token_ids(output.prompt_token_ids),
        sequences=tuple(done.get(index, none) for index in range(request.n)),
        image_sha256s=request.image_sha256s,
    )


def has_lost_images(output: RequestOutput) -> bool:
    """Whether vLLM ended a request at once, as it does where its processes disagree about what they keep of images.

    The process that takes requests believes that the one with the model has an image, and sends only its name: after
    a request that was cancelled before it got there, or on a narrow cache. vLLM then corrects its belief and has the
    request sent again.
    """
    return any(c.finish_reason == "error" and not len(c.token_ids) for c in output.outputs)


def check_prompt(output: RequestOutput, request: SampleRequest) -> None:
    """Raise `EchoError` unless the prompt of an output is that of `request` (I3)."""
    prompt_ids = token_ids(output.prompt_token_ids)
    SampleResult(prompt_ids=prompt_ids, sequences=(), image_sha256s=request.image_sha256s).check_prompt(request)


def sample_chunk(completion: CompletionOutput, request: SampleRequest) -> SampleChunk:
    """What one completion sampled since its output before."""
    logprobs, tops = _read_logprobs(completion.logprobs, request.params.num_top_logprobs)
    ended = completion.finish_reason is not None
    return SampleChunk(
        index=completion.index,
        completion_ids=token_ids(completion.token_ids),
        rollout_logprobs=logprobs,
        top_logprobs=tops,
        finish_reason=_finish_reason(completion) if ended else None,
        version_spans=_version_spans(completion) if ended else (),
    )


def aborted_chunk(index: int) -> SampleChunk:
    """The last chunk of a completion that vLLM ended without an output."""
    return SampleChunk(
        index=index, completion_ids=_NO_IDS, rollout_logprobs=_NO_LOGPROBS, finish_reason=FinishReason.ABORT
    )


def scored_sequence(output: RequestOutput | None, num_ids: int, num_top_logprobs: int) -> ScoredSequence:
    """The logprobs of a prompt of `num_ids` ids; the first has none.

    Raises:
        EngineError: vLLM ended the request without them.
    """
    flat = None if output is None else output.prompt_logprobs
    if flat is None or len(flat) != num_ids:
        raise EngineError(
            f"vLLM gave {'no logprobs' if flat is None else f'{len(flat)} logprobs'} for {num_ids} ids to score: "
            "the request was aborted"
        )
    logprobs, tops = _read_logprobs(flat, num_top_logprobs, skip=1)
    return ScoredSequence(logprobs=logprobs, top_logprobs=tops)


def nothing_scored(num_top_logprobs: int) -> ScoredSequence:
    """The answer for a single id, which has nothing before it."""
    return ScoredSequence(logprobs=_NO_LOGPROBS, top_logprobs=TopLogprobs.empty(num_top_logprobs))


def _sequence(completion: CompletionOutput, request: SampleRequest) -> SampledSequence:
    logprobs, tops = _read_logprobs(completion.logprobs, request.params.num_top_logprobs)
    return SampledSequence(
        completion_ids=token_ids(completion.token_ids),
        rollout_logprobs=logprobs,
        finish_reason=_finish_reason(completion),
        version_spans=_version_spans(completion),
        temperature=request.params.temperature or 1.0,
        top_logprobs=tops,
    )


def _finish_reason(completion: CompletionOutput) -> FinishReason:
    try:
        return FinishReason(completion.finish_reason)
    except ValueError:
        raise EngineError(
            f"vLLM ended a completion with finish_reason {completion.finish_reason!r} ({completion.stop_reason!r})"
        ) from None


def _version_spans(completion: CompletionOutput) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(start=span.start, stop=span.end, policy_version=int(span.version))
        for span in completion.weight_versions or ()
    )


def _read_logprobs(flat: Any, number: int, *, skip: int = 0) -> tuple[Logprobs, TopLogprobs | None]:
    """Read flat logprobs: at each position the id itself, then the `number` most likely ones; from `skip` on."""
    if flat is None or len(flat) <= skip:
        return _NO_LOGPROBS, TopLogprobs.empty(number)
    starts = np.asarray(flat.start_indices)[skip:]
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not number:
        return logprobs[starts], None
    where = starts[:, None] + np.arange(1, number + 1)
    ids = np.asarray(flat.token_ids, dtype=np.int32)
    return logprobs[starts], TopLogprobs(token_ids=ids[where], logprobs=logprobs[where])
