"""Stand-ins for the package verifiers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parents[3] / "support" / "stand_ins"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a version of the stand-in the package `verifiers` until the end of the test."""

    def install(version: str) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
            del sys.modules[name]
        monkeypatch.syspath_prepend(str(STAND_INS / f"verifiers_{version}"))

    return install
