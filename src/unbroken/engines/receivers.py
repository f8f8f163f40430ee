"""New weights for an engine whose model is in this process, from any source."""

from __future__ import annotations

import asyncio
from typing import Any

from unbroken.transfer.sources import ReceivedWeights, Receiver, WeightSource
from unbroken.transfer.transports import RECEIVERS


class LocalReceivers:
    """The receivers of one engine, made when they are first needed. The caller receives one source at a time."""

    sources = RECEIVERS.keys()

    def __init__(self) -> None:
        self._receivers: dict[type[WeightSource], Receiver[Any]] = {}

    async def receive(self, source: WeightSource, *, device: str) -> ReceivedWeights:
        """Return the source's weights; `tensors` is a list. Raises as `Receiver.receive`."""
        return await asyncio.to_thread(self._receive, source, device)

    def _receive(self, source: WeightSource, device: str) -> ReceivedWeights:
        kind = type(source)
        if kind not in self._receivers:
            self._receivers[kind] = RECEIVERS[kind](device)
        received = self._receivers[kind].receive(source)
        return ReceivedWeights(tensors=list(received.tensors), digest=received.digest)
