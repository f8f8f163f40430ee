"""`unbroken gateway` and `unbroken serve --sessions`: from the command line to recorded turns, and to the end."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.forks import ForkedPython
from support.gateways import CHAT, USER, scripted
from support.served import save_tiny_model, served
from support.servers import listening, make_app, server_tokenizer
from support.waits import wait_until
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.gateway.config import GatewayConfig
from unbroken.gateway.serve import with_control_key
from unbroken.ledger.records import SessionStatus
from unbroken.ledger.store import open_store
from unbroken.server.options import AppOptions

STARTED = re.compile(r"unbroken serves (\S+) at (http://\S+) \(.*; sessions in (.*)\)")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    server_tokenizer().save_pretrained(path)
    return str(path)


@dataclass(frozen=True, slots=True)
class Started:
    process: ForkedPython
    client: httpx.AsyncClient

    async def create(self, **settings: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/sessions", json=settings)
        assert answer.status_code == 200, answer.text
        created: dict[str, Any] = answer.json()
        return created


def read_control_key(store: Path) -> str:
    """The key of a server whose output goes to files, which must not keep it."""
    assert (store / "control-key").stat().st_mode & 0o777 == 0o600
    return (store / "control-key").read_text().strip()


@asynccontextmanager
async def gateway_process(folder: Path, *words: str) -> AsyncIterator[Started]:
    """`unbroken gateway` in a process, which is stopped by SIGTERM at the end."""
    output, errors = folder / "output", folder / "errors"
    process = ForkedPython("unbroken", "gateway", "--port", "0", *words, output=output, errors=errors)
    try:
        async with asyncio.timeout(60):
            while not (output.exists() and (match := STARTED.search(output.read_text()))):
                assert process.poll() is None, errors.read_text()
                await asyncio.sleep(0.05)
        key = read_control_key(folder / "sessions")
        assert key not in output.read_text() + errors.read_text()
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=match.group(2), timeout=60, headers=headers) as client:
            yield Started(process, client)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)
    assert process.returncode == 0, errors.read_text()


async def test_a_gateway_records_over_an_upstream_and_ends_when_its_turns_are_on_disk(
    tmp_path: Path, tokenizer: str
) -> None:
    engine = scripted("It is 17.<|im_end|>")
    store = tmp_path / "sessions"
    async with listening(make_app(engine, api_key="up")) as url:
        words = ("--upstream", url, "--upstream-key", "up", "--tokenizer", tokenizer, "--store", str(store))
        async with gateway_process(tmp_path, *words, "--served-model-name", "lookup") as gateway:
            created = await gateway.create()
            async with httpx.AsyncClient(
                base_url=created["openai_base_url"], headers={"Authorization": f"Bearer {created['api_key']}"}
            ) as agent:
                assert (await agent.get("/models")).json()["data"][0]["id"] == "lookup"
                answer = await agent.post("/chat/completions", json={"model": "gpt-5", "messages": [USER]})
                assert answer.json()["choices"][0]["message"]["content"] == "It is 17."
                await engine.pause()
                body = {"messages": [{"role": "user", "content": "And in cell 5?"}], "stream": True}
                leaving = asyncio.create_task(agent.post("/chat/completions", json=body))
                await wait_until(lambda: len(engine.requests) == 2)
                leaving.cancel()  # the agent leaves, its turn goes on
            assert (await gateway.client.get(f"/v1/sessions/{created['session_id']}")).json()["in_flight"] == 1
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert gateway.process.poll() is None
            await engine.resume()
    assert {request.session_id for request in engine.requests} == {created["session_id"]}
    kept = open_store(str(store))
    (record,) = kept.list_sessions(status=SessionStatus.OPEN, after=None, limit=9)
    stored = kept.load(record.session_id)
    kept.close()
    assert stored is not None
    assert [turn.reply_node for turn in stored.turns] == [1, 3]


async def test_an_upstream_of_no_known_kind_is_an_error_with_its_url(tmp_path: Path, tokenizer: str) -> None:
    async with listening(make_app(scripted("hi"))) as url:
        words = ["gateway", "--upstream", f"{url}/nowhere", "--upstream-wait-s", "0", "--tokenizer", tokenizer]
        output = tmp_path / "output"
        process = ForkedPython("unbroken", *words, "--port", "0", "--store", str(tmp_path / "s"), output=output)
        assert await asyncio.to_thread(process.wait, 60) == 1
    assert output.read_text().startswith("unbroken: ")
    assert "nowhere" in output.read_text() or "Not Found" in output.read_text()


def check_agent_is_confined(url: str, created: dict[str, Any]) -> None:
    """With only the URL of its session an agent can do its own turns and nothing else."""
    own = f"/v1/sessions/{created['session_id']}"
    calls = [
        *(("GET", path) for path in ("/v1/sessions", own, f"{own}/samples", f"{own}/tree", "/metrics")),
        *(("POST", path) for path in ("/v1/sessions", f"{own}/finish", "/pause", "/resume", "/v1/weights")),
        ("DELETE", own),
    ]
    for method, path in calls:
        for base in (url, created["anthropic_base_url"]):
            answer = httpx.request(method, f"{base}{path}", json={"reward": 1e6})
            assert answer.status_code in (401, 403), (method, path, answer.text)
    body = {"messages": [USER], "max_tokens": 4}
    assert httpx.post(f"{url}/s/{created['session_id']}{CHAT}", json=body).status_code == 404
    answer = httpx.post(f"{created['openai_base_url']}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.e2e
def test_serve_keeps_sessions_too(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    folder = tmp_path / "sessions"
    with served(model, "--sessions", str(folder), "--ttl-s", "60", engine="transformers") as server:
        control = {"Authorization": f"Bearer {read_control_key(folder)}"}
        created = httpx.post(f"{server.url}/v1/sessions", json={}, headers=control).json()
        check_agent_is_confined(server.url, created)
        headers = {"x-api-key": created["api_key"]}
        body = {"messages": [USER], "max_tokens": 4}
        answer = httpx.post(f"{server.url}{CHAT}", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        session = httpx.get(f"{server.url}/v1/sessions/{created['session_id']}", headers=control).json()
    assert (session["num_turns"], session["status"]) == (2, "open")
    assert session["expires_at"] - session["created_at"] == pytest.approx(60)


def test_a_control_key_is_made_and_shown_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = AppOptions()
    options = with_control_key(plain, GatewayConfig(), str(tmp_path))
    assert options.config.api_key
    shown = capsys.readouterr()
    assert shown.err.count(options.config.api_key) == 1
    assert options.config.api_key not in shown.out
    assert with_control_key(plain, GatewayConfig(), str(tmp_path)).config.api_key != options.config.api_key
    assert with_control_key(options, GatewayConfig(), str(tmp_path)) is options
    assert with_control_key(plain, GatewayConfig(no_control_key=True), str(tmp_path)) is plain
    with pytest.raises(InvalidInputError, match="--no-control-key must not be given together with --api-key"):
        with_control_key(options, GatewayConfig(no_control_key=True), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


GATEWAY = ("gateway", "--upstream", "http://127.0.0.1:9", "--tokenizer", "none", "--store", "none")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*GATEWAY, "--host", "0.0.0.0"), "--host 0.0.0.0 lets other machines in, so it needs --api-key"),
        (
            (*GATEWAY, "--upstream", "10.0.0.1:8000"),
            "--upstream must be an http:// or https:// URL, got '10.0.0.1:8000'",
        ),
        ((*GATEWAY, "--ttl-s", "0"), "--ttl-s must be > 0, got 0.0"),
        ((*GATEWAY, "--max-sessions", "-1"), "--max-sessions must be > 0, got -1"),
        ((*GATEWAY, "--max-body-bytes", "0"), "--max-body-bytes must be > 0, got 0"),
        (
            (*GATEWAY, "--upstream-file", "f"),
            "either --upstream or --upstream-file must be given, got ('http://127.0.0.1:9',) and f",
        ),
        ((GATEWAY[0], *GATEWAY[3:]), "either --upstream or --upstream-file must be given, got () and None"),
        ((*GATEWAY, "--upstream-wait-s", "-1"), "--upstream-wait-s must be >= 0, got -1.0"),
        ((*GATEWAY, "--advertise", "10.0.0.1"), "--advertise must be an http:// or https:// URL of at most 63 ASCII"),
        ((*GATEWAY, "--advertise", "http://10.0.0.1"), "--advertise needs a postgresql:// URL as --store"),
        (("serve", "none", "--advertise", "http://10.0.0.1"), "--advertise needs --sessions LOCATION"),
        ((*GATEWAY, "--workers", "0"), "--workers must be >= 1, got 0"),
        ((*GATEWAY, "--workers", "2"), "--workers 2 needs a postgresql:// URL as --store"),
        (
            (*GATEWAY, "--workers", "2", "--advertise", "http://10.0.0.1"),
            "--advertise must not be given with --workers",
        ),
        ((*GATEWAY[:-1], "redis://x"), "--store must be a folder or a postgresql:// URL"),
        (("serve", "none", "--no-control-key"), "--no-control-key needs --sessions LOCATION"),
        (("serve", "none", "--ttl-s", "5"), "--ttl-s needs --sessions LOCATION"),
        (("serve", "none", "--sessions", "redis://x"), "--sessions must be a folder or a postgresql:// URL"),
    ],
)
def test_a_wrong_option_is_named(words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert expected in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gateway", "--help-all"])
    helps = [block.split("\n", 1) for block in capsys.readouterr().out.split("\n  --")[1:]]
    assert all(len(text.split()) >= 3 for _, text in helps)


def test_a_gateway_needs_no_torch() -> None:
    code = "import sys, unbroken.gateway.serve; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
