"""Publishes weights by broadcast, on vLLM's own wire: to servers of this package, and to stock `vllm serve`.

_meet()     the state of each server; those that lack the version meet the trainer
_send()     all agree to take these weights ── all load them as they come ── each compares the digest, and samples

A server whose update ends half-way samples nothing until it gets a whole version: here it is met and sent anew, once if
the weights can be read again, and otherwise when the caller publishes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError, UnbrokenError, WeightsError
from unbroken.types import InFlight
from unbroken.weights.adapters import is_adapter
from unbroken.weights.base import WeightUpdate
from unbroken.weights.memory import find_gpu_uuid
from unbroken.weights.sources import WeightStream, check_stream, make_digest
from unbroken.weights.wire import (
    BufferPacking,
    Check,
    PackedGroup,
    Rendezvous,
    Transport,
    clear_frames,
    listen,
    send,
    sum_stream,
)

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_LEAVE_S = 10.0
"""How long servers may take to answer once an update has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """A server, and the state of its weights."""

    client: AsyncClient
    policy_version: int
    world_size: int
    dtype: str | None
    device: str
    gpu_uuids: Sequence[str]
    digest: str | None
    """Of the weights in use; None if a whole version must come, and for stock vLLM, which has none."""
    stops_steps: bool = True
    """Whether it stops its steps for an update. Stock vLLM must be told, and told to drop older keys and values."""

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.base_url

    async def start(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an update."""
        if not self.stops_steps:
            mode = "wait" if body["in_flight"] == InFlight.FINISH else "keep"
            await self.client.transfer_weights(f"pause?mode={mode}", {})
        return await self.client.transfer_weights("start_weight_update", body)

    async def finish(self, body: Mapping[str, Any], *, reuse_kv: bool) -> dict[str, Any]:
        """Have the server sample with what came."""
        answer = await self.client.transfer_weights("finish_weight_update", body)
        if not self.stops_steps:
            if not reuse_kv:
                reset = await self.client.transfer_weights("reset_prefix_cache?reset_running_requests=true", {})
                if not reset.get("success", True):
                    raise EngineError("it did not drop the keys and values of older weights")
            await self.client.transfer_weights("resume", {})
        return answer

    async def leave(self) -> None:
        """Let the server notice at once that an update has failed."""
        with suppress(UnbrokenError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                step = "shutdown_weight_transfer_engine" if self.stops_steps else "resume"
                await self.client.transfer_weights(step, {})


class BroadcastPublisher:
    """Broadcasts each version to every worker of every server, over gloo or NCCL.

    Whatever a server refuses (names, shapes, the version) it refuses before anything is sent, and then no server loads.
    From then on each loads by itself, and compares the digest: if one is lost, those that remain get the version whole,
    and `missed_by` of the update names the lost one, which gets the next version. A server that has the version is not
    sent it again.

    Only the calls are encrypted and authenticated, not the weights: use a network between trainer and servers that only
    you can reach.

    Args:
        clients: of the servers, closed by the caller. They need the admin key if the servers have one.
        host: an address of this machine that the servers' machines reach.
        device: of the chunks. With `cuda`, NCCL carries them if trainer and workers each have a GPU that none of the
            others has; gloo otherwise.
        bucket_bytes: a chunk ends with the first weight that makes it larger. At most two chunks are held, and more
            than twice these bytes only for a weight that is larger itself.
        dtype: of floating-point weights on the wire, under torch's name; None is the servers' own. An adapter keeps its
            own.
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
        self._servers: list[_Server] = []
        """The servers of the group."""
        self._published = -1

    async def dtype(self) -> str | None:
        """Return the dtype in which floating-point weights are sent; None is each one's own."""
        if self._dtype is not None:
            return self._dtype
        return _find_dtype(self._servers or (await self._ask_servers())[0])

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
        if policy_version <= self._published:
            self.close()  # some may have it
        is_new = self._group is None
        try:
            update = await self._publish(stream, policy_version, started)
        except EngineError as error:
            # A group that was met earlier may lack a server that was started again. One that was met just now has
            # lost a server, or a server has refused, and would again.
            if is_new and not await self._has_lost_one():
                raise
            if not stream.is_whole:  # the caller must make it again
                raise ServerUnreachableError(str(error)) from error
            update = await self._publish(stream, policy_version, started)
        self._published = policy_version
        if len(self._servers) < len(self._clients):  # the next version shall reach the others too
            self.close()
        return update

    def close(self) -> None:
        """Leave the group. The next `publish` forms a new one."""
        if self._group is not None:
            self._group.close()
        self._group, self._servers = None, []

    async def _publish(self, stream: WeightStream, policy_version: int, started: float) -> WeightUpdate:
        """Try once. If it fails, the group is left."""
        missed_by: Sequence[str] = ()
        having: Sequence[_Server] = ()
        try:
            if self._group is None:
                self._servers, having, missed_by = await self._sort_servers(policy_version)
            stream = self._cast(stream, [*self._servers, *having])
            if self._servers:
                if self._group is None:
                    self._group = await self._meet()
                digest, phases = await self._send(stream, policy_version, having)
            else:
                digest, phases = make_digest(stream.specs, await asyncio.to_thread(sum_stream, stream)), {}
                _check_same(having, digest, policy_version)
        except BaseException:
            servers = self._servers
            self.close()
            await asyncio.gather(*(server.leave() for server in servers))
            raise
        seconds = time.perf_counter() - started
        return WeightUpdate(num_bytes=stream.num_bytes, seconds=seconds, missed_by=tuple(missed_by), phases_s=phases)

    async def _ask_servers(self) -> tuple[list[_Server], list[str]]:
        """Return the states of the servers that answer, and the addresses of the others."""
        states = await asyncio.gather(*(self._ask_state(client) for client in self._clients))
        missing = [client.base_url for client, state in zip(self._clients, states, strict=True) if state is None]
        return [state for state in states if state is not None], missing

    async def _ask_state(self, client: AsyncClient) -> _Server | None:
        if not await client.takes_weights():
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return _Server(client=client, **await client.weights_state())
        except (TimeoutError, ServerUnreachableError):
            return None

    async def _sort_servers(self, policy_version: int) -> tuple[list[_Server], list[_Server], list[str]]:
        """Return the servers that lack the version, those that have it, and the addresses of those that are gone."""
        servers, missing = await self._ask_servers()
        if not servers:
            raise ServerUnreachableError(f"no server is healthy: {', '.join(missing)}")
        having = [each for each in servers if each.policy_version == policy_version and each.digest is not None]
        return [each for each in servers if each not in having], having, missing

    async def _has_lost_one(self) -> bool:
        return len((await self._ask_servers())[0]) < len(self._clients)

    async def _meet(self) -> PackedGroup:
        """Form a group with the servers."""
        if stock := [server.url for server in self._servers if not server.stops_steps]:
            _log.warning(
                "%s: stock vLLM has no digest of its weights: an update that ends half-way may leave it with a mixture",
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
        own = {"transport": rendezvous.transport.value, "timeout_s": self._timeout_s}
        calls = {}
        first_rank = 1
        for server in self._servers:
            info = {
                "master_address": rendezvous.host,
                "master_port": rendezvous.port,
                "rank_offset": first_rank,
                "world_size": rendezvous.world_size,
                "packed": True,
                "packed_buffer_size_bytes": self._packing.buffer_bytes,
            }
            body = {"init_info": info, **own}
            calls[server.url] = server.client.transfer_weights("init_weight_transfer_engine", body)
            first_rank += server.world_size

        def join(check: Check) -> PackedGroup:
            device = _find_device("cpu" if rendezvous.transport is Transport.GLOO else self._device)
            return PackedGroup(rendezvous, rank=0, device=device, listener=listener, check=check)

        return await self._call_all(calls, join)

    def _choose_transport(self) -> Transport:
        if not self._device.startswith("cuda") or any(server.device != "cuda" for server in self._servers):
            return Transport.GLOO
        gpus = [find_gpu_uuid(self._device), *(uuid for server in self._servers for uuid in server.gpu_uuids)]
        # NCCL 2.29 ends a group with two members on one GPU: "Duplicate GPU detected". Two servers may share one.
        return Transport.NCCL if len(set(gpus)) == len(gpus) else Transport.GLOO

    async def _send(
        self, stream: WeightStream, policy_version: int, having: Sequence[_Server]
    ) -> tuple[str, dict[str, float]]:
        """Send the weights; returns their digest, and the time of each phase on the slowest server."""
        times = [time.perf_counter()]
        info = {
            "names": [spec.name for spec in stream.specs],
            "dtype_names": [spec.dtype for spec in stream.specs],
            "shapes": [list(spec.shape) for spec in stream.specs],
        }
        start = {
            "policy_version": policy_version,
            "update_info": info,
            "reuse_kv": self._reuse_kv,
            "in_flight": self._in_flight.value,
        }
        await self._call_all({server.url: server.start(start) for server in self._servers})
        times.append(time.perf_counter())
        group = self._group
        assert group is not None
        calls = {
            server.url: server.client.transfer_weights("update_weights", {"update_info": info})
            for server in self._servers
        }
        sums = await self._call_all(calls, lambda check: send(group, stream, self._packing, check=check))
        times.append(time.perf_counter())
        digest = make_digest(stream.specs, sums)
        _check_same(having, digest, policy_version)
        end = {"weight_version": str(policy_version), "digest": digest}
        await self._call_all({server.url: server.finish(end, reuse_kv=self._reuse_kv) for server in self._servers})
        times.append(time.perf_counter())
        phases = (after - before for before, after in pairwise(times))
        return digest, dict(zip(("start", "send", "finish"), phases, strict=True))

    async def _call_all(
        self, calls: Mapping[str, Coroutine[Any, Any, Any]], work: Callable[[Check], _T | None] = lambda check: None
    ) -> _T:
        """Make a call to each server, by address, while a thread does `work`; returns its result.

        `work` gets a function that raises once a call has failed.

        Raises:
            EngineError: a server refused, failed or did not answer in time; or `work` raised `WeightsError`.
        """
        tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
        working = asyncio.ensure_future(asyncio.to_thread(work, lambda: _check_calls(tasks.values())))
        try:
            result = await asyncio.shield(working)
            _, late = await asyncio.wait(tasks.values(), timeout=self._timeout_s)
            if late or any(map(_find_error, tasks.values())):
                raise WeightsError(
                    f"{len(late)} of {len(tasks)} servers did not answer within {self._timeout_s:g} s" if late else ""
                )
            return cast("_T", result)
        except BaseException as error:
            clear_frames(error)
            if self._group is not None:  # servers that wait for weights notice
                self._group.close()
            await asyncio.wait(tasks.values(), timeout=0 if isinstance(error, asyncio.CancelledError) else _LEAVE_S)
            for task in tasks.values():
                task.cancel()
            await asyncio.wait({working, *tasks.values()})
            if not working.cancelled():
                working.exception()
            if isinstance(error, WeightsError):
                raise _failure(tasks, str(error)) from error
            raise

    def _cast(self, stream: WeightStream, servers: Sequence[_Server]) -> WeightStream:
        """Return the weights in the dtype of the wire."""
        stream = stream.cast(self._dtype or _find_dtype(servers))
        check_stream(stream)
        stock = [server.url for server in self._servers if not server.stops_steps]
        if stock and is_adapter([spec.name for spec in stream.specs]):
            raise InvalidInputError(
                "trainer.lora_updates must be merged, and policies left out, with stock vLLM, which takes no adapter "
                f"over its wire: {stock[0]}"
            )
        return stream


def _failure(calls: Mapping[str, asyncio.Future[Any]], reason: str) -> EngineError:
    failed = []
    for url, call in calls.items():
        if call.cancelled():
            failed.append(f"{url}: no answer")
        elif (error := call.exception()) is not None:
            failed.append(f"{url}: {error}")
    details = f" ({'; '.join(failed)})" if failed else ""
    cause = f": {reason}" if reason else ""
    return EngineError(
        f"the weights were not taken by {len(failed) or len(calls)} of {len(calls)} servers{cause}{details}. "
        "Publish the version again when they can take it"
    )


def _check_same(servers: Sequence[_Server], digest: str, policy_version: int) -> None:
    """Raise `WeightsError` if a server has the version with other weights."""
    for server in servers:
        if server.digest != digest:
            raise WeightsError(
                f"{server.url} has version {policy_version} with other weights, or with weights that came from "
                "files or in another dtype, which cannot be compared: give new weights a new version, or restart "
                "the server"
            )


def _find_dtype(servers: Sequence[_Server]) -> str | None:
    dtypes = {server.dtype for server in servers if server.dtype is not None}
    if len(dtypes) > 1:
        raise EngineError(f"the servers must have weights of one dtype, got {sorted(dtypes)}: set dtype")
    return next(iter(dtypes), None)


def _find_device(device: str) -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _find_error(call: asyncio.Future[Any]) -> str | None:
    """Why a call has failed, in a line; None if it has not."""
    if not call.done():
        return None
    if call.cancelled():
        return "the trainer gave up"
    error = call.exception()
    return None if error is None else (str(error).splitlines() or [type(error).__name__])[0]


def _check_calls(calls: Iterable[asyncio.Future[Any]]) -> None:
    """Raise `WeightsError` if a call has failed or was given up; runs in the thread that sends."""
    if reason := next(filter(None, map(_find_error, calls)), None):
        raise WeightsError(reason)
