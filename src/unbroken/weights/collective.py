"""Publishes weights by broadcast: one announcement to each server, then packed buckets to all of their workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError, WeightsError
from unbroken.transfer.announcement import Announcement, Staging, Transport
from unbroken.transfer.group import WeightGroup
from unbroken.transfer.layout import Layout, TensorSpec, check_bucket_bytes
from unbroken.transfer.sender import compute_sums
from unbroken.types import InFlight
from unbroken.weights.base import WeightUpdate
from unbroken.weights.broadcast import BroadcastUpdate, NotTakenError, Server

if TYPE_CHECKING:
    import torch

_FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})


class CollectivePublisher:
    """Broadcasts each version to every worker of every server, over gloo or NCCL.

    All workers have received and verified everything before the first of them loads: if one fails until then, all keep
    their weights, and the next `publish` forms a new group. A version that some servers have is sent to the others
    only, if there are any. If one of several servers is gone, the others get the version; `missed_by` of the update
    names the missing one, which gets the next version.

    Only the announcement is encrypted and authenticated: use a network between trainer and servers that only you can
    reach.

    Args:
        clients: of the servers, closed by the caller. They need the admin key if the servers have one.
        host: an address of this machine that the servers' machines reach.
        device: of the buckets. With `cuda` and servers on other GPUs, NCCL carries them; gloo otherwise.
        bucket_bytes: size of each of the two buckets, a multiple of 16.
        dtype: of floating-point weights on the wire, under torch's name; None is the servers' own.
        reuse_kv: keep keys and values of older weights.
        staging: where workers keep the weights until they load.
        timeout_s: longest wait for a server to be ready, and for each step of a transfer. With `InFlight.FINISH`
            requests must end within it.

    Raises:
        InvalidInputError: there is no client, or a number is out of its range.
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
        self._servers: list[Server] = []
        """The servers of the group."""
        self._published = -1
        self._missed_by: tuple[str, ...] = ()

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """See `WeightPublisher.publish`. All tensors are held at once, as they are.

        Raises:
            ServerUnreachableError: no server can be reached.
            EngineError: a running server did not take it; the message says which, and whether another has it.
            WeightsError: a server has other weights under this version.
        """
        started = time.perf_counter()
        weights = list(named_parameters)
        try:
            layout, phases = await self._update(weights, policy_version, new_group=policy_version <= self._published)
        except NotTakenError as error:
            if error.is_fresh and await _are_healthy(self._servers):
                raise
            # A server is gone, or was restarted and is not in the group.
            layout, phases = await self._update(weights, policy_version, new_group=True)
        self._published = policy_version
        missed_by = self._missed_by
        if len(self._servers) < len(self._clients):  # the next version shall reach the missing ones too
            self.close()
        return WeightUpdate(
            num_bytes=layout.num_bytes,
            seconds=time.perf_counter() - started,
            missed_by=missed_by,
            phases_s=phases,
        )

    def close(self) -> None:
        """Leave the group. The next `publish` forms a new one."""
        if self._group is not None:
            self._group.close()
        self._group = None

    async def _update(
        self, weights: list[tuple[str, torch.Tensor]], policy_version: int, *, new_group: bool
    ) -> tuple[Layout, dict[str, float]]:
        """Try once; returns what was sent, and the phases of the slowest server."""
        is_fresh = new_group or self._group is None
        if is_fresh:
            await self._open_group(policy_version, weights)
        layout = self._layout(weights, self._servers)
        if not self._servers:
            return layout, {}
        try:
            return layout, await self._send(layout, [tensor for _, tensor in weights], policy_version)
        except NotTakenError as error:
            error.is_fresh = is_fresh
            raise

    async def _open_group(self, policy_version: int, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Open a group for the servers that do not have the version."""
        self.close()
        healthy = await asyncio.gather(*(client.health() for client in self._clients))
        found = [client for client, is_healthy in zip(self._clients, healthy, strict=True) if is_healthy]
        self._missed_by = tuple(client.base_url for client in self._clients if client not in found)
        if not found:
            raise ServerUnreachableError(f"no server is healthy: {', '.join(self._missed_by)}")
        servers = await asyncio.gather(*(_ask_state(client, self._timeout_s) for client in found))
        for server in servers:
            if server.policy_version == policy_version and server.digest is not None:
                await self._check_same(server, weights, policy_version)
        self._servers = [s for s in servers if s.policy_version != policy_version or s.digest is None]
        if not self._servers:
            return
        on_gpus = self._device.startswith("cuda") and all(
            server.device == "cuda" and _gpu_uuid(self._device) not in server.gpu_uuids for server in self._servers
        )
        self._group = WeightGroup.host(
            self._host,
            group_id=uuid4().hex,
            transport=Transport.NCCL if on_gpus else Transport.GLOO,
            world_size=1 + sum(server.world_size for server in self._servers),
            timeout_s=self._timeout_s,
        )

    async def _check_same(self, server: Server, weights: list[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Raise `WeightsError` if a server has the version with other weights."""
        layout = self._layout(weights, [server])
        tensors = [tensor for _, tensor in weights]
        sums = await asyncio.to_thread(compute_sums, layout, tensors, device=self._bucket_device(None))
        if layout.digest(sums) != server.digest:
            raise WeightsError(
                f"{server.client.base_url} has version {policy_version} with other weights, or with weights that came "
                "from files, in other buckets or in another dtype, which cannot be compared: give new weights a new "
                "version, or restart the server"
            )

    def _layout(self, weights: list[tuple[str, torch.Tensor]], servers: Sequence[Server]) -> Layout:
        dtypes = {server.dtype for server in servers if server.dtype is not None}
        if self._dtype is not None:
            dtypes = {self._dtype}
        if len(dtypes) > 1:
            raise EngineError(f"the servers must have weights of one dtype, got {sorted(dtypes)}: set dtype")
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
        """Update the servers of the group; returns the phases of the slowest."""
        assert self._group is not None
        update = BroadcastUpdate(self._group, update_id=uuid4().hex, timeout_s=self._timeout_s)
        announcement = Announcement(
            update_id=update.update_id, policy_version=policy_version, layout=layout, meeting=self._group.meeting,
            staging=self._staging, timeout_s=self._timeout_s,
        )  # fmt: skip
        try:
            update.announce(self._servers, announcement, reuse_kv=self._reuse_kv, in_flight=self._in_flight)
            device = self._bucket_device(self._group.meeting.transport)
            answers = await update.run(layout, tensors, device)
        except BaseException:
            self.close()
            raise
        slowest = max(answers, key=lambda answer: sum(answer["seconds"].values()))
        phases: dict[str, float] = slowest["seconds"]
        return {**phases, **update.phases_s}


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


async def _are_healthy(servers: Sequence[Server]) -> bool:
    return all(await asyncio.gather(*(server.client.health() for server in servers)))


async def _ask_state(client: AsyncClient, timeout_s: float) -> Server:
    try:
        async with asyncio.timeout(timeout_s):
            state = await client.weights_state()
    except TimeoutError:
        raise ServerUnreachableError(f"{client.base_url} did not answer within {timeout_s:g} s") from None
    return Server(
        client=client,
        policy_version=state["policy_version"],
        world_size=state["world_size"],
        dtype=state["dtype"],
        device=state["device"],
        gpu_uuids=tuple(state["gpu_uuids"]),
        digest=state["digest"],
    )
