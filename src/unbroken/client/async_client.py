"""The server's client for asyncio: sends ids and receives ids, in the compact form.

async with AsyncClient("http://127.0.0.1:8000") as client:
    (result,) = await client.generate([[1, 2, 3]], SamplingParams(max_tokens=64), n=4)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np

from unbroken.client.calls import SAME, Calls, EncodedIds, unexpected_answer
from unbroken.client.images import RequestImages, read_images
from unbroken.client.sessions import SessionCalls
from unbroken.errors import EchoError, EngineError, InvalidInputError
from unbroken.types import (
    FinishReason,
    ImageSpan,
    InFlight,
    SampleChunk,
    SampledSequence,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    TokenIds,
    TopLogprobs,
    VersionSpan,
    read_experts,
    read_kept_ids,
    token_ids,
)


class AsyncClient:
    """Calls one server, at e.g. `http://127.0.0.1:8000`, over kept connections.

    If the connection breaks, or the server is full or restarting, a call is retried after a growing pause. Its
    idempotency key keeps the server from sampling twice.

    Each image is sent once and then named by its hash; one that the server has dropped is sent again. An image is a PIL
    image, bytes, a path, base64, a data URL or an `EncodedImage`. `sha256:...` and http URLs are sent as they are.

    `api_key` is the server's admin key for methods that need that one. `transport` replaces `Connections`, e.g. by
    httpx's own with a proxy, or by one for an app in this process.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        connect_timeout_s: float = 10.0,
        max_retries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._calls = Calls(
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_retries=max_retries,
            transport=transport,
        )
        self.sessions = SessionCalls(self._calls)
        """The sessions of a gateway."""

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._calls.base_url

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()

    async def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int] | TokenIds],
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
    ) -> list[SampleResult]:
        """Continue prompts, all texts or all ids. Returns one result per prompt, with n completions.

        In a prompt, each image is one placeholder or its expanded ids; the prompts in results are expanded. `images`
        has for each prompt None, an image, or a list of images or `ImageSpan`s in order. `mm_processor_kwargs` are
        settings of the image processor, such as `max_pixels`; spans have their own. `adapter` is the name of one of the
        server's LoRA adapters, `session_id` that of the conversation.

        Raises:
            SamplingError: the server refuses a prompt or parameter; the message is the server's.
            ImageError: the server refuses an image, or an image cannot be read here.
            EchoError: the server used other images.
            ServerBusyError: the server was full at every retry.
            ServerUnreachableError: there was no connection at any retry.
            ServerError: the server failed.
        """
        params = params or SamplingParams()
        body = {
            "prompts": [p if isinstance(p, str) else _list_ids(p, name="prompts") for p in prompts],
            "params": _encode_params(params),
            "n": n,
            "adapter": adapter,
            "session_id": session_id,
        }
        held = await read_images(images, len(prompts))
        answer = await self._calls.post_with_images("/v1/sample", body, held, mm_processor_kwargs)
        results = [_read_result(result, params) for result in answer["results"]]
        for index, result in enumerate(results):
            _check_images(result.image_sha256s, held, index)
        return results

    async def stream(
        self,
        prompt: Sequence[int] | TokenIds,
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[SampleChunk]:
        """Continue one prompt, in chunks as they are sampled; see `Engine.stream`. Only the answer 503 is retried.

        The server's prompt is compared with `prompt` unless images that are not `ImageSpan`s are to be expanded.

        Raises:
            EchoError: the server used another prompt (I3).
            SamplingError, ImageError, ServerError: as for `generate`.
        """
        ids = _list_ids(prompt, name="prompt")
        body = {
            "prompts": [encoded := EncodedIds(ids)],
            "params": _encode_params(params or SamplingParams()),
            "n": n,
            "adapter": adapter,
            "session_id": session_id,
            "stream": True,
        }
        held = await read_images(None if images is None else [list(images)], 1)
        is_exact = all(isinstance(item, ImageSpan) for item in held.by_prompt[0] or ())
        echo = encoded.to_field("prompt_ids")
        events = await self._calls.stream_with_images("/v1/sample", body, held, mm_processor_kwargs, echo=echo)
        async with aclosing(events):
            async for event in events:
                given = event.get("prompt_ids", SAME)
                if is_exact and given != SAME and given != ids.tolist():
                    raise EchoError(f"{self.base_url} used another prompt than it was sent")
                if "image_sha256s" in event:
                    _check_images(event["image_sha256s"], held, 0)
                yield _read_chunk(event)

    async def score(
        self,
        sequences: Sequence[Sequence[int] | TokenIds],
        *,
        images: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> list[ScoredSequence]:
        """Compute the logprobs of sequences, their images expanded. Arguments and errors are as for `generate`."""
        body = {
            "sequences": [_list_ids(ids, name="sequences") for ids in sequences],
            "temperature": temperature,
            "num_top_logprobs": num_top_logprobs,
        }
        held = await read_images(images, len(sequences))
        answer = await self._calls.post_with_images("/v1/score", body, held, mm_processor_kwargs)
        return [_read_scored(result) for result in answer["results"]]

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Make an OpenAI chat completion with ids; `fields` are other fields of the body. Raises as `generate` does."""
        return await self._chat("/v1/chat/completions", messages, fields)

    async def chat_tokens(
        self, tokens: Sequence[int] | TokenIds, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        """Make a chat completion that continues exactly these ids. Raises as `generate` does.

        `messages` are not rendered; their images belong to the placeholders in `tokens`.
        """
        ids = _list_ids(tokens, name="tokens")
        return await self._chat("/v1/chat/completions/tokens", messages, {"tokens": ids, **fields})

    async def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **fields: Any) -> TokenIds:
        """Encode a text, or render messages with their images expanded, on the server. Raises as `generate` does."""
        if isinstance(prompt, str):
            answer = await self._calls.post("/tokenize", {"prompt": prompt, **fields})
        else:
            answer = await self._calls.post_messages("/tokenize", prompt, fields)
        return token_ids(answer["tokens"])

    async def load_weights(
        self, folder: str | Path, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> bool:
        """Make the server load weights that `weights.files` wrote to a shared disk, or `weights.store` to a store.

        It needs the admin key, if any.

        Returns False if the server had this version already.

        Raises:
            InvalidInputError: the server refuses the folder, the files or the version; it keeps its weights.
            ServerError: the update failed, and the server is no longer healthy.
        """
        body = {
            "folder": str(folder),
            "policy_version": policy_version,
            "reuse_kv": reuse_kv,
            "in_flight": in_flight.value,
        }
        return bool((await self._calls.post("/v1/weights", body))["loaded"])

    async def weights_state(self) -> dict[str, Any]:
        """Read `policy_version`, `world_size`, `dtype`, `device`, `gpu_uuids` and `digest`, for a broadcast.

        Stock vLLM says less: there is no digest, and `stops_steps` is false. `EngineError` if it was started without
        what a broadcast needs.
        """
        try:
            state: dict[str, Any] = await self._calls.get("/v1/weights")
            return state
        except InvalidInputError:
            try:
                config = (await self._calls.get("/server_info?config_format=json"))["vllm_config"]
                size = (await self._calls.get("/get_world_size"))["world_size"]
                label = (await self._calls.get("/weight_info"))["weight_version"]
            except InvalidInputError as error:
                raise EngineError(
                    f"{self.base_url} takes no weights: it must be a server of this package, or `vllm serve` 0.32 "
                    f"or later with VLLM_SERVER_DEV_MODE=1: {error}"
                ) from None
        if not config.get("weight_transfer_config"):
            raise EngineError(
                f'{self.base_url} takes no weights: start vLLM with --weight-transfer-config \'{{"backend": "nccl"}}\''
            )
        backend = config["weight_transfer_config"]["backend"]
        return {
            "policy_version": int(label) if label.isdigit() else 0,
            "world_size": size,
            "dtype": str(config["model_config"]["dtype"]).removeprefix("torch."),
            "device": "cuda" if backend == "nccl" else "cpu",
            "gpu_uuids": [],
            "digest": None,
            "stops_steps": False,
        }

    async def transfer_weights(self, step: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a call of a broadcast, `POST /{step}`, of this server or of stock vLLM. Never retried.

        Raises:
            InvalidInputError: the server refuses it, or the broadcast failed.
            ServerError: the update failed, and the server is no longer healthy.
        """
        answer: dict[str, Any] = await self._calls.post_without_retry(f"/{step}", body)
        return answer

    async def pause(self) -> None:
        """Stop sampling after the current step, for all clients: requests wait. Needs the admin key, if any."""
        await self._calls.post("/pause?mode=keep", {})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._calls.post("/resume", {})

    async def reset_prefix_cache(self) -> None:
        """Drop keys and values of finished requests. Needs the admin key, if any."""
        await self._calls.post("/reset_prefix_cache", {})

    async def policy_version(self) -> int:
        """The version of the weights in use."""
        version: int = await self._read("/version", "policy_version")
        return version

    async def world_size(self) -> int:
        """Number of the server's workers that take part in an update of the weights."""
        size: int = await self._read("/get_world_size", "world_size")
        return size

    async def health(self) -> bool:
        """Whether the server answers and its engine works; never retried."""
        return await self._calls.is_ok("/health")

    async def takes_weights(self) -> bool:
        """Whether the server answers and its engine works, or waits for whole weights; never retried."""
        return await self._calls.is_ok("/health", or_code="weights_incomplete")

    async def models(self) -> list[dict[str, Any]]:
        """The server's models, at least one; `max_model_len` is the context length."""
        models = await self._read("/v1/models", "data")
        if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
            raise unexpected_answer(self.base_url, "/v1/models", {"data": models})
        return models

    async def model(self, name: str) -> dict[str, Any]:
        """What a name of a model means: `policy`, its name without a version, and the `policy_version` that would
        answer; `UnknownPolicyError` if it means nothing.
        """
        entry: dict[str, Any] = await self._calls.get(f"/v1/models/{quote(name, safe='')}")
        return entry

    async def _read(self, path: str, field: str) -> Any:
        """Read a field of a path's answer; raises `ServerError` if it lacks it."""
        answer = await self._calls.get(path)
        if not isinstance(answer, dict) or field not in answer:
            raise unexpected_answer(self.base_url, path, answer)
        return answer[field]

    async def _chat(
        self, path: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        if fields.get("stream"):
            raise InvalidInputError("stream must be left out: use the OpenAI SDK to stream chat completions")
        answer: dict[str, Any] = await self._calls.post_messages(
            path, messages, {"logprobs": True, "return_token_ids": True, **fields}
        )
        return answer


def _check_images(reported: Sequence[str], held: RequestImages, index: int) -> None:
    """Raise `EchoError` unless the server used the images that it was sent (I3); URLs are not compared."""
    sent = held.names(index)
    if len(reported) != len(sent) or any(own not in (None, name) for own, name in zip(sent, reported, strict=True)):
        raise EchoError(f"prompts[{index}] was sent with the images {sent}, the server reports {list(reported)}")


def _list_ids(ids: Sequence[int] | TokenIds, *, name: str) -> TokenIds:
    low = min(ids, default=0) if not isinstance(ids, np.ndarray) else ids.min(initial=0)
    if low < 0:
        raise InvalidInputError(f"{name} must hold ids >= 0, got {low}")
    return token_ids(ids, name=name)


def _encode_params(params: SamplingParams) -> dict[str, Any]:
    """Encode sampling parameters. Some are left out unless set: older servers refuse the keys."""
    return {key: value for key, value in asdict(params).items() if value or not key.startswith(_LATER)}


_LATER = ("return_", "logit_bias", "allowed_token_ids", "min_tokens", "bad_words_ids")


def _read_result(value: Mapping[str, Any], params: SamplingParams) -> SampleResult:
    """Read one prompt's answer. The types check that its parts fit together."""
    return SampleResult(
        prompt_ids=token_ids(value["prompt_ids"]),
        sequences=tuple(_read_sequence(sequence, params) for sequence in value["sequences"]),
        image_sha256s=tuple(value.get("image_sha256s", ())),
    )


def _read_chunk(value: Mapping[str, Any]) -> SampleChunk:
    """Read one event of a stream."""
    finish_reason = value["finish_reason"]
    return SampleChunk(
        index=value["index"],
        completion_ids=token_ids(value["completion_ids"]),
        rollout_logprobs=value["rollout_logprobs"],
        top_logprobs=_read_top_logprobs(value["top_logprobs"]),
        finish_reason=None if finish_reason is None else FinishReason(finish_reason),
        version_spans=_read_spans(value["policy_versions"]),
        routed_experts=read_experts(value.get("routed_experts")),
        kept_ids=read_kept_ids(value.get("kept_ids")),
        queue_s=value.get("queue_s"),
    )


def _read_scored(value: Mapping[str, Any]) -> ScoredSequence:
    """Read the scores of one sequence."""
    return ScoredSequence(logprobs=value["logprobs"], top_logprobs=_read_top_logprobs(value["top_logprobs"]))


def _read_sequence(value: Mapping[str, Any], params: SamplingParams) -> SampledSequence:
    return SampledSequence(
        completion_ids=token_ids(value["completion_ids"]),
        rollout_logprobs=value["rollout_logprobs"],
        finish_reason=FinishReason(value["finish_reason"]),
        version_spans=_read_spans(value["policy_versions"]),
        temperature=value["temperature"],
        controls=params.controls,  # a server that does not know them has refused the request
        top_logprobs=_read_top_logprobs(value["top_logprobs"]),
        routed_experts=read_experts(value.get("routed_experts")),
        kept_ids=read_kept_ids(value.get("kept_ids")),
        queue_s=value.get("queue_s"),
    )


def _read_top_logprobs(value: Mapping[str, Any] | None) -> TopLogprobs | None:
    return None if value is None else TopLogprobs(token_ids=value["token_ids"], logprobs=value["logprobs"])


def _read_spans(value: Sequence[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start=start, stop=stop, policy_version=version) for start, stop, version in value)
