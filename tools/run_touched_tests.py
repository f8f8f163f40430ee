"""Run the unit, contract and property tests that a change touches, for a minute at most: `make quick`.

A change is what differs from the commit where this branch left main, committed or not, and new files. Test files that
changed run first, then those that import a changed module, then those that import a module that does, and so on; among
these first those that import the fewest modules, as they are about what changed. Slow kinds of tests (`LEFT_OUT`) do
not run. Arguments go to pytest: `-k word`, `--lf`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest
from measure_house import PACKAGE, ROOT, SOURCE, find_imports, name_module

LIMIT_S = 50.0
MAX_DISTANCE = 3
TESTS = ROOT / "tests"
FOLDERS = (TESTS / "unit", TESTS / "contract", TESTS / "property")
LEFT_OUT = "not gpu and not clients and not real and not e2e and not vllm"


def main() -> int:
    """Find the test files and run them; pytest's exit code."""
    limit = _Limit(time.monotonic() + LIMIT_S)
    files = find_touched(find_changes())
    if not files:
        print("no test imports what changed: run `make test`")
        return 0
    print(f"{len(files)} test files are near what changed, the nearest first")
    code = pytest.main(["-q", "-m", LEFT_OUT, *sys.argv[1:], *map(str, files)], plugins=[limit])
    passed = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or (
        limit.is_over and not limit.num_failed
    )
    return 0 if passed else int(code)


def find_changes() -> set[Path]:
    """The Python files that differ from main."""
    branches = _run_git("branch", "--all", "--format=%(refname:short)").split()
    main_branch = "main" if "main" in branches else "origin/main"
    base = _run_git("merge-base", "HEAD", main_branch).strip()
    names = _run_git("diff", "--name-only", base) + _run_git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names.splitlines() if name.endswith(".py")}


def find_touched(changes: set[Path]) -> list[Path]:
    """The test files that reach a changed file by imports, the nearest first and of these the most specific."""
    files = {name_module(path): path for path in (SOURCE / PACKAGE).rglob("*.py")}
    files |= {f"support.{path.stem}": path for path in TESTS.glob("support/*.py")}
    tests = {str(path): path for folder in FOLDERS for path in folder.rglob("test_*.py")}
    imports = {name: find_imports(name, ast.parse(path.read_text()), files) for name, path in (files | tests).items()}
    distances = {name: 0 for name, path in (files | tests).items() if path in changes}
    reached = set(distances)
    for distance in range(1, MAX_DISTANCE + 1):
        reached = {name for name, imported in imports.items() if imported & reached and name not in distances}
        distances |= dict.fromkeys(reached, distance)
    found = [name for name in tests if name in distances]
    return [tests[name] for name in sorted(found, key=lambda name: (distances[name], len(imports[name])))]


def _run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


class _Limit:
    """Ends a run of pytest at a time, and says how many tests are left."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._num_run = 0
        self.num_failed = 0
        self.is_over = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_failed += report.failed

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._num_run += 1
        left = item.session.testscollected - self._num_run
        self.is_over = left > 0 and time.monotonic() > self._until_s
        if self.is_over:
            item.session.shouldstop = f"{LIMIT_S:.0f} s are over and {left} tests are left: run `make test`"


if __name__ == "__main__":
    sys.exit(main())
