"""The exception for refusals inside this package: callers get its `Refusal`."""

from __future__ import annotations

from unbroken.rendering.base import Refusal, RefusalReason


class BridgeRefusedError(Exception):
    """There is no bridge here."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.refusal = Refusal(reason=reason, detail=detail)
