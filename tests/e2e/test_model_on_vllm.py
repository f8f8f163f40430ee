"""The model of a run on vLLM: whole, and as adapters beside the base, with the trainer's logprobs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forks import fork_server
from support.rows import random_rows, row
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2))
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    from support.vllm_engines import save_model, tiny_vllm_model

    folder = tmp_path_factory.mktemp("base") / "model"
    save_model(folder, tiny_vllm_model())
    return folder


def train(base: Path, folder: Path, *, lora: bool) -> Trainer:
    """Train the model of a folder, as a run does, and write it with the tokenizer."""
    from unbroken.runs.config import LoraConfig, RunConfig
    from unbroken.runs.export.kept import KeptModels
    from unbroken.runs.models import load_model, locate, prepare_model
    from unbroken.training.config import LoopConfig

    config = RunConfig(output=folder, loop=LoopConfig(num_steps=2), lora=LoraConfig(rank=4) if lora else None)
    model, _ = prepare_model(load_model(base), config)
    trainer = Trainer(model, CONFIG)
    for seed in range(4 if lora else 2):
        trainer.step(random_rows(np.random.default_rng(seed), 6))
    KeptModels(config=config.export, trainer=trainer, source=locate(base), output=folder).write_final(2)
    return trainer


async def assert_the_trainers_logprobs(engine: Any, trainer: Trainer, *, adapter: str | None = None) -> None:
    """What vLLM samples has the trainer's logprobs."""
    request = SampleRequest(
        request_id="a",
        prompt_ids=token_ids(PROMPT),
        n=4,
        adapter=adapter,
        params=SamplingParams(max_tokens=24, seed=0),
    )
    sequences = (await engine.sample(request)).sequences
    for sequence in sequences:
        ids = [*PROMPT, *sequence.completion_ids.tolist()]
        (ours,) = await asyncio.to_thread(trainer.logprobs, [row(ids, sampled=range(len(PROMPT), len(ids)))])
        np.testing.assert_allclose(sequence.rollout_logprobs, ours[len(PROMPT) :], atol=1e-5, rtol=0)
    assert sum(len(sequence.completion_ids) for sequence in sequences) > 8


async def test_vllm_loads_the_final_model_and_samples_with_the_trainers_logprobs(base, tmp_path):
    from support.vllm_engines import start_engine

    trainer = train(base, tmp_path, lora=False)
    engine = await start_engine(tmp_path / "final")
    try:
        await assert_the_trainers_logprobs(engine, trainer)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            await assert_the_trainers_logprobs(engine, train(base, tmp_path / "other", lora=True))
    finally:
        await engine.close()


async def test_vllm_loads_the_final_adapters_beside_the_base(base, tmp_path):
    from support.vllm_engines import start_engine

    trainer = train(base, tmp_path, lora=True)
    engine = await start_engine(base, "--enable-lora", adapters=(("trained", str(tmp_path / "final")),))
    try:
        await assert_the_trainers_logprobs(engine, trainer, adapter="trained")
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            await assert_the_trainers_logprobs(engine, trainer)
    finally:
        await engine.close()


@pytest.mark.parametrize(("rule", "context"), [("longrope", 64), ("longrope", 512), ("dynamic", 128), ("softcap", 512)])
async def test_a_model_whose_rotary_factors_or_soft_cap_transformers_treats_otherwise(rule, context, tmp_path):
    """Trainer, embedded engine and vLLM agree on rows alone and beside long ones, as a tree too."""
    from support.length_rules import model_with_rule
    from support.vllm_engines import save_model, start_engine
    from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
    from unbroken.exactness import fix_rotary
    from unbroken.runs.models import load_model
    from unbroken.training.config import SharedPrefixes

    save_model(tmp_path, model_with_rule(rule))
    engine = await start_engine(tmp_path, "--max-model-len", str(context))
    embedded = TransformersEngine(load_model(tmp_path), config=TransformersEngineConfig(context_length=context))
    try:
        longest = min(context, 120) - 24
        prompts = [np.random.default_rng(number).integers(1, 64, size) for number, size in enumerate((7, 20, longest))]
        params = SamplingParams(max_tokens=12, seed=0)
        requests = [
            SampleRequest(request_id=str(number), prompt_ids=token_ids(ids), n=2, params=params)
            for number, ids in enumerate(prompts)
        ]
        results = [await engine.sample(requests[0]), *await asyncio.gather(*map(engine.sample, requests))]
        pairs = [
            (ids, each) for ids, found in zip([prompts[0], *prompts], results, strict=True) for each in found.sequences
        ]
        rows = [np.concatenate([ids, each.completion_ids]) for ids, each in pairs]
        model = load_model(tmp_path)
        fix_rotary(model, engine.context_length)
        trainer = Trainer(model, TrainerConfig(shared_prefixes=SharedPrefixes.ALWAYS))
        samples = [row(ids.tolist(), sampled=range(1, len(ids))) for ids in rows]
        together = await asyncio.to_thread(trainer.logprobs, samples)
        for (ids, each), whole, sample, found in zip(pairs, rows, samples, together, strict=True):
            (alone,) = await asyncio.to_thread(trainer.logprobs, [sample])
            scored = (await embedded.score(token_ids(whole))).logprobs
            for ours in (found[len(ids) :], alone[len(ids) :], scored[len(ids) - 1 :]):
                np.testing.assert_allclose(each.rollout_logprobs, ours, atol=1e-5, rtol=0)
    finally:
        await embedded.close()
        await engine.close()


async def test_numerics_compares_vllm_with_the_trainer_row_by_row_and_module_by_module(tmp_path, capsys, monkeypatch):
    """vLLM runs transformers' modules, whose names are the trainer's; a CPU cannot have exact numerics with it.

    The command's two processes are forks here: each would import vLLM.
    """
    from support.architectures import tiny_model
    from unbroken.cli import main

    forks = fork_server()
    monkeypatch.setattr("unbroken.runs.numerics.multiprocessing.get_context", lambda kind: forks)
    tiny_model("qwen3", hidden_size=64, head_dim=64, max_position_embeddings=256).save_pretrained(tmp_path)
    vllm = [
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--model-impl",
        "transformers",
        "--num-gpu-blocks-override",
        "64",
    ]
    options = ["--engine.kind=colocated", f"--engine.options={json.dumps(vllm)}", "--precision=bfloat16"]
    command = ["numerics", str(tmp_path), "--rows=4", "--max-tokens=8", "--json", *options]
    assert await asyncio.to_thread(main, command) == 1
    printed = capsys.readouterr().out
    fast, exact = json.loads(printed[printed.index("[\n {") :])
    assert "VllmEngine" in fast["subject"]
    for way in ("prefill", "cached", "alone", "batches", "together", "updated"):
        assert 0 < fast["ways"][way]["k3"] < 1e-2, way
    found = re.fullmatch(
        r"of 21 modules embed_tokens is the first that differs: 136 of 136 ids, by up to (\S+) \(bfloat16 and .*",
        fast["modules"],
    )
    assert found is not None, fast["modules"]
    assert float(found[1]) < 0.01  # rounding: another id's row would be further off
    assert exact["ways"] == {}
    assert "on this cpu device, got exact" in exact["refused"]
