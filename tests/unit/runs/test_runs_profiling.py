"""Profiles: which steps, whose threads, and nothing where none are asked for."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from support import letters_recipe
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.profiler import StepProfiler, parse_steps

PRODUCT = "aten::mm"


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def names(path: Path) -> set[str]:
    return {event["name"] for event in events(path) if event["name"].startswith(("step", PRODUCT))}


def multiply() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_steps_are_those_of_a_python_range():
    assert list(parse_steps("3:5")) == [3, 4]
    assert list(parse_steps(None)) == []


@pytest.mark.parametrize("text", ["3", "3:3", "5:3", "-1:2", "a:b", "3:5:1", ""])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(InvalidInputError, match=r"profile_steps must be FIRST:STOP with FIRST below STOP, .* got"):
        parse_steps(text)


def test_a_trace_has_its_steps_and_the_threads_that_were_there_before(tmp_path):
    begin, end = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait(10)
        with record_function("step's thread"):
            multiply()
        end.set()

    thread = threading.Thread(target=work)
    thread.start()
    profiler = StepProfiler(range(1, 3), tmp_path / "profiles", rank=0)
    for number in range(4):
        with profiler.step(number):
            if number == 1:
                begin.set()
                assert end.wait(10)
    thread.join()
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "steps-1-2.rank-0.json.gz"
    assert names(path) == {"step 1", "step 2", "step's thread", PRODUCT}


def test_a_run_that_ends_early_leaves_a_trace_of_what_it_did(tmp_path):
    profiler = StepProfiler(range(5), tmp_path, rank=1)
    with profiler.step(0):
        multiply()
    with pytest.raises(ZeroDivisionError), profiler.step(1):
        raise ZeroDivisionError
    profiler.close()
    profiler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["steps-0-1.rank-1.json.gz"]


def test_without_steps_nothing_is_written(tmp_path):
    profiler = StepProfiler(range(0), tmp_path / "profiles", rank=0)
    with profiler.step(0):
        pass
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_profiles_its_steps(tmp_path, capsys):
    model = save_tiny_model(tmp_path / "model")
    words = ["train", letters_recipe.__file__, f"--model={model}", f"--output={tmp_path / 'run'}", "--loop.num-steps=3"]
    assert main([*words, "--profile-steps=3:4"]) == 1
    assert "profile_steps must begin before step 3 (loop.num_steps), got 3:4" in capsys.readouterr().err
    assert main([*words, "--profile-steps=1:9"]) == 0
    (path,) = (tmp_path / "run" / "profiles").iterdir()
    assert path.name == "steps-1-2.rank-0.json.gz"
    found = {event["name"] for event in events(path)}
    assert found >= {"step 1", "step 2", "rollouts", "train", "publish", "after step", PRODUCT}
    assert "step 0" not in found
    by_thread = {event["tid"] for event in events(path) if event["name"].startswith("aten::")}
    assert len(by_thread) >= 2, "the engine's and the trainer's"
