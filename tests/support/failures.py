"""How a failure is shown: at once, and so that its assertion is what one sees."""

from __future__ import annotations

from typing import Any

import pytest

NUM_LINES = 40
"""Of what a test wrote or logged, the last ones: torch alone logs 300 in a test of several processes."""


class FailuresAtOnce:
    """Prints each failure when it happens, the assertion last; the end of the run has the names only. With -v, all of
    what the test wrote.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        terminal.write_line("")
        terminal.write_sep("_", f"{report.nodeid} ({report.when})", red=True)
        for name, text in report.sections:
            terminal.write_sep("-", name)
            terminal.write_line(text if self._config.option.verbose > 0 else cut(text))
        terminal.write_sep("-", "the failure")
        terminal.write_line(report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        self._config.option.tbstyle = "no"


def cut(text: str) -> str:
    """The last lines of a text, and how many are left out."""
    lines = text.splitlines()
    left_out = len(lines) - NUM_LINES
    return text if left_out <= 0 else "\n".join([f"({left_out} lines before; -v shows them)", *lines[-NUM_LINES:]])
