"""Environments behind a server of OpenEnv (docs/environments.md); needs the extra `openenv`.

environment = "unbroken.integrations.openenv:OpenEnv"
environment_arguments = { url = "http://127.0.0.1:8000", action = "message", observation = "prompt" }
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from unbroken.errors import EnvServerError, InvalidInputError, missing_extra
from unbroken.messages import Message, get_text
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply
from unbroken.rollout.failures import format_error
from unbroken.rollout.seeds import derive_problem_seed
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, ToolOutcome, ToolStatus, to_content
from unbroken.types import FinishReason
from unbroken.untrusted import MAX_ANSWER_BYTES, read_json

_STATUSES = {
    "invalid_args": ToolStatus.INVALID_ARGUMENTS,
    "tool_not_found": ToolStatus.UNKNOWN_TOOL,
    "timeout": ToolStatus.TIMEOUT,
}


class _Episode:
    """What both environments do: reset a server's episode with a seed of the problem, and describe observations."""

    def __init__(
        self, url: str, seed: int, *, reset: Mapping[str, Any] | None, timeout_s: float, wait_s: float
    ) -> None:
        self.client = _OpenEnvClient(url, timeout_s=timeout_s, wait_s=wait_s)
        self._arguments = {"seed": seed, **(reset or {})}

    async def begin(self) -> Mapping[str, Any]:
        result = await self.client.reset(**self._arguments)
        if result.done:
            raise EnvServerError("the OpenEnv server ended the episode at its reset")
        return result.observation


class OpenEnv:
    """An environment whose action is a text.

    The reward of each step is that of its turn. A reply that was cut by length ends the episode and is no action.
    Subclasses may replace `describe` and `make_action`.
    """

    def __init__(
        self,
        url: str,
        number: int = 0,
        split: str = "train",
        seed: int = 0,
        *,
        action: str,
        observation: str = "",
        first: str = "",
        prompt: str = "",
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        wait_s: float = 300.0,
    ) -> None:
        """Prepare an episode.

        `action` is the field of the server's actions that gets the reply. `observation` is the field of its
        observations that the model sees, `first` that of the first one, if it is another; without a name all fields,
        as JSON. `prompt` is shown before the first observation. `reset` are further arguments of the reset.
        """
        self._episode = _Episode(
            url, derive_problem_seed(seed, split, number), reset=reset, timeout_s=timeout_s, wait_s=wait_s
        )
        self._action = action
        self._observation = observation
        self._first = first or observation
        self._prompt = prompt

    def describe(self, observation: Mapping[str, Any], field: str) -> str:
        """The text of an observation: of a field, or of all of them."""
        return _describe(observation, field)

    def make_action(self, text: str) -> dict[str, Any]:
        """The action of a reply."""
        return {self._action: text}

    async def start(self) -> EnvStart:
        """Connect, reset, and show the first observation."""
        text = self.describe(await self._episode.begin(), self._first)
        return EnvStart(messages=[_say("\n\n".join(filter(None, [self._prompt, text])))])

    async def step(self, reply: Reply) -> Outcome:
        """Take the action of the reply."""
        if reply.finish_reason is FinishReason.LENGTH:
            return Done()
        result = await self._episode.client.step(self.make_action(get_text(reply.message["content"])))
        if result.done:
            return Done(reward=result.reward)
        text = self.describe(result.observation, self._observation)
        return Continue(messages=[_say(text)], reward=result.reward)

    async def reward(self, messages: Sequence[Message]) -> float:
        """0: the turns have the rewards."""
        return 0.0

    async def close(self) -> None:
        """End the episode on the server."""
        await self._episode.client.close()


class OpenEnvTools(ToolEnv):
    """An environment whose actions are calls of tools (OpenEnv's `list_tools` and `call_tool`).

    A turn has the sum of the rewards of its calls. The calls of a turn are made one after the other, in order.
    """

    def __init__(
        self,
        url: str,
        number: int = 0,
        split: str = "train",
        seed: int = 0,
        *,
        messages: Sequence[Message] = (),
        observation: str = "",
        prompt: str = "",
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        wait_s: float = 300.0,
    ) -> None:
        """Prepare an episode, which begins with `messages` (those of the data set) and the `prompt`.

        `observation` is the field of the first observation that follows the prompt, if one should.
        """
        super().__init__(messages, (), lambda messages: 0.0)
        self._episode = _Episode(
            url, derive_problem_seed(seed, split, number), reset=reset, timeout_s=timeout_s, wait_s=wait_s
        )
        self._observation = observation
        self._prompt = prompt
        self._timeout_s = timeout_s
        self._rewards: list[float] = []
        self._is_over = False

    async def start(self) -> EnvStart:
        """Connect, reset, and list the tools."""
        observation = await self._episode.begin()
        listed = await self._episode.client.step({"type": "list_tools"})
        self.add_tools([self._make_tool(each) for each in listed.observation.get("tools", ())])
        start = await super().start()
        text = _describe(observation, self._observation) if self._observation else ""
        first = "\n\n".join(filter(None, [self._prompt, text]))
        return replace(start, messages=[*start.messages, *([_say(first)] if first else [])])

    async def step(self, reply: Reply) -> Outcome:
        """Make the calls of the reply; `Done` without calls, and when the server says so."""
        self._rewards = []
        outcome = await super().step(reply)
        reward = sum(self._rewards) if self._rewards else None
        return Done(reward=reward) if self._is_over else replace(outcome, reward=reward)

    async def close(self) -> None:
        """End the episode on the server."""
        await self._episode.client.close()

    def _make_tool(self, described: Mapping[str, Any]) -> Tool:
        return Tool(
            function=functools.partial(self._call_tool, described["name"]),
            schema={
                "type": "function",
                "function": {
                    "name": described["name"],
                    "description": described.get("description") or "",
                    "parameters": {"type": "object", "properties": {}, **described.get("input_schema", {})},
                },
            },
            timeout_s=self._timeout_s,
            checks_arguments=False,
        )

    async def _call_tool(self, name: str, /, **arguments: Any) -> ToolOutcome:
        if self._is_over:
            return ToolOutcome(status=ToolStatus.ERROR, content="Error: the episode is over")
        result = await self._episode.client.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        self._is_over = result.done
        if result.reward is not None:
            self._rewards.append(result.reward)
        if error := result.observation.get("error"):
            described: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
            status = _STATUSES.get(described.get("error_type", ""), ToolStatus.ERROR)
            return ToolOutcome(status=status, content=f"Error: {described.get('message')}")
        value = result.observation.get("result", result.observation)
        is_error = isinstance(value, Mapping) and value.get("is_error") is True
        if isinstance(value, Mapping) and "data" in value:
            value = value["data"]
        return ToolOutcome(status=ToolStatus.ERROR if is_error else ToolStatus.OK, content=to_content(value))


def _say(text: str) -> Message:
    return {"role": "user", "content": text}


def _describe(observation: Mapping[str, Any], field: str) -> str:
    if field and field not in observation:
        raise EnvServerError(f"the observation must have the field {field!r}, it has {list(observation)}")
    value = observation[field] if field else dict(observation)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_BUSY = "CAPACITY_REACHED"
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepResult:
    """What the server answers to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class _OpenEnvClient:
    """One episode on a server, over a WebSocket.

    The protocol is that of `openenv-core` 0.2: on `/ws`, `{"type": "reset"}` and `{"type": "step"}` are answered by
    `{"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}`. A connection is one
    episode. The HTTP routes make a new environment for each request, and so are of no use here.
    """

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

    async def reset(self, **arguments: Any) -> _StepResult:
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

    async def step(self, action: Mapping[str, Any]) -> _StepResult:
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

    async def _ask(self, message: Mapping[str, Any]) -> _StepResult:
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


def _read_answer(answer: Any, url: str) -> _StepResult:
    data = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(data, dict) and answer.get("type") == "error":
        kind = _BusyError if data.get("code") == _BUSY else EnvServerError
        details = f": {data['errors']}" if data.get("errors") else ""
        raise kind(f"the OpenEnv server {url} answered with {data.get('code')}: {data.get('message')}{details}")
    if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
        raise EnvServerError(f"the OpenEnv server {url} must answer with an observation, got {str(answer)[:500]}")
    return _StepResult(
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
