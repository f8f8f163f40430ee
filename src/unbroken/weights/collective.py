"""Weights to servers by broadcast: one announcement to each, then packed buckets to all of their workers at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError, WeightsError
from unbroken.transfer.announcement import Announcement, Meeting, Staging, Transport
from unbroken.transfer.group import Step, WeightGroup, released
from unbroken.transfer.layout import Layout, TensorSpec, check_bucket_bytes
from unbroken.transfer.sender import send, sums_of
from unbroken.types import InFlight
from unbroken.weights.base import WeightUpdate

if TYPE_CHECKING:
    import torch

_POLL_S = 0.001
_FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """What a server says about its weights."""

    client: AsyncClient
    policy_version: int
    world_size: int
    dtype: str | None
    device: str
    gpu_uuids: tuple[str, ...]
    digest: str | None


class CollectivePublisher:
    """Broadcasts each version to every worker of every server, over gloo or NCCL.

    All workers have received and verified everything before the first of them loads: if one fails until then, all keep
    their weights, and the next `publish` meets the servers anew. A version that only some of the servers have is sent
    to the others; one that all have is not sent at all. Of several servers, one that is gone holds nobody up:
    `missed_by` of the update names it, and the next version finds it again.

    Nothing on the wire is encrypted or authenticated but the announcement: the network between trainer and servers must
    be one's own.

    Args:
        clients: of the servers, which stay the caller's to close. They need the admin key where there is one.
        host: an address of this machine that the servers' machines reach.
        device: where the buckets are: with `cuda`, and servers on other GPUs, NCCL carries them; gloo otherwise.
        bucket_bytes: of each of the two buckets, a multiple of 16.
        dtype: of floating-point weights on the wire, under torch's name; None is the servers' own.
        in_flight: what becomes of the requests that run.
        reuse_kv: keep keys and values of older weights.
        staging: where workers keep what they have received.
        timeout_s: longest wait for a server to be ready, and for each step of a transfer. With `InFlight.FINISH`
            requests must end within it.

    Raises:
        InvalidInputError: there is no client, or a number breaks its rule.
    """

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        bucket_bytes: int = 256 * 2**20,
        dtype: str | None = None,
        in_flight: InFlight = InFlight.PAUSE,
        reuse_kv: bool = False,
        staging: Staging = Staging.DEVICE,
        timeout_s: float = 120.0,
    ) -> None:
        if not clients:
            raise InvalidInputError("clients must hold at least one client, got none")
        if timeout_s <= 0:
            raise InvalidInputError(f"timeout_s must be > 0, got {timeout_s}")
        check_bucket_bytes(bucket_bytes)
        self._clients = list(clients)
        self._host = host
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._in_flight = in_flight
        self._reuse_kv = reuse_kv
        self._staging = staging
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._servers: list[_Server] = []
        """Those of the group."""
        self._published = -1
        self._missed_by: tuple[str, ...] = ()

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """See `WeightPublisher.publish`. All tensors are held at once, as they are.

        Raises:
            ServerUnreachableError: no server can be reached.
            EngineError: a server that is there did not take it; the message says which, and whether another has it.
            WeightsError: a server has other weights under this version.
        """
        started = time.perf_counter()
        weights = list(named_parameters)
        try:
            layout, phases = await self._update(weights, policy_version, anew=policy_version <= self._published)
        except _NotTakenError as error:
            if error.is_fresh and await _are_healthy(self._servers):
                raise
            # A server is gone, or was started again and is not in the group.
            layout, phases = await self._update(weights, policy_version, anew=True)
        self._published = policy_version
        missed_by = self._missed_by
        if len(self._servers) < len(self._clients):  # a group of some, for this version alone
            self.close()
        return WeightUpdate(
            num_bytes=layout.num_bytes,
            seconds=time.perf_counter() - started,
            missed_by=missed_by,
            phases_s=phases,
        )

    def close(self) -> None:
        """Leave the group. The next `publish` meets the servers anew."""
        if self._group is not None:
            self._group.close()
        self._group = None

    async def _update(
        self, weights: list[tuple[str, torch.Tensor]], policy_version: int, *, anew: bool
    ) -> tuple[Layout, dict[str, float]]:
        """One try: what was sent, and how long the phases of the slowest server took."""
        is_fresh = anew or self._group is None
        if is_fresh:
            await self._meet(policy_version, weights)
        layout = self._layout(weights, self._servers)
        if not self._servers:
            return layout, {}
        try:
            return layout, await self._send(layout, [tensor for _, tensor in weights], policy_version)
        except _NotTakenError as error:
            error.is_fresh = is_fresh
            raise

    async def _meet(self, policy_version: int, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Open a group for the servers that do not have the version."""
        self.close()
        healthy = await asyncio.gather(*(client.health() for client in self._clients))
        there = [client for client, is_healthy in zip(self._clients, healthy, strict=True) if is_healthy]
        self._missed_by = tuple(client.base_url for client in self._clients if client not in there)
        if not there:
            raise ServerUnreachableError(f"none of the servers is there and healthy: {', '.join(self._missed_by)}")
        servers = await asyncio.gather(*map(_state_of, there))
        for server in servers:
            if server.policy_version == policy_version and server.digest is not None:
                await self._check_same(server, weights, policy_version)
        self._servers = [s for s in servers if s.policy_version != policy_version or s.digest is None]
        if not self._servers:
            return
        on_gpus = self._device.startswith("cuda") and all(
            server.device == "cuda" and _uuid_of(self._device) not in server.gpu_uuids for server in self._servers
        )
        self._group = WeightGroup.host(
            self._host,
            group_id=uuid4().hex,
            transport=Transport.NCCL if on_gpus else Transport.GLOO,
            world_size=1 + sum(server.world_size for server in self._servers),
            timeout_s=self._timeout_s,
        )

    async def _check_same(self, server: _Server, weights: list[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """A server that has the version must have it from these weights."""
        layout = self._layout(weights, [server])
        tensors = [tensor for _, tensor in weights]
        sums = await asyncio.to_thread(sums_of, layout, tensors, device=self._bucket_device(None))
        if layout.digest(sums) != server.digest:
            raise WeightsError(
                f"{server.client.base_url} has version {policy_version} with other weights, or with weights that came "
                "from files, in other buckets or in another dtype, which cannot be compared: give new weights a new "
                "version, or start the server again"
            )

    def _layout(self, weights: list[tuple[str, torch.Tensor]], servers: Sequence[_Server]) -> Layout:
        dtypes = {server.dtype for server in servers if server.dtype is not None}
        if self._dtype is not None:
            dtypes = {self._dtype}
        if len(dtypes) > 1:
            raise EngineError(f"the servers must have weights of one dtype, got {sorted(dtypes)}: give dtype")
        wanted = next(iter(dtypes), None)
        specs = []
        for name, tensor in weights:
            own = str(tensor.dtype).removeprefix("torch.")
            dtype = wanted if wanted is not None and own in _FLOATING else own
            specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)))
        return Layout(specs=tuple(specs), bucket_bytes=self._bucket_bytes)

    def _bucket_device(self, transport: Transport | None) -> torch.device:
        import torch

        return torch.device("cpu" if transport is Transport.GLOO else self._device)

    async def _send(self, layout: Layout, tensors: Sequence[torch.Tensor], policy_version: int) -> dict[str, float]:
        """One update of the servers of the group; the phases of the slowest."""
        assert self._group is not None
        flight = _Flight(self._group, update_id=uuid4().hex, timeout_s=self._timeout_s)
        announcement = Announcement(
            update_id=flight.update_id, policy_version=policy_version, layout=layout, meeting=self._group.meeting,
            staging=self._staging, timeout_s=self._timeout_s,
        )  # fmt: skip
        try:
            flight.announce(self._servers, announcement, reuse_kv=self._reuse_kv, in_flight=self._in_flight)
            device = self._bucket_device(self._group.meeting.transport)
            answers = await flight.run(layout, tensors, device)
        except BaseException:
            self.close()
            raise
        slowest = max(answers, key=lambda answer: sum(answer["seconds"].values()))
        phases: dict[str, float] = slowest["seconds"]
        return {**phases, **flight.phases_s}


class _NotTakenError(EngineError):
    """Not all servers of the group took an update."""

    is_fresh = False
    """Whether the group had met for this update."""


class _Flight:
    """One update under way: the announcements that wait for their answers, and the trainer's part of the transfer."""

    def __init__(self, group: WeightGroup, *, update_id: str, timeout_s: float) -> None:
        self.update_id = update_id
        self.phases_s: dict[str, float] = {}
        self._group = group
        self._timeout_s = timeout_s
        self._calls: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._given_up = threading.Event()

    def announce(
        self, servers: Sequence[_Server], announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        """Tell every server, and let it answer when it samples with the new weights."""
        first_rank = 1
        for server in servers:
            meeting: Meeting = replace(announcement.meeting, first_rank=first_rank)
            body = replace(announcement, meeting=meeting).to_object()
            call = server.client.receive_weights({**body, "reuse_kv": reuse_kv, "in_flight": in_flight.value})
            self._calls[server.client.base_url] = asyncio.create_task(call)
            first_rank += server.world_size

    async def run(self, layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> list[dict[str, Any]]:
        """The servers' answers.

        Raises:
            EngineError: a server did not take it.
        """
        group, num_workers = self._group, self._group.meeting.world_size - 1
        try:
            began = time.perf_counter()
            await self._until_all(Step.READY, num_workers)
            group.say_go(self.update_id, Step.READY)
            ready = time.perf_counter()
            sums = await self._in_thread(layout, tensors, device)
            group.say_sums(self.update_id, sums)
            sent = time.perf_counter()
            await self._until_all(Step.TAKEN, num_workers)
            group.say_go(self.update_id, Step.TAKEN)
            self.phases_s = {"announce": ready - began, "send": sent - ready}
            answers = await asyncio.gather(*self._calls.values(), return_exceptions=True)
        except WeightsError as error:
            await self._end(str(error))
            raise self._failure(str(error)) from error
        except BaseException:
            await self._end("the trainer gave up")
            raise
        if any(isinstance(answer, BaseException) for answer in answers):
            raise self._failure("")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _until_all(self, step: Step, num_workers: int) -> None:
        until = time.monotonic() + self._timeout_s
        while (number := self._group.num_arrived(self.update_id, step)) < num_workers:
            self._check()
            if time.monotonic() > until:
                raise WeightsError(
                    f"only {number} of {num_workers} workers were {step.value} within {self._timeout_s:g} s"
                )
            await asyncio.sleep(_POLL_S)

    def _check(self) -> None:
        """Raise if it makes no sense to go on; called in other threads, too."""
        if self._given_up.is_set():
            raise WeightsError("the trainer gave up")
        for call in self._calls.values():
            if call.done() and not call.cancelled():
                error = call.exception()
                raise WeightsError(
                    "a server answered before it had all weights"
                    if error is None
                    else (str(error).splitlines() or [type(error).__name__])[0]
                )

    async def _in_thread(self, layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
        work = asyncio.create_task(
            asyncio.to_thread(send, self._group, layout, tensors, device=device, check=self._check)
        )
        try:
            return await asyncio.shield(work)
        except BaseException as error:
            released(error)
            raise
        finally:
            self._given_up.set()
            await asyncio.wait({work})
            self._given_up.clear()

    async def _end(self, reason: str) -> None:
        """Let no server wait for what will not come."""
        with suppress(WeightsError):  # without the store they learn it as well
            self._group.say_no(self.update_id, reason)
        self._group.disconnect()
        _, late = await asyncio.wait(self._calls.values(), timeout=10.0)
        for call in late:
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def _failure(self, reason: str) -> _NotTakenError:
        failed, taken = [], []
        for url, call in self._calls.items():
            error = asyncio.CancelledError("no answer") if call.cancelled() else call.exception()
            if error is None:
                taken.append(url)
            else:
                failed.append(f"{url}: {error}")
        kept = f"; {', '.join(taken)} has it" if taken else ""
        cause = f": {reason}" if reason else ""
        return _NotTakenError(
            f"the weights were not taken by {len(failed)} of {len(self._calls)} servers{cause} ({'; '.join(failed)})"
            f"{kept}. Publish the version again once they can"
        )


def _uuid_of(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


async def _are_healthy(servers: Sequence[_Server]) -> bool:
    return all(await asyncio.gather(*(server.client.health() for server in servers)))


async def _state_of(client: AsyncClient) -> _Server:
    told = await client.weights_state()
    return _Server(
        client=client,
        policy_version=told["policy_version"],
        world_size=told["world_size"],
        dtype=told["dtype"],
        device=told["device"],
        gpu_uuids=tuple(told["gpu_uuids"]),
        digest=told["digest"],
    )
