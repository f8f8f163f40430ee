"""Ways in which new weights reach vLLM's workers: the parts of an update that differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from unbroken.errors import WeightsError
from unbroken.transfer.announcement import Announcement

Rpc = Callable[..., Awaitable[list[Any]]]
"""Calls a method of `WorkerExtension` in every worker; returns what each returned."""


class NewWeights(Protocol):
    """The weights of one update."""

    async def receive(self, rpc: Rpc) -> None:
        """Bring them to the workers; the model is not touched.

        Raises:
            WeightsError: they did not come, or not as they were sent.
        """
        ...

    async def load(self, rpc: Rpc) -> None:
        """Load them into the model. Whatever it raises, the model may be a mixture then."""
        ...


class WeightsInFiles:
    """Safetensors files that the workers read; `names` are the checkpoint's for those in the files, if they differ."""

    def __init__(self, folder: Path, names: dict[str, str], tied: tuple[str, str] | None) -> None:
        self._folder = folder
        self._names = names
        self._tied = tied

    async def receive(self, rpc: Rpc) -> None:
        """See `NewWeights`: they are there."""

    async def load(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        await rpc("load_weight_files", str(self._folder), self._names, self._tied)


class WeightsSent:
    """Weights that a trainer sends to the workers; `names` are the checkpoint's, in the order of the announcement."""

    def __init__(self, announcement: Announcement, names: Sequence[str], tied: tuple[str, str] | None) -> None:
        self._announcement = announcement
        self._names = list(names)
        self._tied = tied
        self.digest = ""
        """Of what came."""

    async def receive(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        answers = await rpc("receive_weights", self._announcement.to_object(), self._names, self._tied)
        for answer in answers:
            if "error" in answer:
                raise WeightsError(answer["error"])
        self.digest = answers[0]["digest"]

    async def load(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        await rpc("load_received", self._names, self._tied)
