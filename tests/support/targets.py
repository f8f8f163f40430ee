"""Which target of the Makefile runs a test: each asks for marks, and for folders or files that can have such tests."""

from __future__ import annotations

import functools
import re
from collections.abc import Set
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OF_TEST = ("contract", "gpu", "property", "unit")
"""The folders that `make test` collects; those of a GPU only to see that they can be imported."""
SAYS_E2E = re.compile(r"vllm|mark\.e2e")
"""In the path or the text of each file outside of tests/e2e that `make e2e` collects."""


def check_has_target(item: pytest.Item) -> None:
    """Refuse a test that no target would run."""
    path = item.path.relative_to(TESTS)
    if find_target(path, {mark.name for mark in item.iter_markers()}) is None:
        raise pytest.UsageError(f"{item.nodeid}: no target of the Makefile runs it: see tests/support/targets.py")


def find_target(path: Path, marks: Set[str]) -> str | None:
    """The target that runs a test, by the path of its file below tests and its marks."""
    folder = path.parts[0]
    if "gpu" in marks:
        return "gpu" if folder == "gpu" else None
    if "clients" in marks:  # `make clients` and `make agents` name files
        return "clients" if folder == "e2e" else None
    if "real" in marks:
        return "real" if folder == "real" else None
    if "nightly" in marks:
        return "nightly"
    if "e2e" in marks:
        return "e2e" if folder == "e2e" or (folder in OF_TEST and says_e2e(path)) else None
    return "test" if folder in OF_TEST and folder != "gpu" else None


@functools.cache
def says_e2e(path: Path) -> bool:
    """Whether `make e2e` collects a file outside of tests/e2e."""
    return SAYS_E2E.search(f"{path}\n{(TESTS / path).read_text('utf-8')}") is not None
