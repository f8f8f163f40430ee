"""A store of the Tinker API in each database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.tinker.store import TinkerStore


@pytest.fixture
def open_store(location: str, tmp_path: Path) -> Iterator[Callable[..., TinkerStore]]:
    """Opens the store, as a server that starts does."""
    stores: list[TinkerStore] = []

    def open_again(**options: Any) -> TinkerStore:
        stores.append(TinkerStore(location, **{"files": tmp_path / "files", **options}))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()
