"""The gsm8k recipes, with a few rows and a tiny random model in place of what they name on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.rollout.tools import ToolStatus
from unbroken.runs.config import EngineKind
from unbroken.runs.prompts.built_in import Config
from unbroken.runs.python_files import load_module
from unbroken.runs.recipe import load_recipe
from unbroken.runs.records.files import find_records, read_records

FOLDER = Path(__file__).parents[2] / "recipes" / "gsm8k"
RECIPES = ("recipe.toml", "with_calculator.toml")
ROWS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "She has 3 + 4 = <<3+4=7>>7 pens.\n#### 7"},
    {"question": "A car costs $1,200. Two cost?", "answer": "2 * 1200 = <<2*1200=2400>>2400\n#### 2,400"},
]
SMALL = (
    "--engine.kind=embedded", "--engine.options=[]", "--precision=float32",
    "--data.hub=none", "--data.subset=none",
    "--loop.num-steps=2", "--rollouts.problems-per-step=2", "--rollouts.group-size=2",
    "--rollouts.sampling.max-tokens=8", "--evaluation.sampling.max-tokens=8",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_trains(tmp_path, model, name):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    output = tmp_path / "run"
    sets = f'[{{data = {{file = "{rows}", prompt = "question"}}}}]'
    data = [f"--data.file={rows}", f"--evaluation-sets={sets}", f"--output={output}", f"--model={model}"]
    assert main(["train", str(FOLDER / name), *SMALL, *data]) == 0
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/num_trainable"] for line in lines] == [4, 4]
    assert {"reward/correct_mean", "reward/has_answer_mean"} <= lines[0].keys()
    member = list(read_records(next(iter(find_records(output / "rollouts").values()))))[1]
    assert "####" in member["messages"][0]["content"]
    assert [each["function"]["name"] for each in member["tools"]] == ["calculate"] * (name != "recipe.toml")
    assert (output / "final" / "config.json").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_for_one_gpu_and_names_what_is_on_the_hub(name):
    config = load_recipe(FOLDER / name).configure([])
    assert isinstance(config, Config)
    assert config.engine.kind is EngineKind.COLOCATED
    assert config.data is not None
    assert [(each.data.hub, each.data.split, each.num_problems) for each in config.evaluation_sets] == [
        ("openai/gsm8k", "test", 200)
    ]
    assert config.data.hub == "openai/gsm8k"


@pytest.mark.parametrize(
    ("text", "value"),
    [("so 7\n#### 7", 7.0), ("#### 1,234.5", 1234.5), ("#### $18", 18.0), ("#### 3\n#### -4", -4.0), ("7", None)],
)
def test_the_number_after_the_mark_is_the_answer(text: str, value: float | None):
    assert load_module(FOLDER / "gsm8k_rewards.py").read_answer(text) == value


def test_rewards_compare_numbers():
    rewards: Any = load_module(FOLDER / "gsm8k_rewards.py")
    assert rewards.correct(["#### 2400", "#### 7.0", "7"], ["#### 2,400", "#### 7", "#### 7"]) == [1.0, 1.0, 0.0]
    assert rewards.has_answer(["#### 1", "1"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("(48 + 24) / 2", "36"), ("2 * 3.5", "7"), ("1/3", "0.3333333333"), ("-7 // 2", "-4"), (" 10 % 4 ", "2")],
)
async def test_the_calculator_computes(expression, answer):
    outcome = await load_module(FOLDER / "calculator.py").calculate.call({"expression": expression})
    assert (outcome.status, outcome.content) == (ToolStatus.OK, answer)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').getcwd()", "expression must be arithmetic, got __import__('os').getcwd()"),
        ("2 ** 9999999", "expression must be arithmetic, got 2 ** 9999999"),
        ("1/0", "ZeroDivisionError"),
        ("1 +", "SyntaxError"),
        ("1" + "+1" * 200, "expression must have at most 200 characters, got 401"),
        ("9" * 190 + "." + " * 1e308", "expression must have a finite value"),
    ],
)
async def test_what_the_calculator_does_not_compute_is_answered_with_the_reason(expression, message):
    outcome = await load_module(FOLDER / "calculator.py").calculate.call({"expression": expression})
    assert outcome.status is ToolStatus.ERROR
    assert message in outcome.content
