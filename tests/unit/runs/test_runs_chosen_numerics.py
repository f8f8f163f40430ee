"""`trainer.numerics = "auto"`: what a run chooses, says, writes down, and keeps."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support import letters_recipe
from support.served import save_tiny_model
from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.runs.chosen_numerics import (
    _H200,
    _MEASURED,
    _count_weights,
    _decide,
    _find_unmeasured,
    _find_unmeasured_setting,
    choose_numerics,
)
from unbroken.runs.collector import Problems
from unbroken.runs.config import EngineKind, RunConfig
from unbroken.runs.folder import claim_folder, lock_folder
from unbroken.runs.recipe import Recipe, Task, load_recipe
from unbroken.runs.settings import build, describe, section_of
from unbroken.runs.training import run_without_training, train_model
from unbroken.types import Numerics

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def make_config(output: Path, **settings) -> RunConfig:
    own = {"output": output, "loop.num_steps": 1}
    return build(section_of(RunConfig), {**own, **{name.replace("__", "."): value for name, value in settings.items()}})


def test_the_page_has_the_table_by_which_a_run_chooses():
    lines = PAGE.read_text("utf-8").partition("### auto")[2].splitlines()
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    sizes = ["any" if row.most == math.inf else f"{row.least:g}B to {row.most:g}B" for row in _MEASURED]
    assert shown == [
        [row.engine, row.machine, row.trained, size, f"{row.cost:.2f}", row.chosen]
        for row, size in zip(_MEASURED, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("has_lora", "billions", "chosen", "why"),
    [
        (False, 0.6, Numerics.EXACT, "1.04 times"),
        (True, 8.0, Numerics.FAST, "1.21 times"),
        (False, 8.0, Numerics.FAST, "not measured with all weights of 8.00B"),
        (True, 0.6, Numerics.FAST, "not measured with LoRA of 0.60B"),
    ],
)
def test_a_measured_model_is_exact_where_that_costs_little(has_lora, billions, chosen, why):
    found, reason = _decide(EngineKind.COLOCATED, _H200, has_lora=has_lora, billions=billions)
    assert found is chosen
    assert why in reason


@pytest.mark.parametrize(
    ("model_config", "why"),
    [
        (Qwen3Config(), None),
        (Qwen3MoeConfig(), "the family qwen3_moe"),
        (MistralConfig(sliding_window=64), "sliding windows"),
        (Qwen3Config(head_dim=96), "heads of 96"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "of type linear"),
        (Qwen3Config(quantization_config={"quant_method": "fp8"}), "quantised weights"),
    ],
)
def test_a_model_that_was_not_seen_to_have_the_same_bits_is_named(model_config, why):
    found = _find_unmeasured(model_config)
    assert found is None if why is None else why in (found or "")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine__options": ("--gpu-memory-utilization=0.3", "--max_model_len", "1024")}, None),
        ({"engine__options": ("--max-model-len", "1024", "--quantization", "fp8")}, "engine.options --quantization"),
        ({"engine__options": ("--dtype", "bfloat16", "--max-model-len=1024")}, None),
        ({"engine__options": ("--dtype=bfloat16",)}, None),
        ({"engine__options": ("--dtype", "float16")}, "engine.options --dtype float16"),
        ({"engine__options": ("--dtype=float32",)}, "engine.options --dtype float32"),
        ({"engine__options": ("-tp", "2")}, "engine.options -tp"),
        ({"engine__options": ("--max-model-len", "1024", "-q=fp8")}, "engine.options -q"),
        ({"engine__options": ("-O3",)}, "engine.options -O3"),
        ({"engine__options": ("--max-model-len", "-1")}, None),
        ({"engine__options": ("--dtype",)}, "engine.options --dtype"),
        ({"engine__options": ("--dtype", "--max-model-len", "3")}, "engine.options --dtype"),
        ({"teacher__models": ("a",)}, "teacher.models"),
        ({"model_settings__kwargs": {"rope_theta": 1e4}}, "model_settings.kwargs"),
    ],
)
def test_a_setting_that_no_measured_run_had_is_named(tmp_path, settings, why):
    settings = {"engine__kind": EngineKind.COLOCATED, **settings}
    assert _find_unmeasured_setting(make_config(tmp_path, **settings)) == why


@pytest.mark.parametrize("kind", [GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_parameters_of_a_measured_family_are_counted_without_the_model(kind, is_tied):
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model_config = kind(**sizes, **heads, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        number = AutoModelForCausalLM.from_config(model_config).num_parameters()
    assert _count_weights(model_config) == pytest.approx(number, rel=2e-3)


def test_on_a_cpu_a_run_is_fast_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    config, said = choose_numerics(make_config(tmp_path))
    assert config.trainer.numerics is Numerics.FAST
    assert said == "numerics: fast (exact is slower on a CPU)"


def test_a_setting_that_exact_numerics_do_not_go_with_makes_a_run_fast(tmp_path):
    config, said = choose_numerics(make_config(tmp_path, trainer__compile=True))
    assert config.trainer.numerics is Numerics.FAST
    assert "must be fast with compile = True" in said


def test_an_engine_that_was_not_measured_makes_a_run_fast(tmp_path):
    settings = {"engine__kind": EngineKind.SERVER, "engine__urls": ("http://a",), "engine__weights_dir": tmp_path}
    assert choose_numerics(make_config(tmp_path, **settings))[1] == (
        "numerics: fast (exact was not measured with engine.kind server)"
    )


def test_numerics_that_are_given_are_kept_and_nothing_is_said(tmp_path):
    config = make_config(tmp_path, trainer__numerics=Numerics.EXACT)
    assert choose_numerics(config) == (config, "")


def test_a_run_continues_with_what_it_chose_and_one_that_trained_nothing_chooses_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    config = make_config(tmp_path)
    began = replace(config, trainer=replace(config.trainer, numerics=Numerics.EXACT))
    claim_folder(tmp_path, "task", describe(began))
    assert choose_numerics(config)[0].trainer.numerics is Numerics.FAST
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    again, said = choose_numerics(config)
    assert again == began
    assert said == "numerics: exact (as the run in this folder began)"
    claim_folder(tmp_path, "task", describe(again))


def test_other_processes_take_what_the_first_has_written(tmp_path):
    config = make_config(tmp_path)
    began = replace(config, trainer=replace(config.trainer, numerics=Numerics.EXACT))
    claim_folder(tmp_path, "task", describe(began))
    assert choose_numerics(config, continues=True)[0] == began


def test_an_evaluation_is_fast_for_its_engine_knows_no_auto_and_no_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    problems, seen = Problems(env=lambda number: None), []

    async def make_task(config: RunConfig) -> Task:
        return Task(model="model", train_on=problems, evaluate_on=problems)

    async def evaluate(config: RunConfig, task: Task) -> None:
        seen.append(config.trainer.numerics)

    recipe = Recipe(name="task.py", doc="", section=section_of(RunConfig), make=make_task)
    run_without_training(recipe, make_config(tmp_path), evaluate)
    assert seen == [Numerics.FAST]


async def test_a_script_makes_its_folder_alone_and_continues_with_the_numerics_of_its_checkpoint(tmp_path, monkeypatch):
    """A script claims no folder, so there is no recipe.json that says them."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    recipe, output = load_recipe(Path(letters_recipe.__file__)), tmp_path / "runs" / "letters"
    own = [f"--output={output}", f"--model={save_tiny_model(tmp_path / 'model')}", "--rollouts.group-size=2"]
    own += ["--loop.num-steps=1", "--rollouts.sampling.max-tokens=4"]
    exact, auto = (recipe.configure([*own, f"--trainer.numerics={name}"]) for name in ("exact", "auto"))
    with (
        lock_folder(output),
        pytest.raises(
            InvalidInputError, match=rf"no other run writes into, and process {os.getpid()} on .* wait for its"
        ),
    ):
        await train_model(exact, await recipe.make_task(exact))
    await train_model(exact, await recipe.make_task(exact))
    assert not (output / "recipe.json").exists()
    assert choose_numerics(auto) == (exact, "numerics: exact (as the run in this folder began)")

    state = output / "checkpoints" / "step-00000001" / "state.json"
    whole = json.loads(state.read_text())
    del whole["processes"][0]["numerics"]
    known = state.read_text()
    state.write_text(json.dumps(whole))
    assert choose_numerics(auto)[1] == "numerics: fast (exact is slower on a CPU)"
    with pytest.raises(
        InvalidInputError, match=r"numerics must be fast to .*-00000001, which does not say .*Continue with"
    ):
        await train_model(exact, await recipe.make_task(exact))

    state.write_text(known.replace('"numerics": "exact"', '"numerics": "fast"'))
    with pytest.raises(InvalidInputError, match=r"-00000001, which was trained with fast, got exact: .* Continue with"):
        await train_model(exact, await recipe.make_task(exact))

    for damaged in ("{}", "", json.dumps({**whole, "processes": ["x"]})):
        state.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"step-00000001 must hold a whole checkpoint"):
            choose_numerics(auto)
