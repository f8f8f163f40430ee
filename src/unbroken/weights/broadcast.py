"""The trainer's side of one broadcast; its steps are in `transfer.group`.

announce()    a request to each server, which answers when it samples with the new weights
run()         all ready? go ── send ── the sums ── all taken? go ── the answers
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unbroken.client import AsyncClient
from unbroken.errors import EngineError, WeightsError
from unbroken.transfer.announcement import Announcement, Meeting
from unbroken.transfer.group import Step, WeightGroup, clear_frames
from unbroken.transfer.layout import Layout
from unbroken.transfer.sender import send
from unbroken.types import InFlight

if TYPE_CHECKING:
    import torch

_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The state of a server's weights, from `GET /v1/weights`."""

    client: AsyncClient
    policy_version: int
    world_size: int
    dtype: str | None
    device: str
    gpu_uuids: tuple[str, ...]
    digest: str | None


class NotTakenError(EngineError):
    """A server of the group did not take an update."""

    is_fresh = False
    """Whether the group was formed for this update."""


class BroadcastUpdate:
    """One update: announcements that wait for their answers, and the sending."""

    def __init__(self, group: WeightGroup, *, update_id: str, timeout_s: float) -> None:
        self.update_id = update_id
        self.phases_s: dict[str, float] = {}
        self._group = group
        self._timeout_s = timeout_s
        self._calls: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._gave_up = threading.Event()

    def announce(
        self, servers: Sequence[Server], announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        """Announce the update to every server; `run` waits for the answers."""
        first_rank = 1
        for server in servers:
            meeting: Meeting = replace(announcement.meeting, first_rank=first_rank)
            body = replace(announcement, meeting=meeting).to_object()
            call = server.client.receive_weights({**body, "reuse_kv": reuse_kv, "in_flight": in_flight.value})
            self._calls[server.client.base_url] = asyncio.create_task(call)
            first_rank += server.world_size

    async def run(self, layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> list[dict[str, Any]]:
        """Send the weights, and return the servers' answers; `NotTakenError` if a server did not take them."""
        group, num_workers = self._group, self._group.meeting.world_size - 1
        try:
            began = time.perf_counter()
            await self._wait_for_all(Step.READY, num_workers)
            group.say_go(self.update_id, Step.READY)
            ready = time.perf_counter()
            sums = await self._send_in_thread(layout, tensors, device)
            group.say_sums(self.update_id, sums)
            sent = time.perf_counter()
            await self._wait_for_all(Step.TAKEN, num_workers)
            group.say_go(self.update_id, Step.TAKEN)
            self.phases_s = {"announce": ready - began, "send": sent - ready}
            await self._wait_for_answers()
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

    async def _wait_for_all(self, step: Step, num_workers: int) -> None:
        until = time.monotonic() + self._timeout_s
        while (number := self._group.num_arrived(self.update_id, step)) < num_workers:
            self._check()
            if time.monotonic() > until:
                raise WeightsError(
                    f"only {number} of {num_workers} workers were {step.value} within {self._timeout_s:g} s"
                )
            await asyncio.sleep(_POLL_S)

    async def _wait_for_answers(self) -> None:
        _, late = await asyncio.wait(self._calls.values(), timeout=self._timeout_s)
        if late:
            raise WeightsError(f"{len(late)} of {len(self._calls)} servers did not load within {self._timeout_s:g} s")

    def _check(self) -> None:
        """Raise `WeightsError` if the update cannot succeed any more; also runs in the sending thread."""
        if self._gave_up.is_set():
            raise WeightsError("the trainer gave up")
        for call in self._calls.values():
            if call.done() and not call.cancelled():
                error = call.exception()
                raise WeightsError(
                    "a server answered before it had all weights"
                    if error is None
                    else (str(error).splitlines() or [type(error).__name__])[0]
                )

    async def _send_in_thread(self, layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
        work = asyncio.create_task(
            asyncio.to_thread(send, self._group, layout, tensors, device=device, check=self._check)
        )
        try:
            return await asyncio.shield(work)
        except BaseException as error:
            clear_frames(error)
            raise
        finally:
            self._gave_up.set()
            await asyncio.wait({work})
            self._gave_up.clear()

    async def _end(self, reason: str) -> None:
        """End the update for all servers."""
        with suppress(WeightsError):  # without the store they notice it too
            self._group.say_no(self.update_id, reason)
        self._group.disconnect()
        _, late = await asyncio.wait(self._calls.values(), timeout=min(10.0, self._timeout_s))
        for call in late:
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def _failure(self, reason: str) -> NotTakenError:
        failed, taken = [], []
        for url, call in self._calls.items():
            error = asyncio.CancelledError("no answer") if call.cancelled() else call.exception()
            if error is None:
                taken.append(url)
            else:
                failed.append(f"{url}: {error}")
        kept = f"; taken by {', '.join(taken)}" if taken else ""
        cause = f": {reason}" if reason else ""
        return NotTakenError(
            f"the weights were not taken by {len(failed)} of {len(self._calls)} servers{cause} ({'; '.join(failed)})"
            f"{kept}. Publish the version again when they can take it"
        )
