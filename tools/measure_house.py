"""Count the concepts of the package, and fail if a number is above its bound in `BOUNDS`: `make check` runs it.

Whoever lets a number grow raises its bound here, so that a review sees it; whoever lowers one lowers the bound. Lines
and files are shown and have no bound: one was paid by joined lines, and by helpers with good names that became a part
of their callers.
`--names` also prints which modules, classes and functions they are; those of the walks: `measure_walks.py --names`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "unbroken"


class Bound(NamedTuple):
    """What a number may be today, and what it should become."""

    at_most: int
    goal: int


BOUNDS = {
    "public names (classes and functions of modules)": Bound(1679, 1690),
    "settings of `unbroken train`": Bound(185, 185),  # 160, and 25 for teachers, policies and what may be sampled
    "functions of complexity above 15": Bound(0, 20),
    "functions of complexity above 10": Bound(114, 130),
    "getattr with a default": Bound(42, 60),
    "walk, command line to optimizer: functions": Bound(34, 36),
    "walk, command line to optimizer: files": Bound(14, 14),
    "walk, request of an agent: functions": Bound(23, 24),
    "walk, request of an agent: files": Bound(13, 13),
    "modules with one importer, under 100 lines": Bound(29, 30),
    "public class names that exist twice": Bound(0, 0),
    "lines of the longest function": Bound(69, 70),
    "functions over 50 lines": Bound(8, 8),
    "import cycles": Bound(0, 0),
    "CPU seconds of the last `make test`": Bound(1500, 900),
}

SMALL = 100
LONG = 50


def main() -> int:
    """Print the tables; 1 if a number is above its bound."""
    modules = {name_module(path): path for path in sorted((SOURCE / PACKAGE).rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    imports = {name: find_imports(name, tree, modules) for name, tree in trees.items()}
    importers = Counter(each for found in imports.values() for each in found)
    functions = [
        (f"{name}.{node.name}", node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = sorted(((node.end_lineno or 0) - node.lineno + 1, name) for name, node in functions)
    branches = sorted((count_branches(node), name) for name, node in functions)
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    is_package = {name: path.name == "__init__.py" for name, path in modules.items()}
    small = [name for name, num in importers.items() if num == 1 and lines[name] < SMALL and not is_package[name]]
    twice = [name for name, num in classes.items() if num > 1]
    cycles = _find_cycles({**imports, PACKAGE: set()})  # its imports are for type checkers: none is made at run time
    values = {
        "public names (classes and functions of modules)": sum(count_public(tree) for tree in trees.values()),
        "settings of `unbroken train`": count_settings(),
        "functions of complexity above 15": sum(num > 15 for num, _ in branches),
        "functions of complexity above 10": sum(num > 10 for num, _ in branches),
        "getattr with a default": sum(count_guesses(tree) for tree in trees.values()),
        **measure_walks(),
        "modules with one importer, under 100 lines": len(small),
        "public class names that exist twice": len(twice),
        "lines of the longest function": lengths[-1][0],
        "functions over 50 lines": sum(length > LONG for length, _ in lengths),
        "import cycles": len(cycles),
        "CPU seconds of the last `make test`": read_cpu_seconds(),
    }
    _print_packages(lines)
    print(f"\n{'':52}{'now':>8}{'bound':>8}{'goal':>8}")
    for name, value in values.items():
        print(f"{name:52}{value:8,}{BOUNDS[name].at_most:8,}{BOUNDS[name].goal:8,}")
    if "--names" in sys.argv[1:]:
        print("\none importer:", *sorted(small), sep="\n  ")
        print("\nclass names that exist twice:", *sorted(twice), sep="\n  ")
        print("\nlongest functions:", *reversed(lengths[-10:]), sep="\n  ")
        print("\nmost branches:", *(each for each in reversed(branches) if each[0] > 10), sep="\n  ")
        print("\ncycles:", *cycles, sep="\n  ")
    grown = [
        f"{name}: {value:,}, at most {BOUNDS[name].at_most:,}"
        for name, value in values.items()
        if value > BOUNDS[name].at_most
    ]
    if grown:
        print("\nLarger than before. Make it smaller, or raise the bound in tools/measure_house.py and say why:")
        print(*grown, sep="\n")
    return bool(grown)


def count_public(tree: ast.Module) -> int:
    """The classes and functions of a module that others may import: what a reader has to know by name."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, kinds) and not node.name.startswith("_") for node in tree.body)


def count_branches(function: ast.AST) -> int:
    """McCabe's complexity (1976), with each `and`, `or`, comprehension and its conditions as a branch.

    Ruff's C901 leaves these out, and so passes what was joined into one expression.
    """
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            branches += 1 + len(node.ifs)
    return branches


def count_guesses(tree: ast.AST) -> int:
    """The calls of `getattr` with a default: each asks an object what it is."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 3]
    return sum(isinstance(call.func, ast.Name) and call.func.id == "getattr" for call in calls)


def count_settings() -> int:
    """The settings that `unbroken train RECIPE --help-all` lists, for the recipe `sums`."""
    recipe = ROOT / "recipes" / "sums" / "recipe.toml"
    command = [sys.executable, "-m", "unbroken", "train", str(recipe), "--help-all"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(line.startswith("  --") for line in shown.splitlines())


def measure_walks() -> dict[str, int]:
    """What `measure_walks.py` prints. It traces real runs, in a process of its own."""
    command = [sys.executable, str(ROOT / "tools" / "measure_walks.py"), "--json"]
    numbers: dict[str, int] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return numbers


def read_cpu_seconds() -> int:
    """What `make test` took in its last run that passed; 0 before the first."""
    path = ROOT / ".venv" / "cpu-of-make-test"
    return int(path.read_text()) if path.exists() else 0


def name_module(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(name: str, tree: ast.AST, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports anywhere; `from package import module` means the module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                found.add(inner if inner in modules else node.module)
    return {each for each in found if each in modules and each != name}


def _find_cycles(imports: dict[str, set[str]]) -> list[str]:
    """The groups of modules that import each other: Tarjan's strongly connected components."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[str] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in imports[name]:
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            place = stack.index(name)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                cycles.append(" ".join(sorted(group)))

    for name in imports:
        if name not in number:
            visit(name)
    return cycles


def _print_packages(lines: dict[str, int]) -> None:
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, package in _name_packages(lines):
        sizes[package] += lines[name]
        files[package] += 1
    print(f"{'package':44}{'lines':>8}{'files':>8}")
    for package, size in sizes.most_common():
        print(f"{package:44}{size:8,}{files[package]:8}")


def _name_packages(lines: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The first folder that each module is in; modules outside of folders are counted together."""
    folders = {".".join(name.split(".")[:2]) for name in lines if name.count(".") > 1}
    for name in lines:
        package = ".".join(name.split(".")[:2])
        yield name, package if package in folders else f"{PACKAGE} (modules outside of folders)"


if __name__ == "__main__":
    sys.exit(main())
