"""Prompts, reward functions and environments of the recipes that are shipped, on a tiny random model."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from support.evaluations import read_evaluations
from support.forks import ForkedPython
from support.processes import run_two
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.runs.records.files import find_records, read_records

RECIPES = Path(__file__).parents[2] / "recipes"
SUMS = RECIPES / "sums" / "recipe.toml"
SMALL = {
    "--rollouts.problems-per-step": "2",
    "--rollouts.group-size": "4",
    "--evaluation.num-problems": "2",
    "--trainer.optimizer.learning-rate": "1e-3",
    "--loop.num-steps": "4",
}
WAITS = """
from asyncio import Event
from pathlib import Path
share, problems = digits, []
async def digits(completions: list[str]) -> list[float]:
    problems.append(completions)
    if len(problems) > 6 and Path(__file__).with_name("waits").exists():
        await Event().wait()
    return share(completions)
"""
"""A reward that waits in the third step: two problems are evaluated before, and two trained on in a step."""

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> Path:
    """The output folder of a run of the shipped recipe that nothing happened to."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(command(SUMS, output, model)) == 0
    return output


def command(recipe: Path, output: Path, model: Path, **options: str) -> list[str]:
    given = {**SMALL, "--output": str(output), "--model": str(model), **options}
    return ["train", str(recipe), *(f"{name}={value}" for name, value in given.items())]


def lines(output: Path) -> list[dict]:
    """What was logged, but for seconds and memory."""
    whole = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("seconds/", "tokens_per_s/", "idle/", "memory/"))}
        for line in whole
    ]


def sums(folder: Path) -> Path:
    """A copy of the recipe to change."""
    shutil.copytree(RECIPES / "sums", folder / "sums")
    return folder / "sums" / "recipe.toml"


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_run_that_is_ended_goes_on_as_one_that_is_not(tmp_path, capsys, model, whole, number, status, word):
    recipe, log = sums(tmp_path), tmp_path / "log"
    words, rewards = command(recipe, tmp_path / "run", model), recipe.with_name("rewards.py")
    rewards.write_text(rewards.read_text() + WAITS)
    rewards.with_name("waits").touch()
    process = ForkedPython("unbroken", *words, output=log)
    while not (tmp_path / "run" / "checkpoints" / "step-00000001").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    rewards.with_name("waits").unlink()
    assert process.wait(timeout=60) == status, log.read_text()
    assert f"{word}; the same command continues from the last checkpoint" in log.read_text()
    assert len(lines(tmp_path / "run")) < 4
    code = rewards.read_text()
    rewards.write_text(code.replace("share(completions)", "[1 - each for each in share(completions)]"))
    assert main(words) == 1
    assert f"the SHA-256 of {rewards} must be '" in capsys.readouterr().err
    rewards.write_text(code)
    assert main(words) == 0
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2, 3]
    # The same ids are sampled; in batches of another make-up, the last bits of their logprobs differ.
    for ours, theirs in zip(lines(tmp_path / "run"), lines(whole), strict=True):
        assert [name for name in ours if ours[name] is None] == [name for name in theirs if theirs[name] is None]
        numbers = [
            {k: v for k, v in line.items() if v is not None and k != "mismatch/equal_share"} for line in (ours, theirs)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-5)
    assert (tmp_path / "run" / "evaluation.jsonl").read_text() == (whole / "evaluation.jsonl").read_text()


def test_a_server_is_started_trained_through_and_ended(tmp_path, model):
    options = {"--engine.kind": "started", "--engine.options": "--engine,transformers"}
    options |= {"--engine.transport": "broadcast", "--loop.num-steps": "2", "--evaluation.num-problems": "0"}
    assert main(command(SUMS, tmp_path / "run", model, **options)) == 0
    for version, line in enumerate(lines(tmp_path / "run"), 1):
        assert line["train/policy_version"] == version
        assert line["staleness/max"] == 0
        assert line["mismatch/k3"] < 1e-8
        assert line["weights/num_bytes"] > 100_000


def test_a_server_that_does_not_start_says_where_to_look(tmp_path, capsys, model):
    options = {"--engine.kind": "started", "--engine.options": "--engine,nonsense"}
    assert main(command(SUMS, tmp_path / "run", model, **options)) == 1
    assert f"{tmp_path}/run/server.log says why" in capsys.readouterr().err
    assert "invalid choice: 'nonsense'" in (tmp_path / "run" / "server.log").read_text()


def test_an_environment_of_ones_own_with_tools_of_its_rows(tmp_path, model):
    options = {"--rollouts.sampling.max-tokens": "8", "--rollouts.limits.max-turns": "2", "--algorithm": "rloo"}
    options["--loop.num-steps"] = "1"
    assert main(command(RECIPES / "guess.py", tmp_path / "run", model, **options)) == 0
    (line,) = lines(tmp_path / "run")
    assert line["rollout/num_trajectories"] == line["rollout/num_trainable"] == 8


def test_pairs_are_trained_on_against_the_first_model(tmp_path, model):
    options = {"--algorithm": "online_dpo", "--trainer.dpo.beta": "0.5", "--loop.num-steps": "1"}
    assert main(command(SUMS, tmp_path / "run", model, **options)) == 0
    (line,) = lines(tmp_path / "run")
    assert line["train/num_rows"] > 0


def test_two_processes_share_out_the_problems_of_one(tmp_path, model, whole):
    run_two("unbroken", *command(SUMS, tmp_path / "two", model))
    for ours, theirs in zip(lines(tmp_path / "two"), lines(whole), strict=True):
        for name in ("train/num_rows", "train/num_loss_tokens", "train/policy_version", "rollout/num_trajectories"):
            assert ours[name] == theirs[name]
        for name in ("reward/mean", "reward/digits_mean", "train/loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)
    evaluated = [[line["reward/mean"] for line in read_evaluations(run)] for run in (whole, tmp_path / "two")]
    assert evaluated[0] == pytest.approx(evaluated[1])
    kept = find_records(tmp_path / "two" / "rollouts")
    assert list(kept) == [(step, rank) for step in range(4) for rank in (0, 1)]
    for (step, rank), path in kept.items():
        head, *members = read_records(path)
        assert (head["step"], head["rank"], head["num_processes"], len(members)) == (step, rank, 2, 4)
    assert len({member["group"] for path in kept.values() for member in list(read_records(path))[1:]}) == 8
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "two", whole))
    assert ours.keys() == theirs.keys()


def test_adapters_are_trained_against_the_model_below_them(tmp_path, model):
    options = {"--lora.rank": "2", "--lora.modules": "q_proj,v_proj", "--trainer.kl-weight": "0.1"}
    options["--loop.num-steps"] = "3"
    assert main(command(SUMS, tmp_path / "run", model, **options)) == 0
    assert [line["train/policy_version"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    for line in lines(tmp_path / "run"):
        assert line["mismatch/max_abs"] < 1e-4
    assert lines(tmp_path / "run")[-1]["train/reference_k3"] > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("return [1.0]", "reward function rewards.py:correct, row "),
        ("return [float('nan')] * len(completions)", "completion 0: the reward must be finite in float32, got nan"),
    ],
)
def test_a_reward_that_is_none_ends_the_run_before_a_step_is_made(tmp_path, capsys, model, function, message):
    recipe = sums(tmp_path)
    rewards = recipe.parent / "rewards.py"
    rewards.write_text(rewards.read_text().replace("    return [float(", f"    {function}\n    return [float("))
    assert main(command(recipe, tmp_path / "run", model, **{"--evaluation.num-problems": "0"})) == 1
    assert message in capsys.readouterr().err
    assert lines(tmp_path / "run") == []


USERS = """
from unbroken import Continue, Env, EnvStart, ToolEnv

def score(completions):
    return helper(completions)

def helper(completions):
    return 1 / 0

class Broken(ToolEnv):
    def __init__(self):
        super().__init__([{"role": "user", "content": "a"}], [], self.judge)

    async def judge(self, messages):
        return 1 / 0

def make(part):
    return 1 / 0

def loss(logprobs, batch, clip):
    return 1 / 0

async def attempt(session):
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("lines", "place", "message"),
    [
        (['rewards = [{function = "mine.py:score"}]'], "helper", "reward function mine.py:score, row "),
        (['environment = "mine.py:Broken"'], "judge", "rollouts of step 0 failed, the first with"),
        (['environment = "mine.py:Broken"', 'curriculum = "mine.py:make"'], "make", "the run's own code failed with"),
        (
            ['rewards = [{function = "rewards.py:varied"}]', 'loss = "mine.py:loss"'],
            "loss",
            "numbers as a step gives them, and failed",
        ),
        (['agent.function = "mine.py:attempt"'], "attempt", "rollouts of step 0 failed, the first with"),
    ],
)
def test_an_exception_in_code_of_the_user_has_its_lines_and_its_traceback_in_a_file(
    tmp_path, capsys, model, lines, place, message
):
    data = [] if "environment" in lines[0] else ['data.file = "prompts.jsonl"']
    text = [f'model = "{model}"', f'output = "{tmp_path / "run"}"', "loop.num_steps = 1", *data]
    text += ["rollouts = {group_size = 2, problems_per_step = 1, sampling.max_tokens = 8}"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "mine.py").write_text(USERS)
    (tmp_path / "rewards.py").write_text("def varied(completions): return [float(k) for k in range(len(completions))]")
    (tmp_path / "task.toml").write_text("\n".join([*text, *lines]))
    assert main(["train", str(tmp_path / "task.toml")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "ZeroDivisionError: division by zero" in error
    number = next(k for k, line in enumerate(USERS.splitlines(), 1) if f"def {place}(" in line) + 1
    assert f'File "{tmp_path}/mine.py", line {number}, in {place}\n    return 1 / 0' in error
    assert f"the whole traceback of the next error is in {tmp_path}/run/traceback.txt" in error
    whole = (tmp_path / "run" / "traceback.txt").read_text()
    assert "Traceback (most recent call last)" in whole
    assert f'/mine.py", line {number}, in {place}' in whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--model": "/nowhere"}, "model must be a folder or the hub's name of a model"),
        (
            {"--data.prompt": "question"},
            "must have the column 'question', which prompt names: its columns are prompt, answer",
        ),
        ({"--rollouts.group-size": "1"}, "rollouts.group_size must be >= 2, got 1: a trajectory is compared"),
        ({"--trainer.dpo.beta": "1"}, "trainer.dpo must be left out with algorithm grpo"),
        ({"--lora.modules": "nowhere_proj"}, "lora.modules must be modules of the model, got ['nowhere_proj']"),
        ({"--engine.kind": "server"}, "engine.urls must be given exactly with kind server"),
        (
            {"--rewards": '[{function = "nowhere.py:f"}]'},
            "rewards[0].function must name a file that exists, got nowhere",
        ),
        ({"--tools": "{recipes}/sums/rewards.py:correct"}, "tools must be functions with the decorator @tool, got"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, capsys, model, options, message):
    options = {name: value.format(recipes=RECIPES) if "{r" in value else value for name, value in options.items()}
    assert main(command(SUMS, tmp_path / "run", model, **options)) == 1
    assert message in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_refused(tmp_path, capsys, model):
    shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    for file in (tmp_path / "model").glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(command(SUMS, tmp_path / "run", tmp_path / "model")) == 1
    assert "chat template" in capsys.readouterr().err


def test_an_output_folder_of_another_recipe_is_refused(tmp_path, capsys, model):
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": "guess.py", "settings": {}, "files": {}, "code": ""}))
    (tmp_path / "evaluation.jsonl").touch()
    assert main(command(SUMS, tmp_path, model)) == 1
    assert "holds a run of guess.py, not of recipe.toml" in capsys.readouterr().err
