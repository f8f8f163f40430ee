"""No test is lost between the targets of the Makefile: each is run by one of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.targets import OF_TEST, TESTS, find_target, says_e2e

ROOT = TESTS.parent


def read_command(target: str) -> list[str]:
    """The words of the command that a target runs."""
    # A `make` that `make test` has started would name its folder too.
    words = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.installed", target]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    words = ["bash", "-c", f"printf '%s\\n' {done.stdout.rpartition(' -m pytest ')[2]}"]
    split = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return split.stdout.split("\n")[:-1]


def test_make_test_and_make_e2e_collect_each_file_that_can_have_their_tests() -> None:
    files = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    folders = {path.parts[0] for path in files}
    assert folders == {*OF_TEST, "e2e", "real"}
    assert [word for word in read_command("test") if word.startswith("tests/")] == [f"tests/{name}" for name in OF_TEST]
    others = [f"tests/{path}" for path in files if path.parts[0] in OF_TEST and says_e2e(path)]
    assert len(others) > 40
    assert sorted(word for word in read_command("e2e") if word.startswith("tests/")) == sorted([*others, "tests/e2e"])


@pytest.mark.parametrize("target", ["test", "e2e"])
def test_marks_of_other_targets_are_left_out(target: str) -> None:
    command = read_command(target)
    marks = command[command.index("-m") + 1]
    others = {"e2e", "nightly", "gpu", "clients", "real"} - {target}
    assert set(marks.replace("not ", "").split(" and ")) == {*others, *({"e2e"} if target == "e2e" else ())}
    assert all(f"not {name}" in marks for name in others)


@pytest.mark.parametrize(
    ("file", "marks", "target"),
    [
        ("unit/test_types.py", set(), "test"),
        ("unit/test_types.py", {"gpu"}, None),
        ("unit/test_types.py", {"real"}, None),
        ("unit/test_types.py", {"clients"}, None),
        ("unit/test_types.py", {"e2e"}, None),  # nothing in its text says so
        ("unit/test_types.py", {"nightly"}, "nightly"),
        ("unit/training/test_training_processes.py", {"e2e"}, "e2e"),
        ("unit/engines/vllm/weights/test_vllm_weights_checkpoint.py", {"e2e"}, "e2e"),  # by its path alone
        ("e2e/test_demo.py", {"e2e"}, "e2e"),
        ("e2e/test_demo.py", {"e2e", "nightly"}, "nightly"),
        ("e2e/test_clients.py", {"e2e", "clients"}, "clients"),
        ("gpu/test_cuda.py", {"gpu"}, "gpu"),
        ("gpu/test_cuda.py", set(), None),
        ("real/test_real_model.py", {"real"}, "real"),
        ("real/test_real_model.py", set(), None),
    ],
)
def test_a_test_that_no_target_would_run_is_refused(file: str, marks: set[str], target: str | None) -> None:
    assert find_target(Path(file), marks) == target
