"""Weights to servers through files on a disk that trainer and servers share."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, InvalidInputError, UnbrokenError
from unbroken.types import InFlight
from unbroken.weights.base import WeightUpdate
from unbroken.weights.files import versions_in, write_weights

if TYPE_CHECKING:
    import torch


class DiskPublisher:
    """Writes each version into `folder` and has every server load it. `serve --weights-dir` names the same folder.

    A server that has the version already answers at once, so a version that reached only some of them can be published
    again. The newest versions are kept, for a server that starts again or falls behind.
    """

    def __init__(
        self, clients: Sequence[AsyncClient], folder: Path, *, num_kept: int = 2, in_flight: InFlight = InFlight.PAUSE
    ) -> None:
        """Publish to the servers of `clients`, which stay the caller's to close.

        Raises:
            InvalidInputError: there is no client, or no version would be kept.
        """
        if not clients:
            raise InvalidInputError("clients must hold at least one client, got none")
        if num_kept < 1:
            raise InvalidInputError(f"num_kept must be at least 1, got {num_kept}")
        self._clients = list(clients)
        self._folder = folder.resolve()
        self._num_kept = num_kept
        self._in_flight = in_flight

    async def publish(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, policy_version: int
    ) -> WeightUpdate:
        """See `WeightPublisher.publish`.

        Raises:
            WeightsError: the version cannot be written; no server was told.
            EngineError: a server did not take it; the message names each, and the others have it.
        """
        started = time.perf_counter()
        files = await asyncio.to_thread(write_weights, self._folder, named_parameters, policy_version=policy_version)
        answers = await asyncio.gather(
            *(
                client.load_weights(files.folder, policy_version=policy_version, in_flight=self._in_flight)
                for client in self._clients
            ),
            return_exceptions=True,
        )
        self._check(answers, policy_version)
        await asyncio.to_thread(self._forget_old)
        return WeightUpdate(num_bytes=files.num_bytes, seconds=time.perf_counter() - started)

    def _check(self, answers: Sequence[object], policy_version: int) -> None:
        failed = {
            client.base_url: answer
            for client, answer in zip(self._clients, answers, strict=True)
            if isinstance(answer, BaseException)
        }
        for error in failed.values():
            if not isinstance(error, UnbrokenError):
                raise error
        if failed:
            told = "; ".join(f"{url}: {error}" for url, error in failed.items())
            first = next(iter(failed.values()))
            raise EngineError(
                f"version {policy_version} of the weights was not taken by {len(failed)} of {len(self._clients)} "
                f"servers ({told}). It stays in {self._folder}: publish it again once they can"
            ) from first

    def _forget_old(self) -> None:
        for path in list(versions_in(self._folder).values())[: -self._num_kept]:
            shutil.rmtree(path, ignore_errors=True)
