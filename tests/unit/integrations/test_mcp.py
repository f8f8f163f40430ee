"""Tools of MCP servers, which are made with the package mcp and run in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.env_rollouts import call, play_env, texts
from support.forks import python_as_fork
from support.processes import free_port
from support.waits import wait_until
from unbroken.errors import EnvServerError, InvalidInputError, ToolDefinitionError
from unbroken.integrations.mcp import McpEnv, McpServer, McpSession
from unbroken.rollout.env import Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.tools import Tool, ToolStatus, tool

pytest.importorskip("mcp_types", reason="needs mcp 2", exc_type=ModuleNotFoundError)

FILE = str(Path(__file__).parents[2] / "support" / "mcp_server.py")
QUESTION = [{"role": "user", "content": "What is 17 + 6?"}]


def stdio(**settings) -> McpServer:
    """A server as a fork: importing the package takes a second."""
    line = f"import runpy, sys; sys.argv = [{FILE!r}]; runpy.run_path({FILE!r}, run_name='__main__')"
    return McpServer(command=(*python_as_fork(), "-c", line), **settings)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, FILE, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


async def open_when_up(server: McpServer) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            async with McpSession(server):
                return
        except EnvServerError:
            assert time.monotonic() < until
            await asyncio.sleep(0.2)


def by_name(session: McpSession) -> dict[str, Tool]:
    return {each.name: each for each in session.tools}


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_an_env():
    assert isinstance(McpEnv(QUESTION, server=stdio()), Env)


async def test_a_rollout_calls_the_tools_and_its_process_ends_with_it():
    server = McpServer(command=(sys.executable, FILE), variables={"COLOR": "red"})
    env = McpEnv(QUESTION, server=server, reward=lambda messages: 0.5)
    trajectory = await play_env(env, call("add", a=17, b=6), call("process"), "It is 23.")
    total, process = texts(trajectory, "tool")
    assert total == "23"
    assert process.endswith(" red")
    assert not is_running(int(process.split()[0]))
    assert trajectory.reward == 0.5
    assert trajectory.tools[0]["function"]["name"] == "add"
    assert trajectory.tools[0]["function"]["description"] == "Add two numbers."
    assert trajectory.tools[0]["function"]["parameters"]["required"] == ["a", "b"]


async def test_errors_of_the_server_are_answers_with_its_text_and_are_counted():
    replies = [call("fail", name="book"), call("add", a="x", b=1), call("nothing"), "So be it."]
    trajectory = await play_env(McpEnv(QUESTION, server=stdio()), *replies)
    failed, invalid, unknown = texts(trajectory, "tool")
    assert "no book here" in failed
    assert "valid integer" in invalid
    assert "there is no tool 'nothing'" in unknown
    assert trajectory.counters["tool_errors/error"] == 2
    assert trajectory.counters["tool_errors/unknown_tool"] == 1
    assert trajectory.reward == 0.0


async def test_a_call_that_takes_too_long_is_answered_and_the_next_one_works():
    env = McpEnv(QUESTION, server=stdio(timeout_s=5.0))
    trajectory = await play_env(env, call("sleep", seconds=60), call("add", a=1, b=2), "Done.")
    assert texts(trajectory, "tool") == ["Error: sleep did not answer within 5 s", "3"]
    assert trajectory.counters["tool_errors/timeout"] == 1


async def test_a_picture_is_a_part():
    async with McpSession(stdio()) as session:
        outcome = await by_name(session)["draw"].call({})
    assert outcome.status is ToolStatus.OK
    text, picture = outcome.content
    assert text == {"type": "text", "text": "A pixel:"}
    assert picture["type"] == "image"
    assert picture["image"].startswith("data:image/png;base64,iVBOR")


async def test_each_rollout_has_notes_of_its_own_unless_the_session_is_shared():
    own = [
        await play_env(McpEnv(QUESTION, server=stdio()), call("note", text=text), "Noted.") for text in ("one", "two")
    ]
    assert [texts(each, "tool") for each in own] == [["one"], ["two"]]
    async with McpSession(stdio()) as session:
        shared = [
            await play_env(McpEnv(QUESTION, session=session), call("note", text=text), "Noted.")
            for text in ("one", "two")
        ]
    assert [texts(each, "tool") for each in shared] == [["one"], ["one, two"]]


async def test_a_shared_session_is_open_while_a_rollout_uses_it():
    session = McpSession(stdio())
    both = await asyncio.gather(
        *(play_env(McpEnv(QUESTION, session=session), call("process"), "Done.") for _ in range(2))
    )
    (process,) = {texts(each, "tool")[0] for each in both}
    assert not is_running(int(process.split()[0]))
    again = await play_env(McpEnv(QUESTION, session=session), call("process"), "Done.")
    assert texts(again, "tool") != [process]


async def test_a_shared_session_whose_server_has_ended_is_opened_again_for_the_next_rollout():
    async with McpSession(stdio()) as session:
        answer = (await by_name(session)["process"].call({})).content
        os.kill(int(str(answer).split()[0]), signal.SIGKILL)
        failed, again = [
            await play_env(McpEnv(QUESTION, session=session), call("add", a=17, b=6), "23.") for _ in range(2)
        ]
    assert "Connection closed" in texts(failed, "tool")[0]
    assert texts(again, "tool") == ["23"]


async def test_a_rollout_that_is_cancelled_ends_its_process(tmp_path):
    marks = tmp_path / "pid"
    program = f"import os, time; open({str(marks)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    server = McpServer(command=(sys.executable, "-c", program), open_timeout_s=60)
    env = McpEnv(QUESTION, server=server)
    rollout = asyncio.create_task(env.start())
    await wait_until(lambda: marks.exists() and marks.read_text())
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    await env.close()
    assert not is_running(int(marks.read_text()))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_url(url, mode):
    server = McpServer(url=url, headers={"Authorization": "Bearer secret"}, mode=mode)
    await open_when_up(server)
    trajectory = await play_env(McpEnv(QUESTION, server=server), call("add", a=17, b=6), call("key"), "It is 23.")
    assert texts(trajectory, "tool") == ["23", "Bearer secret"]


async def test_tools_are_selected_by_name_and_stand_beside_others():
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    env = McpEnv(QUESTION, server=stdio(tools=("note", "add")), tools=[look])
    trajectory = await play_env(env, call("look"), call("fail", name="x"), "Done.")
    assert [each["function"]["name"] for each in trajectory.tools] == ["look", "note", "add"]
    assert texts(trajectory, "tool")[1] == "Error: there is no tool 'fail'. The tools are: look, note, add."


async def test_two_tools_of_one_name_are_refused_and_the_process_ends():
    @tool
    def add() -> str:
        """Add."""
        return ""

    env = McpEnv(QUESTION, server=stdio(), tools=[add])
    with pytest.raises(ToolDefinitionError, match="different names"):
        await env.start()
    await env.close()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(command=("no-such-command",)), "the MCP server no-such-command failed: FileNotFoundError"),
        (McpServer(command=(sys.executable, "-c", "")), "failed: MCPError: .*Connection closed"),
        (McpServer(url="http://127.0.0.1:9/mcp"), "the MCP server http://127.0.0.1:9/mcp failed: ConnectError"),
        ({"tools": ("divide",)}, r"it has no tools \['divide'\], only \['add'"),
        (
            McpServer(command=(sys.executable, "-c", "import time; time.sleep(60)"), open_timeout_s=0.5),
            "it did not name its tools within 0.5 s",
        ),
    ],
)
async def test_a_server_that_does_not_come_up_is_an_error_that_names_it(server, message):
    env = McpEnv(QUESTION, server=stdio(**server) if isinstance(server, dict) else server)
    with pytest.raises(EnvServerError, match=message):
        await env.start()
    await env.close()


async def test_a_server_that_ends_during_a_rollout_is_a_failed_call():
    env = McpEnv(QUESTION, server=stdio())
    trajectory = await play_env(env, call("end"), call("add", a=1, b=1), "Oh.", limits=Limits())
    assert all("Connection closed" in text for text in texts(trajectory, "tool"))
    assert trajectory.counters["tool_errors/error"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of command and url"),
        ({"command": ("x",), "url": "http://x"}, "exactly one of command and url"),
        ({"url": "http://x", "mode": "new"}, "server.mode must be one of"),
        ({"url": "http://x", "timeout_s": 0}, "server.timeout_s must be a finite number of seconds > 0, got 0"),
    ],
)
def test_settings_of_a_server_are_checked(settings, message):
    with pytest.raises(InvalidInputError, match=message):
        McpServer(**settings)


def test_an_environment_has_one_session():
    with pytest.raises(InvalidInputError, match="exactly one of server and session"):
        McpEnv(QUESTION)
