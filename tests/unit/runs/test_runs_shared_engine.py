"""One engine for two processes: both sample from it, also while the one that hosts it waits for the other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.models import tiny_qwen3
from support.processes import run_two
from support.served import save_tiny_model
from support.shared_engine_process import IDS, changed
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.runs.config import EngineConfig, EngineKind
from unbroken.runs.engines import open_engine
from unbroken.runs.processes import Rank

pytestmark = pytest.mark.e2e


async def test_two_processes_share_an_engine_that_sleeps_and_wakes_for_both(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    run_two("support.shared_engine_process", model, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first["hosts"], second["hosts"]) == (True, False)
    assert first["failure"] == "no room"
    assert second["failure"] == "process 0 failed: EngineError: no room"
    for version in (0, 1, 2):
        expected = TransformersEngine(
            changed(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), version)
        )
        for found in (first, second):
            versions, scores = found["steps"][version]
            assert versions == [version]
            np.testing.assert_allclose(scores, (await expected.score(IDS)).logprobs, atol=1e-5)
        await expected.close()


async def test_processes_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(kind=EngineKind.COLOCATED, processes_per_engine=2)
    with pytest.raises(InvalidInputError, match=r"must divide the number of processes, 3, got 2"):
        async with open_engine(
            config,
            model=tiny_qwen3(),
            source="m",
            output=tmp_path,
            device=torch.device("cpu"),
            rank=Rank(num_processes=3),
        ):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": EngineKind.COLOCATED, "processes_per_engine": 0}, "processes_per_engine must be >= 1, got 0"),
        ({"processes_per_engine": 2}, "processes_per_engine must be 1 with kind embedded, got 2"),
    ],
)
def test_wrong_numbers_are_refused(options, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        EngineConfig(**options)
