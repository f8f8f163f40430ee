"""An engine that samples through servers, ours or stock vLLM: one, or several with session affinity and failover.

    engine = await HttpEngine.connect(["http://10.0.0.1:8000", "http://10.0.0.2:8000"], api_key="...")

All turns of a conversation (`session_id`, or request ids `<conversation>/<turn>`) go to the server that has its prefix
cached. If that server is gone they go to another, whose prefix cache is cold but whose answers are as exact.

A server that was restarted has its first weights again. After `require_version`, samples with older weights are
refused, and the conversations of such a server go to others until the weights are published to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from unbroken.client import AsyncClient
from unbroken.engines.checks import check_images, check_request, check_scorable, check_unused
from unbroken.engines.http_servers import EngineServer, ServerAccess, open_server
from unbroken.errors import EngineError, ServerBehindError, ServerError, ServerUnreachableError
from unbroken.types import (
    ImageSpan,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    ScoredSequence,
    TokenIds,
)

_HEALTH_POLL_S = 1.0
"""How often `connect` asks missing servers for their health."""
_AVOID_S = 15.0
"""How long a server that could not be reached gets no requests."""

_log = logging.getLogger(__name__)


class HttpEngine:
    """Samples through servers of this package, or of stock vLLM 0.32 and later. Made by `connect`.

    An aborted request returns no ids. Weights are published to the servers, not sent through this engine.
    """

    takes_structured_output = True
    """Its servers decide."""

    def __init__(
        self,
        clients: Sequence[EngineServer],
        *,
        context_length: int,
        vocab_size: int,
        policy_version: int,
        takes_images: bool = False,
        adapters: Sequence[str] = (),
    ) -> None:
        self._clients = list(clients)
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._policy_version = policy_version
        self._required_version = 0
        self.followers: list[Callable[[int], None]] = []
        """Called with each version that is required: engines of other processes, at the same servers."""
        self.takes_images = takes_images
        self.adapters = tuple(adapters)
        """Names of the servers' LoRA adapters, when they were connected."""
        self._failover = Failover(clients)
        self._in_flight: dict[str, Callable[[], object]] = {}
        """What ends each request."""
        self._aborted: set[str] = set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        base_urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        max_retries: int = 4,
        wait_s: float = 0.0,
        vocab_size: int | None = None,
    ) -> HttpEngine:
        """Connect to servers of one model, and wait up to `wait_s` for those that do not answer yet.

        `vocab_size`, that of the tokenizer, is for stock vLLM, which does not report its own.

        Raises:
            ServerUnreachableError: one of them does not answer.
            EngineError: they serve different models, or one is neither ours nor vLLM 0.32 or later.
        """
        access = ServerAccess(api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        clients: list[EngineServer] = []
        try:
            asked = [access.make_client(url) for url in base_urls]
            clients += asked
            for url in await _wait_for(asked, wait_s):
                async with replace(access, max_retries=0).make_client(url) as late:
                    await late.models()  # it had its time: what is wrong is said without more tries
            found = []
            for index, client in enumerate(asked):
                clients[index], facts = await open_server(client, access, vocab_size=vocab_size)
                found.append(facts)
            described = {(f.model, f.context_length, f.vocab_size, f.takes_images, f.adapters) for f in found}
            if len(described) != 1:
                raise EngineError(f"the servers must serve one model, got {sorted(map(str, described))}")
        except BaseException:
            for each in clients:
                await each.close()
            raise
        return cls(
            clients,
            context_length=found[0].context_length,
            vocab_size=found[0].vocab_size,
            policy_version=max(facts.policy_version for facts in found),
            takes_images=found[0].takes_images,
            adapters=found[0].adapters,
        )

    @property
    def policy_version(self) -> int:
        """The newest version in an answer so far."""
        return self._policy_version

    def require_version(self, policy_version: int) -> None:
        """From now on, refuse samples of older weights, and send the request to another server."""
        self._required_version = policy_version
        self._failover.require_newer()
        for follower in self.followers:
            follower(policy_version)

    async def check_health(self) -> None:
        """Raise `EngineError` unless a server is healthy."""
        self._check_open()
        if not any(await asyncio.gather(*(client.health() for client in self._clients))):
            raise EngineError(f"none of {[client.base_url for client in self._clients]} is healthy")

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions."""
        self._check_open()
        self._check(request)
        task = asyncio.ensure_future(self._sample(request))
        self._in_flight[request.request_id] = task.cancel
        try:
            return await task
        except asyncio.CancelledError:
            if request.request_id in self._aborted:
                nothing = SampledSequence.aborted(request.params)
                return SampleResult(
                    prompt_ids=request.prompt_ids,
                    sequences=(nothing,) * request.n,
                    image_sha256s=request.image_sha256s,
                )
            raise
        finally:
            task.cancel()
            del self._in_flight[request.request_id]
            self._aborted.discard(request.request_id)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Yield the completions in chunks.

        There is failover until the first chunk; later, a server that goes away ends it with an error.

        `EngineError` if the request is aborted when there are ids already: only a stream's end has their versions.
        """
        self._check_open()
        self._check(request)
        aborted = asyncio.Event()
        self._in_flight[request.request_id] = aborted.set
        has_begun = False
        try:
            async with aclosing(self._stream(request)) as chunks:
                while (chunk := await _next_unless(aborted, chunks)) is not None:
                    has_begun = True
                    yield chunk
        finally:
            del self._in_flight[request.request_id]
            self._aborted.discard(request.request_id)
        if not aborted.is_set():
            return
        if has_begun:
            raise EngineError(f"the stream of {request.request_id!r} was aborted")
        for index in range(request.n):
            yield SampleChunk.aborted(index)

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """Return the logprob of each of T ids after the first, given the ids before it."""
        self._check_open()
        check_scorable(
            token_ids, temperature=temperature, vocab_size=self.vocab_size, context_length=self.context_length
        )
        check_images(images, max_images=self._max_images(images))
        last: ServerError | None = None
        for client in self._failover.order(hashlib.sha256(token_ids.tobytes()).hexdigest()):
            try:
                (scored,) = await client.score(
                    [token_ids], images=[images], temperature=temperature, num_top_logprobs=num_top_logprobs
                )
                return scored
            except ServerError as error:
                last = await self._failover.leave(client, error)
        raise self._failover.to_error(last)

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far, with ABORT."""
        if request_id in self._in_flight:
            self._aborted.add(request_id)
            self._in_flight[request_id]()

    async def pause(self) -> None:
        """Pause all servers."""
        self._check_open()
        await asyncio.gather(*(client.pause() for client in self._clients))

    async def resume(self) -> None:
        """Resume all servers."""
        self._check_open()
        await asyncio.gather(*(client.resume() for client in self._clients))

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests on all servers."""
        self._check_open()
        await asyncio.gather(*(client.reset_prefix_cache() for client in self._clients))

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        self._closed = True
        for request_id in list(self._in_flight):
            await self.abort(request_id)
        await asyncio.sleep(0)
        for client in self._clients:
            await client.close()

    async def _sample(self, request: SampleRequest) -> SampleResult:
        last: ServerError | None = None
        for client in self._failover.order(_session(request)):
            try:
                (result,) = await client.generate(
                    [request.prompt_ids],
                    request.params,
                    images=[request.images],
                    n=request.n,
                    adapter=request.adapter,
                    session_id=_session(request),
                )
                for sequence in result.sequences:
                    self._learn_version(client, sequence)
                return result
            except ServerError as error:
                last = await self._failover.leave(client, error)
        raise self._failover.to_error(last)

    async def _stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        last: ServerError | None = None
        for client in self._failover.order(_session(request)):
            has_begun = False
            chunks = client.stream(
                request.prompt_ids,
                request.params,
                images=request.images,
                n=request.n,
                adapter=request.adapter,
                session_id=_session(request),
            )
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        has_begun = True
                        self._learn_version(client, chunk)
                        yield chunk
                return
            except ServerError as error:
                last = await self._failover.leave(client, error)
                if has_begun:
                    raise
        raise self._failover.to_error(last)

    def _learn_version(self, client: EngineServer, sampled: SampledSequence | SampleChunk) -> None:
        for span in sampled.version_spans:
            if span.policy_version < self._required_version:
                raise ServerBehindError(
                    f"{client.base_url} sampled with policy version {span.policy_version}, and {self._required_version}"
                    " was published: it was restarted, or could not be reached then. Publish the weights again"
                )
            self._policy_version = max(self._policy_version, span.policy_version)

    def _check(self, request: SampleRequest) -> None:
        check_request(request, vocab_size=self.vocab_size, context_length=self.context_length)
        check_images(request.images, max_images=self._max_images(request.images))
        check_unused(request.request_id, self._in_flight)

    def _max_images(self, images: Sequence[ImageSpan]) -> int:
        """The server itself checks how many it takes."""
        return len(images) if self.takes_images else 0

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")


async def _wait_for(clients: Sequence[AsyncClient], wait_s: float) -> list[str]:
    """Wait until all servers are healthy, or `wait_s` have passed. Returns those that were not healthy until then."""
    missing: list[str] = []
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        healthy = await asyncio.gather(*(client.health() for client in clients))
        before, missing = missing, [c.base_url for c, is_there in zip(clients, healthy, strict=True) if not is_there]
        if not missing:
            break
        if missing != before:
            _log.warning("waiting up to %g s for %s to serve", wait_s, missing)
        await asyncio.sleep(min(_HEALTH_POLL_S, max(deadline_s - time.monotonic(), 0.0)))
    return missing


def _session(request: SampleRequest) -> str:
    """The conversation of a request: by name, or by the form of its id."""
    return request.session_id or request.request_id.rpartition("/")[0] or request.request_id


async def _next_unless(stopped: asyncio.Event, chunks: AsyncGenerator[SampleChunk]) -> SampleChunk | None:
    """The next chunk; None at the end, or as soon as `stopped` is set."""
    chunk = asyncio.ensure_future(anext(chunks, None))
    stop = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({chunk, stop}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped.is_set() else await chunk
    finally:
        stop.cancel()
        if not chunk.done():
            chunk.cancel()
            await asyncio.wait({chunk})


class Failover:
    """Which of several servers a conversation goes to: its own, unless that could not be reached or has old weights."""

    def __init__(self, servers: Sequence[EngineServer]) -> None:
        self._servers = list(servers)
        self._avoid_until_s: dict[EngineServer, float] = {}
        self._behind: set[EngineServer] = set()

    def order(self, session: str) -> list[EngineServer]:
        """Order the servers for a conversation: its own first (rendezvous hashing), unreachable and old ones last."""
        now_s = time.monotonic()

        def rank(server: EngineServer) -> tuple[bool, bytes]:
            avoided = server in self._behind or self._avoid_until_s.get(server, 0.0) > now_s
            return avoided, hashlib.sha256(f"{session}|{server.base_url}".encode()).digest()

        return sorted(self._servers, key=rank)

    async def leave(self, server: EngineServer, error: ServerError) -> ServerError:
        """Send requests to other servers from now on; raises `error` if it is about the request and not the server."""
        if isinstance(error, ServerBehindError):
            self._behind.add(server)
        elif isinstance(error, ServerUnreachableError) or not await server.health():
            self._avoid_until_s[server] = time.monotonic() + _AVOID_S
        else:
            raise error
        return error

    def require_newer(self) -> None:
        """Other weights are published: which servers are behind them is not known yet."""
        self._behind.clear()

    def to_error(self, last: ServerError | None) -> ServerError:
        """The error for a request that every server was asked for, given the last one's."""
        if isinstance(last, ServerBehindError):
            return last
        return ServerUnreachableError(f"none of {[server.base_url for server in self._servers]} can be reached")
