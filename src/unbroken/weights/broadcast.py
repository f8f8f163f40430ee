"""Publishes weights by broadcast, on vLLM's own wire: to servers of this package, and to stock `vllm serve`.

_open()     the state of each server; those that lack the version meet the trainer
_start()    they say whether they take it: a server that was restarted, or has a newer version, refuses here
_send()     all receive and verify, the digests are compared ── then all load
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError, UnbrokenError, WeightsError
from unbroken.types import InFlight
from unbroken.weights.adapters import is_adapter
from unbroken.weights.base import WeightUpdate
from unbroken.weights.sources import WeightStream, check_stream, make_digest
from unbroken.weights.wire import (
    BufferPacking,
    PackedGroup,
    Rendezvous,
    Transport,
    clear_frames,
    listen,
    send,
    stop_waiting,
    sum_stream,
)

if TYPE_CHECKING:
    import torch

_ABORT_S = 10.0
"""How long servers may take to answer once an update has been given up."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The state of a server's weights."""

    client: AsyncClient
    policy_version: int
    world_size: int
    dtype: str | None
    device: str
    gpu_uuids: Sequence[str]
    digest: str | None
    is_stock: bool = False
    """Whether it is vLLM's own: it loads weights as they come, and has no digests."""

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.base_url


class NotTakenError(EngineError):
    """A server did not take an update."""


class BroadcastPublisher:
    """Broadcasts each version to every worker of every server, over gloo or NCCL.

    All workers have received and verified everything before the first of them loads: if one fails until then, all keep
    their weights, and the next `publish` forms a new group. A version that some servers have is sent to the others
    only, if there are any. If one of several servers is gone, the others get the version; `missed_by` of the update
    names the missing one, which gets the next version. Stock `vllm serve` loads weights as they come, so with it
    none of this holds but the versions.

    Only the calls are encrypted and authenticated, not the weights: use a network between trainer and servers that only
    you can reach.

    Args:
        clients: of the servers, closed by the caller. They need the admin key if the servers have one.
        host: an address of this machine that the servers' machines reach.
        device: of the chunks. With `cuda` and servers on other GPUs, NCCL carries them; gloo otherwise.
        bucket_bytes: a chunk ends with the first weight that makes it larger. At most two chunks are held, and more
            than twice these bytes only for a weight that is larger itself.
        dtype: of floating-point weights on the wire, under torch's name; None is the servers' own.
        reuse_kv: keep keys and values of older weights.
        timeout_s: longest wait for each step of an update. With `InFlight.FINISH` requests must end within it.

    Raises:
        InvalidInputError: there is no client, or a number is out of its range.
    """

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        bucket_bytes: int = 64 * 2**20,
        dtype: str | None = None,
        in_flight: InFlight = InFlight.PAUSE,
        reuse_kv: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        if not clients:
            raise InvalidInputError("clients must hold at least one client, got none")
        if timeout_s <= 0:
            raise InvalidInputError(f"timeout_s must be > 0, got {timeout_s}")
        if bucket_bytes < 1:
            raise InvalidInputError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self._clients = list(clients)
        self._host = host
        self._device = device
        self._packing = BufferPacking(packed=True, buffer_bytes=bucket_bytes)
        self._dtype = dtype
        self._in_flight = in_flight
        self._reuse_kv = reuse_kv
        self._timeout_s = timeout_s
        self._group: PackedGroup | None = None
        self._servers: list[Server] = []
        """The servers of the group, which lack the version."""
        self._up_to_date: list[Server] = []
        """Those that have it."""
        self._published = -1
        self._missed_by: tuple[str, ...] = ()
        self._gave_up = threading.Event()

    async def dtype(self) -> str | None:
        """Return the dtype in which floating-point weights are sent; None is each one's own."""
        if self._dtype is None and not self._servers:
            servers = await self._ask_servers()
            return _common_dtype(servers) if servers else None
        return self._dtype or _common_dtype(self._servers)

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """See `WeightPublisher.publish`. Of a `WeightStream`, such as `Trainer.named_weights`, two chunks are held.

        Raises:
            ServerUnreachableError: no server can be reached, or one went away when a stream had been read in part.
            EngineError: a running server did not take it; the message says which, and whether another has it.
            WeightsError: a server has other weights under this version.
        """
        started = time.perf_counter()
        stream = WeightStream.of(named_parameters)
        try:
            num_bytes, phases = await self._update(stream, policy_version, again=policy_version <= self._published)
        except NotTakenError as error:
            if await self._are_healthy():
                raise
            if not stream.is_whole:  # the caller must make it again
                raise ServerUnreachableError(str(error)) from error
            num_bytes, phases = await self._update(stream, policy_version, again=True)  # without what is gone
        self._published = policy_version
        missed_by = self._missed_by
        if len(self._servers) < len(self._clients):  # the next version shall reach the missing ones too
            self.close()
        seconds = time.perf_counter() - started
        return WeightUpdate(num_bytes=num_bytes, seconds=seconds, missed_by=missed_by, phases_s=phases)

    def close(self) -> None:
        """Leave the group. The next `publish` forms a new one."""
        if self._group is not None:
            self._group.close()
        self._group = None

    async def _update(self, stream: WeightStream, policy_version: int, *, again: bool) -> tuple[int, dict[str, float]]:
        """Try once; returns the bytes of the weights, and the time of each phase on the slowest server."""
        began = time.perf_counter()
        is_fresh = again or self._group is None
        if is_fresh:
            await self._open(policy_version)
        stream = self._cast(stream)
        if not self._servers:
            sums = await asyncio.to_thread(sum_stream, stream)
            self._check_same(make_digest(stream.specs, sums), policy_version)
            return stream.num_bytes, {}
        try:
            await self._start(policy_version)
        except NotTakenError:
            if is_fresh:
                raise
            # A server is gone, or was restarted and is not in the group.
            return await self._update(stream, policy_version, again=True)
        started = time.perf_counter()
        phases = await self._send(stream, policy_version)
        return stream.num_bytes, {"start": started - began, **phases}

    async def _ask_servers(self) -> list[Server]:
        """Return the states of the servers that are healthy, and note the others."""
        healthy = await asyncio.gather(*(client.health() for client in self._clients))
        found = [client for client, is_healthy in zip(self._clients, healthy, strict=True) if is_healthy]
        self._missed_by = tuple(client.base_url for client in self._clients if client not in found)
        return list(await asyncio.gather(*(_ask_state(client, self._timeout_s) for client in found)))

    async def _open(self, policy_version: int) -> None:
        """Meet the servers that do not have the version."""
        self.close()
        servers = await self._ask_servers()
        if not servers:
            raise ServerUnreachableError(f"no server is healthy: {', '.join(self._missed_by)}")
        has_it = {server.url for server in servers if server.policy_version == policy_version and server.digest}
        self._up_to_date = [server for server in servers if server.url in has_it]
        self._servers = [server for server in servers if server.url not in has_it]
        if not self._servers:
            return
        if stock := [server.url for server in self._servers if server.is_stock]:
            _log.warning(
                "%s: stock vLLM loads weights as they come and has no digest of them: an update that fails may leave "
                "it with a mixture, and other servers without",
                ", ".join(stock),
            )
        listener = listen(self._host)
        rendezvous = Rendezvous(
            host=self._host,
            port=listener.getsockname()[1],
            first_rank=1,
            world_size=1 + sum(server.world_size for server in self._servers),
            transport=self._choose_transport(),
            join_timeout_s=self._timeout_s,
            timeout_s=self._timeout_s,
        )
        first_rank = 1
        bodies = {}
        for server in self._servers:
            bodies[server.url] = self._init_body(server, rendezvous, first_rank)
            first_rank += server.world_size
        calls = self._call_all("init_weight_transfer_engine", lambda server: bodies[server.url])
        joining = asyncio.create_task(asyncio.to_thread(self._join, rendezvous, listener))
        waiting: set[asyncio.Task[Any]] = {joining, *calls.values()}
        while waiting and not any(map(_has_failed, (joining, *calls.values()))):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not waiting and not any(map(_has_failed, (joining, *calls.values()))):
            self._group = joining.result()
            return
        self._gave_up.set()
        if not joining.done():
            await asyncio.to_thread(stop_waiting, rendezvous)
        await asyncio.wait({joining}, timeout=_ABORT_S)
        self._gave_up.clear()
        reason = str(joining.exception()) if _has_failed(joining) and not any(map(_has_failed, calls.values())) else ""
        if joining.done() and not _has_failed(joining):
            joining.result().close()
        raise await self._failure(calls, reason)

    def _join(self, rendezvous: Rendezvous, listener: socket.socket) -> PackedGroup:
        import torch

        device = torch.device("cpu" if rendezvous.transport is Transport.GLOO else self._device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return PackedGroup(rendezvous, rank=0, device=device, listener=listener, check=self._check_going)

    def _init_body(self, server: Server, rendezvous: Rendezvous, first_rank: int) -> dict[str, Any]:
        info: dict[str, Any] = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": first_rank,
            "world_size": rendezvous.world_size,
            "packed": True,
            "packed_buffer_size_bytes": self._packing.buffer_bytes,
        }
        if not server.is_stock:
            info |= {"transport": rendezvous.transport.value, "timeout_s": self._timeout_s}
        return {"init_info": info}

    def _choose_transport(self) -> Transport:
        on_gpus = self._device.startswith("cuda") and all(
            server.device == "cuda" and _gpu_uuid(self._device) not in server.gpu_uuids for server in self._servers
        )
        return Transport.NCCL if on_gpus else Transport.GLOO

    async def _start(self, policy_version: int) -> None:
        """Have all servers begin the update; `NotTakenError` if one refuses."""
        for server in self._servers:
            if server.is_stock:  # its routes do not stop requests themselves
                mode = "wait" if self._in_flight is InFlight.FINISH else "keep"
                await server.client.transfer_weights(f"pause?mode={mode}", {})

        def body(server: Server) -> dict[str, Any]:
            return {} if server.is_stock else {"policy_version": policy_version}

        await self._wait_for_all(self._call_all("start_weight_update", body))

    async def _send(self, stream: WeightStream, policy_version: int) -> dict[str, float]:
        """Send the weights, and have all servers load them."""
        info: dict[str, Any] = {
            "names": [spec.name for spec in stream.specs],
            "dtype_names": [spec.dtype for spec in stream.specs],
            "shapes": [list(spec.shape) for spec in stream.specs],
        }
        began = time.perf_counter()
        calls = self._call_all(
            "update_weights", lambda server: {"update_info": info if server.is_stock else {**info, "last": True}}
        )
        try:
            sums = await self._send_in_thread(stream, lambda: _check_calls(calls.values()))
            sent = time.perf_counter()
            digest = make_digest(stream.specs, sums)
            answers = await self._wait_for_all(calls)
            if wrong := [url for url, found in answers.items() if found.get("digest", digest) != digest]:
                raise WeightsError(f"{', '.join(wrong)} received other weights than were sent: their digests differ")
            self._check_same(digest, policy_version)
        except BaseException as error:
            await self._end(calls)
            if isinstance(error, WeightsError | EngineError) and not isinstance(error, NotTakenError):
                raise await self._failure(calls, str(error)) from error
            raise
        verified = time.perf_counter()

        def body(server: Server) -> dict[str, Any]:
            named = {"weight_version": str(policy_version)}
            own = {"digest": digest, "reuse_kv": self._reuse_kv, "in_flight": self._in_flight.value}
            return named if server.is_stock else {**named, **own}

        loads = self._call_all("finish_weight_update", body, then=self._resume_stock)
        answers = await self._wait_for_all(loads)
        of_servers = [found.get("seconds", {}) for found in answers.values()]
        slowest: Mapping[str, float] = max(of_servers, key=lambda seconds: sum(seconds.values()))
        return {"send": sent - began, "verify": verified - sent, **slowest}

    async def _resume_stock(self, server: Server) -> None:
        """Let a stock server sample again, with keys and values of the new weights."""
        if server.is_stock:
            if not self._reuse_kv:
                reset = await server.client.transfer_weights("reset_prefix_cache?reset_running_requests=true", {})
                if not reset.get("success", True):
                    raise EngineError("it did not drop the keys and values of older weights")
            await server.client.transfer_weights("resume", {})

    async def _send_in_thread(self, stream: WeightStream, check: Callable[[], None]) -> list[int]:
        assert self._group is not None

        def check_all() -> None:
            self._check_going()
            check()

        work = asyncio.create_task(asyncio.to_thread(send, self._group, stream, self._packing, check=check_all))
        try:
            return await asyncio.shield(work)
        except BaseException as error:
            clear_frames(error)
            raise
        finally:
            self._gave_up.set()
            await asyncio.wait({work})
            self._gave_up.clear()

    def _check_going(self) -> None:
        if self._gave_up.is_set():
            raise WeightsError("the trainer gave up")

    def _call_all(
        self,
        step: str,
        body: Callable[[Server], Mapping[str, Any]],
        *,
        then: Callable[[Server], Awaitable[None]] | None = None,
    ) -> dict[str, asyncio.Task[dict[str, Any]]]:
        """Make a call to every server of the group; by address."""

        async def call(server: Server) -> dict[str, Any]:
            answer = await server.client.transfer_weights(step, body(server))
            if then is not None:
                await then(server)
            return answer

        return {server.url: asyncio.create_task(call(server)) for server in self._servers}

    async def _wait_for_all(self, calls: Mapping[str, asyncio.Task[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Return the answers; if a server fails or does not answer in time, the group is left."""
        _, late = await asyncio.wait(calls.values(), timeout=self._timeout_s)
        if late or any(map(_has_failed, calls.values())):
            reason = f"{len(late)} of {len(calls)} servers did not answer within {self._timeout_s:g} s" if late else ""
            await self._end(calls)
            raise await self._failure(calls, reason)
        return {url: call.result() for url, call in calls.items()}

    async def _end(self, calls: Mapping[str, asyncio.Task[dict[str, Any]]]) -> None:
        """Leave the group, and have the servers drop what came: nothing of it is loaded."""
        self.close()
        _, late = await asyncio.wait(calls.values(), timeout=min(_ABORT_S, self._timeout_s))
        for call in late:
            call.cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)

        async def leave(server: Server) -> None:
            with suppress(UnbrokenError, TimeoutError):
                async with asyncio.timeout(min(_ABORT_S, self._timeout_s)):
                    step = "resume" if server.is_stock else "shutdown_weight_transfer_engine"
                    await server.client.transfer_weights(step, {})

        await asyncio.gather(*map(leave, self._servers))

    async def _failure(self, calls: Mapping[str, asyncio.Task[dict[str, Any]]], reason: str) -> NotTakenError:
        await asyncio.gather(*(call for call in calls.values() if call.done()), return_exceptions=True)
        failed, taken = [], []
        for url, call in calls.items():
            if not call.done() or call.cancelled():
                failed.append(f"{url}: no answer")
            elif (error := call.exception()) is not None:
                failed.append(f"{url}: {error}")
            else:
                taken.append(url)
        details = f" ({'; '.join(failed)})" if failed else ""
        cause = f": {reason}" if reason else ""
        return NotTakenError(
            f"the weights were not taken by {len(failed) or len(calls)} of {len(calls)} servers{cause}{details}. "
            "Publish the version again when they can take it"
        )

    def _cast(self, stream: WeightStream) -> WeightStream:
        """Return the weights in the dtype of the wire."""
        stream = stream.cast(self._dtype or _common_dtype([*self._servers, *self._up_to_date]))
        check_stream(stream)
        stock = [server.url for server in self._servers if server.is_stock]
        if stock and is_adapter([spec.name for spec in stream.specs]):
            raise InvalidInputError(
                f"trainer.lora_updates must be merged with stock vLLM, which takes no adapter over its wire: {stock[0]}"
            )
        return stream

    def _check_same(self, digest: str, policy_version: int) -> None:
        """Raise `WeightsError` if a server has the version with other weights."""
        for server in self._up_to_date:
            if server.digest != digest:
                raise WeightsError(
                    f"{server.url} has version {policy_version} with other weights, or with weights that came from "
                    "files or in another dtype, which cannot be compared: give new weights a new version, or restart "
                    "the server"
                )

    async def _are_healthy(self) -> bool:
        return all(await asyncio.gather(*(server.client.health() for server in self._servers)))


def _common_dtype(servers: Sequence[Server]) -> str | None:
    dtypes = {server.dtype for server in servers if server.dtype is not None}
    if len(dtypes) > 1:
        raise EngineError(f"the servers must have weights of one dtype, got {sorted(dtypes)}: set dtype")
    return next(iter(dtypes), None)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _check_calls(calls: Iterable[asyncio.Task[dict[str, Any]]]) -> None:
    """Raise `WeightsError` if a server has failed while it should receive; runs in the sending thread."""
    for call in calls:
        if call.done() and not call.cancelled() and (error := call.exception()) is not None:
            raise WeightsError((str(error).splitlines() or [type(error).__name__])[0])


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


async def _ask_state(client: AsyncClient, timeout_s: float) -> Server:
    try:
        async with asyncio.timeout(timeout_s):
            state = await client.weights_state()
    except TimeoutError:
        raise ServerUnreachableError(f"{client.base_url} did not answer within {timeout_s:g} s") from None
    return Server(client=client, **state)
