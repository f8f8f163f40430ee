"""Keeps pages in a browser out of a server without a key.

A browser on this machine reaches the loopback address for every page that it shows. Two headers tell such a page apart:

    Host    the name in the URL: after DNS rebinding (evil.example now resolves to 127.0.0.1) it is evil.example
    Origin  the page that sends a POST, which it may do without asking: https://evil.example, or null

Programs send the server's own name, and no Origin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import Scope

from unbroken.server.config import is_loopback
from unbroken.server.http.errors import HttpError, shorten

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::(\d*))?", re.ASCII | re.IGNORECASE)
_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginCheck:
    """Which values of Host and Origin a server answers.

    Host: this machine (localhost, 127.0.0.1, [::1]) and the `hosts`, with any port. Origin: the same host and port as
    Host, or one of the `hosts` with any port.
    """

    hosts: tuple[str, ...] = ()
    """Names without port, as given by `--allow-host`."""

    def check(self, scope: Scope) -> None:
        """Raise `HttpError` (403) for another Host or Origin. A request without one of them passes that check."""
        own = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for host in own:
            name, _ = _split(host) or ("", "")
            if not (is_loopback(name) or self._is_allowed(name)):
                raise HttpError(
                    403,
                    f"Host must be this machine (localhost, 127.0.0.1, [::1]) or a name given by --allow-host, got "
                    f"{shorten(host)}: a server without --api-key answers no other name, because a web page could use "
                    "it",
                    code="unknown_host",
                )
        for origin in (value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"):
            if not self._is_own_origin(origin, own):
                raise HttpError(
                    403,
                    f"Origin must be this server or a name given by --allow-host, got {shorten(origin)}: a server "
                    "without --api-key answers no web page of another origin",
                    code="foreign_origin",
                )

    def _is_own_origin(self, origin: str, hosts: list[str]) -> bool:
        scheme, separator, rest = origin.partition("://")
        default = _PORTS.get(scheme.lower())
        if not separator or default is None or (parts := _split(rest)) is None:
            return False
        name, port = parts
        own = [_split(host) for host in hosts]
        return self._is_allowed(name) or (name, port or default) in [(n, p or default) for n, p in filter(None, own)]

    def _is_allowed(self, name: str) -> bool:
        return name in {_normalize(host) for host in self.hosts}


def _split(host: str) -> tuple[str, str] | None:
    """`[::1]:8000` gives ("::1", "8000"); None if it is not `HOST` or `HOST:PORT`."""
    match = _HOST.fullmatch(host)
    return None if match is None else (_normalize(match[1]), match[2] or "")


def _normalize(name: str) -> str:
    return name.strip("[]").removesuffix(".").lower()
