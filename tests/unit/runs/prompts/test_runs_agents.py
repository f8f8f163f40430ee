"""Agents in a TOML file: a function or a command attempts each row; what cannot be is refused at the start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from support.attempts import sample_attempts
from support.gateways import scripted
from support.known_agents import install_codex
from unbroken.errors import InvalidInputError
from unbroken.rollout.limits import Limits
from unbroken.runs.prompts.built_in import Config, ProblemMaker
from unbroken.runs.recipe import load_recipe

AGENT = """
import httpx

async def solve(session):
    async with httpx.AsyncClient(headers={"Authorization": "Bearer " + session.api_key}) as client:
        body = {"messages": [{"role": "system", "content": "Add."}, *session.task["prompt"]]}
        answer = await client.post(session.openai_base_url + "/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return 0.5 if session.task["answer"] == "7" else None

def not_async(session):
    return 1.0
"""
REWARDS = """
def correct(completions, answer):
    return [float(messages[0]["content"] == wanted) for messages, wanted in zip(completions, answer)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    row = {"prompt": [{"role": "user", "content": "3 + 4?"}], "answer": "7"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def load(folder: Path, *lines: str) -> Config:
    text = "\n".join(['model = "m"', "loop.num_steps = 1", 'data.file = "rows.jsonl"', *lines])
    (folder / "recipe.toml").write_text(text)
    config = load_recipe(folder / "recipe.toml").configure(["--output", str(folder / "out")])
    assert isinstance(config, Config)
    return config


async def sample(folder: Path, config: Config) -> Any:
    problems = ProblemMaker(config).make(config.data, split="train")
    return await sample_attempts(folder, scripted("7<|im_end|>"), problems, config.rollouts, size=2)


async def test_a_function_attempts_the_rows_and_rewards_are_added(folder: Path) -> None:
    config = load(
        folder, 'agent.function = "agent.py:solve"', "[[rewards]]", 'function = "rewards.py:correct"', "weight = 2.0"
    )
    group = await sample(folder, config)
    assert group.rewards == (2.5, 2.5)
    assert group.trajectories[0].messages[0]["content"] == "Add."


async def test_a_command_attempts_the_rows_and_its_output_is_kept(folder: Path) -> None:
    words = json.dumps([sys.executable, "-c", "import os; print(len(os.environ['UNBROKEN_TASK']) > 10); print(0.25)"])
    config = load(folder, f"agent.command = {words}", 'agent.reward = "output"')
    group = await sample(folder, config)
    assert group.rewards == (0.25, 0.25)
    assert [log.read_text() for log in (folder / "out" / "agents").glob("*.log")] == ["True\n0.25\n"] * 2


async def test_a_file_in_a_command_is_beside_the_toml_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word without a dot and a slash stays as it is, and so does one that names no file; a command runs elsewhere."""
    (folder / "programs").mkdir()
    for name in ("attempt.py", "programs/attempt", "python"):
        (folder / name).write_text("print(0.75)")
    words = ["python", "attempt.py", "programs/attempt", "./attempt.py", "missing.py", ".", "-c", "a.b/" + "c" * 5000]
    config = load(folder, f"agent.command = {json.dumps(words)}", 'agent.reward = "output"')
    assert config.agent is not None
    files = [str(folder / name) for name in ("attempt.py", "programs/attempt", "attempt.py")]
    assert list(config.agent.command) == ["python", *files, *words[4:]]
    config = load(folder, f'agent.command = ["{sys.executable}", "attempt.py"]', 'agent.reward = "output"')
    assert (await sample(folder, config)).rewards == (0.75, 0.75)
    monkeypatch.chdir(folder)
    for option in ("python,attempt.py", '["python", "attempt.py"]'):
        recipe = load_recipe(folder / "recipe.toml")
        found = recipe.configure(["--agent.command", option])
        assert list(found.agent.command) == ["python", str(folder / "attempt.py")]  # type: ignore[attr-defined]


NAMED = ('agent.name = "codex"', 'agent.check = ["true"]')


async def test_a_known_agent_gets_the_prompt_of_its_row_in_a_copy_of_the_workspace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_codex(folder / "bin", monkeypatch)
    (folder / "project").mkdir()
    (folder / "project" / "notes.txt").write_text("as it was")
    code = "import json, os; assert open('said.txt').read() == json.loads(os.environ['UNBROKEN_TASK'])['answer']"
    check = json.dumps([sys.executable, "-c", f"{code}; assert os.path.exists('notes.txt')"])
    config = load(folder, NAMED[0], 'agent.workspace = "project"', f"agent.check = {check}")
    group = await sample(folder, config)
    assert group.rewards == (1.0, 1.0)
    assert group.trajectories[0].messages[0]["content"] == "3 + 4?"
    assert len(list((folder / "out" / "agents").glob("*.check.log"))) == 2


async def test_a_path_into_the_workspace_is_the_copys_and_any_other_file_is_out_of_the_agents_reach(
    folder: Path,
) -> None:
    """With the TOML file in the workspace, its words would name the original's tests: no agent could pass them."""
    (folder / "tests").mkdir()
    for name in ("tests/check.py", "secret.py"):
        (folder / name).write_text("import os, sys; sys.exit(os.path.exists('bad'))")
    for workspace in (".", "tests/.."):
        config = load(
            folder,
            f'agent.workspace = "{workspace}"',
            'agent.command = ["python", "tests/check.py"]',
            'agent.check = ["./tests/check.py", "secret.py", "missing.py", "."]',
        )
        (folder / "tests" / "check.py").chmod(0o755)
        assert config.agent is not None
        agent: Any = config.agent.load(output=folder / "out", limits=Limits(timeout_s=7))
        assert agent.command == ("python", "./tests/check.py")
        assert agent.check.command == ("./tests/check.py", "./secret.py", "missing.py", ".")
        assert agent.check.timeout_s == 7
        assert agent.workspace.leave_out == folder / "out"
    config = load(folder, 'agent.workspace = "tests"', *NAMED[:1], 'agent.check = ["python", "secret.py"]')
    assert config.agent is not None
    assert list(config.agent.check) == ["python", str(folder / "secret.py")]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"role": "system", "content": "Add."}, {"role": "user", "content": "3?"}], "got messages of system, user"),
        ([{"role": "user", "content": "3?"}, {"role": "assistant", "content": "4"}], "got messages of user, assistant"),
    ],
)
def test_a_prompt_that_is_no_task_for_a_known_agent_is_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompt: list[dict[str, str]], words: str
) -> None:
    install_codex(folder / "bin", monkeypatch)
    rows = [{"prompt": [{"role": "user", "content": "1?"}]}, {"prompt": prompt}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = load(folder, *NAMED)
    with pytest.raises(InvalidInputError) as raised:
        ProblemMaker(config).make(config.data, split="train")
    assert f"row 1 of {folder / 'rows.jsonl'} must be one message of the user" in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ['agent.command = ["a"]', 'agent.function = "agent.py:solve"'],
            "agent must have exactly one of function, command and name, got function=",
        ),
        (
            ['agent.command = ["a"]'],
            'agent.reward must be "exit" or "output" with a command, no check and no rewards',
        ),
        (
            ['agent.function = "agent.py:solve"', 'agent.reward = "exit"'],
            "agent.reward must be left out with agent.function, got 'exit'",
        ),
        (
            ['agent.function = "agent.py:solve"', 'agent.check = ["true"]'],
            "agent.check must be left out with agent.function, got ('true',)",
        ),
        (
            [*NAMED, 'agent.command = ["a"]'],
            "agent must have exactly one of function, command and name, got function=None",
        ),
        ([*NAMED, 'agent.reward = "exit"'], "agent.reward must be left out with agent.check, got 'exit'"),
        ([NAMED[0], 'agent.reward = "exit"'], "agent.reward must be left out with agent.name, got 'exit'"),
        ([NAMED[0]], "agent.check must be given with a name and no rewards: nothing would score it"),
        (['agent.name = "codx"', NAMED[1]], "agent.name must be one of claude-code, cline, codex"),
        ([*NAMED], "got 'codex': there is no program codex on PATH. Install it: npm install -g @openai/codex"),
        (
            ['agent.command = ["a"]', 'agent.check = ["no-such-program"]'],
            "agent.check must begin with a program, got 'no-such-program': there is none on PATH",
        ),
        (
            ['agent.command = ["a"]', NAMED[1], 'agent.workspace = "missing"'],
            "agent.workspace must be a folder, got ",
        ),
        (['agent.function = "agent.py:solve"', 'tools = ["a.py:b"]'], "tools must be left out with an agent"),
        (['agent.function = "agent.py:not_async"'], "agent.function must be an async function of an AgentSession"),
        (['agent.function = "agent.py:solv"'], "agent.function must name something in"),
    ],
)
def test_what_cannot_be_an_agent_is_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], words: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(InvalidInputError) as raised:
        ProblemMaker(load(folder, *lines))
    assert words in str(raised.value)
