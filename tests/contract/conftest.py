"""Fixtures of the engine's contract: each test runs over every engine, if marked over those of one kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.engine_subjects import SUBJECTS, VOCAB_SIZE, Subject, on_vllm, scripted
from support.servers import listening, make_app
from support.stock_server import StockServer, make_vllm_app
from unbroken.engines.http import HttpEngine


@pytest.fixture
def vllm_subject(shared_vllm: Any) -> Subject:
    return on_vllm(shared_vllm.engine)


@pytest_asyncio.fixture(loop_scope="session")
async def server_subject() -> AsyncIterator[Subject]:
    """Our server."""
    behind = scripted()
    async with connected(behind, make_app(behind.engine)) as subject:
        yield subject


@pytest_asyncio.fixture(loop_scope="session")
async def stock_subject() -> AsyncIterator[Subject]:
    """The stand-in for a stock vLLM server."""
    behind = scripted()
    async with connected(behind, StockServer(behind.engine).make_app()) as subject:
        yield subject


@pytest_asyncio.fixture(loop_scope="session")
async def stock_vllm_subject(shared_vllm: Any) -> AsyncIterator[Subject]:
    """vLLM's own application."""
    async with connected(on_vllm(shared_vllm.engine), await make_vllm_app(shared_vllm.engine)) as subject:
        yield subject


@asynccontextmanager
async def connected(behind: Subject, app: Any) -> AsyncIterator[Subject]:
    async with listening(app) as url:
        engine = await HttpEngine.connect([url], vocab_size=VOCAB_SIZE, max_retries=0)
        yield Subject(engine=engine, num_sampled=behind.num_sampled, weights=[], poll_s=behind.poll_s)
        await engine.close()


@pytest.fixture(params=[*SUBJECTS, "vllm_subject", "server_subject", "stock_subject", "stock_vllm_subject"])
def sampler(request: pytest.FixtureRequest) -> Subject:
    """Whatever samples: an engine here, or a server."""
    return _make(request)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh_vllm_subject(tmp_path: Path) -> Subject:
    from support.vllm_engines import save_model, start_engine, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model())
    return on_vllm(await start_engine(tmp_path))


@pytest.fixture(params=[*SUBJECTS, "vllm_subject"])
def any_subject(request: pytest.FixtureRequest) -> Subject:
    return _make(request)


@pytest_asyncio.fixture(loop_scope="session")
async def subject(any_subject: Subject, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """An engine that may be any, and may serve other tests too: it is left running, with whatever weights."""
    yield any_subject
    if "vllm" in request.node.callspec.id:
        await any_subject.engine.abort("a")
        await any_subject.engine.resume()
    else:
        await any_subject.engine.close()


@pytest.fixture(params=[*SUBJECTS, "fresh_vllm_subject"])
def own_subject(request: pytest.FixtureRequest) -> Subject:
    """An engine of the test's own, which it closes."""
    return _make(request)


def _make(request: pytest.FixtureRequest) -> Subject:
    """Make an engine, or skip a test that is for a kind of engine that it is not."""
    subject: Subject = (
        SUBJECTS[request.param]() if request.param in SUBJECTS else request.getfixturevalue(request.param)
    )
    for marker in request.node.iter_markers("engine"):
        kind = marker.kwargs["kind"]
        if not isinstance(subject.engine, kind):
            pytest.skip(f"{type(subject.engine).__name__} is no {kind.__name__}")
    return subject
