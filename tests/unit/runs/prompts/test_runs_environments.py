"""Environments by name: their arguments come from the table, the row and the run, and each is checked at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from unbroken.errors import InvalidInputError
from unbroken.rollout.tools import tool
from unbroken.runs.prompts.built_in import Config
from unbroken.runs.prompts.dataset import DataConfig, Rows
from unbroken.runs.prompts.environments import Environments
from unbroken.runs.python_files import FunctionName
from unbroken.runs.recipe import load_recipe

FILE = """
from typing import Literal
from unbroken import ToolEnv

class Any_(ToolEnv):
    def __init__(self, number, split, seed, *, largest: int = 20, level: Literal["easy", "hard"] = "easy"):
        super().__init__([{"role": "user", "content": "?"}], [], lambda messages: 0.0)
        self.seen = (number, split, seed, largest, level)

class OfRows(ToolEnv):
    def __init__(self, messages, answer, tools, strict: bool):
        super().__init__(messages, tools, lambda messages: float(answer))
        self.seen = (messages[0]["content"], answer, [each.name for each in tools], strict)

class Open(ToolEnv):
    def __init__(self, **given):
        self.seen = given

class NoEnv:
    async def start(self): ...

def make(number):
    return Any_(number, "made", 0)
"""


@tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "envs.py").write_text(FILE)
    rows = [{"prompt": "1?", "answer": 1, "uses": ["add"]}, {"prompt": "2?", "answer": 2, "uses": []}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "envs.py"


def environments(file: Path, name: str, **arguments: Any) -> Environments:
    return Environments(FunctionName(f"{file}:{name}"), arguments, seed=3)


def load_rows(file: Path, **options: Any) -> Rows:
    return Rows(DataConfig(file=file.parent / "prompts.jsonl", shuffle=False, **options), seed=0)


def test_an_environment_gets_the_table_and_the_number(file):
    make = environments(file, "Any_", largest=5, level="hard")(None, [], split="train")
    assert [make(number).seen for number in (0, 7)] == [(0, "train", 3, 5, "hard"), (7, "train", 3, 5, "hard")]
    assert environments(file, "make")(None, [], split="train")(4).seen == (4, "made", 0, 20, "easy")


def test_an_environment_gets_the_columns_that_it_names(file):
    make = environments(file, "OfRows", strict=True)(load_rows(file, tools="uses"), [add], split="train")
    assert [make(number).seen for number in range(3)] == [
        ("1?", 1, ["add"], True), ("2?", 2, [], True), ("1?", 1, ["add"], True),
    ]  # fmt: skip
    seen = environments(file, "Open", a=1)(load_rows(file), [], split="test")(0).seen
    assert {name: seen[name] for name in ("prompt", "answer", "number", "split", "seed", "a")} == {
        "prompt": "1?", "answer": 1, "number": 0, "split": "test", "seed": 3, "a": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Any_", {"largest": "x"}, r"environment_arguments.largest must be a valid integer, got 'x'"),
        ("Any_", {"level": "odd"}, r"environment_arguments.level must be 'easy' or 'hard', got 'odd'"),
        ("Any_", {"largets": 3}, r"environment_arguments.largets must be an argument of Any_: it takes largest, level"),
        ("Any_", {"number": 3}, r"environment_arguments.number must be left out: the run gives it, got 3"),
        ("NoEnv", {}, r"environment must name a class with the methods of Env, got NoEnv, which has no step, reward"),
        ("Anny", {}, r"environment must name something in .*, got 'Anny': the file has Any_"),
    ],
)
def test_a_table_that_the_class_does_not_take_is_refused(file, name, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        environments(file, name, **arguments)


def test_a_module_is_imported_and_a_plain_name_is_no_class(file):
    with pytest.raises(InvalidInputError, match=r"environment must name something that can be imported"):
        Environments(FunctionName("nowhere_at_all:Env"), {}, seed=0)
    with pytest.raises(
        InvalidInputError, match=r"environment must be written module:Class or file.py:Class, got 'Env'"
    ):
        Environments(FunctionName("Env"), {}, seed=0)
    Environments(FunctionName("support.pictures_recipe:PictureEnv"), {}, seed=0)(None, [], split="train")


@pytest.mark.parametrize(
    ("name", "arguments", "has_rows", "message"),
    [
        ("OfRows", {}, True, r"environment_arguments.strict must be given: OfRows needs it, and there is the columns"),
        ("OfRows", {"strict": True}, False, r"environment_arguments.messages must be given: .* there is no data set"),
        ("OfRows", {"strict": True, "answer": 3}, True, r"environment_arguments.answer must be left out: the data set"),
        ("Any_", {}, True, r"data must be left out with Any_, which takes neither messages nor a column: prompt, ans"),
    ],
)
def test_arguments_that_nobody_or_two_give_are_refused(file, name, arguments, has_rows, message):
    with pytest.raises(InvalidInputError, match=message):
        environments(file, name, **arguments)(load_rows(file) if has_rows else None, [], split="train")


def test_tools_for_a_class_without_tools_are_refused(file):
    with pytest.raises(InvalidInputError, match=r"tools must be left out with Any_, which takes no argument `tools`"):
        environments(file, "Any_")(None, [add], split="train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "data must be given without an environment: data.file or data.hub"),
        ('data.file = "a.jsonl"', "rewards must hold at least one function or model without an environment"),
        ('data.file = "a.jsonl"\nrewards = [{function = "r.py:f"}]\nenvironment_arguments = {a = 1}',
         "environment_arguments must be left out without an environment, got"),
        ('environment = "envs.py:Any_"\nrewards = [{function = "r.py:f"}]', "rewards must be left out without data"),
    ],
)  # fmt: skip
def test_a_recipe_has_data_and_rewards_or_an_environment(file, text, message):
    recipe = file.parent / "recipe.toml"
    recipe.write_text(f'model = "m"\nloop.num_steps = 1\n{text}')
    with pytest.raises(InvalidInputError, match=message):
        load_recipe(recipe).configure([])


def test_a_toml_file_and_the_command_line_name_an_environment_and_its_arguments(file):
    recipe = file.parent / "recipe.toml"
    recipe.write_text(
        'model = "m"\nloop.num_steps = 1\nenvironment = "envs.py:Any_"\n[environment_arguments]\nlargest = 5\n'
    )
    config = load_recipe(recipe).configure([])
    assert isinstance(config, Config)
    assert config.environment == f"{file.parent}/envs.py:Any_"
    assert config.environment_arguments == {"largest": 5}
    config = load_recipe(recipe).configure(["--environment-arguments", '{level = "hard"}'])
    assert config.environment_arguments == {"level": "hard"}
