"""Change one comparison, boolean or branch of a module at a time, and name the changes that no test sees.

    python tools/mutate.py src/unbroken/types --tests tests/unit/test_types.py --seconds 600

Works on a copy; each change is tested in a fork of a process that has the large imports. Conditions of a branch that
raises, returns or continues come first, each made true ("always") and false ("never"): a guard is tested to act, and to
stay quiet. What is found is for reading: many changes that are left change nothing (docs/lab-notes/mutations.md).
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis  # noqa: F401  for all forks
import numpy as np  # noqa: F401
import pytest

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
LEFT_OUT = "not e2e and not gpu and not clients and not real"
SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class Mutation(NamedTuple):
    """A changed module."""

    rank: int
    """Guards first, then other branches, then operators."""
    file: Path
    line: int
    before: str
    after: str
    module: str


def main() -> int:
    """Print each change that passes the tests; 1 if the tests fail without any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    asked = parser.parse_args()
    files = [each for path in asked.sources for each in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    mutations = [each for file in files for each in find_mutations(file.resolve().relative_to(ROOT))]
    random.Random(0).shuffle(mutations)
    mutations.sort(key=lambda each: each.rank)
    end = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        if not passes(Path(folder), asked.tests):
            print("the tests fail as they are")
            return 1
        num_tried = num_left = 0
        for each in mutations:
            if time.monotonic() > end:
                break
            num_tried += 1
            file = Path(folder) / each.file
            original = file.read_text()
            file.write_text(each.module)
            if passes(Path(folder), asked.tests):
                num_left += 1
                print(f"{each.file}:{each.line}  {each.before}  ->  {each.after}", flush=True)
            file.write_text(original)
    print(f"{num_tried} of {len(mutations)} changes tried, {num_left} of them not seen")
    return 0


def find_mutations(file: Path) -> Iterator[Mutation]:
    """All changes of a module, each as the text of a whole one."""
    tree = ast.parse((ROOT / file).read_text())
    for number, node in enumerate(ast.walk(tree)):
        for rank, change in _list_changes(node):
            changed = copy.deepcopy(tree)
            target = next(each for k, each in enumerate(ast.walk(changed)) if k == number)
            change(target)
            shown = [ast.unparse(each.test if isinstance(each, ast.If) else each) for each in (node, target)]
            text = ast.unparse(ast.fix_missing_locations(changed))
            yield Mutation(rank, file, getattr(node, "lineno", 0), *shown, text)


def _list_changes(node: ast.AST) -> Iterator[tuple[int, Callable[[Any], None]]]:
    if isinstance(node, (ast.If, ast.IfExp)):
        ends = (ast.Raise, ast.Return, ast.Continue)
        rank = 0 if isinstance(node, ast.If) and any(isinstance(each, ends) for each in node.body) else 1
        yield rank, lambda target: setattr(target, "test", ast.Constant(True))
        yield rank, lambda target: setattr(target, "test", ast.Constant(False))
    elif isinstance(node, ast.Compare):
        for k, operator in enumerate(node.ops):
            swap = SWAPS[type(operator)]
            yield 2, lambda target, k=k, swap=swap: target.ops.__setitem__(k, swap())
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield 2, lambda target: setattr(target, "op", other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield 2, lambda target: setattr(target, "operand", ast.UnaryOp(ast.Not(), target.operand))


def passes(folder: Path, tests: Sequence[str]) -> bool:
    """Whether the tests pass on the copy; a change that makes them hang is seen."""
    if (process := os.fork()) == 0:
        code = 1
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.chdir(folder)
            paths = [str(folder / "src"), str(folder / "tests")]
            sys.path[:0] = paths
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for what the tests start
            config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
            # pytest cannot rewrite what is imported already, and says so by a warning, which is an error here.
            code = int(pytest.main(["-x", "-q", "-n0", "--assert=plain", "-m", LEFT_OUT, *config, *tests]))
        finally:
            os._exit(code)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


if __name__ == "__main__":
    sys.exit(main())
