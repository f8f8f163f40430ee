"""A folder belongs to one recipe with one config."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.errors import InvalidInputError
from unbroken.runs.folder import claim_folder, digest_files, lock_folder, make_folder
from unbroken.runs.recipe import load_recipe
from unbroken.runs.settings import describe

SETTINGS = {"output": "runs/a", "seed": 0, "trainer.optimizer.betas": [0.9, 0.999], "loop.num_steps": 5}


def make_step(folder: Path) -> None:
    """Leave the numbers of a step."""
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "metrics" / "metrics.jsonl").write_text('{"step": 0}\n')


def test_a_run_begins_and_continues(tmp_path):
    assert not claim_folder(tmp_path / "runs" / "a", "lookup.py", SETTINGS)
    assert claim_folder(tmp_path / "runs" / "a", "lookup.py", SETTINGS)


@pytest.mark.parametrize(
    "changed",
    [
        *({"output": "b"}, {"loop.num_steps": 9}, {"engine.urls": ["http://b"]}, {"loop.outages.wait_s": 9.0}),
        *({"sessions.host": "10.0.0.1"}, {"rollouts.samplers": 4}, {"trainer.warn_of_inexact": False}),
    ],
)
def test_what_decides_no_gradient_may_change(tmp_path, changed):
    claim_folder(tmp_path, "lookup.py", SETTINGS)
    make_step(tmp_path)
    assert claim_folder(tmp_path, "lookup.py", SETTINGS | changed)
    assert json.loads((tmp_path / "recipe.json").read_text())["settings"] == SETTINGS | changed


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        (
            "sums.toml",
            SETTINGS,
            r"output must be a folder without a run of another recipe: .* holds a run of lookup.py, not of sums.toml",
        ),
        ("lookup.py", SETTINGS | {"seed": 1}, r"seed must be 0 as in the run in .*, got 1: .* or another --output"),
        ("lookup.py", SETTINGS | {"new": True}, r"new must be None as in the run in .*, got True"),
        ("lookup.py", SETTINGS | {"output_format": "x"}, r"output_format must be None as in the run in .*, got 'x'"),
        (
            "lookup.py",
            SETTINGS | {"seed": 1, "new": 2, "other": 3},
            r"^new must be None as in the run in .*, got 2, and other None, got 3, and seed 0, got 1: a run",
        ),
        ("lookup.py", {"output": "runs/a"}, r"seed must be 0 as in the run in .*, got None"),
    ],
)
def test_another_run_is_refused_and_changes_nothing(tmp_path, recipe, settings, message):
    claim_folder(tmp_path, "lookup.py", SETTINGS)
    make_step(tmp_path)
    before = (tmp_path / "recipe.json").read_text()
    with pytest.raises(InvalidInputError, match=message):
        claim_folder(tmp_path, recipe, settings)
    assert (tmp_path / "recipe.json").read_text() == before


def test_a_run_may_stop_to_claim_equal_bits_but_not_begin_to(tmp_path):
    fast, exact = (SETTINGS | {"trainer.numerics": name} for name in ("fast", "exact"))
    claim_folder(tmp_path, "lookup.py", exact)
    make_step(tmp_path)
    assert claim_folder(tmp_path, "lookup.py", fast)
    with pytest.raises(InvalidInputError, match=r"trainer.numerics must be 'fast' as in the run in .*, got 'exact'"):
        claim_folder(tmp_path, "lookup.py", exact)


def test_of_tables_that_differ_only_the_field_is_shown(tmp_path):
    one = {"function": "rewards.py:correct", "weight": 1.0, "timeout_s": 600.0}
    claim_folder(tmp_path, "lookup.py", SETTINGS | {"rewards": [one, one]})
    make_step(tmp_path)
    for rewards, message in (
        ([one, one | {"weight": 0.5}], r"^rewards\[1\].weight must be 1.0 as in the run in .*, got 0.5: a run"),
        ([one], r"^rewards must be a list of 2 as in the run in .*, got a list of 1: a run"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            claim_folder(tmp_path, "lookup.py", SETTINGS | {"rewards": rewards})


def test_a_run_that_trained_no_step_begins_anew_with_other_settings(tmp_path):
    """A model's name or an agent's command that is corrected would else need another folder."""
    claim_folder(tmp_path, "lookup.py", SETTINGS)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text("")
    (tmp_path / "server.log").write_text("no such model")
    (tmp_path / "evaluation.jsonl").write_text('{"step": 0}\n')
    assert not claim_folder(tmp_path, "lookup.py", SETTINGS | {"seed": 1})
    assert not (tmp_path / "evaluation.jsonl").exists()
    (tmp_path / "evaluation.jsonl").touch()
    for name in ("agents", "sessions", "rollouts", "checkpoints"):
        (tmp_path / name).mkdir()
    for file in ("agents/a.log", "sessions/sessions.sqlite3", "rollouts/step-0.jsonl", "traceback.txt"):
        (tmp_path / file).touch()
    with pytest.raises(InvalidInputError, match=r"holds a run of lookup.py, not of sums.toml"):
        claim_folder(tmp_path, "sums.toml", SETTINGS)
    (tmp_path / "evaluation.jsonl").unlink()
    assert not claim_folder(tmp_path, "sums.toml", SETTINGS | {"model": "another"})
    assert json.loads((tmp_path / "recipe.json").read_text()) == {
        "recipe": "sums.toml", "settings": SETTINGS | {"model": "another"}, "files": {}, "code": "", "curriculum": None,
    }  # fmt: skip
    assert sorted(each.name for each in tmp_path.iterdir()) == ["recipe.json", "server.log"]


def test_a_run_goes_on_with_other_contents_of_a_file_only_on_purpose(tmp_path):
    name = "the SHA-256 of rewards.py"
    claim_folder(tmp_path, "lookup.py", SETTINGS, files={name: "a" * 64, "the SHA-256 of tools.py": "c" * 64})
    make_step(tmp_path)
    assert claim_folder(tmp_path, "lookup.py", SETTINGS, files={name: "a" * 64})
    message = (
        f"{name} must be 'a+' as in the run in .*, got 'b+': .* another --output; .* write null in its place in .*json"
    )
    with pytest.raises(InvalidInputError, match=message):
        claim_folder(tmp_path, "lookup.py", SETTINGS, files={name: "b" * 64})
    path = tmp_path / "recipe.json"
    path.write_text(path.read_text().replace(f'"{"a" * 64}"', "null"))
    assert claim_folder(tmp_path, "lookup.py", SETTINGS, files={name: "b" * 64})
    assert json.loads(path.read_text())["files"] == {name: "b" * 64, "the SHA-256 of tools.py": "c" * 64}
    with pytest.raises(InvalidInputError, match=name):
        claim_folder(tmp_path, "lookup.py", SETTINGS, files={name: "a" * 64})


def test_a_run_that_trained_no_step_begins_anew_with_other_files(tmp_path):
    """A reward function that failed in the first step is corrected."""
    claim_folder(tmp_path, "lookup.py", SETTINGS, files={"the SHA-256 of a.py": "a"})
    assert not claim_folder(tmp_path, "lookup.py", SETTINGS, files={"the SHA-256 of a.py": "b"})


def test_the_files_that_settings_name_are_known_by_their_contents(tmp_path):
    names = ["p.jsonl", "q.csv.gz", "a.parquet", "rewards.py", "tools.py", "env.py", "agent.sh", "key", "urls.json"]
    for name in ["model/chat_template.jinja", "model/tokenizer.json", "saved/train/data-00000-of-00001.arrow", *names]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "model" / "model.safetensors").write_text("weights, which a run trains")
    settings = {
        "model": f"{tmp_path}/model", "data.file": [f"{tmp_path}/p.jsonl", f"{tmp_path}/q.csv.gz"], "data.prompt": "q",
        "rewards": [{"function": f"{tmp_path}/rewards.py:right", "model": None}], "tools": [f"{tmp_path}/tools.py:add"],
        "environment": f"{tmp_path}/env.py:Env", "agent.command": ["sh", f"{tmp_path}/agent.sh"], "seed": 0,
        "evaluation_sets": [{"data": {"file": f"{tmp_path}/{name}"}} for name in ("a.parquet", "saved")],
        "engine.api_key_file": f"{tmp_path}/key", "engine.urls_file": f"{tmp_path}/urls.json", "loss": "module:loss",
        "curriculum": f"{tmp_path}/nowhere.py:make", "environment_arguments": {"text": "a\0b", "long": "x" * 9999},
    }  # fmt: skip
    before = digest_files(settings)
    found = {name.removeprefix(f"the SHA-256 of {tmp_path}/") for name in before}
    assert found == {
        *names[:-2],
        "model/chat_template.jinja",
        "model/tokenizer.json",
        "saved/train/data-00000-of-00001.arrow",
    }
    for name in found:
        (tmp_path / name).write_text("another")
        after = digest_files(settings)
        assert [each for each in before if after[each] != before[each]] == [f"the SHA-256 of {tmp_path}/{name}"]
        before = after


@pytest.mark.parametrize("name", ["checkpoints", "model", "final"])
def test_what_a_run_made_belongs_to_its_settings(tmp_path, name):
    claim_folder(tmp_path, "lookup.py", SETTINGS)
    (tmp_path / name / "step-00000001").mkdir(parents=True)
    with pytest.raises(InvalidInputError, match=r"seed must be 0 as in the run in"):
        claim_folder(tmp_path, "lookup.py", SETTINGS | {"seed": 1})


def test_a_run_that_continues_unchanged_writes_nothing(tmp_path):
    """The processes of a run claim its folder at the same time, and none may find another's file half written."""
    claim_folder(tmp_path, "lookup.py", SETTINGS)
    before = (tmp_path / "recipe.json").stat()
    assert claim_folder(tmp_path, "lookup.py", SETTINGS)
    assert (tmp_path / "recipe.json").stat().st_ino == before.st_ino


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"output must be a writable folder, got .*file/run"):
        claim_folder(tmp_path / "file" / "run", "lookup.py", SETTINGS)
    with pytest.raises(InvalidInputError, match=r"output must be a writable folder, got .*file/run"):
        make_folder(tmp_path / "file" / "run")


def test_the_folder_of_a_run_is_made_for_this_user_only_and_one_that_is_there_stays(tmp_path):
    (tmp_path / "there").mkdir(mode=0o755)
    for name, mode in (("above/run", 0o700), ("there", 0o755)):
        make_folder(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_folder_on_a_full_disk_is_locked_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("unbroken.runs.folder.os.write", lambda *_: Path("/dev/full").write_text("x"))
    with lock_folder(tmp_path), pytest.raises(InvalidInputError, match="process of another run runs in"):
        lock_folder(tmp_path).__enter__()


def test_a_claim_that_was_cut_short_is_made_again(tmp_path):
    (tmp_path / "recipe.json.part").write_text("{")
    assert not claim_folder(tmp_path, "lookup.py", SETTINGS)


def test_a_broken_claim_is_refused(tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(
        InvalidInputError, match=r"recipe.json must hold the recipe and settings of the run in its folder: KeyError"
    ):
        claim_folder(tmp_path, "lookup.py", SETTINGS)


def test_a_run_that_begins_anew_removes_the_one_before_and_no_other_file(tmp_path):
    assert not claim_folder(tmp_path, "lookup.py", SETTINGS, anew=True)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text("{}")
    (tmp_path / "evaluation.jsonl").write_text("{}")
    (tmp_path / "thesis.tex").write_text("")
    assert not claim_folder(tmp_path, "lookup.py", SETTINGS | {"seed": 1}, anew=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["recipe.json", "thesis.tex"]
    with pytest.raises(InvalidInputError, match=r"holds a run of lookup.py, not of sums.toml"):
        claim_folder(tmp_path, "sums.toml", SETTINGS, anew=True)


HOLDER = """
import sys, time
from pathlib import Path
from unbroken.runs.folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_with_the_process_of_the_first(tmp_path):
    claim_folder(tmp_path, "lookup.py", SETTINGS)
    with lock_folder(tmp_path):
        with pytest.raises(
            InvalidInputError, match=rf"no other run writes into, and process {os.getpid()} on .* runs in {tmp_path}"
        ):
            lock_folder(tmp_path).__enter__()
        assert not claim_folder(tmp_path / "other", "lookup.py", SETTINGS)
    assert [path.name for path in tmp_path.glob("*.lock")] == []
    with lock_folder(tmp_path):
        pass


def test_a_lock_dies_with_the_process_that_holds_it(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(InvalidInputError, match=f"process {holder.pid} on "):
            lock_folder(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with lock_folder(tmp_path):
        assert not claim_folder(tmp_path, "lookup.py", SETTINGS)


def test_a_folder_with_other_files_is_refused_and_keeps_these_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    message = r"output must be an empty folder or that of a run, and .* other files"
    with pytest.raises(InvalidInputError, match=message), lock_folder(tmp_path):
        claim_folder(tmp_path, "lookup.py", SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


FORK = """
import os, signal, sys, time
from pathlib import Path
from unbroken.runs.folder import lock_folder

with lock_folder(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_has_forked_does_not_hold_its_folder(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", FORK, str(folder)], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        try:
            assert process.wait(timeout=60) == -signal.SIGKILL
            with lock_folder(folder):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_run_keeps_no_secret_and_continues_without_it(tmp_path):
    """The password of a database was in recipe.json, which all users could read."""
    config = load_recipe(None).configure(
        [
            "--model=m", "--loop.num-steps=1", "--environment=verifiers:a",
            "--sessions.store=postgresql://me:p@ss/w0rd@db.example/runs?sslmode=require&sslpassword=hunter2",
            '--environment-arguments={judge = {api_key = "sk-aaaaaaaaaaaaaaaa", model = "j"}, max_tokens = 5}',
        ]
    )  # fmt: skip
    claim_folder(tmp_path / "run", "a", describe(config))
    file = tmp_path / "run" / "recipe.json"
    kept = file.read_text()
    for secret in ("p@ss", "w0rd", "hunter2", "sk-a"):
        assert secret not in kept
    settings = json.loads(kept)["settings"]
    assert settings["sessions.store"] == "postgresql://me:***@db.example/runs?sslmode=require&sslpassword=***"
    assert settings["environment_arguments"] == {"judge": {"api_key": "***", "model": "j"}, "max_tokens": 5}
    make_step(tmp_path / "run")
    assert claim_folder(tmp_path / "run", "a", describe(config))


def test_the_folder_of_a_run_is_for_its_user_alone_and_one_that_was_there_stays_as_it_is(tmp_path):
    before = os.umask(0o022)
    try:
        (tmp_path / "shared").mkdir()
        for name, mode in (("runs/a", 0o700), ("shared", 0o755)):
            with lock_folder(tmp_path / name):
                claim_folder(tmp_path / name, "lookup.py", SETTINGS)
                assert (tmp_path / name).stat().st_mode & 0o777 == mode
                for file in ("recipe.json", "run.lock"):
                    assert (tmp_path / name / file).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)
