"""A server made with the package mcp: `python mcp_server.py`, or with a port for streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
"""A PNG of one red pixel."""

server = MCPServer("tests")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note; returns all notes of this server."""
    notes.append(text)
    return ", ".join(notes)


@server.tool()
def fail(name: str) -> str:
    """Fail; `name` is also the name of an argument of ours."""
    raise ToolError(f"no {name} here")


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def end() -> None:
    """End the server's process in the middle of the call."""
    os._exit(1)


@server.tool()
def draw() -> list[str | Image]:
    """Draw a pixel."""
    return ["A pixel:", Image(data=PIXEL, format="png")]


@server.tool()
def process() -> str:
    """The id of the server's process, and one of its variables."""
    return f"{os.getpid()} {os.environ.get('COLOR')}"


@server.tool()
def key(context: Context) -> str:
    """The key that the request came with."""
    return str(dict(context.request_context.request.headers).get("authorization"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
