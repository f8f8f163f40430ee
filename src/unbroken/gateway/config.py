"""The gateway's own configuration, as `unbroken gateway --help-all` shows it, which needs no extra."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from unbroken.errors import InvalidInputError

_MAX_URL = 63
"""What PostgreSQL keeps of a connection's name."""
_ADDRESS = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?/?")


class OnDisconnect(StrEnum):
    """What happens to a turn whose reader leaves before its end."""

    FINISH = "finish"
    """It is sampled to its end and recorded: the agent will ask again, and gets it then."""
    ABORT = "abort"
    """It is aborted and not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits and defaults of all sessions, and whether their control API is open."""

    ttl_s: float = 24 * 3600.0
    """Seconds that a session lives, unless it is created with its own `ttl_s`."""
    max_sessions: int = 10_000
    """Maximum number of open sessions that are at work here; beyond it the answer is 429."""
    max_in_flight: int = 64
    """Maximum number of requests of one session at a time, unless its own limit is lower."""
    on_disconnect: OnDisconnect = OnDisconnect.FINISH
    """What happens to a turn whose reader leaves before its end, unless its session says otherwise: finish it and keep
    it for the agent's retry, or abort it."""
    no_control_key: bool = False
    """Take all calls, such as listing and deleting sessions, without a key. Otherwise a random one is made and shown at
    the start if --api-key is not given."""
    advertise: str | None = None
    """URL at which the other gateways of a PostgreSQL store reach this one: they pass on what belongs to its sessions.
    Without it, they answer 503 to that while this gateway runs."""
    is_worker: bool = False
    """Whether others serve the same port: then a session belongs to the process that its first request reaches, not to
    the one that creates it, which may create those of all agents."""
    sweep_s: float = 30.0
    """Seconds between two searches for sessions whose time is over."""
    drain_s: float = 30.0
    """Seconds that turns without a reader have to finish once the server is stopped."""

    def __post_init__(self) -> None:
        for name in ("ttl_s", "max_sessions", "max_in_flight", "sweep_s"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be > 0, got {getattr(self, name)}")
        url = self.advertise
        if url is not None and not (len(url) <= _MAX_URL and _is_address(url)):
            raise InvalidInputError(
                f"advertise must be an http:// or https:// URL of at most {_MAX_URL} ASCII characters, with a host, a "
                f"port if need be, and no path, got {url!r}"
            )


def _is_address(url: str) -> bool:
    found = _ADDRESS.fullmatch(url)
    return found is not None and (found[1] is None or 0 < int(found[1]) < 2**16)
