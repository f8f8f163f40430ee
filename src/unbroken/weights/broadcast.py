"""One update by broadcast under way, as the trainer sees it; `transfer.group` has its steps.

announce()    a request to each server, which is answered when it samples with the new weights
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
from unbroken.transfer.group import Step, WeightGroup, released
from unbroken.transfer.layout import Layout
from unbroken.transfer.sender import send
from unbroken.types import InFlight

if TYPE_CHECKING:
    import torch

_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a server says about its weights."""

    client: AsyncClient
    policy_version: int
    world_size: int
    dtype: str | None
    device: str
    gpu_uuids: tuple[str, ...]
    digest: str | None


class NotTakenError(EngineError):
    """Not all servers of the group took an update."""

    is_fresh = False
    """Whether the group had met for this update."""


class BroadcastUpdate:
    """One update under way: the announcements that wait for their answers, and the trainer's part of the transfer."""

    def __init__(self, group: WeightGroup, *, update_id: str, timeout_s: float) -> None:
        self.update_id = update_id
        self.phases_s: dict[str, float] = {}
        self._group = group
        self._timeout_s = timeout_s
        self._calls: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._given_up = threading.Event()

    def announce(
        self, servers: Sequence[Server], announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        """Tell every server, and let it answer when it samples with the new weights."""
        first_rank = 1
        for server in servers:
            meeting: Meeting = replace(announcement.meeting, first_rank=first_rank)
            body = replace(announcement, meeting=meeting).to_object()
            call = server.client.receive_weights({**body, "reuse_kv": reuse_kv, "in_flight": in_flight.value})
            self._calls[server.client.base_url] = asyncio.create_task(call)
            first_rank += server.world_size

    async def run(self, layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> list[dict[str, Any]]:
        """The servers' answers.

        Raises:
            EngineError: a server did not take it.
        """
        group, num_workers = self._group, self._group.meeting.world_size - 1
        try:
            began = time.perf_counter()
            await self._until_all(Step.READY, num_workers)
            group.say_go(self.update_id, Step.READY)
            ready = time.perf_counter()
            sums = await self._in_thread(layout, tensors, device)
            group.say_sums(self.update_id, sums)
            sent = time.perf_counter()
            await self._until_all(Step.TAKEN, num_workers)
            group.say_go(self.update_id, Step.TAKEN)
            self.phases_s = {"announce": ready - began, "send": sent - ready}
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

    async def _until_all(self, step: Step, num_workers: int) -> None:
        until = time.monotonic() + self._timeout_s
        while (number := self._group.num_arrived(self.update_id, step)) < num_workers:
            self._check()
            if time.monotonic() > until:
                raise WeightsError(
                    f"only {number} of {num_workers} workers were {step.value} within {self._timeout_s:g} s"
                )
            await asyncio.sleep(_POLL_S)

    def _check(self) -> None:
        """Raise if it makes no sense to go on; called in other threads, too."""
        if self._given_up.is_set():
            raise WeightsError("the trainer gave up")
        for call in self._calls.values():
            if call.done() and not call.cancelled():
                error = call.exception()
                raise WeightsError(
                    "a server answered before it had all weights"
                    if error is None
                    else (str(error).splitlines() or [type(error).__name__])[0]
                )

    async def _in_thread(self, layout: Layout, tensors: Sequence[torch.Tensor], device: torch.device) -> list[int]:
        work = asyncio.create_task(
            asyncio.to_thread(send, self._group, layout, tensors, device=device, check=self._check)
        )
        try:
            return await asyncio.shield(work)
        except BaseException as error:
            released(error)
            raise
        finally:
            self._given_up.set()
            await asyncio.wait({work})
            self._given_up.clear()

    async def _end(self, reason: str) -> None:
        """Let no server wait for what will not come."""
        with suppress(WeightsError):  # without the store they learn it as well
            self._group.say_no(self.update_id, reason)
        self._group.disconnect()
        _, late = await asyncio.wait(self._calls.values(), timeout=10.0)
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
        kept = f"; {', '.join(taken)} has it" if taken else ""
        cause = f": {reason}" if reason else ""
        return NotTakenError(
            f"the weights were not taken by {len(failed)} of {len(self._calls)} servers{cause} ({'; '.join(failed)})"
            f"{kept}. Publish the version again once they can"
        )
