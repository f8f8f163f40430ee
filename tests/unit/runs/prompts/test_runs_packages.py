"""Environments of other packages in a recipe or on the command line: tasks of Harbor, and the agent that they need."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.terminal_tasks import write_notes_task
from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor import move_session
from unbroken.rollout.agents.session import AgentSession
from unbroken.runs.prompts.built_in import Config, ProblemMaker
from unbroken.runs.recipe import load_recipe

COMMAND = 'agent.command = ["bash", "{instruction}"]'


def load(folder: Path, *lines: str) -> Config:
    write_notes_task(folder / "tasks" / "count")
    text = "\n".join(['model = "m"', "loop.num_steps = 1", 'environment = "harbor:tasks"', *lines])
    (folder / "recipe.toml").write_text(text)
    config = load_recipe(folder / "recipe.toml").configure(["--output", str(folder / "out")])
    assert isinstance(config, Config)
    return config


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([COMMAND], "agent must be left out with harbor:"),
        (['data.file = "rows.jsonl"'], "data must be left out with harbor:"),
        (['[[rewards]]\nfunction = "a.py:b"'], "rewards must be left out with harbor:"),
        (
            ["environment_arguments.contaners = {}"],
            "environment_arguments.contaners must be a section of the recipe: did",
        ),
        (["environment_arguments.agent_timeout_s = 0"], "environment_arguments.agent_timeout_s must be a finite"),
        ([], "environment harbor:FOLDER needs the package harbor, with Python 3.12 or newer, and containers that it "),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "harbor", None)
    with pytest.raises(InvalidInputError) as raised:
        ProblemMaker(load(tmp_path, *lines)).make(None, split="train")
    assert words in str(raised.value)


def test_an_agent_for_an_environment_that_has_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f'model = "m"\nloop.num_steps = 1\nenvironment = "verifiers:a"\n{COMMAND}\n')
    with pytest.raises(InvalidInputError, match="agent must be left out with verifiers:a, which has its own"):
        load_recipe(tmp_path / "recipe.toml").configure([])


def test_placeholders_of_a_word_are_filled_in_once_and_other_braces_stay() -> None:
    session = AgentSession(
        session_id="s",
        api_key="k",
        openai_base_url="http://h/v1",
        anthropic_base_url="http://h",
        model="m",
        task={"instruction": "say {model}", "number": 3},
    )
    assert (
        session.fill("{instruction} {openai_base_url}{x} {number} {{model}}")
        == "say {model} http://h/v1{x} {number} {m}"
    )


def test_containers_are_told_where_the_gateway_is_for_them() -> None:
    session = AgentSession(
        session_id="s",
        api_key="k",
        openai_base_url="http://127.0.0.1:80/s/s/v1",
        model="m",
        task={},
        anthropic_base_url="http://127.0.0.1:80/s/s",
    )
    with pytest.raises(
        InvalidInputError, match=r"containers cannot reach the gateway at http://127.0.0.1:80: set sess"
    ):
        move_session(session, None)
    moved = move_session(session, "172.17.0.1")
    assert (moved.openai_base_url, moved.anthropic_base_url) == (
        "http://172.17.0.1:80/s/s/v1",
        "http://172.17.0.1:80/s/s",
    )
    other = replace(session, openai_base_url="https://gateway/s/s/v1")
    assert move_session(other, None) is other
