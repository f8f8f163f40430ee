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

from unbroken.errors import EnvServerError, InvalidInputError, RewardError, missing_extra
from unbroken.ledger.numbers import to_finite_float32
from unbroken.rollout.failures import format_error
from unbroken.untrusted import MAX_ANSWER_BYTES, read_json

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
        self._check(*await self._post("/seed_session", row, self._timeout_s), "/seed_session")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[int, str]:
        """Call a tool; returns the status of the answer and its text."""
        return await self._post(f"/{quote(name)}", arguments, self._timeout_s)

    async def verify(self, row: Mapping[str, Any], response: Mapping[str, Any]) -> float:
        """The reward of a response.

        Raises:
            EnvServerError: the server has none, or says that it does not count (`mask_sample`).
        """
        status, text = await self._post("/verify", {**row, "response": response}, self._verify_timeout_s)
        self._check(status, text, "/verify")
        try:
            result = read_json(text, max_bytes=MAX_ANSWER_BYTES)
            reward = to_finite_float32(result["reward"], name="reward", error=RewardError)
        except (InvalidInputError, RewardError, TypeError, KeyError) as error:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} must answer /verify with a reward, got {text[:500]}: "
                f"{format_error(error)}"
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
                status, text = await self._post("/close_session", {}, _CLOSE_TIMEOUT_S)
                if status >= 500:
                    self._check(status, text, "/close_session")
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

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, str]:
        """The status of the answer and its text."""
        import httpx

        assert self._http is not None, "the session has begun"
        try:
            async with (
                self._turn,
                asyncio.timeout(timeout_s),
                self._http.stream("POST", f"{self._url}{path}", json=dict(body)) as response,
            ):
                data = bytearray()
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        raise EnvServerError(
                            f"the NeMo Gym server {self._url} must answer {path} with at most {MAX_ANSWER_BYTES} bytes"
                        )
                return response.status_code, data.decode("utf-8", "replace")
        except TimeoutError:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} did not answer {path} within {timeout_s:g} s"
            ) from None
        except (httpx.HTTPError, OSError) as error:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} cannot be reached for {path}: {format_error(error)}"
            ) from error

    def _check(self, status: int, text: str, path: str) -> None:
        if status >= 400:
            raise EnvServerError(f"the NeMo Gym server {self._url} answered {path} with {status}: {text[:500]}")
