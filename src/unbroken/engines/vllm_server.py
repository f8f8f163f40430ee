"""A stock `vllm serve` (0.32 or later) as one of the servers of `HttpEngine`: ids in, ids out.

    POST /inference/v1/generate   {"token_ids": [...], "sampling_params": {...}, "stream": false}
    {"prompt_token_ids": [...], "choices": [{"index": 0, "token_ids": [...], "finish_reason": "stop",
      "logprobs": {"content": [{"token_id": 5, "logprob": -0.1, "top_logprobs": [...]}]}, "weight_versions": [...]}]}

It samples from text only. Its labels of weights count as policy versions where they are whole numbers, else as 0.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from unbroken.client.calls import SAME, Calls, EncodedIds
from unbroken.engines.checks import check_images
from unbroken.errors import (
    EchoError,
    EngineError,
    InvalidInputError,
    SamplingError,
    ServerError,
    ServerUnreachableError,
    UnknownPolicyError,
)
from unbroken.types import (
    FinishReason,
    ImageSpan,
    KeptIds,
    RoutedExperts,
    SampleChunk,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    TokenIds,
    TopLogprobs,
    VersionSpan,
    check_reproducible,
    read_experts,
    token_ids,
)

_GENERATE = "/inference/v1/generate"
_CLAMPED = -9999.0
"""What vLLM writes for minus infinity, and for the logprob of a sampled id that it does not know."""
_PROBES = (0.01, 2.0)
"""Temperatures at which the most likely id has different logprobs, if the temperature has been applied to them."""


class VllmServer:
    """One server, with those methods of `AsyncClient` that `HttpEngine` calls. Made by `connect`."""

    def __init__(self, calls: Calls, *, vocab_size: int, applies_sampling: bool) -> None:
        """`applies_sampling` says that logprobs are those after temperature and the other parameters."""
        self._calls = calls
        self._vocab_size = vocab_size
        self._applies_sampling = applies_sampling

    @classmethod
    async def connect(cls, calls: Calls, *, vocab_size: int) -> VllmServer:
        """Find out which logprobs the server gives. `vocab_size` is that of the tokenizer.

        Raises:
            EngineError: the server does not have the endpoint, or gives logits.
            ServerError: it does not answer.
        """
        tops = []
        for temperature in _PROBES:
            params = SamplingParams(max_tokens=1, temperature=temperature, num_top_logprobs=1)
            body = {"token_ids": [0], "sampling_params": _encode(params, 1, vocab_size)}
            try:
                answer = await calls.post_again(_GENERATE, body)
            except (InvalidInputError, ServerError) as error:
                if isinstance(error, ServerUnreachableError):
                    raise
                raise EngineError(
                    f"{calls.base_url} must be a server of this package, or `vllm serve --enable-scale-out` of version "
                    f"0.32 or later: {error}"
                ) from None
            (entry,) = answer["choices"][0]["logprobs"]["content"]
            tops.append(max(one["logprob"] for one in entry["top_logprobs"]))
        if max(tops) > 1e-3:
            raise EngineError(
                f"{calls.base_url} gives logits, not logprobs: start it with --logprobs-mode processed_logprobs"
            )
        return cls(calls, vocab_size=vocab_size, applies_sampling=abs(tops[0] - tops[1]) > 1e-3)

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._calls.base_url

    async def generate(
        self,
        prompts: Sequence[TokenIds],
        params: SamplingParams,
        *,
        images: Sequence[Sequence[ImageSpan]] = (),
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
    ) -> list[SampleResult]:
        """Continue exactly one prompt, of ids. A call that is cancelled is aborted there."""
        (prompt_ids,) = prompts
        body = self._make_body(prompt_ids, params, images=images, n=n, adapter=adapter)
        echo = body["token_ids"].to_field("prompt_token_ids")
        answer = await self._calls.post_again(_GENERATE, body, session_id=session_id, echo=echo)
        given = answer["prompt_token_ids"]
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        chunks = [_read_choice(choice, params) for choice in choices]
        return [
            SampleResult(
                prompt_ids=prompt_ids if given == SAME else token_ids(given),
                sequences=tuple(SampleChunk.join([chunk], params=params) for chunk in chunks),
            )
        ]

    async def stream(
        self,
        prompt: TokenIds,
        params: SamplingParams,
        *,
        images: Sequence[ImageSpan] = (),
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[SampleChunk]:
        """Continue one prompt, in chunks as they are sampled; see `Engine.stream`."""
        body = self._make_body(prompt, params, images=[images], n=n, adapter=adapter)
        echo = body["token_ids"].to_field("prompt_token_ids")
        events = await self._calls.open_stream(_GENERATE, {**body, "stream": True}, session_id=session_id, echo=echo)
        num_ids = [0] * n
        async with aclosing(events):
            async for event in events:
                given = event.get("prompt_token_ids")
                if given is not None and given != SAME and given != prompt.tolist():
                    raise EchoError(f"{self.base_url} used another prompt than it was sent")
                for choice in event["choices"]:
                    index = choice["index"]
                    num_ids[index] += len(choice["token_ids"] or ())
                    yield _read_choice(choice, params, num_ids=num_ids[index])

    async def score(
        self,
        sequences: Sequence[TokenIds],
        *,
        images: Sequence[Sequence[ImageSpan]] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> list[ScoredSequence]:
        """Compute the logprobs of exactly one sequence, at temperature 1: vLLM applies no temperature to a prompt."""
        (ids,) = sequences
        _refuse_images(images)
        if temperature != 1.0:
            raise SamplingError(f"temperature must be 1 to score with a stock vLLM server, got {temperature}")
        sampling = {"max_tokens": 1, "prompt_logprobs": num_top_logprobs, "detokenize": False}
        answer = await self._calls.post_again(_GENERATE, {"token_ids": ids, "sampling_params": sampling})
        return [_read_scores(answer["prompt_logprobs"] or [None], ids, num_top_logprobs)]

    async def health(self) -> bool:
        """Whether the server answers and its engine works."""
        return await self._calls.is_ok("/health")

    async def model(self, name: str) -> dict[str, Any]:
        """The entry of a model or an adapter, also with @VERSION; `UnknownPolicyError` for another name.

        It has no `policy_version`: vLLM labels its weights, and tells it with what they sampled.
        """
        models: list[dict[str, Any]] = (await self._calls.get("/v1/models"))["data"]
        for entry in models:
            if entry["id"] in (name, re.sub(r"@(latest|[0-9]{1,9})$", "", name)):
                return {**entry, "policy": entry["id"]}
        raise UnknownPolicyError.of(repr(name[:100]), [entry["id"] for entry in models])

    async def pause(self) -> None:
        """Stop sampling: requests wait. `EngineError` unless the server has the path."""
        await self._control("/pause?mode=keep")

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._control("/resume")

    async def reset_prefix_cache(self) -> None:
        """Drop keys and values of finished requests."""
        await self._control("/reset_prefix_cache")

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()

    async def _control(self, path: str) -> None:
        try:
            await self._calls.post_without_answer(path)
        except InvalidInputError as error:
            raise EngineError(
                f"{self.base_url} refuses POST {path}, which vLLM has if VLLM_SERVER_DEV_MODE=1: {error}"
            ) from None

    def _make_body(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        images: Sequence[Sequence[ImageSpan]],
        n: int,
        adapter: str | None,
    ) -> dict[str, Any]:
        _refuse_images(images)
        if params.return_kept_ids and params.truncates and not params.top_k:
            raise SamplingError(
                f"return_kept_ids with {params.truncations} needs top_k too on {self.base_url}: vLLM returns the most "
                "likely ids only, and the trainer needs all that were kept"
            )
        # Without text there are only ids, and which of its own ends of text vLLM forbids too, no answer says.
        for name in ("bad_words_ids", "min_tokens"):
            if value := getattr(params, name):
                raise SamplingError(
                    f"{name} must be left out with {self.base_url}, got {value}: stock vLLM takes it only in a way "
                    "that the trainer cannot follow; serve the model by `unbroken serve --engine vllm`"
                )
        if not self._applies_sampling:
            self._check_raw(params)
        named = {} if adapter is None else {"model": adapter}
        return {
            "token_ids": EncodedIds(prompt_ids),
            "sampling_params": _encode(params, n, self._vocab_size),
            "return_token_ids": True,
            **named,
        }

    def _check_raw(self, params: SamplingParams) -> None:
        """Raise `SamplingError` for parameters that the server's logprobs would not have."""
        advice = "start vLLM with --logprobs-mode processed_logprobs"
        if params.temperature not in (0.0, 1.0):
            raise SamplingError(
                f"temperature must be 0 or 1, got {params.temperature}: {self.base_url} gives logprobs before the "
                f"temperature; {advice}"
            )
        try:
            check_reproducible(params, whose=f"before sampling, as {self.base_url} gives them, the")
        except SamplingError as error:
            raise SamplingError(f"{error}; {advice}") from None


def _refuse_images(images: Sequence[Sequence[ImageSpan]]) -> None:
    for spans in images:
        check_images(spans, max_images=0)


def _encode(params: SamplingParams, n: int, vocab_size: int) -> dict[str, Any]:
    """Our parameters as vLLM's, every one of them: the server's defaults may be those of a generation config."""
    form = params.structured_output
    fields: dict[str, Any] = {
        "n": n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_token_ids),
        # The model's end of text stops only where the request says so, but a form has no other end.
        "ignore_eos": form is None,
        "include_stop_str_in_output": True,
        "detokenize": bool(params.stop_strings),
        # One more than asked for: vLLM counts the sampled id among them, at any rank.
        "logprobs": min(most + 1, vocab_size) if (most := _count_logprobs(params)) else 0,
    }
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): value for token_id, value in params.logit_bias}
    if params.allowed_token_ids:
        fields["allowed_token_ids"] = list(params.allowed_token_ids)
    if form is not None:
        fields["structured_outputs"] = {
            key: value
            for key, value in (
                ("regex", form.regex),
                ("json", form.json_schema),
                ("structural_tag", form.structural_tag),
            )
            if value is not None
        }
    return fields


def _count_logprobs(params: SamplingParams) -> int:
    """How many of the most likely ids are asked for at each position: with kept ids so many that one of them was cut,
    also where some ids are as likely as the last that top-k keeps, which vLLM keeps too.
    """
    is_asked = params.return_kept_ids and params.truncates
    return max(params.num_top_logprobs, params.top_k + params.top_k // 2 + 16 if is_asked else 0)


def _read_choice(choice: Mapping[str, Any], params: SamplingParams, *, num_ids: int | None = None) -> SampleChunk:
    """Read a choice, or what a stream has of it; `num_ids` is the number of its ids so far."""
    ids = token_ids(choice["token_ids"] or ())
    entries = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in entries] != ids.tolist():
        raise EngineError("vLLM must give one logprob for each sampled id, and gave those of other ids")
    logprobs = np.array([entry["logprob"] for entry in entries], dtype=np.float32)
    if (logprobs <= _CLAMPED).any():
        raise EngineError("vLLM sampled an id without a finite logprob: its weights give no finite distribution")
    reason = choice["finish_reason"]
    return SampleChunk(
        index=choice["index"],
        completion_ids=ids,
        rollout_logprobs=logprobs,
        top_logprobs=_read_tops([entry["top_logprobs"] for entry in entries], params.num_top_logprobs),
        finish_reason=None if reason is None else _read_reason(reason),
        version_spans=() if reason is None else _read_versions(choice, len(ids) if num_ids is None else num_ids),
        routed_experts=None if reason is None else _read_routing(choice, params),
        kept_ids=_read_kept(entries, params),
    )


def _read_kept(entries: Sequence[Mapping[str, Any]], params: SamplingParams) -> KeptIds | None:
    """What each id was sampled from: the ids with a finite logprob, of lists with the sampled id first."""
    if not (params.return_kept_ids and params.truncates):
        return None
    lists = [[(one["token_id"], one["logprob"]) for one in entry["top_logprobs"]] for entry in entries]
    if not lists:
        return KeptIds.whole(0)
    shared = min(map(len, lists))  # vLLM 0.33 gives one more where the sampled id is not among the most likely
    tops = np.array([entry[:shared] for entry in lists])
    return KeptIds.of_top(
        tops[:, :, 0].astype(np.int32), _unclamp(tops[:, :, 1]), vocab_size=2**31, of=params.truncations
    )


def _read_routing(choice: Mapping[str, Any], params: SamplingParams) -> RoutedExperts | None:
    if not params.return_routed_experts:
        return None
    experts = read_experts(choice.get("routed_experts"))
    if experts is None and choice["finish_reason"] != FinishReason.ABORT.value:
        raise EngineError(
            "return_routed_experts needs a server that records them, and this one returned none: start vLLM with "
            "--enable-return-routed-experts"
        )
    return experts


def _read_reason(reason: str) -> FinishReason:
    try:
        return FinishReason(reason)
    except ValueError:
        raise EngineError(f"vLLM ended a completion with finish_reason {reason!r}") from None


def _read_versions(choice: Mapping[str, Any], num_ids: int) -> tuple[VersionSpan, ...]:
    """The spans of a whole completion. vLLM's first label is "default"."""
    spans = choice.get("weight_versions") or [{"version": "default", "start": 0, "end": num_ids}]
    return tuple(
        VersionSpan(start=span["start"], stop=span["end"], policy_version=_read_version(span["version"]))
        for span in spans
        if span["end"] > span["start"]
    )


def _read_version(label: str) -> int:
    return int(label) if label.isascii() and label.isdigit() and len(label) < 10 else 0


def _read_tops(lists: Sequence[Sequence[Mapping[str, Any]]], number: int) -> TopLogprobs | None:
    """The `number` most likely ids of each position, from lists that have the sampled id first."""
    if not lists or not number:
        return TopLogprobs.empty(number)
    best = [
        sorted(((one["token_id"], one["logprob"]) for one in entries), key=_by_logprob)[:number] for entries in lists
    ]
    return _make_tops(best)


def _read_scores(
    positions: Sequence[Mapping[str, Mapping[str, Any]] | None], ids: TokenIds, number: int
) -> ScoredSequence:
    """Read the logprobs of a prompt: for each position after the first, an entry for each id, the prompt's own too."""
    if len(positions) != len(ids):
        raise EngineError(f"vLLM gave {len(positions)} logprobs for {len(ids)} ids to score")
    entries = [entry or {} for entry in positions[1:]]
    logprobs = [entry[str(own)]["logprob"] for entry, own in zip(entries, ids[1:].tolist(), strict=True)]
    tops = [
        sorted(((int(key), one["logprob"]) for key, one in entry.items()), key=_by_logprob)[:number]
        for entry in entries
    ]
    return ScoredSequence(
        logprobs=_unclamp(logprobs), top_logprobs=_make_tops(tops) if tops and number else TopLogprobs.empty(number)
    )


def _make_tops(best: Sequence[Sequence[tuple[int, float]]]) -> TopLogprobs:
    return TopLogprobs(
        token_ids=np.array([[token_id for token_id, _ in row] for row in best], dtype=np.int32),
        logprobs=_unclamp([[logprob for _, logprob in row] for row in best]),
    )


def _by_logprob(entry: tuple[int, float]) -> float:
    return -entry[1]


def _unclamp(logprobs: Any) -> Any:
    values = np.array(logprobs, dtype=np.float32)
    return np.where(values <= _CLAMPED, np.float32(-np.inf), values)
