"""Sampling while training with servers: adapters as updates, other ways to treat requests in flight, two servers."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import letters_recipe
from support.served import save_tiny_model, served
from unbroken.cli import main
from unbroken.engines.http import HttpEngine
from unbroken.types import token_ids

pytestmark = pytest.mark.e2e

NUM_STEPS = 6
MAX_STALENESS = 2
IDS = [5, 6, 7, 8, 9, 10]
CASES = {
    "adapters": (1, ["--lora.rank=4", "--trainer.lora-updates=adapter", "--export.merged=true"]),
    "finish": (1, ["--engine.in-flight=finish"]),
    "reuse_kv": (1, ["--engine.reuse-kv=true"]),
    "two servers": (2, []),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


async def score(url: str) -> list[float]:
    engine = await HttpEngine.connect([url])
    try:
        assert engine.policy_version == NUM_STEPS
        return (await engine.score(token_ids(IDS))).logprobs.tolist()
    finally:
        await engine.close()


def score_final(output: Path) -> list[float]:
    """The same by the model that the trainer has at the end."""
    final = AutoModelForCausalLM.from_pretrained(output / "final", dtype=torch.float32)
    with torch.no_grad():
        logprobs = final(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(logprobs[place, following]) for place, following in enumerate(IDS[1:])]


@pytest.mark.parametrize("case", CASES)
def test_a_run_samples_ahead_and_leaves_its_servers_with_the_last_weights(tmp_path, model, case):
    num_servers, options = CASES[case]
    weights, output = tmp_path / "weights", tmp_path / "run"
    with ExitStack() as stack:
        started = [
            stack.enter_context(served(model, "--weights-dir", str(weights), engine="transformers"))
            for _ in range(num_servers)
        ]
        urls = [each.url for each in started]
        words = ["train", letters_recipe.__file__, f"--output={output}", f"--model={model}"]
        words += [f"--loop.num-steps={NUM_STEPS}", f"--loop.max-staleness={MAX_STALENESS}", "--engine.kind=server"]
        words += [f"--engine.urls={','.join(urls)}", f"--engine.weights-dir={weights}"]
        assert main([*words, *options]) == 0
        scores = [asyncio.run(score(url)) for url in urls]
    for found in scores:
        assert found == pytest.approx(score_final(output), abs=1e-4)
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/policy_version"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert 0 < max(line["staleness/max"] for line in lines) <= MAX_STALENESS
    assert all(line["outages/num_losses"] == 0 for line in lines)
