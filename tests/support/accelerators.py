"""Accelerators for tests: accelerate keeps one precision per process until it is reset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """A process in which no accelerator was made."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def bfloat16(fresh_accelerate: None) -> Any:
    """An accelerator that computes in it."""
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision="bf16")
