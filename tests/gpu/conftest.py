"""What torch's compiler warns of on a GPU is not ours, and what a test sets in accelerate ends with it."""

from __future__ import annotations

from pathlib import Path

import pytest

_TORCHS_OWN = (
    # Inductor imports torch.utils.mkldnn, which uses it (torch 2.13).
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    # Float32 is compared exactly here.
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            for warning in _TORCHS_OWN:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _no_precision_of_the_test_before(fresh_accelerate: None) -> None:
    """An accelerator that a test made in bfloat16 would be that of the next test's trainer."""
