"""A store of the Tinker API in each database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.postgres import PostgresServer, run_postgres
from unbroken.tinker.store import TinkerStore


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with run_postgres() as server:
        yield server


@pytest.fixture
def postgres_store(postgres: PostgresServer, tmp_path: Path) -> Callable[..., TinkerStore]:
    """Opens the store of a database that is empty at first."""
    postgres.remove_sessions()
    return lambda **options: TinkerStore(postgres.url, **{"files": tmp_path / "files", **options})


@pytest.fixture(params=["sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., TinkerStore]]:
    """Opens the store, as a server that starts does."""
    stores: list[TinkerStore] = []
    make: Callable[..., TinkerStore] = (
        request.getfixturevalue("postgres_store")
        if request.param == "postgres"
        else lambda **options: TinkerStore(tmp_path / "store", **options)
    )

    def open_again(**options: Any) -> TinkerStore:
        stores.append(make(**options))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()
