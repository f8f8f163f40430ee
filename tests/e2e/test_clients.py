"""Clients that others wrote, as PyPI has them, against our server: a question that takes two calls of a tool."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.agent_programs import find_python
from support.agent_server import ANSWER, Played, play
from support.served import save_tiny_model, served
from support.servers import listening, server_tokenizer

pytestmark = pytest.mark.clients


def run(name: str, *arguments: str, venv: str | None) -> tuple[dict[str, Any], Played]:
    """Run a client's script, with this Python or that of `venv`; returns what it printed and what the server played."""
    script = Path(__file__).parent / "clients" / f"{name}_client.py"
    played = play()

    async def run_script() -> subprocess.CompletedProcess[str]:
        async with listening(played.app) as url:
            command = [str(find_python(venv)), str(script), url, *arguments]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=240, check=False
            )

    done = asyncio.run(run_script())
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, played


@pytest.mark.parametrize(("name", "venv"), [("openai", None), ("litellm", "agents"), ("pydantic_ai", "agents")])
def test_a_client_of_openais_dialect_uses_a_tool_over_three_turns(name: str, venv: str | None) -> None:
    found, played = run(name, venv=venv)
    assert found["answer"] == found["streamed"] == ANSWER
    assert found["calls"] == [[2, 3], [5, 4]] * 2
    assert len(played.turns) >= 6
    if name == "pydantic_ai":
        assert found["typed"]  # the scripted engine is asked again for the call


def test_anthropics_sdk_uses_a_tool_over_three_turns() -> None:
    found, played = run("anthropic", venv="agents")
    assert found["answer"] == found["streamed"] == ANSWER
    assert found["calls"] == [[2, 3], [5, 4]] * 2
    assert len(played.turns) == 6
    assert found["counted"] > 0
    assert found["refused"] == "not_found_error"


def test_googles_sdk_uses_a_tool_over_three_turns() -> None:
    found, played = run("gemini", venv="agents")
    assert found["answer"] == found["streamed"] == ANSWER
    assert found["calls"] == [[2, 3], [5, 4]] * 2
    assert len(played.turns) == 6
    assert found["counted"] > 0
    assert found["refused"] == "NOT_FOUND"


@pytest.mark.parametrize(("name", "venv"), [("openai_responses", None), ("openai_agents", "openai-agents")])
def test_a_client_of_responses_uses_a_tool_over_three_turns(name: str, venv: str | None) -> None:
    found, played = run(name, venv=venv)
    assert found["answer"] == found["streamed"] == ANSWER
    assert found["calls"] == [[2, 3], [5, 4]] * 2
    assert len(played.turns) == 6


def test_smolagents_calls_tools_and_writes_code() -> None:
    found, _ = run("smolagents", venv="agents")
    assert found["answer"] == found["code"] == ANSWER
    assert found["calls"][:4] == [[2, 3], [5, 4]] * 2
    assert "400" in found["required"]


def test_i1_verifiers_token_client_continues_the_ids_so_far() -> None:
    found, played = run("verifiers_tokens", venv="verifiers-0.1")
    assert (found["answer"], found["reward"], found["errors"]) == (ANSWER, 1.0, [None, None])
    assert found["calls"] == [[2, 3], [5, 4]]
    assert '"name": "add", oops' in found["malformed"]  # it took empty content for a failure
    played.turns.pop()
    assert [(prompt, ids) for prompt, ids, _ in found["turns"]] == played.turns
    assert all(num_logprobs == len(ids) for _, ids, num_logprobs in found["turns"])
    assert played.is_one_sequence()


def test_i1_verifiers_train_client_bridges_to_the_next_turn(tmp_path: Path) -> None:
    server_tokenizer().save_pretrained(tmp_path)
    found, played = run("verifiers_train", str(tmp_path), venv="verifiers-0.4")
    assert (found["answer"], found["calls"]) == (ANSWER, [[2, 3], [5, 4]])
    assert [(prompt, ids) for prompt, ids, *_ in found["turns"]] == played.turns
    assert [bridged for *_, bridged in found["turns"]] == [False, True, True]
    assert all(num_logprobs == len(ids) for _, ids, num_logprobs, _ in found["turns"])
    assert played.is_one_sequence()


def test_agents_that_require_calls_get_them_from_a_random_model_vllm(tmp_path: Path) -> None:
    script = Path(__file__).parent / "clients" / "required_client.py"
    with served(save_tiny_model(tmp_path)) as server:
        command = [str(find_python("agents")), str(script), server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["typed"]
    assert all(city["name"] in ("Paris", "Rome") for city in found["typed"])
    assert found["picked"]
