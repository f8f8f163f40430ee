"""Publishes weights to servers through a store: a folder that trainer and servers share, or an object store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError, UnbrokenError, WeightsError
from unbroken.types import InFlight
from unbroken.weights.base import WeightUpdate
from unbroken.weights.sources import WeightStream
from unbroken.weights.store import StoredVersion, VersionStore

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


class DiskPublisher:
    """Writes each version into a store, which the servers see too, and has every server load it.

    The store is a folder, the servers' `--weights-dir`, or a `VersionStore`, their `--versions-from`. Where it has
    deltas, weights are written in the servers' dtype: in float32, nearly every element changes.

    A server that has the version answers at once, so a version can be published again for those that missed it. If one
    of several servers is gone, the others get the version, and `missed_by` of the update names it. Until it gets the
    next version, it samples with older weights, which `HttpEngine.require_version` refuses.

    Servers may come and go (`admit`, `dismiss`). "All" are those that are there when a version has been written: one
    that goes after that is left out, one that comes loads the newest version by itself and holds up none of the others.
    """

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        store: VersionStore | Path,
        *,
        num_kept: int = 2,
        in_flight: InFlight = InFlight.PAUSE,
        reuse_kv: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        """Publish to the servers of `clients` (one or more), which the caller closes; keep `num_kept` >= 1 versions.

        A server that has not loaded a version within `timeout_s` has failed. `reuse_kv` keeps keys and values of older
        weights.
        """
        if not clients:
            raise InvalidInputError("clients must hold at least one client, got none")
        if num_kept < 1:
            raise InvalidInputError(f"num_kept must be at least 1, got {num_kept}")
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout_s must be > 0, got {timeout_s}")
        self._clients = list(clients)
        self._store = store if isinstance(store, VersionStore) else VersionStore(store)
        self._num_kept = num_kept
        self._in_flight = in_flight
        self._reuse_kv = reuse_kv
        self._timeout_s = timeout_s
        self._dtype: str | None = None
        """Of all servers, if they have one, once it is known; for deltas."""
        self._newest: StoredVersion | None = None

    async def admit(self, client: AsyncClient) -> None:
        """Bring a server the newest version, and all that follow. It may be one of the servers already.

        Raises:
            EngineError: it did not take the version, or came with weights although none has been published.
        """
        newest = self._newest
        if newest is None and client not in self._clients and (found := await client.policy_version()) > 0:
            raise EngineError(f"it has policy version {found}, and no version has been published yet: restart it")
        if newest is not None:
            await self._load(client, newest)
        if client not in self._clients:
            self._clients.append(client)
        if self._newest is not None and self._newest is not newest:  # written while this one was loaded
            await self._load(client, self._newest)

    def dismiss(self, client: AsyncClient) -> None:
        """Send a server no more versions."""
        if client in self._clients:
            self._clients.remove(client)

    async def dtype(self) -> str | None:
        """None: weights are written in the dtype that the servers have in common at that time."""
        return None

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """See `WeightPublisher.publish`.

        Raises:
            WeightsError: the version cannot be written; no server was asked to load it.
            ServerUnreachableError: no server can be reached.
            EngineError: a running server did not take it; the message names each of them.
        """
        started = time.perf_counter()
        if self._store.has_deltas and self._dtype is None:
            self._dtype = await _find_dtype(self._clients)
        weights = WeightStream.of(named_parameters).cast(self._dtype)
        version = await asyncio.to_thread(self._store.write, weights.read_cast(), policy_version=policy_version)
        self._newest = version
        clients = tuple(self._clients)
        asked = await _find_healthy(clients)
        answers = await asyncio.gather(*(self._load(client, version) for client in asked), return_exceptions=True)
        failed = {c: answer for c, answer in zip(asked, answers, strict=True) if isinstance(answer, BaseException)}
        if failed:
            others_have_it = len(failed) < len(asked)
            await self._check_failures(failed, policy_version, len(clients), others_have_it=others_have_it)
        await asyncio.to_thread(self._remove_old)
        missed_by = [client.base_url for client in clients if client not in asked or client in failed]
        return WeightUpdate(
            num_bytes=version.num_bytes, seconds=time.perf_counter() - started, missed_by=tuple(missed_by)
        )

    async def _load(self, client: AsyncClient, version: StoredVersion) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.load_weights(
                    f"{self._store.url}/{version.name}",
                    policy_version=version.policy_version,
                    reuse_kv=self._reuse_kv,
                    in_flight=self._in_flight,
                )
        except TimeoutError:
            raise EngineError(f"it did not answer within {self._timeout_s:g} s (timeout_s)") from None

    async def _check_failures(
        self,
        failed: Mapping[AsyncClient, BaseException],
        policy_version: int,
        num_servers: int,
        *,
        others_have_it: bool,
    ) -> None:
        """Raise unless the servers that failed are gone and others have the version."""
        for error in failed.values():
            if not isinstance(error, UnbrokenError):
                raise error
        are_gone = [
            isinstance(error, ServerUnreachableError) or not await client.health() for client, error in failed.items()
        ]
        if others_have_it and all(are_gone):
            return
        reasons = "; ".join(f"{client.base_url}: {error}" for client, error in failed.items())
        kind = ServerUnreachableError if all(are_gone) else EngineError
        raise kind(
            f"version {policy_version} of the weights was not taken by {len(failed)} of {num_servers} servers "
            f"({reasons}). It stays in {self._store.url}: publish it again once they can"
        ) from next(iter(failed.values()))

    def _remove_old(self) -> None:
        try:
            self._store.remove_old(self._num_kept)
        except WeightsError as error:  # the servers have the version; whoever may not delete runs out of room
            _logger.warning("old versions stay: %s", error)


async def _find_healthy(clients: Sequence[AsyncClient]) -> Sequence[AsyncClient]:
    """Return the healthy servers, or all if there are none: calls of the others are retried for a while."""
    if not clients:
        raise ServerUnreachableError("no server is there to take the weights")
    healthy = await asyncio.gather(*(client.takes_weights() for client in clients))
    return [client for client, is_healthy in zip(clients, healthy, strict=True) if is_healthy] or clients


async def _find_dtype(clients: Sequence[AsyncClient]) -> str | None:
    """The dtype of the weights in all servers that answer; None if they have several, or one does not say."""
    states = await asyncio.gather(*(client.weights_state() for client in clients), return_exceptions=True)
    found = {state["dtype"] for state in states if isinstance(state, dict)}
    return found.pop() if len(found) == 1 else None
