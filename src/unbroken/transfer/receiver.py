"""A worker's side: everything is received and verified before anything is loaded.

A load that fails between two broadcasts would leave the others waiting, and the model with a mixture. So nothing of the
model is touched here: `receive` fills a row of its own, and whoever loads takes the tensors out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from unbroken.errors import WeightsError
from unbroken.transfer.announcement import Announcement, Staging, Transport
from unbroken.transfer.group import Step, WeightGroup, released

if TYPE_CHECKING:
    import torch


def _nothing(weights: Mapping[str, torch.Tensor]) -> None:
    pass


class Receiver:
    """Receives weights for one device; it stays in its group from one update to the next."""

    def __init__(self, device: torch.device | str) -> None:
        import torch

        self._device = torch.device(device)
        self._group: WeightGroup | None = None
        self._row: torch.Tensor | None = None
        self._announcement: Announcement | None = None

    def receive(
        self, announcement: Announcement, *, rank: int, verify: Callable[[Mapping[str, torch.Tensor]], None] = _nothing
    ) -> str:
        """Receive what is announced; returns the digest of it, once all workers have theirs.

        Args:
            announcement: as the trainer told it.
            rank: of this worker in the group.
            verify: called with what came; raises `WeightsError` to refuse it, for all workers.

        Raises:
            WeightsError: the trainer or another worker is gone, is too slow or sends nothing, there is no room, or what
                came is not what was sent. Nothing is kept of it.
        """
        self.drop()
        try:
            group = self._meet(announcement, rank)
            row = self._make_room(announcement)
            group.arrive(announcement.update_id, Step.READY)
            group.wait_for_word(announcement.update_id, Step.READY)
            sums = self._fill(row, group, announcement)
            _compare(sums, group.sums(announcement.update_id))
            self._row, self._announcement = row, announcement
            verify(dict(self.tensors()))
            group.arrive(announcement.update_id, Step.TAKEN)
            group.wait_for_word(announcement.update_id, Step.TAKEN)
        except BaseException as error:
            released(error)
            if self._group is not None:
                with suppress(WeightsError):  # the trainer may be what failed
                    self._group.say_failed(announcement.update_id, str(error))
            self.leave()
            raise
        return announcement.layout.digest(sums)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was received, under the names that were announced; views of one row."""
        import torch

        assert self._row is not None
        assert self._announcement is not None
        layout = self._announcement.layout
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            values = self._row[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype))
            yield spec.name, values.view(spec.shape)

    def drop(self) -> None:
        """Forget what was received."""
        self._row = self._announcement = None

    def leave(self) -> None:
        """Forget what was received, and leave the group."""
        self.drop()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _meet(self, announcement: Announcement, rank: int) -> WeightGroup:
        meeting = announcement.meeting
        if not 1 <= rank < meeting.world_size:
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

    def _make_room(self, announcement: Announcement) -> torch.Tensor:
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
        """Receive the buckets into the row; what each adds up to."""
        import torch

        wire = self._device if announcement.meeting.transport is Transport.NCCL else torch.device("cpu")
        group.connect(wire)
        layout = announcement.layout
        through = None
        if wire != row.device:
            through = torch.empty(min(layout.bucket_bytes, layout.num_bytes), dtype=torch.uint8, device=wire)
        sums = []
        work = None
        for start, stop in layout.buckets():
            target = row[start:stop] if through is None else through[: stop - start]
            work = group.broadcast(target)
            group.follow(work)
            sums.append(bucket_sum(target))
            if through is not None:
                row[start:stop].copy_(target)
        group.finish(work, wire)
        totals: list[int] = torch.stack(sums).tolist()
        return totals


def _compare(sums: list[int], expected: list[int]) -> None:
    wrong = [number for number, (own, sent) in enumerate(zip(sums, expected, strict=True)) if own != sent]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} of {len(sums)} buckets are not what the trainer sent, the first is number {wrong[0]}"
        )


def bucket_sum(bucket: torch.Tensor) -> torch.Tensor:
    """The sum of a bucket's bytes, taken as 64-bit integers, modulo 2**64."""
    import torch

    return bucket.view(torch.int64).sum()
