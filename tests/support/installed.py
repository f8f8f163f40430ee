"""What a test needs and a machine may lack."""

from __future__ import annotations

import pytest


def require_vllm() -> None:
    """Skip where vLLM is not installed, or only its files are, without what it needs: `make setup` installs all."""
    pytest.importorskip("vllm.v1.engine.async_llm", reason="needs vLLM", exc_type=ModuleNotFoundError)
