"""Updates of an engine's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class InFlight(StrEnum):
    """How running requests continue when new weights come."""

    PAUSE = "pause"
    """They wait while the weights load and continue with the new ones: their ids carry two versions or more."""
    FINISH = "finish"
    """They finish with the old weights; new requests wait for the new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's answer to an update, once it samples with the new weights."""

    policy_version: int
    digest: str | None
    """Checksum of the received weights, if the transport computes one (`Layout.digest`)."""
    seconds: Mapping[str, float]
    """Duration of each part: `receive` (and to stop the requests), `load`, `resume` (and to reset the caches)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlacement:
    """The place and dtype of an engine's weights, for a sender that wants to match them."""

    dtype: str | None
    """Of floating-point weights, under torch's name; None if any dtype is taken."""
    device: str
    """The kind of device: `cpu`, `cuda`."""
    gpu_uuids: tuple[str, ...] = ()
    """The GPUs of the workers. A sender over NCCL must use others."""
