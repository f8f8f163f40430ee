"""What torch's compiler warns of on a GPU is not ours, and what a test sets in accelerate ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_TORCHS_OWN = "ignore:::torch[.]"
"""What torch's own modules warn of: Inductor of `torch.jit.script_method` and TF32, Dynamo of gradients."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings(_TORCHS_OWN))


@pytest.fixture(autouse=True)
def _nothing_of_the_test_before(fresh_accelerate: None) -> Iterator[None]:
    """An accelerator that a test made in bfloat16 would be that of the next test's trainer.

    The models of all tests recompile the same functions, of which torch allows eight in a process.
    """
    with torch._dynamo.config.patch(recompile_limit=128):
        yield
