"""An application that a run serves from its own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from unbroken.errors import ServerError
from unbroken.server.process import host_app


@asynccontextmanager
async def _fail_to_start(_app: FastAPI) -> AsyncIterator[None]:
    raise RuntimeError("the disk is full")
    yield


async def test_an_application_that_does_not_start_is_an_error() -> None:
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:\d+ did not start"):
        async with host_app(FastAPI(lifespan=_fail_to_start)):
            pytest.fail("nothing is served")
