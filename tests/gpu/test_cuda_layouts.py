"""I9 with vLLM and our defaults on a GPU: head layouts of real models, and a real model, sample from their weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.rollouts import play_turns
from unbroken.runs.chosen_numerics import choose_numerics
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.numerics import open_pair
from unbroken.runs.policy_check import DENSE, check_against_folder
from unbroken.runs.settings import build, section_of
from unbroken.training.metrics.mismatch import check_one_policy
from unbroken.types import Numerics, SampleRequest, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from head_layouts import LAYOUTS, save_model

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REAL = Path(os.environ.get("REAL_MODEL", Path(__file__).resolve().parents[2] / ".venv" / "real-model"))
"""The folder that tools/real_model.py makes."""


def compare(folder: Path) -> Any:
    """Sample and compare in a process of its own: two engines that start in one process fork in each other's locks."""
    command = [sys.executable, "-m", "support.layout_engine", str(folder)]
    done = subprocess.run(
        command, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line)


def test_i9_each_layout_of_heads_samples_from_its_own_weights(tmp_path: Path):
    """All engines start at once: each takes a minute."""
    folders = {layout: tmp_path / layout.replace("/", "-") for layout in LAYOUTS}
    for layout, folder in folders.items():
        save_model(layout, folder)
    with ThreadPoolExecutor(len(folders)) as pool:
        found = dict(zip(folders, pool.map(compare, folders.values()), strict=True))
    print(json.dumps(found, indent=1))
    assert {layout: each["k3"] for layout, each in found.items() if not each["k3"] < DENSE} == {}
    assert all(each["num_tokens"] > 2000 for each in found.values())


@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason="tools/real_model.py has made no model")
@pytest.mark.parametrize("numerics", Numerics)
async def test_i9_a_real_model_speaks_and_is_scored_alike(numerics, tmp_path: Path):
    from unbroken.rendering.loader import load_renderer

    options = ("--dtype", "bfloat16", "--max-model-len", "2048", "--gpu-memory-utilization", "0.3")
    config = build(
        section_of(RunConfig),
        {
            "output": tmp_path,
            "loop.num_steps": 1,
            "precision": Precision.BFLOAT16,
            "engine.kind": EngineKind.COLOCATED,
            "engine.options": options,
            "trainer.numerics": numerics,
            "trainer.optimizer.learning_rate": 1e-5,
        },
    )
    config, _ = choose_numerics(config, continues=False, model=REAL)
    if numerics is Numerics.AUTO and torch.cuda.get_device_name() == "NVIDIA H200":
        assert config.trainer.numerics is Numerics.EXACT
    renderer = load_renderer(str(REAL))
    # Its likeliest answer is ahead by 1.5 nats at each id. Of the capital of France, "The" is ahead
    # of "L" by 0.08 to 0.25, as the rounding falls: with exact numerics it spoke French.
    question = [{"role": "user", "content": "Repeat this sentence: Paris is the capital of France."}]
    async with open_pair(config, str(REAL)) as (opened, trainer):
        prompt = renderer.render(question).token_ids
        params = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=renderer.get_stop_token_ids())
        result = await opened.engine.sample(SampleRequest(request_id="france", prompt_ids=prompt, params=params))
        reply = renderer.parse_response(result.sequences[0].completion_ids, prompt_ids=prompt, tools=[])
        assert "Paris" in reply.content
        print(await check_against_folder(opened.engine, REAL, renderer))
        rows = await play_turns(opened.engine, SamplingParams(max_tokens=48), longest_given=900, num_agents=64)
        logprobs = [each[row.loss_mask] for row, each in zip(rows, trainer.logprobs(rows), strict=True)]
        found = check_one_policy(rows, logprobs, policy_version=0, max_k3=DENSE)
    print(f"{numerics}: {found}")
    assert found is not None
    if config.trainer.numerics is Numerics.EXACT:
        assert found.max_abs == 0.0
