"""Servers of the Model Context Protocol (MCP) as the tools of a `ToolEnv`; needs the extra `mcp`.

    environment = "unbroken.integrations.mcp:McpEnv"
    environment_arguments.server = { command = ["python", "server.py"] }   # or { url = "http://..." }

Each rollout has its own session, which for a command is its own process. An `McpSession` that several
environments get is shared: it is open while any of them is.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.errors import EnvServerError, InvalidInputError, missing_extra
from unbroken.messages import ContentPart, Message, ToolSchema
from unbroken.rollout.env import EnvStart
from unbroken.rollout.failures import format_error, unwrap_group
from unbroken.rollout.limits import is_duration
from unbroken.rollout.tool_env import RewardFunction, ToolEnv
from unbroken.rollout.tools import Tool, ToolOutcome, ToolStatus, to_content

MODES = ("auto", "legacy")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """How to reach a server: a command that speaks on its standard input and output, or a URL (streamable HTTP)."""

    command: tuple[str, ...] = ()
    """The words of the command. It gets few of this process's variables (PATH, HOME, ...), and `variables`."""
    url: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the command."""
    folder: Path | None = None
    """The folder that the command runs in."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers for the URL, such as a key."""
    tools: tuple[str, ...] = ()
    """The tools to offer, in this order; empty: all, in the server's order."""
    timeout_s: float = 30.0
    """Seconds for each call of a tool."""
    open_timeout_s: float = 30.0
    """Seconds until the server has started and named its tools."""
    mode: str = "auto"
    """auto: the newest protocol that the server speaks; legacy: the older one, in which a URL has sessions."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise InvalidInputError(
                f"server must have exactly one of command and url, got command={list(self.command)}, url={self.url!r}"
            )
        if self.mode not in MODES:
            raise InvalidInputError(f"server.mode must be one of {list(MODES)}, got {self.mode!r}")
        for name in ("timeout_s", "open_timeout_s"):
            if not is_duration(getattr(self, name)):
                raise InvalidInputError(
                    f"server.{name} must be a finite number of seconds > 0, got {getattr(self, name)!r}"
                )

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class McpSession:
    """A session with a server, for one rollout or for several at once.

    It is opened when the first `async with` block is entered, and closed, with the command's process, when the last one
    is left. If the server closes it, the next block opens it again. It belongs to one event loop at a time.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._num_users = 0
        self._turn = asyncio.Lock()
        self._connections: list[_Connection] = []

    async def __aenter__(self) -> McpSession:
        """Open the session, unless it is open; raises `EnvServerError` if that fails."""
        async with self._turn:
            if self._connections and self._connections[0].is_lost:
                with suppress(EnvServerError):  # the calls of those that used it have said so
                    await self._connections.pop().close()
            if not self._connections:
                self._connections.append(await _Connection.open(self._server))
            self._num_users += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the session, unless others use it."""
        async with self._turn:
            self._num_users -= 1
            if self._num_users == 0 and self._connections:
                await self._connections.pop().close()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The server's tools, while the session is open. The server itself checks their arguments."""
        return self._connections[0].tools


class McpEnv(ToolEnv):
    """A `ToolEnv` with the tools of a server, and with other tools if there are any.

    A tool's texts are the answer, joined by line breaks; pictures become image parts. What the server reports as an
    error is the answer with the server's text, and is counted as one.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        server: McpServer | None = None,
        session: McpSession | None = None,
        reward: RewardFunction | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        """Create an episode with its own session of `server`, or with a shared `session`.

        Without `reward` it is 0, for runs whose `[[rewards]]` are added to it.

        Raises:
            InvalidInputError: not exactly one of `server` and `session` is given.
        """
        super().__init__(messages, tools, reward or (lambda messages: 0.0))
        if (server is None) == (session is None):
            raise InvalidInputError(f"exactly one of server and session must be given, got {server} and {session}")
        self._session = McpSession(server) if server is not None else session
        self._opened = AsyncExitStack()

    async def start(self) -> EnvStart:
        """Open the session, and return the first messages and the schemas of all tools."""
        assert self._session is not None
        await self._opened.enter_async_context(self._session)
        self.add_tools(self._session.tools)
        return await super().start()

    async def close(self) -> None:
        """Close the session, and end the command's process, unless others use it."""
        await self._opened.aclose()


class _Connection:
    """A connected client. Only the task that opened it may close it, so a separate task does both."""

    def __init__(self, server: McpServer) -> None:
        self.tools: tuple[Tool, ...] = ()
        self.is_lost = False
        """Whether a call found that the server has closed it."""
        self._server = server
        self._is_over = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, server: McpServer) -> _Connection:
        connection = cls(server)
        ready = asyncio.create_task(connection._is_ready.wait())
        try:
            await asyncio.wait({ready, connection._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            connection._task.cancel()
            await asyncio.wait({connection._task})
            raise
        finally:
            ready.cancel()
        connection._check()
        return connection

    async def close(self) -> None:
        self._is_over.set()
        await asyncio.wait({self._task})  # not cancelled with the caller: it must end the server's process
        self._check()

    def _check(self) -> None:
        """Raise what ended the task."""
        error = self._task.exception() if self._task.done() and not self._task.cancelled() else None
        if error is None:
            return
        cause = unwrap_group(error)
        if isinstance(cause, InvalidInputError):
            raise cause
        text = str(cause) if isinstance(cause, EnvServerError) else format_error(cause)
        raise EnvServerError(f"the MCP server {self._server} failed: {text}") from cause

    async def _hold(self) -> None:
        clock = asyncio.timeout(self._server.open_timeout_s)
        async with AsyncExitStack() as stack:
            try:
                async with clock:
                    client = await _connect(self._server, stack)
                    call = functools.partial(self._call, client)
                    self.tools = _select(await _list_tools(client, self._server, call), self._server)
            except TimeoutError:
                if not clock.expired():
                    raise
                raise EnvServerError(f"it did not name its tools within {self._server.open_timeout_s:g} s") from None
            self._is_ready.set()
            await self._is_over.wait()

    async def _call(self, client: Any, name: str, /, **arguments: Any) -> ToolOutcome:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            return _to_outcome(await client.call_tool(name, arguments))
        except MCPError as error:
            self.is_lost = self.is_lost or error.code == CONNECTION_CLOSED
            raise


async def _connect(server: McpServer, stack: AsyncExitStack) -> Any:
    try:
        import httpx2
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise missing_extra(error, "server needs the package mcp", "mcp") from error
    if server.url:
        timeout = httpx2.Timeout(server.timeout_s, read=None)
        http_client = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout)
        transport: Any = streamable_http_client(server.url, http_client=await stack.enter_async_context(http_client))
    else:
        transport = StdioServerParameters(
            command=server.command[0], args=list(server.command[1:]), env=dict(server.variables), cwd=server.folder
        )
    return await stack.enter_async_context(Client(transport, mode=server.mode))


async def _list_tools(client: Any, server: McpServer, call: Callable[..., Any]) -> list[Tool]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [_make_tool(each, functools.partial(call, each.name), server.timeout_s) for each in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return tools


def _make_tool(described: Any, function: Callable[..., Any], timeout_s: float) -> Tool:
    schema: ToolSchema = {
        "type": "function",
        "function": {
            "name": described.name,
            "description": described.description or "",
            "parameters": {"type": "object", "properties": {}, **described.input_schema},
        },
    }
    return Tool(function=function, schema=schema, timeout_s=timeout_s, checks_arguments=False)


def _to_outcome(result: Any) -> ToolOutcome:
    parts = [_to_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        content: str | list[ContentPart] = to_content(result.structured_content)
    elif all(isinstance(part, str) for part in parts):
        content = to_content("\n".join(parts))
    else:
        content = to_content(parts)
    return ToolOutcome(status=ToolStatus.ERROR if result.is_error else ToolStatus.OK, content=content)


def _to_part(block: Any) -> Any:
    """The text of a block, or its picture as a part; what models cannot take is named."""
    if block.type == "text":
        return block.text
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}}
    if block.type == "resource" and hasattr(block.resource, "text"):
        return block.resource.text
    if block.type == "resource_link":
        return f"[resource {block.name}: {block.uri}]"
    return f"[{block.type} is not shown]"


def _select(tools: Sequence[Tool], server: McpServer) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in tools}
    if missing := [name for name in server.tools if name not in by_name]:
        raise EnvServerError(f"it has no tools {missing}, only {list(by_name)}")
    return tuple(by_name[name] for name in server.tools) if server.tools else tuple(tools)
