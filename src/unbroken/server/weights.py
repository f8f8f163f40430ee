"""New weights from files: checked, verified, then handed to the engine, one version at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from unbroken.engines.base import Engine
from unbroken.server.problems import HttpError
from unbroken.types import InFlight
from unbroken.weights.files import WeightFiles, read_manifest


class WeightLoader:
    """Loads versions out of one folder. Idempotent: the version in use is not loaded again."""

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine = engine
        self._folder = None if folder is None else folder.resolve()
        self._loaded: WeightFiles | None = None
        self._lock = asyncio.Lock()

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
        async with self._lock:
            files = await asyncio.to_thread(read_manifest, path)
            if files.policy_version != policy_version:
                raise HttpError(
                    400,
                    f"policy_version must be that of the folder, {files.policy_version}, got {policy_version}",
                    param="policy_version",
                )
            if policy_version == self._engine.policy_version and self._loaded is not None:
                self._check_same(files, self._loaded)
                return False
            await asyncio.to_thread(files.verify)
            await self._engine.load_weights(
                files.tensors(), policy_version=policy_version, reuse_kv=reuse_kv, in_flight=in_flight
            )
            self._loaded = files
            return True

    def _inside(self, folder: Path) -> Path:
        if self._folder is None:
            raise HttpError(400, "this server takes no weights: start it with --weights-dir", param="folder")
        path = folder.resolve()
        if self._folder not in path.parents:
            raise HttpError(400, f"folder must lie in the server's --weights-dir, got {str(folder)!r}", param="folder")
        return path

    def _check_same(self, files: WeightFiles, loaded: WeightFiles) -> None:
        if files.digest != loaded.digest:
            raise HttpError(
                409,
                f"version {files.policy_version} is in use with other weights than those in {files.folder}: give new "
                "weights a new version",
                param="policy_version",
                code="version_in_use",
            )
