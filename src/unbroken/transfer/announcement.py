"""What a trainer says, once, before it sends a version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.transfer.layout import Layout, TensorSpec


class Transport(StrEnum):
    """What carries the bytes."""

    GLOO = "gloo"
    """TCP, from memory to memory; everywhere."""
    NCCL = "nccl"
    """From GPU to GPU."""


class Staging(StrEnum):
    """Where a worker keeps what it receives until all of it is there and verified."""

    DEVICE = "device"
    """Beside the model: a second copy of the whole model on each worker's device, for the time of an update."""
    HOST = "host"
    """In the memory of the worker's machine, from where it loads: slower, and nothing but a bucket on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the group of the trainer (rank 0) and all workers of all servers meets."""

    host: str
    port: int
    group_id: str
    """Who is in this group already does not meet again."""
    transport: Transport
    world_size: int
    first_rank: int
    """Of this server's workers."""

    def __post_init__(self) -> None:
        if not 1 <= self.port < 2**16:
            raise InvalidInputError(f"port must lie in [1, 65536), got {self.port}")
        if not 1 <= self.first_rank < self.world_size:
            raise InvalidInputError(
                f"first_rank must lie in [1, world_size), got {self.first_rank} with world_size {self.world_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One update: who sends what to whom."""

    update_id: str
    policy_version: int
    layout: Layout
    meeting: Meeting
    staging: Staging
    timeout_s: float
    """Longest wait for the others, at each point where one waits."""

    def to_object(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "update_id": self.update_id,
            "policy_version": self.policy_version,
            "tensors": [
                {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in self.layout.specs
            ],
            "bucket_bytes": self.layout.bucket_bytes,
            "meeting": {
                "host": self.meeting.host,
                "port": self.meeting.port,
                "group_id": self.meeting.group_id,
                "transport": self.meeting.transport.value,
                "world_size": self.meeting.world_size,
                "first_rank": self.meeting.first_rank,
            },
            "staging": self.staging.value,
            "timeout_s": self.timeout_s,
        }

    @staticmethod
    def from_object(told: Mapping[str, Any]) -> Announcement:
        """What `to_object` wrote; its fields have their types.

        Raises:
            InvalidInputError: a value breaks a rule.
        """
        specs = tuple(
            TensorSpec(name=one["name"], dtype=one["dtype"], shape=tuple(one["shape"])) for one in told["tensors"]
        )
        meeting = told["meeting"]
        return Announcement(
            update_id=told["update_id"],
            policy_version=told["policy_version"],
            layout=Layout(specs=specs, bucket_bytes=told["bucket_bytes"]),
            meeting=Meeting(**{**meeting, "transport": Transport(meeting["transport"])}),
            staging=Staging(told["staging"]),
            timeout_s=told["timeout_s"],
        )
