"""Where an agent's model is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str

    def __post_init__(self) -> None:
        assert self.api_key_var not in os.environ


@dataclass
class ModelContext:
    model: str
    client: Any
