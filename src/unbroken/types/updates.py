"""Updates of the weights."""

from __future__ import annotations

from enum import StrEnum


class InFlight(StrEnum):
    """What becomes of the requests that run when new weights come."""

    PAUSE = "pause"
    """They wait while the weights load and go on with the new ones: their ids carry two versions or more."""
    FINISH = "finish"
    """They are sampled to their end with the old weights, and requests that come meanwhile wait for the new ones."""
