"""Fetches images behind http(s) URLs, from the hosts that the operator allows.

Fetching any URL would let clients reach services in the server's own network. So the URL's host must be allowed,
together with its port unless that is the scheme's default; redirects are checked, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx

from unbroken.errors import ImageError
from unbroken.server.http.errors import shorten

_MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFetcher:
    """Fetches the file behind a URL; call it in a thread."""

    hosts: tuple[str, ...]
    """`HOST` or `HOST:PORT`, exactly as in the URL, ignoring case."""
    max_bytes: int
    timeout_s: float = 10.0
    """For one image, redirects included."""
    transport: httpx.AsyncBaseTransport | None = None
    """Replaces real connections in tests."""

    def __call__(self, url: str) -> bytes:
        """Fetch the file. Raises `ImageError` if the host is not allowed, or sends no file within the limits."""
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self._fetch(url))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()  # `asyncio.run` would wait for the thread that looks up the host's name, past the deadline

    async def _fetch(self, url: str) -> bytes:
        # httpx's own time-out begins again with every byte of a header.
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                httpx.AsyncClient(timeout=self.timeout_s, trust_env=False, transport=self.transport) as client,
            ):
                for _ in range(_MAX_REDIRECTS + 1):
                    self._check(url)
                    async with client.stream("GET", url) as response:
                        if not response.has_redirect_location:
                            return await self._read(response, url)
                        url = urljoin(url, response.headers["location"])
        except TimeoutError:
            raise ImageError(f"the image at {shorten(url)} takes longer than {self.timeout_s} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ImageError(
                f"the image at {shorten(url)} cannot be fetched: {type(error).__name__}: {error}"
            ) from None
        raise ImageError(f"the image at {shorten(url)} takes more than {_MAX_REDIRECTS} redirects")

    def _check(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ImageError(f"image URL {shorten(url)} is not a valid URL: {error}") from None
        host = (parts.hostname or "").lower()
        name = host if port in (None, _PORTS.get(parts.scheme)) else f"{host}:{port}"
        if parts.scheme not in _PORTS or "@" in parts.netloc or name not in {one.lower() for one in self.hosts}:
            raise ImageError(
                f"image URLs must be http(s) with a host that this server allows ({', '.join(self.hosts)}), got "
                f"{shorten(url)}: send the image itself"
            )

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        if response.status_code != 200:
            raise ImageError(f"the image at {shorten(url)} cannot be fetched: HTTP {response.status_code}")
        pieces: list[bytes] = []
        size = 0
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > self.max_bytes:
                raise ImageError(f"the image at {shorten(url)} has more than {self.max_bytes} bytes")
        return b"".join(pieces)
