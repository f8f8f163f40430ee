"""New weights: checked, verified, then handed to the engine, one version at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from unbroken.engines.base import Engine, ReceivedWeights, WeightFileReader, WeightHolder, WeightReceiver
from unbroken.engines.checks import check_version_rises
from unbroken.server.http.errors import HttpError
from unbroken.transfer.announcement import Announcement
from unbroken.transfer.receiver import Receiver
from unbroken.types import InFlight
from unbroken.weights.files import WeightFiles, read_manifest

_T = TypeVar("_T")


class WeightLoader:
    """Loads versions out of one folder, or from a trainer's broadcast. The version in use is not loaded again.

    An update that has begun is finished even if its caller leaves: one that comes next waits for it.
    """

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine = engine
        self._folder = None if folder is None else folder.resolve()
        self._loaded: tuple[int, str] | None = None
        """Version and digest of what was loaded here last."""
        self._receiver: Receiver | None = None
        self._lock = asyncio.Lock()
        self._updates: set[asyncio.Task[Any]] = set()

    async def state(self) -> dict[str, Any]:
        """What a trainer must know to send weights."""
        holder = self._engine if isinstance(self._engine, WeightHolder) else None
        return {
            "policy_version": self._engine.policy_version,
            "world_size": self._engine.world_size,
            "dtype": None if holder is None else holder.weight_dtype,
            "device": _device_of(self._engine),
            "gpu_uuids": [] if holder is None else list(await holder.gpu_uuids()),
            "digest": self._digest_in_use,
        }

    async def load(self, folder: Path, *, policy_version: int, reuse_kv: bool, in_flight: InFlight) -> bool:
        """Have the engine sample with the version in `folder`; whether it was new.

        The files are verified first, so a refusal leaves the weights as they are.

        Raises:
            HttpError: the server takes no weights, the folder is elsewhere, or it holds another version than it is
                said to, or other weights for the version in use.
            WeightsError: the folder holds no whole version, or a file is not what was written.
            SamplingError: the version does not rise, or a name or shape is not the model's.
            EngineError: the engine failed while it loaded them; it is no longer healthy.
        """
        path = self._inside(folder)
        return await self._finished(self._load(path, policy_version, reuse_kv=reuse_kv, in_flight=in_flight))

    async def receive(self, announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight) -> ReceivedWeights:
        """Have the engine sample with what a trainer sends.

        Raises:
            SamplingError: the version does not rise, a name or shape is not the model's, or the trainer counts other
                workers.
            WeightsError: the transfer failed; the old weights are in use.
            EngineError: the engine failed while it loaded them; it is no longer healthy.
        """
        return await self._finished(self._receive(announcement, reuse_kv=reuse_kv, in_flight=in_flight))

    @property
    def _digest_in_use(self) -> str | None:
        """Of the version in use, unless it came another way, such as parameter by parameter."""
        version, digest = self._loaded or (None, None)
        return digest if version == self._engine.policy_version else None

    async def _finished(self, update: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(update)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def _load(self, path: Path, policy_version: int, *, reuse_kv: bool, in_flight: InFlight) -> bool:
        async with self._lock:
            files = await asyncio.to_thread(read_manifest, path)
            if files.policy_version != policy_version:
                raise HttpError(
                    400,
                    f"policy_version must be that of the folder, {files.policy_version}, got {policy_version}",
                    param="policy_version",
                )
            if policy_version == self._engine.policy_version and (digest := self._digest_in_use) is not None:
                self._check_same(files, digest)
                return False
            await asyncio.to_thread(files.verify)
            if isinstance(self._engine, WeightFileReader):
                await self._engine.load_weight_files(
                    files.folder, policy_version=policy_version, reuse_kv=reuse_kv, in_flight=in_flight
                )
            else:
                await self._engine.load_weights(
                    files.tensors(), policy_version=policy_version, reuse_kv=reuse_kv, in_flight=in_flight
                )
            self._loaded = policy_version, files.digest
            return True

    async def _receive(self, announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight) -> ReceivedWeights:
        async with self._lock:
            check_version_rises(announcement.policy_version, current=self._engine.policy_version)
            meeting = announcement.meeting
            if meeting.first_rank + self._engine.world_size > meeting.world_size:
                raise HttpError(
                    400,
                    f"meeting.world_size must count the trainer and all workers, got {meeting.world_size} with "
                    f"first_rank {meeting.first_rank} for a server of {self._engine.world_size}",
                    param="meeting.world_size",
                )
            if isinstance(self._engine, WeightReceiver):
                received = await self._engine.receive_weights(announcement, reuse_kv=reuse_kv, in_flight=in_flight)
            else:
                received = await self._receive_here(announcement, reuse_kv=reuse_kv, in_flight=in_flight)
            self._loaded = announcement.policy_version, received.digest
            return received

    async def _receive_here(
        self, announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight
    ) -> ReceivedWeights:
        """For an engine in this process."""
        if self._receiver is None:
            self._receiver = Receiver(_device_of(self._engine))
        receiver = self._receiver
        began = time.perf_counter()
        digest = await asyncio.to_thread(receiver.receive, announcement, rank=announcement.meeting.first_rank)
        received = time.perf_counter()
        try:
            await self._engine.load_weights(
                receiver.tensors(), policy_version=announcement.policy_version, reuse_kv=reuse_kv, in_flight=in_flight
            )
        finally:
            receiver.drop()
        seconds = {"receive": received - began, "load": time.perf_counter() - received}
        return ReceivedWeights(digest=digest, seconds=seconds)

    def _inside(self, folder: Path) -> Path:
        if self._folder is None:
            raise HttpError(400, "this server takes no weights from files: start it with --weights-dir", param="folder")
        path = folder.resolve()
        if self._folder not in path.parents:
            raise HttpError(400, f"folder must lie in the server's --weights-dir, got {str(folder)!r}", param="folder")
        return path

    def _check_same(self, files: WeightFiles, digest: str) -> None:
        if files.digest != digest:
            raise HttpError(
                409,
                f"version {files.policy_version} is in use with other weights than those in {files.folder}, or with "
                "weights that came by broadcast, which cannot be compared: give new weights a new version, or start "
                "the server again",
                param="policy_version",
                code="version_in_use",
            )


def _device_of(engine: Engine) -> str:
    return engine.weight_device if isinstance(engine, WeightHolder) else "cpu"
