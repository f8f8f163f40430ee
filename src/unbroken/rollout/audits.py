"""Shadow audits of a rollout: compare some of its bridges with a full rendering while the engine samples.

    turn 3     bridge ──► prompt ──► engine samples ................ ──► env.step ──► finish ──► turn 4: bridge, or fork
                             └──► full rendering, in a thread ───────────────────────────┘

The engine never waits for an audit; the next turn does. A rollout has at most one running audit.
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
    """Raise `InvalidInputError` unless `audit_every` is a whole number >= 0."""
    if type(audit_every) is not int or audit_every < 0:
        raise InvalidInputError(f"audit_every must be a whole number >= 0 (0: no audits), got {audit_every!r}")


class ShadowAudits:
    """Selects the turns to audit, 1 bridged turn in `every` on average. Leaving the context ends the running audit.

    The selection depends only on the turns' names: equal for a rollout of the same name, different for its siblings.
    """

    def __init__(self, renderer: Renderer, counters: Counters, *, every: int, timeout_s: float) -> None:
        self._renderer = renderer
        self._counters = counters
        self._every = every
        self._timeout_s = timeout_s
        self._used: UsedBridge | None = None
        self._task: asyncio.Task[Audit] | None = None

    def is_due(self, turn_name: str) -> bool:
        """Whether to audit the bridge to this turn."""
        if self._every == 0:
            return False
        digest = hashlib.blake2b(turn_name.encode(errors="backslashreplace"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self._every == 0

    def start(self, used: UsedBridge | None) -> None:
        """Start the audit of a bridge, if there is one; it runs as soon as the caller awaits something."""
        assert self._task is None, "the previous audit was not finished"
        if used is None:
            return
        self._used = used
        work = functools.partial(audit_bridge, self._renderer, used)
        self._task = asyncio.create_task(run_in_daemon_thread(work))

    async def finish(self) -> AuditOutcome | None:
        """Wait for the running audit, count it, and return its outcome; None if no audit runs.

        A wrong bridge is revoked. An exception of the renderer, other than a refusal of the messages, is raised.
        """
        if self._task is None or self._used is None:
            return None
        await asyncio.wait([self._task])  # unlike `await task`: a cancellation must not cancel the task
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
        """Wait for the thread, but at most `timeout_s`: rendering a template may never end."""
        if self._task is None:
            return
        task = self._task
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            if not task.done() or task.cancelled() or task.exception() is not None:
                task.cancel()
                self._task = None
                self._counters.count(Event.SHADOW_AUDIT, AuditOutcome.ABANDONED)
        await self.finish()
