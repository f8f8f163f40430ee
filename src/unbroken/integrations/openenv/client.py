"""One episode on a server of OpenEnv, over a WebSocket.

The protocol is that of `openenv-core` 0.2: on `/ws`, `{"type": "reset"}` and `{"type": "step"}` are answered by
`{"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}`. A connection is one episode.
The HTTP routes make a new environment for each request, and so are of no use here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unbroken.errors import EnvServerError, InvalidInputError, missing_extra
from unbroken.rollout.failures import format_error
from unbroken.untrusted import MAX_ANSWER_BYTES, read_json

_BUSY = "CAPACITY_REACHED"
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the server answers to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvClient:
    """One episode on a server."""

    def __init__(self, url: str, *, timeout_s: float, wait_s: float) -> None:
        """Prepare a connection.

        `timeout_s` is for each answer. `wait_s` is how long to wait for one of the server's sessions, of which it has
        `max_concurrent_envs`, by default one.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
            raise InvalidInputError(f"url must begin with http://, https://, ws:// or wss:// and a host, got {url!r}")
        self._url = parts._replace(
            scheme=parts.scheme.replace("http", "ws"), path=f"{parts.path.rstrip('/')}/ws"
        ).geturl()
        self._is_local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._waits = False
        self._socket: Any = None

    async def reset(self, **arguments: Any) -> StepResult:
        """Connect and begin the episode; waits while all sessions of the server are taken."""
        until = asyncio.get_running_loop().time() + self._wait_s
        while True:
            try:
                await self._connect()
                return await self._ask({"type": "reset", "data": arguments})
            except _BusyError:
                await self.close()
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take an action."""
        return await self._ask({"type": "step", "data": dict(action)})

    async def close(self) -> None:
        """End the episode."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _connect(self) -> None:
        websockets = _import_websockets()
        try:
            self._socket = await websockets.connect(
                self._url,
                open_timeout=self._timeout_s,
                max_size=MAX_ANSWER_BYTES,
                ping_interval=None,  # a server that computes in its event loop does not answer pings
                proxy=None if self._is_local else True,
            )
        except (OSError, ValueError, websockets.WebSocketException) as error:
            raise EnvServerError(f"the OpenEnv server {self._url} cannot be reached: {format_error(error)}") from error
        self._waits = False

    async def _ask(self, message: Mapping[str, Any]) -> StepResult:
        async with self._turn:
            if self._waits:  # the answers have no numbers
                raise EnvServerError(f"the OpenEnv server {self._url} still owes an answer: the episode cannot go on")
            self._waits = True
            websockets = _import_websockets()
            try:
                async with asyncio.timeout(self._timeout_s):
                    with suppress(websockets.ConnectionClosed):  # a server that closes has said why before
                        await self._socket.send(json.dumps(message))
                    answer = read_json(await self._socket.recv(), max_bytes=MAX_ANSWER_BYTES)
            except TimeoutError:
                raise EnvServerError(
                    f"the OpenEnv server {self._url} did not answer within {self._timeout_s:g} s"
                ) from None
            except (OSError, ValueError, websockets.WebSocketException) as error:
                raise EnvServerError(f"the OpenEnv server {self._url} did not answer: {format_error(error)}") from error
            self._waits = False
        return _read_answer(answer, self._url)


class _BusyError(EnvServerError):
    """All sessions of the server are taken."""


def _read_answer(answer: Any, url: str) -> StepResult:
    data = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(data, dict) and answer.get("type") == "error":
        kind = _BusyError if data.get("code") == _BUSY else EnvServerError
        details = f": {data['errors']}" if data.get("errors") else ""
        raise kind(f"the OpenEnv server {url} answered with {data.get('code')}: {data.get('message')}{details}")
    if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
        raise EnvServerError(f"the OpenEnv server {url} must answer with an observation, got {str(answer)[:500]}")
    return StepResult(
        observation=data["observation"],
        reward=_read_reward(data.get("reward"), url),
        done=_read_done(data.get("done"), url),
    )


def _read_done(done: Any, url: str) -> bool:
    if done is not None and not isinstance(done, bool):
        raise EnvServerError(f"the OpenEnv server {url} must give true or false as done, got {done!r}")
    return bool(done)


def _read_reward(reward: Any, url: str) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise EnvServerError(f"the OpenEnv server {url} must give a finite number as reward, got {reward!r}")
    return float(reward)


def _import_websockets() -> Any:
    try:
        return importlib.import_module("websockets")
    except ImportError as error:
        raise missing_extra(error, "url needs the package websockets", "openenv") from error
