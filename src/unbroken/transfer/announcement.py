"""The announcement of a broadcast, which the trainer sends to each server before a version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.transfer.layout import Layout, TensorSpec
from unbroken.transfer.sources import SharedSource


class Transport(StrEnum):
    """The library that carries the bytes."""

    GLOO = "gloo"
    """TCP, from memory to memory; everywhere."""
    NCCL = "nccl"
    """From GPU to GPU."""


class Staging(StrEnum):
    """Where a worker keeps what it receives until all of it is there and verified."""

    DEVICE = "device"
    """On the worker's device: a second copy of the whole model there during an update."""
    HOST = "host"
    """In the memory of the worker's machine: slower, and only one bucket on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the trainer (rank 0) and all workers of all servers form a group."""

    host: str
    port: int
    group_id: str
    """A worker that is in this group already does not join again."""
    transport: Transport
    world_size: int
    first_rank: int
    """Rank of this server's first worker."""

    def __post_init__(self) -> None:
        if not 1 <= self.port < 2**16:
            raise InvalidInputError(f"port must lie in [1, 65536), got {self.port}")
        if not 1 <= self.first_rank < self.world_size:
            raise InvalidInputError(
                f"first_rank must lie in [1, world_size), got {self.first_rank} with world_size {self.world_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(SharedSource):
    """One broadcast, as the trainer announces it to one server."""

    update_id: str
    policy_version: int
    layout: Layout
    meeting: Meeting
    staging: Staging
    timeout_s: float
    """Longest wait for the other members, at each step."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self.layout.specs}

    def to_object(self) -> dict[str, Any]:
        """See `SharedSource`; as JSON."""
        return {
            "update_id": self.update_id,
            "policy_version": self.policy_version,
            "tensors": [spec.to_object() for spec in self.layout.specs],
            "bucket_bytes": self.layout.bucket_bytes,
            "meeting": {**asdict(self.meeting), "transport": self.meeting.transport.value},
            "staging": self.staging.value,
            "timeout_s": self.timeout_s,
        }

    @staticmethod
    def from_object(fields: Mapping[str, Any]) -> Announcement:
        """See `SharedSource`; the fields must have the right types. `InvalidInputError` if a value breaks a rule."""
        specs = tuple(map(TensorSpec.from_object, fields["tensors"]))
        meeting = fields["meeting"]
        return Announcement(
            update_id=fields["update_id"],
            policy_version=fields["policy_version"],
            layout=Layout(specs=specs, bucket_bytes=fields["bucket_bytes"]),
            meeting=Meeting(**{**meeting, "transport": Transport(meeting["transport"])}),
            staging=Staging(fields["staging"]),
            timeout_s=fields["timeout_s"],
        )
