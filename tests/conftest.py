"""Options of the test run."""

import pytest

from support.vllm_session import shared_vllm as shared_vllm
from support.vllm_session import vision_vllm as vision_vllm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-conversations",
        type=int,
        default=2000,
        help="random conversations for each chat template of the corpus (make fuzz: 20,000)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM share a process, as they share an engine (`pytest -n 2 --dist loadgroup`)."""
    for item in items:
        if "vllm" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("vllm"))


@pytest.fixture
def num_conversations(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--num-conversations"))
