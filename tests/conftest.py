"""Which tests `make test` and `make e2e` run, how they are spread over processes, and failures that show at once."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from support.browser import Browser, open_browser
from support.failures import FailuresAtOnce
from support.forks import commands_as_forks, preload, start_workers_as_forks
from support.installed import require_vllm
from support.postgres import location as location
from support.postgres import postgres as postgres
from support.targets import check_has_target
from support.vllm_session import shared_vllm as shared_vllm
from support.vllm_session import vision_vllm as vision_vllm

# Each client of httpx reads all certificates that are trusted (140, 33 ms); no test speaks TLS with anybody.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "certificate.pem")
# A busy machine answers late, and httpx waits for 5 s unless a test says how long.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(dict.fromkeys(("connect", "read", "write", "pool"), 60.0))

# A case may take as long as the machine needs: 200 ms, Hypothesis's own limit, pass while another process has the core.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

_VLLM = re.compile("vllm(?!/template)")
"""In the ids of tests that need vLLM; `vllm/template_...` are chat templates."""
_MANY_OBJECTS = 50_000
"""So many that each full collection takes longer than most tests, 30 ms."""
_SPREAD_SINGLY = ("tests/property/test_rendering_corpus_properties.py", "tests/real/test_real_conversations.py")
"""Files of many tests that share nothing: given out one by one at the end, they keep all processes busy."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # imports leave no garbage, and collecting it took a twelfth of their time
    if not hasattr(config, "workerinput"):  # only the process that has the terminal
        config.pluginmanager.register(FailuresAtOnce(config))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of vLLM and of `make e2e`, and put what takes longest first: tests are given out in this order."""
    for item in items:
        if is_vllm := _VLLM.search(item.nodeid):
            item.add_marker(pytest.mark.vllm)
        if item.nodeid.startswith("tests/e2e/") or (is_vllm and not item.nodeid.startswith("tests/contract/")):
            item.add_marker(pytest.mark.e2e)
        check_has_target(item)
    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of imported modules and of tests, which live as long as the process
    atexit.register(gc.unfreeze)  # triton complains about what is left at the end
    if "unbroken.training.model.logprobs" in sys.modules:
        from support.proofs import remember_proofs

        remember_proofs()
    if "unbroken.rendering.template" in sys.modules:
        from support.probes import remember_probes

        remember_probes()
    # torch writes hundreds of lines a checkpoint that nobody reads, and pytest keeps the text of each.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    gc.set_threshold(10_000, 20, 50)  # 700, 10, 10 before: it took a twentieth of the tests' time
    gc.enable()


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("vllm"):
        return 0
    if item.get_closest_marker("e2e"):
        return 1
    return 3 if item.nodeid.startswith(_SPREAD_SINGLY) else 2


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    # coverage sees what a process imports only if it was there before. Forks get their input by /proc.
    if "coverage" not in sys.modules and sys.platform == "linux":
        start_workers_as_forks(specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByGroup:
    config.option.loadscopereorder = False
    return _ByGroup(config, log)


class _ByGroup(LoadScopeScheduling):
    """Gives the tests of vLLM to one process, which mostly waits for its engines, and others by file, for its fixtures.

    The groups of `--dist loadgroup` would do, but pytest-xdist 3.8 does not find them under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        if _VLLM.search(nodeid):
            return "vllm"
        return nodeid if nodeid.startswith(_SPREAD_SINGLY) else nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what a file's tests have imported: torch's compiler alone would be looked at for 0.2 s in each collection.

    Many tests collect garbage after they have imported something large.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    if len(gc.get_objects(generation=2)) > _MANY_OBJECTS:
        gc.collect()  # what is frozen is never collected
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm"):
        require_vllm()
        preload("support.vllm_processes")


@pytest.fixture
def forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m unbroken ...`, which a test or a run starts, is a fork, for tests that are not about its start."""
    for name, value in commands_as_forks().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """A process in which no accelerator was made: accelerate keeps one precision per process until it is reset."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def bfloat16(fresh_accelerate: None) -> Any:
    """An accelerator that computes in it."""
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision="bf16")


@pytest.fixture(scope="module")
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the library `datasets` for one file of tests; its own is in the user's home."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        datasets.disable_progress_bars()
        yield


@pytest.fixture(scope="session")
def started_browser() -> Iterator[Browser]:
    """A browser for all tests of this process."""
    with open_browser() as started:
        yield started


@pytest.fixture
def browser(started_browser: Browser) -> Iterator[Browser]:
    """A browser whose pages must have thrown nothing, and tried nothing that their policy refuses."""
    started_browser.errors.clear()
    yield started_browser
    assert started_browser.errors == []
