"""An engine that samples through servers, ours or stock vLLM: one, or several with session affinity and failover.

    engine = await HttpEngine.connect(["http://10.0.0.1:8000", "http://10.0.0.2:8000"], api_key="...")

All turns of a conversation (`session_id`, or request ids `<conversation>/<turn>`) go to the server that has its prefix
cached. If that server is gone they go to another, whose prefix cache is cold but whose answers are as exact.

A server that was restarted has its first weights again. After `require_version`, samples with older weights are
refused, and the conversations of such a server go to others until the weights are published to it.

With an `EngineDirectory` servers come and go. One that comes is used once it has the newest version, which it gets from
a publisher; what one that goes had not answered is sampled again by another, with the same seeds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from unbroken.client import AsyncClient
from unbroken.engines.checks import check_images, check_request, check_scorable, check_unused
from unbroken.engines.directory import MAX_FAILURES, EngineDirectory, check_address, follow
from unbroken.engines.http_servers import EngineServer, ServerAccess, ServerFacts, open_server
from unbroken.errors import EngineError, ServerBehindError, ServerError, ServerUnreachableError, UnknownPolicyError
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

_NEEDS_OURS = "servers that come and go must be those of this package: stock vLLM does not say which version it has"

_log = logging.getLogger(__name__)


class HttpEngine:
    """Samples through servers of this package, or of stock vLLM 0.32 and later. Made by `connect`.

    An aborted request returns no ids. Weights are published to the servers, not sent through this engine.
    """

    takes_structured_output = True
    """Its servers decide."""

    def __init__(self, servers: _Failover) -> None:
        facts = servers.facts
        self.context_length = facts.context_length
        self.vocab_size = facts.vocab_size
        self.followers: list[Callable[[int], None]] = []
        """Called with each version that is required: engines of other processes, at the same servers."""
        self.takes_images = facts.takes_images
        self.image_processor = facts.image_processor
        """The settings of the servers' image processor, if they say them."""
        self.numerics = facts.numerics
        self.tensor_parallel_size = facts.tensor_parallel_size
        self.adapters = facts.adapters
        """Names of the LoRA adapters that all servers had when they were connected."""
        self.adapter_room = facts.adapter_room
        """How many adapters an update may have, that all of these servers take; None for any."""
        self._failover = servers
        self._following: asyncio.Task[None] | None = None
        """What takes servers of a directory in and lets them go."""
        self._in_flight: dict[str, Callable[[], object]] = {}
        """What ends each request."""
        self._aborted: set[str] = set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        servers: Sequence[str] | EngineDirectory,
        *,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        max_retries: int = 4,
        wait_s: float = 0.0,
        vocab_size: int | None = None,
    ) -> HttpEngine:
        """Connect to servers of one model, and wait up to `wait_s` for those that do not answer yet.

        Of a directory one is enough; others come later. `vocab_size`, that of the tokenizer, is for stock vLLM, which
        does not report its own.

        Raises:
            ServerUnreachableError: one of them does not answer, or none of a directory.
            EngineError: they serve different models, or one is neither ours nor vLLM 0.32 or later.
        """
        access = ServerAccess(api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        if not isinstance(servers, EngineDirectory):
            return cls(await _connect(servers, access, wait_s=wait_s, vocab_size=vocab_size))
        first = await _find_first(servers, access, wait_s)
        failover = await _connect(first, access, wait_s=0.0, vocab_size=vocab_size)
        if not all(isinstance(server, AsyncClient) for server in failover.servers):
            await failover.close()
            raise EngineError(f"{servers}: {_NEEDS_OURS}")
        engine = cls(failover)
        engine._following = follow(servers, failover, first)
        return engine

    @property
    def policy_version(self) -> int:
        """The newest version in an answer so far, or that was noted."""
        return self._failover.policy_version

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that are there now."""
        return tuple(self._failover.members)

    @property
    def model_name(self) -> str:
        """What the servers call their model."""
        return self._failover.facts.model

    async def find_model(self, name: str) -> dict[str, Any]:
        """What a server says of a name: `policy` and, if it is one of ours, `policy_version`; `parent` unless it is the
        served model. `UnknownPolicyError` if it means nothing there.
        """
        self._check_open()
        last: ServerError | None = None
        for client in self._failover.candidates(name):
            try:
                async with self._failover.while_there(client):
                    return await client.model(name)
            except ServerError as error:
                last = await self._failover.avoid(client, error)
        raise self._failover.to_error(last)

    def note_version(self, policy_version: int) -> None:
        """Take note of a version that the servers have taken."""
        self._failover.policy_version = max(self._failover.policy_version, policy_version)

    def require_version(self, policy_version: int) -> None:
        """From now on, refuse samples of older weights, and send the request to another server."""
        self._failover.require_newer(policy_version)
        for follower in self.followers:
            follower(policy_version)

    async def check_health(self) -> None:
        """Raise `EngineError` unless a server is healthy, or waits for whole weights, which can be published."""
        self._check_open()
        if not any(await asyncio.gather(*map(_takes_weights, self._failover.servers))):
            raise EngineError(f"none of {self._failover} is healthy")

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
                    prompt_ids=request.prompt_ids, sequences=(nothing,) * request.n, image_sha256s=request.image_sha256s
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
        abort = self._in_flight[request.request_id] = _Abort()
        has_begun = False
        try:
            async with aclosing(self._stream(request)) as chunks:
                while (chunk := await abort.next_of(chunks)) is not None:
                    has_begun = True
                    yield chunk
        finally:
            del self._in_flight[request.request_id]
            self._aborted.discard(request.request_id)
        if not abort.is_called:
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
        for client in self._failover.candidates(hashlib.sha256(token_ids.tobytes()).hexdigest()):
            try:
                async with self._failover.while_there(client):
                    (scored,) = await client.score(
                        [token_ids], images=[images], temperature=temperature, num_top_logprobs=num_top_logprobs
                    )
                return scored
            except ServerError as error:
                last = await self._failover.avoid(client, error)
        raise self._failover.to_error(last)

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far, with ABORT."""
        if request_id in self._in_flight:
            self._aborted.add(request_id)
            self._in_flight[request_id]()

    async def pause(self) -> None:
        """Pause all servers."""
        self._check_open()
        await asyncio.gather(*(client.pause() for client in self._failover.servers))

    async def resume(self) -> None:
        """Resume all servers."""
        self._check_open()
        await asyncio.gather(*(client.resume() for client in self._failover.servers))

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests on all servers."""
        self._check_open()
        await asyncio.gather(*(client.reset_prefix_cache() for client in self._failover.servers))

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        self._closed = True
        for request_id in list(self._in_flight):
            await self.abort(request_id)
        await asyncio.sleep(0)
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self._failover.close()

    async def _sample(self, request: SampleRequest) -> SampleResult:
        last: ServerError | None = None
        for client in self._failover.candidates(_session(request)):
            try:
                async with self._failover.while_there(client):
                    (result,) = await client.generate(
                        [request.prompt_ids],
                        request.params,
                        images=[request.images],
                        n=request.n,
                        adapter=request.adapter,
                        session_id=_session(request),
                    )
                for sequence in result.sequences:
                    self._failover.learn_version(client, sequence)
                return result
            except (ServerError, UnknownPolicyError) as error:
                last = await self._failover.avoid(client, error)
        raise self._failover.to_error(last)

    async def _stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        last: ServerError | None = None
        for client in self._failover.candidates(_session(request)):
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
                        self._failover.learn_version(client, chunk)
                        yield chunk
                return
            except (ServerError, UnknownPolicyError) as error:
                last = await self._failover.avoid(client, error)
                if has_begun:
                    raise
        raise self._failover.to_error(last)

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


async def _connect(
    base_urls: Sequence[str], access: ServerAccess, *, wait_s: float, vocab_size: int | None
) -> _Failover:
    """Connect to all of these servers; raises as `HttpEngine.connect`."""
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
        facts = _join_facts(found)
    except BaseException:
        for each in clients:
            await each.close()
        raise
    members = dict(zip(base_urls, clients, strict=True))
    newest = max(facts.policy_version for facts in found)
    return _Failover(members, access=access, facts=facts, policy_version=newest)


def _join_facts(found: Sequence[ServerFacts]) -> ServerFacts:
    """What several servers say, with the adapters that all have, and room that all have; `EngineError` if they have
    different models.
    """
    common = set(map(_find_common, found))
    if len(common) != 1:
        raise EngineError(f"the servers must serve one model, got {sorted(map(str, common))}")
    adapters = [name for name in found[0].adapters if all(name in each.adapters for each in found)]
    rooms = [each.adapter_room for each in found if each.adapter_room is not None]
    least = min(rooms, key=lambda room: room.max_adapters, default=None)
    if least is not None:
        lowest = min(rooms, key=lambda room: room.max_rank)
        least = replace(least, max_rank=lowest.max_rank, how_rank=lowest.how_rank)
    return replace(common.pop(), adapters=tuple(adapters), adapter_room=least)


def _find_common(facts: ServerFacts) -> ServerFacts:
    """What servers of one model have in common, also if one has missed an update: several policies, which an update
    brings, are among the adapters. Room for them may differ.
    """
    return replace(facts, policy_version=0, adapters=(), adapter_room=None)


async def _wait_for(clients: Sequence[AsyncClient], wait_s: float) -> list[str]:
    """Wait until all servers are healthy, or `wait_s` have passed. Returns those that were not healthy until then."""
    missing: list[str] = []
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        healthy = await asyncio.gather(*map(_takes_weights, clients))
        before, missing = missing, [c.base_url for c, is_there in zip(clients, healthy, strict=True) if not is_there]
        if not missing:
            break
        if missing != before:
            _log.warning("waiting up to %g s for %s to serve", wait_s, missing)
        await asyncio.sleep(min(_HEALTH_POLL_S, max(deadline_s - time.monotonic(), 0.0)))
    return missing


async def _find_first(directory: EngineDirectory, access: ServerAccess, wait_s: float) -> list[str]:
    """Wait until servers of a directory are healthy; returns their addresses."""
    listed: tuple[str, ...] | None = None
    deadline_s = time.monotonic() + wait_s
    while True:
        before, listed = listed, await asyncio.to_thread(directory.addresses)
        async with AsyncExitStack() as stack:
            for url in listed:
                check_address(url)
            asked = [await stack.enter_async_context(access.make_client(url)) for url in listed]
            healthy = await asyncio.gather(*map(_takes_weights, asked))
        if found := [url for url, is_there in zip(listed, healthy, strict=True) if is_there]:
            return found
        if time.monotonic() >= deadline_s:
            raise ServerUnreachableError(f"none of the servers in {directory} answers: {list(listed)}")
        if listed != before:
            _log.warning("waiting up to %g s for one of the servers in %s: %s", wait_s, directory, list(listed))
        await asyncio.sleep(min(_HEALTH_POLL_S, max(deadline_s - time.monotonic(), 0.0)))


async def _takes_weights(server: EngineServer) -> bool:
    return await (server.takes_weights() if isinstance(server, AsyncClient) else server.health())


def _session(request: SampleRequest) -> str:
    """The conversation of a request: by name, or by the form of its id."""
    return request.session_id or request.request_id.rpartition("/")[0] or request.request_id


class _Abort:
    """Ends a stream when it is called, also while the next chunk is waited for."""

    def __init__(self) -> None:
        self.is_called = False
        self._waiting: asyncio.Timeout | None = None

    def __call__(self) -> None:
        if self._waiting is not None and not self.is_called:
            self._waiting.reschedule(0.0)
        self.is_called = True

    async def next_of(self, chunks: AsyncGenerator[SampleChunk]) -> SampleChunk | None:
        """The next chunk; None at the end, or as soon as this is called."""
        if self.is_called:
            return None
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await anext(chunks, None)
        except TimeoutError:
            if not self.is_called:
                raise
            return None
        finally:
            self._waiting = None


class _Failover:
    """The servers, and which a conversation goes to: its own, unless that could not be reached or has old weights.

    As `Members` of a directory, they come and go.
    """

    def __init__(
        self, members: Mapping[str, EngineServer], *, access: ServerAccess, facts: ServerFacts, policy_version: int
    ) -> None:
        """`members` are the first servers by their addresses, `facts` what all have in common."""
        self.members = dict(members)
        self.facts = facts
        self.policy_version = policy_version
        """The newest in an answer so far, or that was noted."""
        self._access = access
        self._required_version = 0
        self._known = dict(members)
        """Those that are gone too: streams may still end there, and they may come back."""
        self._calls: dict[EngineServer, set[asyncio.Timeout]] = defaultdict(set)
        """Which are given up when their server is let go."""
        self._avoid_until_s: dict[EngineServer, float] = {}
        self._behind: set[EngineServer] = set()
        self._joining: set[EngineServer] = set()
        """Those that have not had the newest version since they came."""
        self._num_failures: Counter[EngineServer] = Counter()
        """Health checks in a row that failed for those that are there and about to join."""

    def __str__(self) -> str:
        return str([server.base_url for server in self.servers]) if self.members else "the servers that were listed"

    @property
    def servers(self) -> list[EngineServer]:
        """Those that are there."""
        return list(self.members.values())

    def candidates(self, session: str) -> Iterator[EngineServer]:
        """Those to ask for a conversation, one after the other; also those that are added later."""
        asked: set[EngineServer] = set()
        while (server := next((each for each in self.order(session) if each not in asked), None)) is not None:
            asked.add(server)
            yield server

    def order(self, session: str) -> list[EngineServer]:
        """Order the servers for a conversation: its own first (rendezvous hashing), unreachable and old ones last."""
        now_s = time.monotonic()
        last = self._behind | self._joining

        def rank(server: EngineServer) -> tuple[bool, bytes]:
            avoided = server in last or self._avoid_until_s.get(server, 0.0) > now_s
            return avoided, hashlib.sha256(f"{session}|{server.base_url}".encode()).digest()

        return sorted(self.servers, key=rank)

    async def avoid(self, server: EngineServer, error: ServerError | UnknownPolicyError) -> ServerError:
        """Send requests to other servers from now on; raises `error` if it is about the request and not the server."""
        if isinstance(error, UnknownPolicyError):
            error = await self._find_missed(server, error)
        if isinstance(error, ServerBehindError):
            self._behind.add(server)
        elif isinstance(error, ServerUnreachableError) or not await server.health():
            self._avoid_until_s[server] = time.monotonic() + _AVOID_S
        else:
            raise error
        return error

    async def _find_missed(self, server: EngineServer, error: UnknownPolicyError) -> ServerError:
        """The error of a server that lacks an adapter because it has missed an update; raises `error` if it has not."""
        if not isinstance(server, AsyncClient):  # stock vLLM gets its adapters in no update
            raise error
        try:
            found = await server.policy_version()
        except ServerError as gone:
            return gone
        if found >= self._required_version:
            raise error
        return ServerBehindError(
            f"{server.base_url} has policy version {found}, and {self._required_version} was published: {error}"
        )

    @asynccontextmanager
    async def while_there(self, server: EngineServer) -> AsyncIterator[None]:
        """A block with a call to a server; `ServerUnreachableError` as soon as the server is let go."""
        calls = self._calls[server]
        call = asyncio.timeout(None if server in self.servers else 0)
        try:
            async with call:
                calls.add(call)
                try:
                    yield
                finally:
                    calls.discard(call)
        except TimeoutError:
            if not call.expired():
                raise
            raise ServerUnreachableError(f"{server.base_url} went away") from None

    def learn_version(self, server: EngineServer, sampled: SampledSequence | SampleChunk) -> None:
        """Take note of the versions that sampled this; raises `ServerBehindError` for one that is too old."""
        for span in sampled.version_spans:
            if span.policy_version < self._required_version:
                raise ServerBehindError(
                    f"{server.base_url} sampled with policy version {span.policy_version}, and {self._required_version}"
                    " was published: it was restarted, or could not be reached then. Publish the weights again"
                )
            self.policy_version = max(self.policy_version, span.policy_version)

    def require_newer(self, policy_version: int) -> None:
        """Other weights are published: which servers are behind them is not known yet."""
        self._required_version = policy_version
        self._behind.clear()

    def to_error(self, last: ServerError | None) -> ServerError:
        """The error for a request that every server was asked for, given the last one's."""
        if isinstance(last, ServerBehindError):
            return last
        return ServerUnreachableError(f"none of {self} can be reached")

    async def join(self, url: str) -> None:
        """Take a server in: last of all at first, and like the others once it has their version.

        Raises:
            EngineError: it does not answer, has another model, or has not got the version yet.
        """
        if url not in self.members:
            await self._open(url)
        server = self.members[url]
        assert isinstance(server, AsyncClient), "`connect` has refused others"
        if not await server.health():
            self._num_failures[server] += 1
            if self._num_failures[server] == MAX_FAILURES:
                self.leave(url)
            raise ServerUnreachableError("it does not answer")
        self._num_failures.pop(server, None)
        found, newest = await server.policy_version(), await self._find_newest(server)
        if found != newest:
            self._joining.add(server)
            raise ServerBehindError(f"it has another policy version than the newest, {newest}")
        self._joining.discard(server)
        self._avoid_until_s.pop(server, None)

    async def is_healthy(self, url: str) -> bool:
        """Whether a server that was taken in answers."""
        return await self.members[url].health()

    def leave(self, url: str) -> None:
        """Let a server go: others are asked again for what it has not answered."""
        if (server := self.members.pop(url, None)) is not None:
            self._joining.discard(server)
            self._num_failures.pop(server, None)
            for call in self._calls[server]:
                call.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close the connections."""
        for server in self._known.values():
            await server.close()

    async def _find_newest(self, joining: EngineServer) -> int:
        """The newest version that is known: in an answer, or of one of the servers, for a process that samples little.

        With no server but this one it is whatever this one has, from the version that is required on.
        """
        others = [each for each in self.order("") if each is not joining and each not in self._joining]
        known = [self.policy_version, self._required_version]
        for server in others[:1] or [joining]:
            assert isinstance(server, AsyncClient), "`connect` has refused others"
            known.append(await server.policy_version())
        return max(known)

    async def _open(self, url: str) -> None:
        client = self._known.get(url) or self._access.make_client(url)
        self._known[url] = client
        if not await client.health():
            raise ServerUnreachableError("it does not answer")
        assert isinstance(client, AsyncClient), "`connect` has refused others"
        server, facts = await open_server(client, self._access, vocab_size=self.facts.vocab_size)
        if server is not client:
            await self._known.pop(url).close()
            await server.close()
            raise EngineError(_NEEDS_OURS)
        if _find_common(facts) != _find_common(self.facts):
            raise EngineError(f"the servers must serve one model, {self.facts}, and it has {facts}")
        self.members[url] = server
        self._joining.add(server)
