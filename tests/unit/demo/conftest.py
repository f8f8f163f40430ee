"""The demo's tools and tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.demo.lookup import tool_schemas
from unbroken.demo.model import build_tokenizer
from unbroken.messages import ToolSchema


@pytest.fixture(scope="session")
def tools() -> list[ToolSchema]:
    return tool_schemas()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer()
