"""A worker's side of a broadcast: everything is received and verified before anything is loaded.

A load that fails between two broadcasts would leave the other workers waiting, and the model with a mixture. So
`BroadcastReceiver` fills a row of its own, and touches nothing of the model.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from unbroken.errors import WeightsError
from unbroken.transfer.announcement import Announcement, Staging, Transport
from unbroken.transfer.group import Step, WeightGroup, clear_frames
from unbroken.transfer.sources import ReceivedWeights, Receiver, TiedNames, check_tied

if TYPE_CHECKING:
    import torch


class BroadcastReceiver(Receiver[Announcement]):
    """Receives weights for one device; stays in its group from one update to the next."""

    def __init__(self, device: torch.device | str, *, rank: int = 0) -> None:
        import torch

        super().__init__(device, rank=rank)
        self._device: torch.device = torch.device(device)
        self._group: WeightGroup | None = None

    def receive(self, source: Announcement, *, tied: TiedNames | None = None) -> ReceivedWeights:
        """Receive the announced weights; returns once the workers of all servers have theirs.

        Raises:
            WeightsError: the trainer or another worker is gone, too slow or silent, there is no room, the weights
                differ from those that were sent, or the tied ones from one another. Nothing is kept.
        """
        try:
            group = self._join(source)
            row = self._allocate_row(source)
            group.arrive(source.update_id, Step.READY)
            group.wait_for_go(source.update_id, Step.READY)
            sums = self._fill(row, group, source)
            _compare_sums(sums, group.sums(source.update_id))
            weights = dict(source.layout.split(row))
            check_tied(weights, tied)
            group.arrive(source.update_id, Step.TAKEN)
            group.wait_for_go(source.update_id, Step.TAKEN)
        except BaseException as error:
            clear_frames(error)
            if self._group is not None:
                with suppress(WeightsError):  # the trainer may be what failed
                    self._group.say_failed(source.update_id, str(error))
            self.leave()
            raise
        return ReceivedWeights(tensors=weights.items(), digest=source.layout.digest(sums))

    def leave(self) -> None:
        """Disconnect from the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self, announcement: Announcement) -> WeightGroup:
        meeting = announcement.meeting
        rank = meeting.first_rank + self._rank
        if rank >= meeting.world_size:
            raise WeightsError(
                f"this worker would be rank {rank} of {meeting.world_size}: the trainer counts other workers"
            )
        if meeting.transport is Transport.NCCL and self._device.type != "cuda":
            raise WeightsError(f"nccl needs a GPU, and this worker is on {self._device}: use gloo")
        if self._group is not None and self._group.meeting.group_id != meeting.group_id:
            self.leave()
        if self._group is None:
            self._group = WeightGroup.join(meeting, rank=rank, timeout_s=announcement.timeout_s)
            self._group.check_open()
        return self._group

    def _allocate_row(self, announcement: Announcement) -> torch.Tensor:
        import torch

        on_host = announcement.staging is Staging.HOST or announcement.meeting.transport is Transport.GLOO
        device = torch.device("cpu") if on_host else self._device
        num_bytes = announcement.layout.num_bytes
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise WeightsError(
                f"the weights need {num_bytes / 2**30:.1f} GiB more on {device}, which are not free: leave the engine "
                "less of it (vllm: --gpu-memory-utilization), or stage them on the host"
            ) from error

    def _fill(self, row: torch.Tensor, group: WeightGroup, announcement: Announcement) -> list[int]:
        """Receive the buckets into the row, and return the sum of each."""
        import torch

        wire = self._device if announcement.meeting.transport is Transport.NCCL else torch.device("cpu")
        group.connect(wire)
        layout = announcement.layout
        bucket = None
        if wire != row.device:
            bucket = torch.empty(min(layout.bucket_bytes, layout.num_bytes), dtype=torch.uint8, device=wire)
        sums = []
        work = None
        for start, stop in layout.buckets():
            target = row[start:stop] if bucket is None else bucket[: stop - start]
            work = group.broadcast(target)
            group.follow(work)
            sums.append(sum_bucket(target))
            if bucket is not None:
                row[start:stop].copy_(target)
        group.finish(work, wire)
        totals: list[int] = torch.stack(sums).tolist()
        return totals


def sum_bucket(bucket: torch.Tensor) -> torch.Tensor:
    """Return the sum of a bucket's bytes, taken as 64-bit integers, modulo 2**64."""
    import torch

    return bucket.view(torch.int64).sum()


def _compare_sums(sums: list[int], expected: list[int]) -> None:
    wrong = [number for number, (own, sent) in enumerate(zip(sums, expected, strict=True)) if own != sent]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} of {len(sums)} buckets are not what the trainer sent, the first is number {wrong[0]}"
        )
