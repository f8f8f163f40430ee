"""What our tests print of a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.failures import NUM_LINES, FailuresAtOnce


@pytest.mark.parametrize(("verbose", "num_shown"), [(0, NUM_LINES), (1, 300)])
def test_a_failure_ends_with_its_assertion_and_not_with_a_log_of_300_lines(verbose, num_shown):
    written: list[str] = []
    terminal = SimpleNamespace(
        write_line=lambda text: written.extend(text.splitlines()),
        write_sep=lambda sign, text, **_: written.append(text),
    )
    plugins = SimpleNamespace(getplugin=lambda name: terminal)
    config: Any = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(verbose=verbose))
    log = "\n".join(f"torch: line {number}" for number in range(300))
    report: Any = SimpleNamespace(
        failed=True, nodeid="test_x.py::test_x", when="call", longreprtext="E  assert 1 == 2", sections=[("log", log)]
    )
    FailuresAtOnce(config).pytest_runtest_logreport(report)
    assert written[-1] == "E  assert 1 == 2"
    lines = [line for line in written if line.startswith("torch")]
    assert lines == log.splitlines()[-num_shown:]
    assert (f"({300 - NUM_LINES} lines before; -v shows them)" in written) == (verbose == 0)


def test_what_passes_prints_nothing():
    config: Any = SimpleNamespace()
    report: Any = SimpleNamespace(failed=False)
    FailuresAtOnce(config).pytest_runtest_logreport(report)
