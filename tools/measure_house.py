"""Print how large the package is, and fail if a number is above its bound in `BOUNDS`: `make check` runs it.

Whoever lets a number grow raises its bound here, so that a review sees it; whoever lowers one lowers the bound. Lines
and files are shown and have no bound: one was paid by joined lines, and by helpers with good names that became a part
of their callers.
`--names` also prints which modules, classes and functions they are. `measure_walks.py` counts what a run goes through.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "unbroken"

BOUNDS = {
    "modules with one importer, under 100 lines": 35,
    "public class names that exist twice": 0,
    "lines of the longest function": 70,
    "functions over 50 lines": 6,
    "import cycles": 0,
}
"""The largest value of each number that passes."""
GOALS = {
    "modules with one importer, under 100 lines": 30,
    "public class names that exist twice": 5,
    "lines of the longest function": 70,
    "functions over 50 lines": 8,
    "import cycles": 0,
}
"""What the numbers should become."""

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
        ((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    is_package = {name: path.name == "__init__.py" for name, path in modules.items()}
    small = [name for name, num in importers.items() if num == 1 and lines[name] < SMALL and not is_package[name]]
    twice = [name for name, num in classes.items() if num > 1]
    cycles = _find_cycles(imports)
    values = {
        "modules with one importer, under 100 lines": len(small),
        "public class names that exist twice": len(twice),
        "lines of the longest function": max(functions)[0],
        "functions over 50 lines": sum(length > LONG for length, _ in functions),
        "import cycles": len(cycles),
    }
    _print_packages(lines)
    print(f"\n{'':44}{'now':>8}{'bound':>8}{'goal':>8}")
    for name, value in values.items():
        print(f"{name:44}{value:8,}{BOUNDS[name]:8,}{GOALS[name]:8,}")
    if "--names" in sys.argv[1:]:
        print("\none importer:", *sorted(small), sep="\n  ")
        print("\nclass names that exist twice:", *sorted(twice), sep="\n  ")
        print("\nlongest functions:", *sorted(functions, reverse=True)[:10], sep="\n  ")
        print("\ncycles:", *cycles, sep="\n  ")
    grown = [f"{name}: {value:,}, at most {BOUNDS[name]:,}" for name, value in values.items() if value > BOUNDS[name]]
    if grown:
        print("\nLarger than before. Make it smaller, or raise the bound in tools/measure_house.py and say why:")
        print(*grown, sep="\n")
    return bool(grown)


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
