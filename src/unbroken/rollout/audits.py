"""Shadow audits of one rollout: some of its bridges compared with a full rendering while the engine samples.

    turn 3     bridge ──► prompt ──► engine samples ................ ──► env.step ──► settle ──► turn 4: bridge, or fork
                             └──► full rendering, in a thread ───────────────────────────┘

The engine never waits for an audit; the turn after waits for it. At most one is under way in a rollout.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from types import TracebackType

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError
from unbroken.rendering.base import Renderer
from unbroken.rendering.bridge.shadow_audit import Audit, AuditOutcome, RevocableRenderer, UsedBridge, audit_bridge
from unbroken.rollout.threads import run_in_daemon_thread


def check_audit_every(audit_every: int) -> None:
    """Check what the callers of rollouts may say.

    Raises:
        InvalidInputError: it is no whole number of at least 0.
    """
    if type(audit_every) is not int or audit_every < 0:
        raise InvalidInputError(f"audit_every must be a whole number >= 0 (0: no audits), got {audit_every!r}")


class ShadowAudits:
    """Draws the turns to audit, and holds the audit under way. Leaving the context ends it.

    1 bridged turn in `every` is audited, on average. Which ones follows from the turns' names alone, so a rollout with
    the same name is audited at the same turns, and siblings are at different ones.
    """

    def __init__(self, renderer: Renderer, counters: Counters, *, every: int, patience_s: float) -> None:
        self._renderer = renderer
        self._counters = counters
        self._every = every
        self._patience_s = patience_s
        self._used: UsedBridge | None = None
        self._task: asyncio.Task[Audit] | None = None

    def wants(self, turn_name: str) -> bool:
        """Whether the bridge to this turn, if it has one, is to be audited."""
        if self._every == 0:
            return False
        digest = hashlib.blake2b(turn_name.encode(errors="backslashreplace"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self._every == 0

    def begin(self, used: UsedBridge | None) -> None:
        """Audit this bridge, if there is one, from the next time on that the caller awaits something."""
        assert self._task is None, "the audit before was not settled"
        if used is None:
            return
        self._used = used
        work = functools.partial(audit_bridge, self._renderer, used)
        self._task = asyncio.create_task(run_in_daemon_thread(work))

    async def settle(self) -> AuditOutcome | None:
        """Wait for the audit under way, count it, revoke what it refutes, return its outcome; None if there is none.

        What the renderer raises, other than its verdict on the messages, is raised.
        """
        if self._task is None or self._used is None:
            return None
        await asyncio.wait([self._task])  # a cancellation ends the waiting and not the task
        task, used = self._task, self._used
        self._task = self._used = None
        audit = task.result()
        self._counters.count(Event.SHADOW_AUDIT, audit.outcome)
        if audit.outcome is AuditOutcome.MISMATCH and isinstance(self._renderer, RevocableRenderer):
            self._renderer.revoke_bridge(
                used.new_messages, assistant=used.assistant, tools=used.tools, detail=audit.detail
            )
        return audit.outcome

    async def __aenter__(self) -> ShadowAudits:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the thread, but not for longer than `patience_s`: a template may never end."""
        if self._task is None:
            return
        task = self._task
        try:
            await asyncio.wait([task], timeout=self._patience_s)
        finally:
            if not task.done() or task.cancelled() or task.exception() is not None:
                task.cancel()
                self._task = None
                self._counters.count(Event.SHADOW_AUDIT, AuditOutcome.ABANDONED)
        await self.settle()
