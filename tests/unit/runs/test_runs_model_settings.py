"""How a run loads its model: attention, dtype, revision, keyword arguments; and the context of its engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from support import letters_recipe
from support.length_rules import LONGEST, ORIGINAL, model_with_rule
from support.servers import server_tokenizer
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.config import (
    Attention,
    EngineConfig,
    EngineKind,
    LoraConfig,
    ModelSettings,
    Precision,
    RunConfig,
    TeacherConfig,
)
from unbroken.runs.engines import open_engine
from unbroken.runs.models import (
    check_config_changes,
    find_revision,
    find_sizes,
    load_model,
    needs_engine_memory,
    prepare_model,
    warn_about_memory,
)
from unbroken.runs.processes import Rank
from unbroken.training.config import LoopConfig, ParallelConfig, TrainerConfig


def save(folder: Path, rule: str) -> Path:
    tokenizer = server_tokenizer()
    model_with_rule(rule, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("gemma2"), "softcap")


@pytest.fixture(scope="module")
def phi3(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("phi3"), "longrope")


def run_config(**fields: Any) -> RunConfig:
    return RunConfig(**{"output": Path("run"), "loop": LoopConfig(num_steps=1), **fields})


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(("context", "max_tokens"), [(ORIGINAL, 40), (LONGEST, 100)])
def test_a_run_with_longrope_trains_the_policy_that_sampled(phi3, tmp_path, context, max_tokens):
    """Of short rows and long ones, by the rule of the engine's context."""
    options = ["--model", str(phi3), "--output", str(tmp_path / "run"), "--loop.num-steps", "1"]
    options += ["--engine.embedded.context-length", str(context), "--rollouts.sampling.max-tokens", str(max_tokens)]
    options += ["--rollouts.group-size", "4", "--rollout-log.groups", "0", "--trainer.kl-weight", "0.1"]
    assert main(["train", str(Path(letters_recipe.__file__)), *options]) in (0, None)
    (lines,) = [file.read_text().splitlines() for file in (tmp_path / "run").rglob("metrics.jsonl")]
    metrics = json.loads(lines[0])
    assert metrics["mismatch/k3"] < 1e-9
    (kl,) = [value for name, value in metrics.items() if name.endswith("kl")]
    assert kl < 1e-9  # the reference has the policy's factors


@pytest.mark.parametrize("attention", [None, Attention.EAGER, Attention.FLEX])
def test_policy_and_engine_follow_the_config_with_every_attention_that_can(gemma2, attention, tmp_path):
    model = load_model(gemma2, ModelSettings(attn_implementation=attention))
    assert model.config._attn_implementation == (attention or "eager")


async def test_the_embedded_engine_has_eager_in_place_of_flex_attention(gemma2, tmp_path):
    model = load_model(gemma2, ModelSettings(attn_implementation=Attention.FLEX))
    async with open_engine(
        EngineConfig(), model=model, source=gemma2, output=tmp_path, device=torch.device("cpu"), rank=Rank()
    ) as found:
        assert found.engine._forward.model.config._attn_implementation == "eager"


def test_sdpa_is_refused_for_a_model_with_soft_caps(gemma2):
    with pytest.raises(
        InvalidInputError, match=r"attn_implementation must be eager or flex_attention for Gemma2.*sdpa"
    ):
        load_model(gemma2, ModelSettings(attn_implementation=Attention.SDPA))


def test_an_unknown_attention_is_refused_by_its_name(phi3, tmp_path, capsys):
    options = ["--model", str(phi3), "--output", str(tmp_path), "--model-settings.attn-implementation", "flash"]
    assert main(["train", str(Path(letters_recipe.__file__)), *options]) == 1
    rule = "--model-settings.attn-implementation must be 'eager', 'sdpa' or 'flex_attention', got 'flash'"
    assert rule in capsys.readouterr().err


def test_frozen_weights_below_adapters_may_be_bfloat16_and_no_others(phi3):
    settings = ModelSettings(dtype=Precision.BFLOAT16)
    with pytest.raises(InvalidInputError, match=r"model_settings.dtype must be float32 without lora, got bfloat16"):
        run_config(model_settings=settings)
    config = run_config(model_settings=settings, lora=LoraConfig(rank=2))
    model, _ = prepare_model(load_model(phi3, settings), config)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("dtype", "lora", "precision", "chosen"),
    [
        (None, None, "bfloat16", "float32"),
        (None, LoraConfig(), "float32", "float32"),
        (None, LoraConfig(), "bfloat16", "bfloat16"),
        ("float32", LoraConfig(), "bfloat16", "float32"),
        ("bfloat16", LoraConfig(), "float32", "bfloat16"),
    ],
)
def test_the_base_below_adapters_is_in_the_type_that_its_layers_are_computed_in(dtype, lora, precision, chosen):
    settings = ModelSettings(dtype=dtype and Precision(dtype))
    config = run_config(model_settings=settings, lora=lora, precision=Precision(precision))
    assert config.chosen_model_settings.dtype == chosen


@pytest.mark.parametrize("kind", ["embedded", "started", "server"])
def test_keyword_arguments_change_the_config_where_the_engine_has_it_too(gemma2, kind):
    settings = ModelSettings(kwargs={"attn_logit_softcapping": 7.0, "use_safetensors": True})
    assert load_model(gemma2, settings).config.attn_logit_softcapping == 7.0
    of_server = {"urls": ("http://127.0.0.1:9",), "weights_dir": Path("w")} if kind == "server" else {}
    config = run_config(model_settings=settings, engine=EngineConfig(kind=EngineKind(kind), **of_server))
    if kind == "embedded":
        check_config_changes(gemma2, config)
        return
    with pytest.raises(InvalidInputError, match=rf"kwargs must not change .* \(attn_logit_softcapping\) .* {kind}"):
        check_config_changes(gemma2, config)


@pytest.mark.parametrize("name", ["dtype", "device_map", "trust_remote_code"])
def test_keyword_arguments_that_are_not_the_users_are_refused(name):
    with pytest.raises(InvalidInputError, match=rf"kwargs must be without {name}.* got"):
        ModelSettings(kwargs={name: "x"})


def test_a_keyword_argument_that_no_model_takes_is_refused(phi3):
    with pytest.raises(InvalidInputError, match=r"which takes model_settings, got .*'nothing': 1}: .*nothing"):
        load_model(phi3, ModelSettings(kwargs={"nothing": 1}))


def test_a_revision_is_a_folder_from_the_hubs_cache(phi3, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    of_model, commit = tmp_path / "models--me--tiny", "a" * 40
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "v2").write_text(commit)
    (of_model / "snapshots").mkdir()
    (of_model / "snapshots" / commit).symlink_to(phi3)
    assert Path(find_revision("me/tiny", "v2")) == of_model / "snapshots" / commit
    assert find_revision("me/tiny", None) == "me/tiny"
    with pytest.raises(InvalidInputError, match=r"model_settings.revision must be one of 'me/tiny' .* got 'v3'"):
        find_revision("me/tiny", "v3")
    with pytest.raises(InvalidInputError, match=r"model_settings.revision must be left out for a model in a folder"):
        find_revision(phi3, "v2")


@pytest.mark.parametrize(
    ("precision", "gib", "warns"), [("bfloat16", 0.5, True), ("bfloat16", 8, False), ("float32", 0.5, False)]
)
def test_a_run_that_will_not_fit_is_warned_of_before_its_model_is_loaded(phi3, precision, gib, warns, caplog):
    config = run_config(precision=Precision(precision))
    warn_about_memory(phi3, config, find_sizes(phi3, config), device_bytes=gib * 2**30)
    assert ("GiB are needed on a GPU of 0.5 GiB" in caplog.text) == warns
    assert ("lora.rank = 16" in caplog.text) == warns


@pytest.mark.parametrize(
    ("changes", "gib", "needs"),
    [
        ({}, 8, False),
        ({}, 0.5, True),
        ({"precision": Precision.FLOAT32}, 8, True),  # nothing is estimated
        ({"options": ("--enable-sleep-mode",)}, 8, True),
        ({"options": ("--gpu-memory-utilization=0.9",)}, 8, True),
        ({"teacher": TeacherConfig(models=("large",))}, 8, True),  # of any size
        ({"teacher": TeacherConfig(models=("http://gpu-2:8100",))}, 8, False),
    ],
)
def test_an_engine_sleeps_where_the_trainer_needs_its_memory_or_its_options_ask_for_it(phi3, changes, gib, needs):
    options = ("--gpu-memory-utilization", "0.3", *changes.get("options", ()))
    others = {name: value for name, value in changes.items() if name != "options"}
    engine = EngineConfig(kind=EngineKind.COLOCATED, options=options)
    config = run_config(**{"precision": Precision.BFLOAT16, "engine": engine, **others})
    assert needs_engine_memory(phi3, config, find_sizes(phi3, config), device_bytes=gib * 2**30) == needs


def test_processes_that_share_the_ids_of_rows_are_warned_of_what_each_needs(phi3, caplog):
    for sequence in (1, 2):
        trainer = TrainerConfig(tokens_per_micro_batch=65_536, parallel=ParallelConfig(sequence=sequence))
        config = run_config(precision=Precision.BFLOAT16, trainer=trainer)
        warn_about_memory(phi3, config, find_sizes(phi3, config), device_bytes=2**27, num_processes=2)
    assert re.findall(r"a pass of 65,536 ids (\d\.\d)", caplog.text) == ["0.6", "0.3"]
