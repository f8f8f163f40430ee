"""A session with a resources server of NeMo Gym, over HTTP.

POST /seed_session   the example                            a cookie, which names the session
POST /TOOL           the arguments of a call                the answer, as it is
POST /verify         the example, with the response         {"reward": 1.0, ...}
POST /close_session  {}, for servers that hold something until then
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from unbroken.errors import EnvServerError, InvalidInputError, missing_extra
from unbroken.rollout.failures import format_error

_CLOSE_TIMEOUT_S = 5.0


class ResourcesSession:
    """One session. The server is asked one thing after the other, in the order of the calls."""

    def __init__(self, url: str, *, timeout_s: float, verify_timeout_s: float) -> None:
        """Prepare the session; `timeout_s` is for each answer but that of the verifier."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidInputError(f"url must begin with http:// or https:// and a host, got {url!r}")
        self._url = url.rstrip("/")
        self._is_local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._timeout_s = timeout_s
        self._verify_timeout_s = verify_timeout_s
        self._turn = asyncio.Lock()
        self._http: Any = None

    async def seed(self, row: Mapping[str, Any]) -> None:
        """Begin the session with an example."""
        self._http = self._connect()
        self._check(await self._post("/seed_session", row, self._timeout_s), "/seed_session")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[int, str]:
        """Call a tool; returns the status of the answer and its text."""
        response = await self._post(f"/{quote(name)}", arguments, self._timeout_s)
        return response.status_code, response.text

    async def verify(self, row: Mapping[str, Any], response: Mapping[str, Any]) -> float:
        """The reward of a response.

        Raises:
            EnvServerError: the server has none, or says that it does not count (`mask_sample`).
        """
        answer = await self._post("/verify", {**row, "response": response}, self._verify_timeout_s)
        self._check(answer, "/verify")
        try:
            result = answer.json()
            reward = float(result["reward"])
        except (ValueError, TypeError, KeyError):
            raise EnvServerError(
                f"the NeMo Gym server {self._url} must answer /verify with a reward, got {answer.text[:500]}"
            ) from None
        if result.get("mask_sample"):
            reason = result.get("failure_reason") or result.get("failure_kind") or "it does not say why"
            raise EnvServerError(f"the NeMo Gym server {self._url} could not verify the rollout: {reason}")
        return reward

    async def close(self) -> None:
        """End the session. Servers that hold nothing for one refuse that, which is no error."""
        if self._http is None:
            return
        try:
            if self._http.cookies:  # the session was begun
                response = await self._post("/close_session", {}, _CLOSE_TIMEOUT_S)
                if response.status_code >= 500:
                    self._check(response, "/close_session")
        finally:
            http, self._http = self._http, None
            await http.aclose()

    def _connect(self) -> Any:
        try:
            import httpx
        except ImportError as error:
            raise missing_extra(error, "url needs the package httpx", "nemo-gym") from error
        # Without TLS no certificates are read, which takes longer than all requests of a short rollout.
        return httpx.AsyncClient(
            timeout=None, trust_env=not self._is_local, verify=urlsplit(self._url).scheme == "https"
        )

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        import httpx

        assert self._http is not None, "the session has begun"
        try:
            async with self._turn, asyncio.timeout(timeout_s):
                return await self._http.post(f"{self._url}{path}", json=dict(body))
        except TimeoutError:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} did not answer {path} within {timeout_s:g} s"
            ) from None
        except (httpx.HTTPError, OSError) as error:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} cannot be reached for {path}: {format_error(error)}"
            ) from error

    def _check(self, response: Any, path: str) -> None:
        if response.status_code >= 400:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} answered {path} with {response.status_code}: {response.text[:500]}"
            )
