"""The model and the engine of a report: the model in this process, or servers that run already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.warm_up import write_warm_model
from unbroken.drift.config import EngineChoice
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError, missing_extra
from unbroken.runs.keys import read_key
from unbroken.runs.models import load_model

_WARM_UP = WarmUpConfig(num_demo_steps=700)
"""Less than the demo's, to be short. With 450 steps the model hardly writes words as its tokenizer would."""


def ensure_demo_model(folder: Path) -> Path:
    """Return the folder of the demo's untrained, warmed-up model, which is made there the first time."""
    if not (folder / "config.json").exists():
        try:
            write_warm_model(folder, _WARM_UP, seed=0)
        except OSError as error:
            raise InvalidInputError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


@asynccontextmanager
async def open_engine(choice: EngineChoice, model: str, *, vocab_size: int) -> AsyncIterator[Engine]:
    """Open the engine, and close it when the block ends.

    Raises:
        InvalidInputError: there is no such model, the embedded engine cannot run it, or the client extra is missing.
        EngineError: a server does not answer, or is of another kind.
    """
    engine = await (_connect(choice, vocab_size) if choice.urls else asyncio.to_thread(_load, model))
    try:
        yield engine
    finally:
        await engine.close()


def _load(model: str) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersEngine(load_model(model).to(device))


async def _connect(choice: EngineChoice, vocab_size: int) -> Engine:
    try:
        from unbroken.engines.http import HttpEngine
    except ModuleNotFoundError as error:
        raise missing_extra(error, "--engine URL needs the client extra", "client") from error
    key = read_key(choice.api_key_file, field="--api-key-file")
    return await HttpEngine.connect(choice.urls, api_key=key, vocab_size=vocab_size)
