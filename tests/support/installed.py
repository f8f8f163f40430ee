"""Skip tests for which a package is missing."""

from __future__ import annotations

import pytest


def require_vllm() -> None:
    """Skip if vLLM or one of its dependencies is not installed; `make setup` installs them all."""
    pytest.importorskip("vllm.v1.engine.async_llm", reason="needs vLLM", exc_type=ModuleNotFoundError)
