"""A stand-in for a stock `vllm serve --enable-scale-out`: its answers, after its source, over any engine of ours."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from unbroken.engines.base import Engine
from unbroken.types import SampleChunk, SampleRequest, SamplingParams, token_ids, write_experts

_PARAMS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed",
)  # fmt: skip


@dataclass
class StockServer:
    """What the server does, and what it was asked."""

    engine: Engine
    name: str = "stock"
    enabled: bool = True
    """Whether it was started with --enable-scale-out."""
    applies_sampling: bool = True
    """Whether it was started with --logprobs-mode processed_logprobs."""
    version: str = "default"
    """The label of its weights."""
    num_refusals: int = 0
    """How many requests are answered with 503 from now on."""
    cuts_tops: bool = True
    """Whether the list of the most likely ids has as many as asked for, the sampled one among them (0.32), or all that
    the engine gave: one more if the sampled one is not among the most likely (0.33)."""
    records_routing: bool = False
    """Whether it was started with --enable-return-routed-experts; the engine's replies must have them."""
    gives_tops: bool = False
    """Whether the most likely ids are the engine's own, instead of made up."""
    shift: float = 0.0
    """Added to all logprobs."""
    echo: list[int] | None = None
    """The prompt that it reports instead of the true one."""
    adapters: tuple[str, ...] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    num_running: int = 0

    def make_app(self) -> FastAPI:
        app = FastAPI()
        app.get("/health")(lambda: Response())
        app.get("/version")(lambda: {"version": "0.32.0"})
        app.get("/v1/models")(self._models)
        app.post("/inference/v1/generate")(self._generate)
        return app

    def _models(self) -> dict[str, Any]:
        own = {"id": self.name, "object": "model", "owned_by": "vllm", "root": "/models/x", "parent": None}
        own["max_model_len"] = self.engine.context_length  # type: ignore[assignment]
        more = [{**own, "id": name, "parent": self.name, "max_model_len": None} for name in self.adapters]
        return {"object": "list", "data": [own, *more]}

    async def _generate(self, request: Request) -> Response:
        if not self.enabled:
            return _error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out")
        if self.num_refusals:
            self.num_refusals -= 1
            return _error(503, "weights are being updated")
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        sampling = body["sampling_params"]
        if sampling.get("prompt_logprobs") is not None:
            return await self._score(body)
        if not 0 <= sampling["temperature"] <= 2:
            return _error(400, f"temperature must be in [0, 2], got {sampling['temperature']}.")
        ours = SampleRequest(
            request_id=f"generate-tokens-{len(self.bodies)}",
            prompt_ids=token_ids(body["token_ids"]),
            n=sampling["n"],
            params=SamplingParams(
                **{name: sampling[name] for name in _PARAMS},
                stop_token_ids=tuple(sampling["stop_token_ids"]),
                stop_strings=tuple(sampling["stop"]),
                return_routed_experts=self.records_routing,
                num_top_logprobs=sampling["logprobs"] if self.gives_tops else 0,
            ),
        )
        if body.get("stream"):
            return StreamingResponse(self._stream(body, ours), media_type="text/event-stream")
        choices: list[list[SampleChunk]] = [[] for _ in range(ours.n)]
        async for chunk in self._sample(ours):
            choices[chunk.index].append(chunk)
            if await request.is_disconnected():
                return Response(status_code=499)
        whole = []
        for chunks in choices:
            parts = [self._format(body, chunk) for chunk in chunks]
            content = [entry for part in parts for entry in part["logprobs"]["content"]]
            ids = [token_id for part in parts for token_id in part["token_ids"]]
            whole.append({**parts[-1], "token_ids": ids, "logprobs": {"content": content}})
        return JSONResponse(
            {
                "request_id": ours.request_id,
                "model": self.name,
                "output_mode": "tokens",
                "choices": whole,
                "usage": {},
                "prompt_logprobs": None,
                "prompt_token_ids": self._report(body),
            }
        )

    async def _sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self.num_running += 1
        try:
            async with aclosing(self.engine.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.num_running -= 1

    async def _stream(self, body: dict[str, Any], request: SampleRequest) -> AsyncIterator[str]:
        prompt = {"prompt_token_ids": self._report(body)}
        async for chunk in self._sample(request):
            event = {"request_id": request.request_id, "usage": None, "choices": [self._format(body, chunk)], **prompt}
            prompt = {}
            data = json.dumps(event, separators=(",", ":"))  # as pydantic writes it
            yield f"data: {data}\n\n"
        yield "data: [DONE]\n\n"

    async def _score(self, body: dict[str, Any]) -> Response:
        ids, number = body["token_ids"], body["sampling_params"]["prompt_logprobs"]
        scored = await self.engine.score(token_ids(ids), num_top_logprobs=number)
        positions: list[Any] = [None]
        for k, own in enumerate(ids[1:]):
            entry = {str(own): {"logprob": float(scored.logprobs[k]), "rank": 1, "decoded_token": None}}
            if scored.top_logprobs is not None:
                for top, logprob in zip(
                    scored.top_logprobs.token_ids[k].tolist(), scored.top_logprobs.logprobs[k].tolist(), strict=True
                ):
                    entry[str(top)] = {"logprob": max(logprob, -9999.0), "rank": 2, "decoded_token": None}
            positions.append(entry)
        return JSONResponse({"choices": [{"index": 0}], "prompt_logprobs": positions, "prompt_token_ids": None})

    def _report(self, body: dict[str, Any]) -> Any:
        return (self.echo or body["token_ids"]) if body.get("return_token_ids") else None

    def _format(self, body: dict[str, Any], chunk: SampleChunk) -> dict[str, Any]:
        """A choice. The sampled id is first among the most likely ones, and one of their number."""
        sampling = body["sampling_params"]
        temperature = sampling["temperature"] or 1.0
        scale = 1 / temperature if self.applies_sampling else 1.0
        content = []
        sampled = zip(chunk.completion_ids.tolist(), chunk.rollout_logprobs.tolist(), strict=True)
        for position, (token_id, logprob) in enumerate(sampled):
            own = {"token_id": token_id, "logprob": logprob * scale + self.shift, "rank": 2}
            others = [{"token_id": k, "logprob": -1.0 - k, "rank": k} for k in range(8) if k != token_id]
            if self.gives_tops and (tops := chunk.top_logprobs) is not None:
                own = {"token_id": token_id, "logprob": logprob}
                entries = zip(tops.token_ids[position].tolist(), tops.logprobs[position].tolist(), strict=True)
                others = [{"token_id": k, "logprob": max(each, -9999.0)} for k, each in entries if k != token_id]
            most = max(sampling["logprobs"], 1) if self.cuts_tops else sampling["logprobs"] + 1
            content.append({**own, "top_logprobs": [own, *others][:most]})
        ended = chunk.finish_reason is not None
        num_ids = sum(span.stop - span.start for span in chunk.version_spans)
        return {
            "index": chunk.index,
            "token_ids": chunk.completion_ids.tolist(),
            "logprobs": {"content": content},
            "finish_reason": chunk.finish_reason.value if chunk.finish_reason is not None else None,
            "stop_reason": None,
            "weight_versions": [{"version": self.version, "start": 0, "end": num_ids}] if ended else None,
            "routed_experts": write_experts(chunk.routed_experts),
        }


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers={"Retry-After": "0"})


async def make_vllm_app(engine: Any) -> Any:
    """vLLM's own application over an engine that runs."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    level = logging.getLogger().level
    model = engine._llm.model_config.model
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, "--enable-scale-out"])
    app = build_app(args, ("generate",), engine._llm.model_config)
    await init_app_state(engine._llm, app.state, args, ("generate",))
    logging.getLogger().setLevel(level)  # vLLM's application sets it, for all loggers of this process
    return app
