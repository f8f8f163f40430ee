"""Hostile templates in the audit's process: an error in time, whatever the template does, and the caller goes on."""

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from support.templates import CHATML
from unbroken.audit.config import AuditConfig, AuditTarget
from unbroken.audit.process import run_in_process
from unbroken.audit.report import AuditReport
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.limited_process import ProcessLimits

SHORT = ProcessLimits(timeout_s=1)
SMALL = ProcessLimits(timeout_s=90, memory_bytes=512 << 20)
MAX_DURATION_S = 100.0
"""The first process imports its modules, which takes seconds on a loaded machine."""
ENDLESS_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def _repeat(statement: str) -> str:
    return "{% set x = 'abcdefgh' %}" + statement * 60 + "{{ x | length }}"


ENDLESS = {
    "loops in loops": ENDLESS_LOOPS,
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "one operation of Python": "{{ 7 ** (10 ** 12) > 1 }}",
    "lists of lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "equal lists of lists": "{% set x, y = [1], [1] %}" + "{% set x, y = [x, x], [y, y] %}" * 60 + "{{ x == y }}",
    "a loop over tools only": CHATML + "{% if tools %}" + ENDLESS_LOOPS + "{% endif %}",
    "a loop over tool messages only": CHATML + "{% if messages[-1].role == 'tool' %}" + ENDLESS_LOOPS + "{% endif %}",
}
HUGE = {
    "a product": "{{ ('x' * 10 ** 12) | length }}",
    "a list": "{{ ([1] * 10 ** 12) | length }}",
    "~": _repeat("{% set x = x ~ x %}"),
    "a block": _repeat("{% set x %}{{ x }}{{ x }}{% endset %}"),
    "replace": _repeat("{% set x = x | replace('a', x) %}"),
    "an indent of JSON": "{{ [1] | tojson(indent=10 ** 12) }}",
    "text in a loop": "{% for i in range(9999) %}" + "y" * 9999 + "{% endfor %}",
}


def audit(source: str, folder: Path, limits: ProcessLimits) -> AuditReport:
    file = folder / "template.jinja"
    file.write_text(source)
    return run_in_process(AuditTarget(template=str(file)), AuditConfig(num_conversations=5), limits)


@pytest.fixture(scope="module", autouse=True)
def started_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What forks the processes has imported its modules, so that the short limit is that of the template."""
    audit(CHATML, tmp_path_factory.mktemp("first"), SMALL)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_stopped_at_the_deadline(name: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"took longer than 1 s and was stopped.*--timeout"):
        audit(ENDLESS[name], tmp_path, SHORT)
    assert time.monotonic() - start < MAX_DURATION_S


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_makes_huge_values_is_an_error_of_a_limit(name: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"goes over a limit|more than 0\.5 GiB of memory"):
        audit(HUGE[name], tmp_path, SMALL)
    assert time.monotonic() - start < MAX_DURATION_S


def test_a_process_that_dies_is_an_error_that_names_its_exit_code(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())

    def kill_process() -> None:
        while not (started := set(multiprocessing.active_children()) - others):
            time.sleep(0.01)
        started.pop().kill()

    killer = threading.Thread(target=kill_process)
    killer.start()
    with pytest.raises(TemplateError, match="ended without a report, with exit code -9"):
        audit(ENDLESS_LOOPS, tmp_path, SMALL)
    killer.join()


def test_deep_recursion_is_refused_by_the_template_and_reported(tmp_path: Path) -> None:
    report = audit(CHATML + "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", tmp_path, SMALL)
    assert report.exit_code == 4
    assert "RecursionError" in report.kind.detail


def test_an_error_of_the_process_reaches_the_caller_with_its_type() -> None:
    with pytest.raises(InvalidInputError, match=r"no_such.jinja cannot be read"):
        run_in_process(AuditTarget(template="no_such.jinja"), AuditConfig(), SMALL)


def test_limits_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="limits of a process must be positive"):
        ProcessLimits(timeout_s=0)
    with pytest.raises(InvalidInputError, match="finite"):
        ProcessLimits(timeout_s=float("inf"))
