"""What a file must have to be a recipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import letters_recipe
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.folder import lock_folder
from unbroken.runs.python_files import load_module
from unbroken.runs.recipe import load_recipe
from unbroken.runs.settings import describe, format_value, read_options

RECIPES = Path(__file__).parents[3] / "recipes"

GOOD = '''"""A recipe.

More about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unbroken.runs.config import RunConfig
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """Its config."""

    output: Path = Path("runs/mine")
    size: int = 3
    loop: LoopConfig = LoopConfig(num_steps=2)


async def make_task(config: Config) -> Task:
    """Make it."""
'''


def recipe(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_python_recipe_has_a_config_and_makes_a_task(tmp_path):
    found = load_recipe(recipe(tmp_path, GOOD))
    config = found.configure(["--size", "4"])
    assert (config.size, config.loop.num_steps, config.output) == (4, 2, Path("runs/mine"))
    assert found.name == "mine.py"
    assert found.doc == "A recipe.\n\nMore about it."


def test_a_toml_recipe_has_values_for_a_python_one_and_the_command_line_comes_last(tmp_path):
    recipe(tmp_path, GOOD)
    found = load_recipe(recipe(tmp_path, 'recipe = "mine.py"\nsize = 5\nloop.num_steps = 7', "mine.toml"))
    config = found.configure(["--size", "6"])
    assert (config.size, config.loop.num_steps) == (6, 7)


def test_a_toml_recipe_of_its_own_is_about_prompts(tmp_path):
    found = load_recipe(recipe(tmp_path, 'model = "m"\ndata.file = "a.jsonl"\nloop.num_steps = 7', "mine.toml"))
    (tmp_path / "a.jsonl").touch()
    assert found.configure(["--rewards", '[{function = "json:loads"}]']).data.file == tmp_path / "a.jsonl"
    with pytest.raises(
        InvalidInputError, match=r"rewards must hold at least one function or model without an environment: "
    ):
        found.configure([])


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (GOOD.replace("Config(RunConfig)", "Other(RunConfig)"), "mine.py", r"must define Config, a frozen dataclass"),
        (GOOD.replace("(RunConfig)", ""), "mine.py", r"must define Config, a frozen dataclass that extends RunConfig"),
        (GOOD.replace("async def", "def"), "mine.py", r"must define `async def make_task\(config: Config\) -> Task`"),
        ("1 / 0", "mine.py", r"mine.py cannot be loaded: ZeroDivisionError"),
        ("", "mine.yaml", r"RECIPE must be a Python or TOML file \(.py, .toml\), got .*mine.yaml"),
        ('recipe = "other.py"', "mine.toml", r"other.py must be a Python file, but it does not exist"),
        ("recipe = 3", "mine.toml", r"mine.toml: recipe must be the path of a Python recipe, got 3"),
        ("size = 3", "mine.toml", r"mine.toml: size must be a field of the recipe"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, text, name, message):
    with pytest.raises(InvalidInputError, match=message):
        load_recipe(recipe(tmp_path, text, name))


async def test_a_recipe_that_makes_no_task_is_refused(tmp_path):
    found = load_recipe(recipe(tmp_path, GOOD))
    with pytest.raises(InvalidInputError, match=r"make_task of mine.py must return a Task .*, got None"):
        await found.make_task(found.configure([]))


def test_a_file_is_run_once_until_it_changes(tmp_path):
    """A judge that it loads would else be there for each of its functions."""
    file = recipe(tmp_path, "judge = object()", "rewards.py")
    first = load_module(file).judge
    assert load_module(tmp_path / "." / "rewards.py").judge is first
    file.write_text("judge = 'another'")
    os.utime(file, ns=(0, 0))
    assert load_module(file).judge == "another"


@pytest.mark.parametrize("name", ["lookup.py", "sums/recipe.toml"])
def test_values_are_listed_as_they_can_be_given(name):
    found = load_recipe(RECIPES / name)
    described = describe(found.configure([]))
    values = {field: described[field] for field in found.section.all_fields() if field in described}
    given = found.configure([f"--{field}={format_value(value)}" for field, value in values.items() if value != ""])
    assert describe(given) == described


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"nowhere.py: there is no such file"):
        load_recipe(tmp_path / "nowhere.py")


def test_a_model_is_a_folder_beside_the_toml_file_if_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "tasks" / "mine").mkdir(parents=True)
    (tmp_path / "here" / "mine").mkdir(parents=True)
    (tmp_path / "here" / "other").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = 'model = "{0}"\n[[rewards]]\nmodel = "{0}"\n'
    for name, expected in (("mine", str(tmp_path / "tasks" / "mine")), ("other", "other"), ("me/mine", "me/mine")):
        found = load_recipe(recipe(tmp_path / "tasks", text.format(name), "task.toml"))
        assert (found.values["model"], found.values["rewards"][0].model) == (expected, expected)
    assert read_options(["--model", "mine"], found.section) == {"model": "mine"}


def test_a_second_run_in_the_folder_of_one_that_runs_is_refused(tmp_path, capsys):
    output = tmp_path / "run"
    words = ["train", letters_recipe.__file__, f"--output={output}", f"--model={tmp_path}"]
    with lock_folder(output):
        assert main(words) == 1
    printed = capsys.readouterr().err
    assert f"output must be a folder that no other run writes into, and process {os.getpid()} on " in printed
    assert not (output / "recipe.json").exists()


def test_an_environment_needs_no_file(tmp_path, capsys):
    words = ["train", "--env", "envs.py:Echo", f"--output={tmp_path / 'run'}"]
    assert main([*words, "--loop.num-steps", "2"]) == 1
    assert "environment must name a file that exists, got envs.py: there is no such file" in capsys.readouterr().err
    (tmp_path / "envs.py").write_text("class Echo: ...\n")
    assert main(["train", "--env", f"{tmp_path}/envs.py:Echo", f"--output={tmp_path / 'run'}"]) == 1
    assert "model must be given, by --model" in capsys.readouterr().err
    assert main(["train", "--env", "envs.py:Echo", "--help"]) == 0
    assert "usage: unbroken train --env NAME [--FIELD VALUE ...]" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["train"], ["train", "--env"]])
def test_without_a_recipe_and_an_environment_there_is_nothing_to_train(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "a RECIPE or --env NAME must be given" in capsys.readouterr().err


def test_another_python_recipe_of_the_same_name_does_not_go_on_with_a_run_wherever_it_lies(tmp_path, capsys):
    for name, text in (("a", GOOD), ("b", GOOD + "# Another.\n")):
        (tmp_path / name).mkdir()
        recipe(tmp_path / name, text)
    output = tmp_path / "run"
    assert main(["train", str(tmp_path / "a" / "mine.py"), f"--output={output}"]) == 1
    assert "make_task of mine.py must return a Task" in capsys.readouterr().err
    (output / "metrics").mkdir()
    (output / "metrics" / "metrics.jsonl").write_text("{}\n")
    assert main(["train", str(tmp_path / "b" / "mine.py"), f"--output={output}"]) == 1
    assert "the SHA-256 of mine.py, the recipe's code must be '" in capsys.readouterr().err
    (tmp_path / "b" / "mine.py").write_text(GOOD)
    assert main(["train", str(tmp_path / "b" / "mine.py"), f"--output={output}"]) == 1
    assert "make_task of mine.py must return a Task" in capsys.readouterr().err  # it goes on up to there
