"""New weights for the server's engine: verified, then loaded, one version at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from unbroken.engines.base import Engine, TransferEngine
from unbroken.engines.checks import require_updatable
from unbroken.errors import EngineError, UnbrokenError, WeightsError
from unbroken.server.http.errors import HttpError
from unbroken.types import InFlight, WeightReceipt
from unbroken.weights.files import FileSource
from unbroken.weights.store import StoredVersion, VersionStore

_LOOK_EVERY_S, _TRY_AGAIN_S = 1.0, 10.0

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class WeightLoader:
    """Loads versions from one folder or store, or what a trainer has broadcast. The version in use is not loaded again.

    An update that has begun is finished even if its caller leaves; the next one waits for it.
    """

    def __init__(self, engine: Engine, folder: Path | None, versions_from: str | Path | None = None) -> None:
        """`folder` has the versions that callers may name, in any folder inside, and so has `versions_from`."""
        self._engine = engine
        self._folder = None if folder is None else folder.resolve()
        self._versions = None if versions_from is None else VersionStore(versions_from)
        self._loaded: tuple[int, str] | None = None
        """Version and digest of the last update made here."""
        self.refused = ""
        """Why the newest of the versions that are followed is not in use; empty if it is."""
        self._lock = asyncio.Lock()
        self._updates: set[asyncio.Task[Any]] = set()

    async def state(self) -> dict[str, Any]:
        """Return what a trainer must know to send weights."""
        engine = require_updatable(self._engine)
        placement = await engine.weight_placement()
        return {
            "policy_version": engine.policy_version,
            "world_size": engine.world_size,
            "dtype": placement.dtype,
            "device": placement.device,
            "gpu_uuids": list(placement.gpu_uuids),
            "digest": await self._find_digest(),
        }

    async def load(self, folder: str, *, policy_version: int, reuse_kv: bool, in_flight: InFlight) -> bool:
        """Load the version in `folder`, once its files are verified; returns whether it was new.

        Raises:
            HttpError: `folder` is not in `--weights-dir` or the store, has another version, or differs from the same
                version in use.
            WeightsError: the folder holds no whole version, or a file is not what was written.
            SamplingError, EngineError: as `Engine.update_weights`.
        """
        if self._versions is not None and folder.startswith(f"{self._versions.url}/"):
            store, name = self._versions, folder.removeprefix(f"{self._versions.url}/")
        else:
            path = self.check_folder(Path(folder))
            store, name = VersionStore(path.parent), path.name
        return await self._run_to_end(self._load_named(store, name, policy_version, reuse_kv, in_flight))

    async def finish(
        self,
        engine: TransferEngine,
        *,
        policy_version: int | None,
        digest: str | None,
    ) -> WeightReceipt:
        """Sample with what a trainer has brought; raises as `WeightReceiver.finish`."""
        return await self._run_to_end(self._finish(engine, policy_version, digest))

    async def _find_digest(self) -> str | None:
        """Digest of the version in use; None if it was not brought here, or an update ended half-way since."""
        version, digest = self._loaded or (None, None)
        try:
            await self._engine.check_health()
        except EngineError:
            return None
        return digest if version == self._engine.policy_version else None

    async def _finish(self, engine: TransferEngine, policy_version: int | None, digest: str | None) -> WeightReceipt:
        receipt = await engine.transfer.finish(policy_version=policy_version, digest=digest)
        if receipt.digest is not None:
            self._loaded = receipt.policy_version, receipt.digest
        return receipt

    async def _run_to_end(self, update: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(update)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def _load_named(
        self, store: VersionStore, name: str, policy_version: int, reuse_kv: bool, in_flight: InFlight
    ) -> bool:
        try:
            version = await asyncio.to_thread(store.read, name)
            if version.policy_version != policy_version:
                raise HttpError(
                    400,
                    f"policy_version must be that of the folder, {version.policy_version}, got {policy_version}",
                    param="policy_version",
                )
            return await self._load(store, version, reuse_kv=reuse_kv, in_flight=in_flight)
        finally:
            if store is not self._versions:
                store.close()

    async def _load(
        self,
        store: VersionStore,
        version: StoredVersion,
        *,
        reuse_kv: bool = False,
        in_flight: InFlight = InFlight.PAUSE,
    ) -> bool:
        async with self._lock:
            is_in_use = version.policy_version == self._engine.policy_version
            if is_in_use and (digest := await self._find_digest()) is not None:
                _check_same(version, digest)
                return False
            files = await asyncio.to_thread(store.fetch, version)
            await asyncio.to_thread(files.check_values)
            await require_updatable(self._engine).update_weights(
                FileSource(files.folder), policy_version=version.policy_version, reuse_kv=reuse_kv, in_flight=in_flight
            )
            self._loaded = version.policy_version, version.digest
            return True

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Load the newest version of `versions_from`, and then each newer one, with no trainer that asks for it.

        A version that cannot be loaded is logged and tried again; until then the server has the one before, or the
        newest whole one.
        """
        if self._versions is None:
            yield
            return
        require_updatable(self._engine)
        self.refused = await self._follow(self._versions)

        async def look(versions: VersionStore) -> None:
            while True:
                await asyncio.sleep(_TRY_AGAIN_S if self.refused else _LOOK_EVERY_S)
                self.refused = await self._follow(versions)

        looking = asyncio.create_task(look(self._versions))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking, *self._updates})
            self._versions.close()

    async def _follow(self, versions: VersionStore) -> str:
        """Load the newest version unless it is in use; returns why it could not be, which is logged if it is new."""
        place = versions.url
        try:
            newest = await asyncio.to_thread(versions.find_newest)
            try:
                await self._load_newest(versions, newest)
            except WeightsError:
                whole = await asyncio.to_thread(versions.find_newest, is_whole=True)
                if whole is not None and whole != newest and whole.policy_version > self._engine.policy_version:
                    await self._load_newest(versions, whole)
                raise
        except (UnbrokenError, HttpError, OSError) as error:
            if str(error) != self.refused:
                _log.warning("the newest version in %s is not loaded, and is tried again: %s", place, error)
            return str(error)
        except Exception as error:
            if repr(error) != self.refused:
                _log.exception("the newest version in %s is not loaded, and is tried again", place)
            return repr(error)
        return ""

    async def _load_newest(self, versions: VersionStore, newest: StoredVersion | None) -> None:
        in_use = self._engine.policy_version, await self._find_digest()
        if newest is not None and (newest.policy_version, newest.digest) != in_use:
            await self._run_to_end(self._load(versions, newest))
            _log.info("version %d of the weights was loaded from %s", newest.policy_version, versions.url)

    def check_folder(self, folder: Path, *, param: str = "folder") -> Path:
        """The folder without links; `HttpError` naming the field `param` unless it lies in `--weights-dir`."""
        if self._folder is None:
            raise HttpError(400, "this server takes no weights from files: start it with --weights-dir", param=param)
        try:
            path = folder.resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL, or links in a circle
            path = None
        if path is None or self._folder not in path.parents:
            raise HttpError(400, f"{param} must lie in the server's --weights-dir, got {str(folder)!r}", param=param)
        return path


def _check_same(version: StoredVersion, digest: str) -> None:
    if version.digest != digest:
        raise HttpError(
            409,
            f"version {version.policy_version} is in use with other weights than those in {version.name}, or with "
            "weights that came by broadcast, which cannot be compared: give new weights a new version, or start "
            "the server again",
            param="policy_version",
            code="version_in_use",
        )
