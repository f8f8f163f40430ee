"""`unbroken eval`: the numbers with their intervals, and models of each kind on a task, without a trainer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import letters_recipe
from support.evaluations import read_evaluations
from support.served import save_tiny_model, served
from unbroken.cli import main
from unbroken.runs.evaluate import make_labels, open_task
from unbroken.runs.evaluation.evaluator import cut_evaluations
from unbroken.runs.evaluation.numbers import Measure
from unbroken.runs.records.files import find_records, read_records, write_records
from unbroken.training.trainer import Trainer
from unbroken.viewer.resources import open_runs

RECIPE = str(Path(letters_recipe.__file__))
SHORT = ("--rollouts.sampling.max-tokens", "6")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, model) -> Path:
    """A run of one step with a checkpoint, evaluated before and after it."""
    output = tmp_path_factory.mktemp("run") / "letters"
    options = ["--evaluation.num-problems=3", "--evaluation.num-samples=2", "--loop.num-steps=1", *SHORT]
    assert main(["train", RECIPE, f"--output={output}", f"--model={model}", *options]) == 0
    return output


def evaluate(output: Path, *words: str, task: str = RECIPE) -> dict[str, Any]:
    assert main(["eval", task, "--output", str(output), *words]) == 0
    report: dict[str, Any] = json.loads((output / "report.json").read_text())
    return report


def test_a_number_is_that_of_all_samples_and_its_interval_that_of_problems():
    found = Measure.of([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert found.value == 6 / 8
    assert found.find_interval() == (0.5, 1.0)  # the ends: one problem twice
    many = Measure.of([[float(n % 2)] for n in range(400)])
    low, high = many.find_interval()
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.006)


@pytest.mark.parametrize(
    ("values", "is_pass", "interval"),
    [
        ([[1.0], [1.0], [1.0], [1.0]], True, (0.5101, 1.0)),
        ([[0.0], [1.0], [1.0], [0.0]], True, (0.15, 0.85)),
        ([[1.0], [1.0]], False, None),
        ([[0.25]], True, None),
        ([[], []], True, None),
        ([[], [0.5], [0.75]], True, (0.5, 0.75)),
    ],
)
def test_an_interval_is_wilsons_where_all_problems_pass_or_fail_and_there_is_none_without_a_spread(
    values, is_pass, interval
):
    found = Measure.of(values, is_pass=is_pass).find_interval()
    assert found == (None if interval is None else pytest.approx(interval, abs=1e-4))


def test_models_of_all_kinds_are_evaluated_as_in_training_without_a_trainer(tmp_path, model, run, monkeypatch, capsys):
    monkeypatch.delattr(Trainer, "__init__")
    words = ["--problems", "3", "--samples", "2", *SHORT, "--model", str(model), "--model", str(run)]
    (tmp_path / "key").write_text("secret")
    key = ["--api-key-file", str(tmp_path / "key")]
    with served(model, *key, engine="transformers") as server:
        words += ["--model", server.url, "--tokenizer", str(model), "--model", str(run / "checkpoints")]
        words += ["--engine.api-key-file", str(tmp_path / "key")]
        report = evaluate(tmp_path / "out", *words)
        shutil.copytree(tmp_path / "out", tmp_path / "part")
        (tmp_path / "part" / "report.json").write_text(json.dumps(report | {"models": report["models"][:1]}))
        gone = tmp_path / "part" / report["models"][0]["model"] / "evaluations"
        shutil.rmtree(gone / "evaluation")
        assert main(["eval", RECIPE, "--output", str(tmp_path / "part"), *words]) == 1
        assert f"{gone}/evaluation must be a file of rollouts: FileNotFoundError" in capsys.readouterr().err
    measures = [each["sets"]["evaluation"]["measures"] for each in report["models"]]
    before, after = read_evaluations(run)
    names = ("reward/mean", "pass@1", "pass@2", "completion_tokens/mean")
    for measured, line in zip(measures, (before, after, before, after), strict=True):
        assert {name: measured[name]["value"] for name in names} == pytest.approx({name: line[name] for name in names})
    first, trained, same, _ = [
        each["measures"]["reward/mean"] for each in [{"measures": measures[0]}, *report["differences"]]
    ]
    assert trained["value"] == pytest.approx(after["reward/mean"] - before["reward/mean"])
    assert (same["value"], same["low"], first["num_problems"]) == (0.0, None, 3)
    folders = [Path(each["folder"]) for each in report["models"]]
    for folder, line in zip(folders, (before, after, before, after), strict=True):
        ((key, path),) = find_records(folder / "evaluations" / "evaluation").items()
        head, *rollouts = read_records(path)
        assert (key, head["set"], len(rollouts)) == ((0, 0), "evaluation", 6)
        assert np.mean([each["reward"] for each in rollouts]) == pytest.approx(line["reward/mean"])
        assert not list(folder.glob(".model*"))
    shown = open_runs([tmp_path / "out"])
    assert [each["name"] for each in shown.get("index")["runs"]] == sorted(each["model"] for each in report["models"])


def test_models_with_like_names_have_labels_of_their_own():
    assert make_labels(["/a/b", "x/a/b", "a-b-1", "http://h:80", "/"]) == ["a-b-2", "a-b-3", "a-b-1", "h-80", "model-5"]


def test_a_data_set_is_a_task_with_a_reward_function_and_json_is_all_that_is_printed(tmp_path, model, capsys):
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def length(completions):\n    return [len(text) / 8 for text in completions]\n\n\n"
        "def zero(completions):\n    return [0.0 for _ in completions]\n"
    )
    rewards = [f"--reward={tmp_path / 'rewards.py'}:{name}" for name in ("length", "zero")]
    capsys.readouterr()
    task = str(tmp_path / "tasks.jsonl")
    report = evaluate(tmp_path / "out", "--model", str(model), "--json", *rewards, *SHORT, task=task)
    assert json.loads(capsys.readouterr().out) == report
    (found,) = (each["sets"]["evaluation"] for each in report["models"])
    assert (found["num_problems"], found["num_samples"]) == (4, 1)
    parts = {name: found["measures"][f"reward_parts/{name}"] for name in ("length", "zero")}
    assert parts["length"]["value"] == found["measures"]["reward/mean"]["value"] > 0
    assert (parts["zero"]["value"], parts["zero"]["low"]) == (0.0, None)
    assert found["statuses"]
    ((_, path),) = find_records(tmp_path / "out" / "evaluations" / "evaluation").items()
    _, *rollouts = read_records(path)
    assert sorted(each["data"]["columns"]["answer"] for each in rollouts) == list("0123")
    assert main(["eval", task, f"--model={model}", *rewards, "--problems=5", f"--output={tmp_path}/other"]) == 1
    assert "--problems must be at most 4, which evaluation has, got 5" in capsys.readouterr().err


def test_an_interrupted_evaluation_keeps_what_it_sampled_and_the_same_command_goes_on(tmp_path, model, capsys):
    tasks, output, own = tmp_path / "tasks.jsonl", tmp_path / "out", shutil.copytree(model, tmp_path / "model")
    tasks.write_text("".join(f'{{"prompt": "Say {n}.", "answer": "{n}"}}\n' for n in range(4)))
    (tmp_path / "rewards.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\n\n\n"
        "def end(completions, answer):\n"
        "    with (HERE / 'calls').open('a') as file:\n        file.write(answer[0])\n"
        "    if answer[0] == '3' and not (HERE / 'again').exists():\n"
        "        while len(list(HERE.glob('out/evaluations/*/*.gz'))) < 3:\n            time.sleep(0.01)\n"
        "        (HERE / 'again').touch()\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(5)\n"
        "    return [1.0 for _ in completions]\n"
    )
    words = [str(tasks), f"--model={own}", f"--reward={tmp_path}/rewards.py:end", f"--output={output}", *SHORT]
    output.mkdir()
    for name in ("run.lock", "recipe.json.part", "traceback.txt"):  # it was killed before it had sampled
        (output / name).touch()
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests are a background job
    try:
        assert main(["eval", *words]) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert "3 of 4 problems of evaluation are answered, and kept in" in capsys.readouterr().err
    assert main(["eval", *words, "--samples=2"]) == 1
    assert "--samples must be left out as in the evaluation in" in capsys.readouterr().err
    code = tmp_path / "rewards.py"
    files = {tasks: f"the SHA-256 of {tasks}", code: f"the SHA-256 of {code}"}
    for path, name in {**files, own / "model.safetensors": f"the weights of {own}"}.items():
        then = path.read_bytes()
        path.write_bytes(then[:-4] + b'5"}\n')
        assert main(["eval", *words]) == 1
        assert re.search(rf"{name} must be '\w+' as in the evaluation in .*, got '\w+'", capsys.readouterr().err)
        path.write_bytes(then)
    assert main(["eval", *words]) == main(["eval", *words]) == 0
    assert sorted((tmp_path / "calls").read_text()) == list("01233")
    report = json.loads((output / "report.json").read_text())
    found = report["models"][0]["sets"]["evaluation"]
    assert (len(report["models"]), found["num_rollouts"], found["seconds"]) == (1, 4, None)


def test_a_run_of_no_steps_evaluates_keeps_all_rollouts_and_goes_on_with_steps(tmp_path, model):
    words = ["train", RECIPE, f"--output={tmp_path / 'run'}", f"--model={model}", "--evaluation.num-problems=2", *SHORT]
    assert main([*words, "--loop.num-steps=0"]) == 0
    assert [line["step"] for line in read_evaluations(tmp_path / "run")] == [0]
    assert (tmp_path / "run" / "final" / "config.json").is_file()
    assert main([*words, "--loop.num-steps=1"]) == 0
    assert [line["step"] for line in read_evaluations(tmp_path / "run")] == [0, 1]
    found = find_records(tmp_path / "run" / "evaluations" / "evaluation")
    assert [(key, len(list(read_records(path))) - 1) for key, path in found.items()] == [((0, 0), 2), ((1, 0), 2)]


def test_evaluations_of_steps_that_were_lost_are_removed_with_their_rollouts(tmp_path):
    lines = [json.dumps({"step": step, "num_rollouts": 1}) + "\n" for step in (0, 4, 8)]
    (tmp_path / "evaluation.jsonl").write_text("".join(lines))
    head = {"kind": "step", "format": 1}
    for step in (0, 4, 8):
        write_records(tmp_path / "evaluations" / "hard", step, 0, [head], images={})
    cut_evaluations(tmp_path, 4)
    assert [line["step"] for line in read_evaluations(tmp_path)] == [0, 4]
    assert list(find_records(tmp_path / "evaluations" / "hard")) == [(0, 0), (4, 0)]


def test_a_compressed_data_file_is_a_task():
    assert open_task("prompts.jsonl.gz")[1] == ["--data.file", "prompts.jsonl.gz"]


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("recipe.txt", "", "TASK must be a recipe (.py, .toml), a data set's file (.jsonl, .json, .parquet, .csv), or"),
        ("no.toml", "", "RECIPE must be a Python or TOML file, got no.toml: there is no such file"),
        (
            RECIPE,
            "--model /no/folder",
            "--model must be a folder or the hub's name of a model, got '/no/folder': there",
        ),
        (RECIPE, "--model {empty}/../emty", "emty': there is no such folder: did you mean"),
        ("{rows}", "--model {model}", "or --reward rewards.py:name of `unbroken eval`"),
        (RECIPE, "--model {empty}", "CHECKPOINT must be a checkpoint's folder or that of a run with one"),
        (RECIPE, "--model http://127.0.0.1:9", "no answer from http://127.0.0.1:9 in 2 tries"),
        (RECIPE, "--model {model} --model {model}", "--model must be different models, got"),
        (RECIPE, "--model {model} --samples 0", "--samples must be >= 1, got 0"),
        (RECIPE, "--model {model} --samples=99999999999", "must be less than 1000000, what a file of"),
        (RECIPE, "--model {broken} --problems=1", "model must be a folder or the hub's name of a model, got"),
        (RECIPE, "--model {model} --rollouts.samplers 2 --engine.kind started", "rollouts.samplers must be"),
        (RECIPE, "--model {model} --output {model}", "output must be a new or empty folder, or that of the same"),
        (RECIPE, "--model {model} --nothing 2", "--nothing must be a field of the recipe"),
        (
            RECIPE,
            "--model {model} --engine.kind server --engine.urls http://x --engine.weights-dir /tmp",
            "engine.kind must be embedded, started or colocated to evaluate",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_sentence(tmp_path, model, capsys, task, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    shutil.copytree(model, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "model.safetensors", 1000)
    words = words.format(model=model, empty=tmp_path / "empty", broken=tmp_path / "broken")
    output = "" if "--output" in words else f"--output {tmp_path / 'out'}"
    assert main(["eval", task.format(rows=tmp_path / "rows.jsonl"), *output.split(), *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_of_a_saved_data_set_is_a_task_as_its_file_is(tmp_path):
    for task in (str(tmp_path), "prompts.jsonl.gz"):
        recipe, words = open_task(task)
        assert (recipe.name, words) == ("built-in recipe", ["--data.file", task])
