"""The exception for refusals inside this package: callers get its `Refusal`."""

from __future__ import annotations

from unbroken.rendering.base import Refusal, RefusalReason


class BridgeRefusedError(Exception):
    """The bridge cannot be proven.

    `because_of` are texts that change it: it may be proven for histories without them.
    """

    def __init__(self, reason: RefusalReason, detail: str, *, because_of: frozenset[str] = frozenset()) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.because_of = because_of
        self.refusal = Refusal(reason=reason, detail=detail)
