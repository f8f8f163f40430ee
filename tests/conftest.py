"""Options of the test run."""

import pytest

from support.vllm_session import shared_vllm as shared_vllm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-conversations",
        type=int,
        default=2000,
        help="random conversations for each chat template of the corpus (make fuzz: 20,000)",
    )


@pytest.fixture
def num_conversations(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--num-conversations"))
