"""`unbroken eval --follow RUN`: the checkpoints of a run, evaluated by another process than the one that trains."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support import letters_recipe
from support.evaluations import read_evaluations
from support.served import save_tiny_model, served
from support.waits import wait_until
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.evaluation.evaluator import Evaluator
from unbroken.runs.folder import lock_folder
from unbroken.runs.recipe import load_recipe
from unbroken.runs.records.files import find_records, read_records
from unbroken.runs.settings import build, describe, read_described, read_options
from unbroken.training.checkpoints import find_checkpoints
from unbroken.viewer.resources import open_runs
from unbroken.weights.folders import remove_folder

RECIPE = Path(letters_recipe.__file__)
SHORT = ["--rollouts.sampling.max-tokens=8", "--rollouts.group-size=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Path:
    """A run of three steps with all of its checkpoints, and evaluations of its own of both ends."""
    output = tmp_path_factory.mktemp("runs") / "letters"
    assert main(train(output, model, "--evaluation.num-problems=3", "--evaluation.every=2")) == 0
    return output


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "letters"))


def train(output: Path, model: Path, *options: str, num_steps: int = 3) -> list[str]:
    words = ["train", str(RECIPE), f"--output={output}", f"--model={model}", f"--loop.num-steps={num_steps}"]
    return [*words, "--checkpoints.every=1", "--checkpoints.num-kept=9", *SHORT, *options]


def follow(run: Path, *words: str) -> int:
    return main(["eval", "--follow", str(run), *words])


def numbers(lines: list[dict[str, Any]]) -> dict[int, tuple[float, int]]:
    return {line["step"]: (line["reward/mean"], line["policy_version/max"]) for line in lines}


def read_completions(run: Path) -> dict[int, list[Any]]:
    """The ids of each evaluation's rollouts, by step."""
    files = find_records(run / "evaluations" / "evaluation")
    return {
        step: [[row["token_ids"] for row in record["rows"]] for record in list(read_records(path))[1:]]
        for (step, _), path in files.items()
    }


def test_checkpoints_are_evaluated_as_the_run_would_have_on_the_same_curve(run, capsys):
    own = read_evaluations(run)
    assert [line["step"] for line in own] == [0, 2, 3]
    shutil.rmtree(run / "evaluations")
    (run / "evaluation.jsonl").unlink()
    capsys.readouterr()
    assert follow(run, "--json") == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    lines = read_evaluations(run)
    assert report == {"run": str(run), "state": "ended", "evaluations": lines, "removed_steps": []}
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert numbers(lines).items() >= numbers(own).items()
    assert numbers(lines)[1][1] == 1
    assert "ended after 3 steps, 4 evaluations made here" in " ".join(shown.err.split())
    records = find_records(run / "evaluations" / "evaluation")
    assert list(records) == [(step, 0) for step in range(4)]
    head, *rollouts = read_records(records[1, 0])
    assert (head["policy_version"], len(rollouts)) == (1, 3)
    shown_run = open_runs([run]).get("run/0")
    assert [line["step"] for line in shown_run["evaluations"]] == [0, 1, 2, 3]
    assert shown_run["recorded_steps"][-4:] == [f"{step}@evaluation" for step in range(4)]


@pytest.mark.parametrize("updates", ["merged", "adapter"])
def test_adapters_are_evaluated_as_the_run_that_trained_them_would_have(tmp_path, model, updates):
    """What the run's engine got does not matter: the follower's samples as that one did, with the same versions."""
    output = tmp_path / "adapters"
    adapters = ["--lora.rank=4", "--trainer.optimizer.learning-rate=0.3", f"--trainer.lora-updates={updates}"]
    assert main(train(output, model, "--evaluation.num-problems=3", "--evaluation.every=1", *adapters)) == 0
    own, rollouts = numbers(read_evaluations(output)), read_completions(output)
    assert len({str(found) for found in rollouts.values()}) == 4, "each step must change what is sampled"
    shutil.rmtree(output / "evaluations")
    (output / "evaluation.jsonl").unlink()
    assert follow(output) == 0
    assert numbers(read_evaluations(output)) == own
    assert read_completions(output) == rollouts


def test_what_is_evaluated_stays_as_it_is_and_is_not_evaluated_again(run, capsys):
    before = read_evaluations(run)
    assert follow(run) == 0
    assert "1 evaluation made here" in " ".join(capsys.readouterr().err.split())
    lines = read_evaluations(run)
    assert [line for line in lines if line["step"] != 1] == before
    assert follow(run) == 0
    assert "0 evaluations made here" in " ".join(capsys.readouterr().err.split())
    assert read_evaluations(run) == lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--problems=2"], "--problems must be 3 as in the evaluations of evaluation in"),
        (["--output=elsewhere"], "output must be left out with --follow"),
        (["--nothing=2"], "--nothing must be a field of the recipe"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(run, capsys, words, message):
    assert follow(run, *words) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_and_a_recipe_that_moved_are_named(run, tmp_path, capsys):
    assert follow(tmp_path / "none") == 1
    assert "must hold the recipe and settings of the run" in capsys.readouterr().err
    stored = json.loads((run / "recipe.json").read_text())
    assert Path(stored["code"]) == RECIPE
    (run / "recipe.json").write_text(json.dumps(stored | {"code": "/moved/letters_recipe.py"}))
    assert follow(run) == 1
    assert "/moved/letters_recipe.py is not there: `unbroken eval RECIPE --follow" in capsys.readouterr().err
    assert main(["eval", str(RECIPE), "--follow", str(run)]) == 0


def test_the_engine_of_the_training_gets_no_weights(run, capsys):
    stored = json.loads((run / "recipe.json").read_text())
    stored["settings"] |= {"engine.kind": "server", "engine.urls": ["http://127.0.0.1:9"], "engine.weights_dir": "/w"}
    (run / "recipe.json").write_text(json.dumps(stored))
    words = ["--engine.kind=server", "--engine.urls=http://127.0.0.1:9"]
    assert follow(run, *words, f"--engine.weights-dir={run.parent}") == 1
    assert "engine.urls must be other than the run's, got ['http://127.0.0.1:9'] for both" in capsys.readouterr().err
    assert follow(run, *words[:1], "--engine.urls=http://127.0.0.1:8", "--engine.weights-dir=/w") == 1
    assert "engine.weights_dir must be other than the run's, got /w for both" in capsys.readouterr().err


def test_a_checkpoint_that_is_half_written_is_none_and_one_that_is_damaged_ends_it(run, capsys):
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000001").rename(checkpoints / f".step-00000001-{'0' * 32}")
    assert follow(run) == 0
    assert [line["step"] for line in read_evaluations(run)] == [0, 2, 3]
    (checkpoints / f".step-00000001-{'0' * 32}").rename(checkpoints / "step-00000001")
    state = checkpoints / "step-00000001" / "state.json"
    state.write_text(state.read_text()[:100])
    assert follow(run) == 1
    assert "step-00000001 must hold a whole checkpoint" in capsys.readouterr().err


def test_a_checkpoint_that_the_run_removes_first_is_counted_and_said(run, capsys, monkeypatch):
    """It is there when the follower begins, and gone when its turn comes."""
    (run / "evaluation.jsonl").unlink()
    sample = Evaluator.sample

    async def removes(self):
        if (first := run / "checkpoints" / "step-00000001").exists():
            remove_folder(first)
        return await sample(self)

    monkeypatch.setattr(Evaluator, "sample", removes)
    assert follow(run, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["removed_steps"] == [1]
    said = " ".join(shown.err.split())
    assert "step 1 is not evaluated: the run removed its checkpoint first (1 so far" in said
    assert "3 evaluations made here, 1 left out, as the run removed its checkpoint first" in said
    assert [(line["step"], line["num_lost"]) for line in read_evaluations(run)] == [(0, 0), (2, 1), (3, 1)]


def test_it_goes_on_where_sigterm_ended_it(run, capsys, monkeypatch):
    (run / "evaluation.jsonl").unlink()
    sample, sampled = Evaluator.sample, []

    async def ends(self):
        sampled.append(self.sampler.engine.policy_version)
        if sampled == [0, 1, 2]:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return await sample(self)

    monkeypatch.setattr(Evaluator, "sample", ends)
    # A terminated command has 15 s to end: its timer ended pytest itself, with status 143, in a later test.
    monkeypatch.setattr("unbroken.runs.signals.exit_in", lambda seconds, *, status: None)
    assert follow(run) == 143
    assert "what was evaluated is kept, and the same command continues it" in capsys.readouterr().err
    assert [line["step"] for line in read_evaluations(run)] == [0, 1]
    assert follow(run) == 0
    assert [line["step"] for line in read_evaluations(run)] == [0, 1, 2, 3]
    assert sampled == [0, 1, 2, 2, 3]


def test_a_run_that_died_is_named_so_and_one_follower_is_enough(run, capsys):
    ended = subprocess.Popen(["true"])
    ended.wait()
    (run / "run.lock").write_text(f"{ended.pid} on {socket.gethostname()}\n")
    with lock_folder(run / "follow"):
        assert follow(run) == 1
    assert "no other run writes into, and process" in capsys.readouterr().err
    assert follow(run) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "died after 3 steps, 1 evaluation made here: the same command follows it once it is started again" in said


def test_a_run_is_followed_while_it_trains_until_it_has_ended(tmp_path, model, capsys, forked_commands):
    """It cannot make its third step before the first two are evaluated."""
    output = tmp_path / "live"
    held = tmp_path / "live.held"
    held.write_text("2")
    words = train(output, model, "--rollouts.problems-per-step=2", num_steps=4)
    process = subprocess.Popen([sys.executable, "-m", "unbroken", *words], stdout=subprocess.DEVNULL)

    def let_go() -> None:
        asyncio.run(wait_until(lambda: (output / "evaluation.jsonl").exists() and len(read_evaluations(output)) == 3))
        held.unlink()

    waiting = threading.Thread(target=let_go)
    try:
        asyncio.run(wait_until(lambda: 1 in find_checkpoints(output / "checkpoints") or process.poll()))
        waiting.start()
        assert follow(output, "--problems=2") == 0
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        held.unlink(missing_ok=True)
        waiting.join()
    assert [(line["step"], line["policy_version/min"]) for line in read_evaluations(output)] == [
        (n, n) for n in range(5)
    ]
    assert "ended after 4 steps, 5 evaluations made here" in " ".join(capsys.readouterr().err.split())


@pytest.mark.e2e
def test_servers_of_its_own_get_each_version(run, model):
    before = numbers(read_evaluations(run))
    (run / "evaluation.jsonl").unlink()
    with served(model, "--weights-dir", str(run.parent / "weights"), engine="transformers") as server:
        words = [
            "--engine.kind=server",
            f"--engine.urls={server.url}",
            f"--engine.weights-dir={run.parent / 'weights'}",
        ]
        assert follow(run, *words) == 0
    found = numbers(read_evaluations(run))
    assert {step: found[step] for step in before} == before
    assert found[1][1] == 1


def test_the_settings_of_a_run_are_read_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("r.py", "x.jsonl", "y.jsonl"):
        (tmp_path / name).touch()
    section = load_recipe(None).section
    words = {
        "model": "m", "output": "o", "data.file": "x.jsonl", "rewards": '[{function="r.py:f", weight=0.5}]',
        "loop.num-steps": "3", "algorithm": "rloo", "lora.rank": "4", "checkpoints.every-s": "none",
        "evaluation-sets": '[{name="a", data={file="y.jsonl"}, sampling={temperature=0.6}}]',
        "renderer.template-kwargs": "{a=true}", "rollouts.sampling.stop-token-ids": "1,2",
    }  # fmt: skip
    config = build(section, read_options([f"--{name}={value}" for name, value in words.items()], section))
    stored = json.loads(json.dumps(describe(config)))
    assert build(section, read_described(stored, section)) == config
    with pytest.raises(
        InvalidInputError, match=r"trackers\.project must be given again, by --trackers\.project: secrets"
    ):
        read_described(stored | {"trackers.project": "https://u:***@host"}, section)
    with pytest.raises(InvalidInputError, match="learning_rat"):
        read_described({"trainer.optimizer.learning_rat": 1}, section)
    # A set's own format, which code alone can give: this set would take the place of the recipe's, without it.
    stored["evaluation_sets"][0]["sampling"]["structured_output"] = {"regex": "a*"}
    with pytest.raises(InvalidInputError, match=r"evaluation_sets\[0\]\.sampling\.structured_output must be left out"):
        read_described(stored, section)
