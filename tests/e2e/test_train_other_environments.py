"""`unbroken train` on environments of other libraries, as docs/environments.md names them.

What `make test` does not install is in an environment of `make clients`. The recorded ids of all rollouts are
compared.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.agent_programs import find_python
from support.client_runs import CLIENTS, ROOT, client_command, client_environment, run_with_client
from support.env_rollouts import call, play_env, texts
from support.exact_runs import RECORD_ALL, check_exact, read_metrics
from support.nemo_gym_server import make_example, save_examples
from support.served import save_tiny_model
from support.server_processes import serve_openenv, serve_script
from unbroken.cli import main
from unbroken.integrations.nemo_gym import NeMoGymEnv
from unbroken.runs.records.files import find_records, read_records

SUPPORT = ROOT / "tests" / "support"
PAGE = (ROOT / "docs" / "environments.md").read_text("utf-8")
VENV = "environments"
RECIPE = f"""
loop.num_steps = 2
trainer.kl_weight = 0.01
evaluation.num_problems = 1
rollouts.problems_per_step = 2
rollouts.group_size = 2
rollouts.limits.max_turns = 3
rollouts.sampling.max_tokens = 6
rollouts.sampling.stop_token_ids = {[*range(0, 256, 2)]}  # a random model ends no reply by itself
"""
NUM_ROLLOUTS = 8

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, recipe: str, *, venv: str | None = None) -> list[dict[str, Any]]:
    """Train two steps, here or with the Python of `venv`, and check that all rows are exact; returns the metrics."""
    (folder / "recipe.toml").write_text(RECIPE + recipe)
    run = folder / "run"
    words = ["train", str(folder / "recipe.toml"), f"--output={run}", f"--model={model}", *RECORD_ALL]
    if venv is None:
        assert main(words) == 0
    else:
        run_with_client(run, venv, "unbroken", *words)
    check_exact(run, num_rollouts=NUM_ROLLOUTS)
    lines = read_metrics(run)
    assert len(lines) == 2
    return lines


def read_page(section: str) -> str:
    """The recipe in a section of the page, without its model and its length."""
    found = re.search(rf"^## {section}\n.*?^```toml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return re.sub(r"^(model|loop\.num_steps) = .*\n", "", found[1], flags=re.MULTILINE)


def check_turns(lines: list[dict[str, Any]]) -> None:
    """The environment answered replies, and each next turn is a bridge."""
    for line in lines:
        assert line["rollout/turns_mean"] > 1
        assert line["counters/bridges"] == NUM_ROLLOUTS / 2 * (line["rollout/turns_mean"] - 1)


def test_the_environment_of_the_page(tmp_path, model):
    page = (ROOT / "docs" / "own-environment.md").read_text("utf-8")
    (code,) = re.findall(r"A file `sums.py`:\n```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 20
    (tmp_path / "sums.py").write_text(code)
    lines = train(tmp_path, model, 'environment = "sums.py:Sum"\nenvironment_arguments = { largest = 50 }\n')
    assert [line["rollout/turns_mean"] for line in lines] == [2, 2]
    check_turns(lines)


def test_the_checks_of_this_file_can_fail(tmp_path, model):
    (tmp_path / "envs.py").write_text(
        """
from unbroken import Done, EnvStart, Rewrite

class Forgetful:
    def __init__(self, number):
        self.turns = number % 2  # the first problem of a step has one turn, the second is rewritten

    async def start(self):
        return EnvStart(messages=[{"role": "user", "content": "Hello."}])

    async def step(self, reply):
        self.turns -= 1
        return Done() if self.turns < 0 else Rewrite(messages=[{"role": "user", "content": "Again."}])

    async def reward(self, messages):
        return 0.0

    async def close(self):
        pass
"""
    )
    with pytest.raises(AssertionError, match="rewritten_history"):
        train(tmp_path, model, 'environment = "envs.py:Forgetful"\n')
    (run,) = tmp_path.glob("run")
    assert [line["counters/forks"] for line in read_metrics(run)] == [2, 2]
    path = next(iter(find_records(run / "rollouts").values()))
    lines = list(read_records(path))
    records = [line for line in lines if line["kind"] == "trajectory"]
    for turn in (turn for record in records for turn in record["turns"]):
        turn["fork"] = None
    records[0]["rows"][0]["rollout_logprobs"][0] -= 0.01
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(AssertionError, match="k3"):
        check_exact(run, num_rollouts=NUM_ROLLOUTS)


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
    lines = train(tmp_path, model, 'environment = "envs.py:make"\n')
    check_turns(lines)
    assert all(line["reward/mean"] > 0 for line in lines)


@pytest.mark.clients
def test_gymnasium(tmp_path, model):
    check_turns(train(tmp_path, model, read_page("Gymnasium"), venv=VENV))


@pytest.mark.clients
def test_textarena(tmp_path, model):
    check_turns(train(tmp_path, model, read_page("TextArena"), venv=VENV))


@pytest.mark.clients
def test_reasoning_gym(tmp_path, model):
    lines = train(tmp_path, model, read_page("reasoning-gym"), venv=VENV)
    assert [line["rollout/turns_mean"] for line in lines] == [1, 1]


@pytest.mark.clients
def test_openenv(tmp_path, model):
    find_python(VENV)
    with serve_openenv("text", client_command(VENV), client_environment(VENV, tmp_path)) as url:
        recipe = read_page("OpenEnv").replace("http://127.0.0.1:8000", url)
        lines = train(tmp_path, model, recipe, venv=VENV)
    check_turns(lines)
    assert all(line["reward/mean"] > 0 for line in lines)


@pytest.mark.clients
def test_the_adapters_pass_their_tests_with_the_packages(tmp_path):
    names = ("gym", "openenv", "reasoning_gym")
    files = [str(ROOT / "tests" / "unit" / "integrations" / f"test_{name}.py") for name in names]
    printed = run_with_client(tmp_path / "run", VENV, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert re.search(r"^\d+ passed in ", printed, flags=re.MULTILINE), printed  # none was left out


def test_an_mcp_server(tmp_path, model):
    pytest.importorskip("mcp_types", reason="needs mcp 2", exc_type=ModuleNotFoundError)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "x", "answer": k}) + "\n" for k in (5, 7)))
    (tmp_path / "rewards.py").write_text(
        "def right(completions, answer):\n    return [float(each) for each in answer]\n"
    )
    recipe = f"""
data.file = "prompts.jsonl"
environment = "unbroken.integrations.mcp:McpEnv"
environment_arguments.server = {{ command = {json.dumps([sys.executable, str(SUPPORT / "mcp_server.py")])} }}
rewards = [{{ function = "rewards.py:right" }}]
"""
    for line in train(tmp_path, model, recipe):
        assert line["reward/mean"] == 6


def train_on_counter(folder: Path, model: Path, url: str) -> list[float]:
    """The mean rewards of training on two examples of a counter, of which one is right without a call."""
    file = save_examples(folder, make_example(start=7, expected=7), make_example(start=3, expected=7))
    recipe = read_page("NeMo Gym").replace("http://127.0.0.1:8000", url).replace("example.jsonl", str(file), 1)
    return [line["reward/mean"] for line in train(folder, model, recipe)]


def test_nemo_gym(tmp_path, model):
    with serve_script([sys.executable, str(SUPPORT / "nemo_gym_server.py")]) as url:
        assert train_on_counter(tmp_path, model, url) == [0.5, 0.5]


@pytest.mark.clients
def test_nemo_gym_with_a_server_of_the_package(tmp_path, model):
    with serve_package("example_session_state_mgmt") as url:
        assert train_on_counter(tmp_path, model, url) == [0.5, 0.5]


@pytest.mark.clients
async def test_tools_of_a_server_of_nemo_gym_are_called_in_its_session(tmp_path):
    count = call("increment_counter", count=1)[:-1] + call("increment_counter", count=3)
    with serve_package("example_session_state_mgmt") as url:
        trajectory = await play_env(
            NeMoGymEnv(url, save_examples(tmp_path)), count, call("get_counter_value"), "Seven."
        )
    assert texts(trajectory, "tool") == ['{"success":true}', '{"success":true}', '{"count":7}']
    assert trajectory.reward == 1.0


@pytest.mark.clients
async def test_examples_of_the_package_of_nemo_gym_are_solved(tmp_path):
    """The workplace assistant has 27 tools behind one route, and verifies what the calls did."""
    file = find_package_file("workplace_assistant/data/example.jsonl")
    (made,) = json.loads(file.read_text("utf-8").splitlines()[0])["ground_truth"]
    solution = call(made["name"], **json.loads(made["arguments"]))
    with serve_package("workplace_assistant") as url:
        solved = await play_env(NeMoGymEnv(url, file, 0, "evaluation"), solution, "Done.")
        skipped = await play_env(NeMoGymEnv(url, file, 0, "evaluation"), "Done.")
    assert (solved.reward, skipped.reward) == (1.0, 0.0)
    assert texts(solved, "tool") == ['{"output":"Email replied successfully."}']


@contextmanager
def serve_package(name: str) -> Iterator[str]:
    """A resources server of the package nemo-gym."""
    with serve_script([str(find_python("nemo-gym")), str(CLIENTS / "nemo_gym_server.py")], name) as url:
        yield url


def find_package_file(path: str) -> Path:
    """A file of the package's resources servers."""
    (found,) = find_python("nemo-gym").parents[1].glob(f"lib/python3*/site-packages/resources_servers/{path}")
    return found
