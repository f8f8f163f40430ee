"""`unbroken train` on environments of other libraries, as docs/environments.md names them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.openenv_process import serve_openenv
from support.served import save_tiny_model
from unbroken.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text("utf-8")
RECIPE = """
loop.num_steps = 2
trainer.kl_weight = 0.01
rollouts = { problems_per_step = 2, group_size = 2, sampling.max_tokens = 6, limits.max_turns = 3 }
evaluation.num_problems = 1
"""

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, recipe: str) -> list[dict[str, Any]]:
    """Train two steps; the rows are exact: the trainer computes the logprobs that the ids were sampled with."""
    (folder / "recipe.toml").write_text(recipe)
    assert main(["train", str(folder / "recipe.toml"), f"--output={folder / 'run'}", f"--model={model}"]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["mismatch/max_abs"] < 1e-4
        assert not [key for key in line if key.startswith("counters/forks/")]
    return lines


def test_the_environment_of_the_page(tmp_path, model):
    (code,) = re.findall(r"^A file `sums.py`:\n```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 20
    (tmp_path / "sums.py").write_text(code)
    recipe = 'environment = "sums.py:Sum"\nenvironment_arguments = { largest = 50 }\n'
    for line in train(tmp_path, model, recipe + RECIPE):
        assert line["rollout/turns_mean"] == 2


def test_an_environment_with_the_methods_of_gymnasium(tmp_path, model):
    (tmp_path / "envs.py").write_text(
        """
from unbroken.integrations.gym import GymEnv

class Countdown:
    def reset(self, *, seed):
        self.left = 3
        return f"{self.left} left, {seed % 7}", {}

    def step(self, action):
        self.left -= 1
        return f"{self.left} left", float(len(action)), self.left == 0, False, {}

def make(number, split, seed):
    return GymEnv(Countdown(), number, split, seed)
"""
    )
    for line in train(tmp_path, model, 'environment = "envs.py:make"\n' + RECIPE):
        assert line["reward/mean"] >= 0


def test_gymnasium(tmp_path, model):
    pytest.importorskip("gymnasium", reason="needs gymnasium", exc_type=ModuleNotFoundError)
    recipe = """
environment = "unbroken.integrations.gym:GymEnv"
environment_arguments = { env = "FrozenLake-v1", actions = ["left", "down"], options = { render_mode = "ansi" } }
"""
    train(tmp_path, model, recipe + RECIPE)


def test_textarena(tmp_path, model):
    pytest.importorskip("textarena", reason="needs textarena", exc_type=ModuleNotFoundError)
    recipe = """
environment = "unbroken.integrations.gym:TextArenaEnv"
environment_arguments = { env = "GuessTheNumber-v0" }
"""
    train(tmp_path, model, recipe + RECIPE)


def test_reasoning_gym(tmp_path, model):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym", exc_type=ModuleNotFoundError)
    recipe = """
environment = "unbroken.integrations.reasoning_gym:ReasoningGymEnv"
environment_arguments = { dataset = "leg_counting", options = { max_animals = 4 } }
"""
    train(tmp_path, model, recipe + RECIPE)


def test_an_mcp_server(tmp_path, model):
    pytest.importorskip("mcp_types", reason="needs mcp 2", exc_type=ModuleNotFoundError)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "x", "answer": k}) + "\n" for k in (5, 7)))
    (tmp_path / "rewards.py").write_text(
        "def right(completions, answer):\n    return [float(each) for each in answer]\n"
    )
    recipe = f"""
data.file = "prompts.jsonl"
environment = "unbroken.integrations.mcp:McpEnv"
environment_arguments.server = {{ command = {json.dumps([sys.executable, str(ROOT / "tests/support/mcp_server.py")])} }}
rewards = [{{ function = "rewards.py:right" }}]
"""
    for line in train(tmp_path, model, recipe + RECIPE):
        assert line["reward/mean"] == 6


def test_openenv(tmp_path, model):
    pytest.importorskip("openenv.core.env_server", reason="needs openenv-core", exc_type=ModuleNotFoundError)
    with serve_openenv("text") as url:
        recipe = f"""
environment = "unbroken.integrations.openenv:OpenEnv"
environment_arguments = {{ url = "{url}", action = "message", observation = "prompt" }}
"""
        train(tmp_path, model, recipe + RECIPE)
