"""The servers behind `HttpEngine`: ours, or stock vLLM, distinguished by their answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unbroken.client import AsyncClient
from unbroken.client.calls import Calls, unexpected_answer
from unbroken.engines.base import AdapterRoom
from unbroken.engines.vllm_server import VllmServer
from unbroken.errors import EngineError
from unbroken.types import ImageSpan, Numerics, SampleChunk, SampleResult, SamplingParams, ScoredSequence, TokenIds


class EngineServer(Protocol):
    """What `HttpEngine` asks of a server; `AsyncClient` has more."""

    @property
    def base_url(self) -> str:
        """Its address."""
        ...

    async def generate(
        self,
        prompts: Sequence[TokenIds],
        params: SamplingParams,
        *,
        images: Sequence[Sequence[ImageSpan]],
        n: int,
        adapter: str | None,
        session_id: str | None,
    ) -> list[SampleResult]:
        """Continue prompts, all texts or all ids."""
        ...

    def stream(
        self,
        prompt: TokenIds,
        params: SamplingParams,
        *,
        images: Sequence[ImageSpan],
        n: int,
        adapter: str | None,
        session_id: str | None,
    ) -> AsyncGenerator[SampleChunk]:
        """Continue one prompt, in chunks as they are sampled; see `Engine.stream`."""
        ...

    async def score(
        self,
        sequences: Sequence[TokenIds],
        *,
        images: Sequence[Sequence[ImageSpan]],
        temperature: float,
        num_top_logprobs: int,
    ) -> list[ScoredSequence]:
        """Compute the logprobs of sequences, their images expanded."""
        ...

    async def model(self, name: str) -> dict[str, Any]:
        """What a name of a model means, as `/v1/models/NAME` says it; `UnknownPolicyError` if nothing."""
        ...

    async def health(self) -> bool:
        """Whether the server answers and its engine works; never retried."""
        ...

    async def pause(self) -> None:
        """Stop sampling after the current step, for all clients: requests wait."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop keys and values of finished requests."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """How all servers are called; see `AsyncClient`."""

    api_key: str | None
    timeout_s: float
    max_retries: int

    def make_client(self, base_url: str) -> AsyncClient:
        """Make a client of one server."""
        return AsyncClient(base_url, api_key=self.api_key, timeout_s=self.timeout_s, max_retries=self.max_retries)

    def make_calls(self, base_url: str) -> Calls:
        """Make the calls of a server that is not ours."""
        return Calls(
            base_url,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            connect_timeout_s=10.0,
            max_retries=self.max_retries,
            transport=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself."""

    model: str
    context_length: int
    vocab_size: int
    takes_images: bool
    image_processor: str | None
    """Its settings, as `ImageProcessor.description`; None if the server takes no images, or does not say."""
    adapters: tuple[str, ...]
    adapter_room: AdapterRoom | None
    """How many adapters an update may have; None for any."""
    policy_version: int = 0
    numerics: Numerics = Numerics.FAST
    tensor_parallel_size: int = 1  # with fast numerics servers may differ


async def open_server(
    client: AsyncClient, access: ServerAccess, *, vocab_size: int | None
) -> tuple[EngineServer, ServerFacts]:
    """Find out which kind of server this is. Returns `client` if it is ours, or a client of stock vLLM.

    Raises:
        ServerError: it does not answer, or not as such a server does.
        EngineError: it is neither of them, or it is vLLM and `vocab_size` is None.
    """
    models = await client.models()
    if not models[0].keys() >= {"id", "max_model_len"}:
        raise unexpected_answer(client.base_url, "/v1/models", {"data": models})
    if "vocab_size" in models[0]:
        version = await client.policy_version()
        room = _read_room(client.base_url, models[0])
        facts = _read_facts(models, vocab_size=models[0]["vocab_size"], adapter_room=room, policy_version=version)
        return client, facts
    if vocab_size is None:
        raise EngineError(
            f"{client.base_url} is not a server of this package and does not report its vocab_size: give that of the "
            "tokenizer"
        )
    calls = access.make_calls(client.base_url)
    try:
        server = await VllmServer.connect(calls, vocab_size=vocab_size)
    except BaseException:
        await calls.close()
        raise
    await client.close()
    how = f"{server.base_url} is stock vLLM, which takes none in an update"
    room = AdapterRoom(max_adapters=0, max_rank=0, how=how, how_rank=how)
    return server, _read_facts(models, vocab_size=vocab_size, adapter_room=room)


def _read_room(base_url: str, model: dict[str, Any]) -> AdapterRoom | None:
    match model.get("adapter_room"):
        case None:
            return None
        case {
            "max_adapters": int(max_adapters),
            "max_rank": int(max_rank),
            "how": str(how),
            "how_rank": str(how_rank),
        } if (
            # To Python true and false are integers too.
            bool not in map(type, (max_adapters, max_rank)) and min(max_adapters, max_rank) >= 0
        ):
            how, how_rank = f"{base_url}: {how}", f"{base_url}: {how_rank}"
            return AdapterRoom(max_adapters=max_adapters, max_rank=max_rank, how=how, how_rank=how_rank)
    raise unexpected_answer(base_url, "/v1/models", model)


def _read_facts(
    models: list[dict[str, Any]], *, vocab_size: int, adapter_room: AdapterRoom | None, policy_version: int = 0
) -> ServerFacts:
    processor = models[0].get("image_processor")
    numerics = Numerics(models[0].get("numerics", Numerics.FAST))
    return ServerFacts(
        model=models[0]["id"],
        context_length=models[0]["max_model_len"],
        vocab_size=vocab_size,
        takes_images=models[0].get("takes_images", False),
        image_processor=json.dumps(processor, sort_keys=True) if isinstance(processor, dict) else None,
        numerics=numerics,
        tensor_parallel_size=1 if numerics is Numerics.FAST else models[0].get("tensor_parallel_size", 1),
        adapters=tuple(one["id"] for one in models if one.get("parent") is not None),
        adapter_room=adapter_room,
        policy_version=policy_version,
    )
