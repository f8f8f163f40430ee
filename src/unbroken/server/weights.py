"""New weights for the server's engine: verified, then loaded, one version at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from unbroken.engines.base import Engine, TransferEngine
from unbroken.engines.checks import require_updatable
from unbroken.errors import UnbrokenError
from unbroken.server.http.errors import HttpError
from unbroken.transfer.files import FileSource
from unbroken.types import InFlight, WeightReceipt
from unbroken.weights.files import WeightFiles, list_newest_first, read_manifest

_LOOK_EVERY_S, _TRY_AGAIN_S = 1.0, 10.0

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class WeightLoader:
    """Loads versions from one folder, or what a trainer has broadcast. The version in use is not loaded again.

    An update that has begun is finished even if its caller leaves; the next one waits for it.
    """

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine = engine
        self._folder = None if folder is None else folder.resolve()
        self._loaded: tuple[int, str] | None = None
        """Version and digest of the last update made here."""
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
            "digest": self._digest_in_use,
        }

    async def load(self, folder: Path, *, policy_version: int, reuse_kv: bool, in_flight: InFlight) -> bool:
        """Load the version in `folder`, once its files are verified; returns whether it was new.

        Raises:
            HttpError: `folder` is not in `--weights-dir`, has another version, or differs from the same version in use.
            WeightsError: the folder holds no whole version, or a file is not what was written.
            SamplingError, EngineError: as `Engine.update_weights`.
        """
        path = self.check_folder(folder)
        return await self._run_to_end(self._load(path, policy_version, reuse_kv=reuse_kv, in_flight=in_flight))

    async def finish(
        self,
        engine: TransferEngine,
        *,
        policy_version: int | None,
        digest: str | None,
        reuse_kv: bool,
        in_flight: InFlight,
    ) -> WeightReceipt:
        """Load what a trainer has broadcast; without a `policy_version` as the next one.

        Raises:
            WeightsError: it is not what the trainer sent, by its `digest`.
            SamplingError, EngineError: as `Engine.update_weights`.
        """
        return await self._run_to_end(self._finish(engine, policy_version, digest, reuse_kv, in_flight))

    @property
    def _digest_in_use(self) -> str | None:
        """Digest of the version in use; None if it came another way, such as parameter by parameter."""
        version, digest = self._loaded or (None, None)
        return digest if version == self._engine.policy_version else None

    async def _run_to_end(self, update: Coroutine[Any, Any, _T]) -> _T:
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
                _check_same(files, digest)
                return False
            await asyncio.to_thread(files.verify)
            await require_updatable(self._engine).update_weights(
                FileSource(files.folder), policy_version=policy_version, reuse_kv=reuse_kv, in_flight=in_flight
            )
            self._loaded = policy_version, files.digest
            return True

    async def _finish(
        self,
        engine: TransferEngine,
        policy_version: int | None,
        digest: str | None,
        reuse_kv: bool,
        in_flight: InFlight,
    ) -> WeightReceipt:
        async with self._lock:
            try:
                source = await engine.transfer.collect(digest)
                version = engine.policy_version + 1 if policy_version is None else policy_version
                receipt = await engine.update_weights(
                    source, policy_version=version, reuse_kv=reuse_kv, in_flight=in_flight
                )
            except Exception as error:
                await engine.transfer.cancel(str(error))
                raise
            assert receipt.digest is not None
            self._loaded = receipt.policy_version, receipt.digest
            return receipt

    @asynccontextmanager
    async def following(self, folder: Path | None) -> AsyncIterator[None]:
        """Load the newest version in `folder`, and then each newer one, with no trainer that asks for it.

        A version that cannot be loaded is logged and tried again; until then the server has the one before. None:
        nothing is loaded.
        """
        if folder is None:
            yield
            return
        require_updatable(self._engine)
        refused = await self._follow(folder, refused="")

        async def look() -> None:
            nonlocal refused
            while True:
                await asyncio.sleep(_TRY_AGAIN_S if refused else _LOOK_EVERY_S)
                refused = await self._follow(folder, refused=refused)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    async def _follow(self, folder: Path, *, refused: str) -> str:
        """Load the newest version unless it is in use; returns why it could not be, which is logged if it is new."""
        try:
            newest = await asyncio.to_thread(_read_newest, folder)
            in_use = self._engine.policy_version, self._digest_in_use
            if newest is not None and (newest.policy_version, newest.digest) != in_use:
                update = self._load(newest.folder, newest.policy_version, reuse_kv=False, in_flight=InFlight.PAUSE)
                await self._run_to_end(update)
                _log.info("version %d of the weights was loaded from %s", newest.policy_version, newest.folder)
        except (UnbrokenError, HttpError, OSError) as error:
            if str(error) != refused:
                _log.warning("the newest version in %s is not loaded, and is tried again: %s", folder, error)
            return str(error)
        except Exception as error:
            if repr(error) != refused:
                _log.exception("the newest version in %s is not loaded, and is tried again", folder)
            return repr(error)
        return ""

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


def _read_newest(folder: Path) -> WeightFiles | None:
    for _ in range(2):  # old versions are removed meanwhile
        with suppress(FileNotFoundError):
            paths = list_newest_first(folder)
            return read_manifest(paths[0]) if paths else None
    return None


def _check_same(files: WeightFiles, digest: str) -> None:
    if files.digest != digest:
        raise HttpError(
            409,
            f"version {files.policy_version} is in use with other weights than those in {files.folder}, or with "
            "weights that came by broadcast, which cannot be compared: give new weights a new version, or start "
            "the server again",
            param="policy_version",
            code="version_in_use",
        )
