"""`unbroken.fit` makes the run of `unbroken train`, with rows and functions as they are, also in a running loop."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path

import datasets
import pytest

import unbroken
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.folder import read_recipe
from unbroken.runs.prompts.built_in import load_tool
from unbroken.runs.records.files import find_records, read_records

pytestmark = pytest.mark.usefixtures("datasets_cache")

ROWS = [{"prompt": f"{k} + {k}?", "answer": str(2 * k)} for k in range(4)]
REWARD = """
def correct(completions, answer):
    return [len(text) % 7 + float(right in text) for text, right in zip(completions, answer)]
"""
TOOL = '''
from unbroken import tool

@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number
'''
SMALL = {"rollouts": {"problems_per_step": 2, "group_size": 2, "sampling": {"max_tokens": 8}}}
SMALL |= {"evaluation": {"num_problems": 2}, "trainer": {"numerics": "exact", "optimizer": {"learning_rate": 1e-3}}}


def correct(completions, answer):
    return [len(text) % 7 + float(right in text) for text, right in zip(completions, answer, strict=True)]


@unbroken.tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def fit(model, output, **changes):
    given = {"rows": ROWS, "reward": correct, "tools": [double], "steps": 2, "output": output, **SMALL, **changes}
    return unbroken.fit(model, **given)


def without_seconds(steps):
    timed = ("seconds/", "tokens_per_s/", "idle/", "memory/")
    return [{name: value for name, value in step.items() if not name.startswith(timed)} for step in steps]


def read_tokens(folder):
    """The ids, logprobs and rewards of all rollouts."""
    records = [each for _, path in sorted(find_records(folder / "rollouts").items()) for each in read_records(path)]
    return [[record.get(name) for name in ("rows", "reward", "messages", "data")] for record in records]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, model):
    """A run that was made where a loop runs."""

    async def cell():
        return fit(model, tmp_path_factory.mktemp("fitted") / "run")

    return asyncio.run(cell())


def test_fit_makes_the_run_that_train_makes(fitted, model, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "tools.py").write_text(TOOL)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "task.toml").write_text(
        f'model = "{model}"\ndata.file = "prompts.jsonl"\ntools = ["tools.py:double"]\noutput = "run"\n'
        "loop.num_steps = 2\nrollouts = {problems_per_step = 2, group_size = 2, sampling.max_tokens = 8}\n"
        'evaluation.num_problems = 2\ntrainer = {numerics = "exact", optimizer.learning_rate = 1e-3}\n'
        '[[rewards]]\nfunction = "rewards.py:correct"\n'
    )
    assert main(["train", str(tmp_path / "task.toml")]) == 0
    trained = unbroken.FitResult(folder=tmp_path / "run")
    assert len(fitted.metrics) == 2
    assert without_seconds(fitted.metrics) == without_seconds(trained.metrics)
    assert read_tokens(fitted.folder) == read_tokens(trained.folder)
    names = ["config.json", "model.safetensors"]
    assert [(fitted.model / each).read_bytes() for each in names] == [
        (trained.model / each).read_bytes() for each in names
    ]
    own, other = read_recipe(fitted.folder), read_recipe(trained.folder)
    differ = {name for name in own.settings if own.settings[name] != other.settings[name]}
    assert differ == {"output", "data.file", "data.hub", "rewards", "tools"}
    assert own.settings["tools"] == ["fit:double"]
    assert {"the SHA-256 of fit:correct", "the SHA-256 of fit:double"} <= own.files.keys()


def test_the_result_has_the_metrics_rollouts_evaluations_and_the_model(fitted):
    assert [step["step"] for step in fitted.metrics] == [0, 1]
    assert len([record["reward"] for record in fitted.rollouts]) == 2 * 2 * 2
    assert [line["step"] for line in fitted.evaluations] == [0, 2]
    assert (fitted.model / "config.json").is_file()


def test_the_result_is_a_page_whose_texts_are_no_markup(fitted, tmp_path):
    page = fitted._repr_html_()
    assert page.startswith('<iframe sandbox="allow-scripts"')
    assert "mean reward by step" in page
    assert "unbroken view" in page
    assert "<script" not in page  # it is in the attribute srcdoc, escaped


def test_the_same_call_continues_and_another_reward_is_refused(fitted, model):
    assert len(fit(model, fitted.folder, steps=3).metrics) == 3

    def correct(completions):
        return [0.5 * len(text) for text in completions]

    with pytest.raises(
        InvalidInputError, match=r"the SHA-256 of fit:correct must be .* as in the run in .*, got .* or another output="
    ):
        fit(model, fitted.folder, reward=correct, steps=3)
    weighted = [{"function": globals()["correct"], "weight": 0.5}]
    with pytest.raises(InvalidInputError, match=r"^rewards\[0\]\.weight must be 1\.0 as in .*, got 0\.5: .* output="):
        fit(model, fitted.folder, reward=(), rewards=weighted, steps=3)


def test_the_loop_that_calls_is_free_of_the_run_and_an_error_comes_through(model, tmp_path):
    def broken(completions):
        raise ValueError("no such answer")

    async def cell():
        fit(model, tmp_path / "run", reward=broken)

    with pytest.raises(unbroken.UnbrokenError, match="no such answer"):
        asyncio.run(cell())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-4}, "learning_rate must be a field of the recipe: did you mean trainer.optimizer.learni"),
        ({"loop": {"num_steps": 3}}, "loop.num_steps must be left out: steps is the same, got 3"),
        ({"steps": "two"}, "loop.num_steps must be a valid integer, got 'two'"),
        ({"reward": 3}, "reward must be a function or a list of functions, got 3"),
        ({"reward": functools.partial(correct)}, r"rewards\[0\].function must be a function or class with a name"),
        ({"reward": [correct, 1.0]}, "reward must be a function or a list of functions, got 1.0 as number 1"),
        ({"rewards": [{"function": correct}]}, "rewards must be left out with reward"),
        ({"tools": [correct]}, "a second|tools must be functions with the decorator @tool"),
        ({"tools": double}, "tools must be a list of functions with the decorator @tool, got "),
        ({"rows": []}, "rows must be a list of dicts with at least one"),
        ({"rows": 7}, "rows must be a list of dicts .*, got int"),
        ({"rows": ["1 + 1?"]}, r"rows must be dicts of columns, got '1 \+ 1\?' as row 0"),
        ({"rows": [{"prompt": "a"}, {"prompt": 3}]}, "rows must have values of one type in each column"),
        ({"rows": ROWS, "data": {"hub": "some/rows"}}, "data.hub must be left out with rows, got 'some/rows'"),
        ({"rows": "nothing.jsonl"}, "data.file must name a file that exists, got nothing.jsonl"),
        ({"rows": None}, "data must be given without an environment"),
        ({"environment_arguments": {"make": correct}}, "environment_arguments.make must be a value as in a recipe's"),
        ({"trainer": 3}, "trainer must be a table of .*, got 3"),
        ({"model": object()}, "model must be a model's folder or its name on the hub, got an object of object"),
    ],
    # By the names of the arguments: a value's text may have an address, which differs between workers.
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_argument_is_named_with_its_rule_and_value_before_a_folder_is_made(model, tmp_path, changes, message):
    given = {"model": model, **changes}
    with pytest.raises(InvalidInputError, match=message):
        fit(given.pop("model"), tmp_path / "run", **given)
    assert not (tmp_path / "run" / "metrics").exists()


def test_rows_may_be_a_data_set_and_a_file(model, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    runs = [
        fit(model, tmp_path / name, rows=rows, steps=1)
        for name, rows in {"given": datasets.Dataset.from_list(ROWS), "file": file}.items()
    ]
    assert without_seconds(runs[0].metrics) == without_seconds(runs[1].metrics)


def test_a_column_that_the_first_row_lacks_is_kept(model, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "2"}]
    seen = []

    def see(completions, answer):
        seen.extend(answer)
        return [0.5] * len(completions)

    fit(model, tmp_path / "run", rows=rows, reward=see, steps=0)
    assert set(seen) == {None, "2"}


def test_an_environment_is_a_class_as_it_is(model, tmp_path):
    class Echo:
        def __init__(self, number):
            self.number = number

        async def start(self):
            return unbroken.EnvStart(messages=[{"role": "user", "content": f"Say {self.number}."}])

        async def step(self, message):
            return unbroken.Done()

        async def reward(self, messages):
            return float(self.number % 2)

        async def close(self):
            pass

    result = fit(model, tmp_path / "run", rows=None, reward=(), tools=(), environment=Echo, steps=1)
    assert {record["reward"] for record in result.rollouts} == {0.0, 1.0}


def test_what_was_given_is_not_there_for_another_command():
    with pytest.raises(
        InvalidInputError, match=r"tools must name .*, got 'fit:double': that was given to unbroken\.fit"
    ):
        load_tool(Path("fit:double"))


def test_a_teacher_beside_rewards_that_are_normalised_apart_after_a_warm_start(model, tmp_path):
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "said.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    teacher = save_tiny_model(tmp_path / "teacher", initializer_range=0.1)

    def brief(completions):
        return [-len(text) for text in completions]

    settings = {
        "reward": [correct, brief],
        "advantages": "gdpo",
        "teacher": {"models": [teacher]},
        "warm_start": {"data": str(tmp_path / "said.jsonl"), "steps": 1, "weight": 0.5},
        "trainer": {"num_iterations": 2, "num_minibatches": 2, "teacher_weight": 0.1},
    }
    first = fit(model, tmp_path / "run", steps=2, tools=(), **settings)
    continued = fit(model, tmp_path / "run", steps=3, tools=(), **settings)
    assert first.folder == continued.folder
    supervised, *rest = continued.metrics
    assert "teacher/kl" not in supervised
    assert [step["step"] for step in rest] == [1, 2]
    for step in rest:
        assert step["teacher/kl"] > 0
        assert step["teacher/token_share"] == 1
        assert step["supervised/loss"] > 0
        assert step["counters/dropped_rows"] == 0
