"""Agents of a config."""

from __future__ import annotations

from typing import Any


def agent_config_fields(config: Any) -> Any:
    return config.agents
