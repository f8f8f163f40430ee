"""`unbroken numerics`, and runs with exact numerics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.architectures import tiny_model
from support.letters_recipe import Config
from support.served import save_tiny_model
from support.vision import save_vision_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.config import EngineConfig, EngineKind, Precision
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.types import Numerics

RECIPE = Path(__file__).parents[2] / "support" / "letters_recipe.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_dense_model_is_exact_here_and_the_report_says_what_fast_costs(model, capsys):
    assert main(["numerics", str(model), "--rows", "6", "--max-tokens", "24"]) == 0
    report, progress = capsys.readouterr()
    assert [line.split()[:2] for line in progress.splitlines() if "compared" in line] == [
        [kind, way]
        for kind in ("fast", "exact")
        for way in ("modules", "prefill", "cached", "alone", "batches", "together", "updated")
    ]
    fast, exact = ([line for line in report.splitlines() if line.startswith(kind)] for kind in ("fast", "exact"))
    assert len(fast) == len(exact) == 6
    assert all("100.0 %" in line for line in exact)
    assert any("100.0 %" not in line for line in fast)
    words = " ".join(report.split())
    assert "modules, fast of 33 modules layers.0.self_attn.q_proj is the first that differs: " in words
    assert "modules, exact outputs of 33 modules are equal" in words
    assert 'verdict: exact, with trainer.numerics = "exact"' in report.splitlines()


def test_sums_as_long_as_those_of_real_models_are_exact(tmp_path, capsys):
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    save_tiny_model(tmp_path, **sizes, num_hidden_layers=1, intermediate_size=1536)
    assert main(["numerics", str(tmp_path), "--rows", "2", "--max-tokens", "8"]) == 0
    report = capsys.readouterr().out
    assert " modules are equal" in " ".join(report.split())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_text_rows_of_a_model_that_takes_images_are_exact(family, tmp_path, capsys):
    save_vision_model(tmp_path, family)
    assert main(["numerics", str(tmp_path), "--rows", "2", "--max-tokens", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "modules language_model.layers.0.self_attn.q_proj is the first" in shown


def test_engines_that_run_elsewhere_are_refused(model, capsys):
    assert main(["numerics", str(model), "--engine.kind", "started"]) == 1
    assert "engine.kind must be embedded or colocated to compare numerics, got started" in capsys.readouterr().err


def test_a_model_that_is_certain_of_its_ids_proves_nothing(tmp_path, capsys):
    save_tiny_model(tmp_path, initializer_range=3.0)
    assert main(["numerics", str(tmp_path), "--rows", "2", "--max-tokens", "8"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "verdict: none: these weights are too certain of their ids for rounding to show" in shown


def test_a_model_that_cannot_be_exact_is_named_with_the_reason(tmp_path, capsys):
    tiny_model("qwen2_moe").save_pretrained(tmp_path)
    assert main(["numerics", str(tmp_path), "--rows", "2", "--max-tokens", "8", "--json"]) == 1
    fast, exact = json.loads(capsys.readouterr().out)
    assert fast["ways"]["together"]["num_tokens"] > 0
    assert exact["ways"] == {}
    assert "mlp.gate has 4 features" in exact["refused"]


@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--engine.kind=started", '--engine.options=["--engine","transformers"]', "--loop.max-staleness=2"],
        ["--lora.rank=4", "--rollouts.sampling.top-k=5", "--rollouts.sampling.temperature=0.7"],
    ],
    ids=["embedded", "started, ahead", "lora and top-k"],
)
def test_every_step_of_a_run_has_no_difference_at_all_where_it_has_the_weights_that_sampled(
    model, tmp_path, options, caplog
):
    output = tmp_path / "run"
    arguments = [str(RECIPE), f"--model={model}", f"--output={output}", "--loop.num-steps=4"]
    assert main(["train", *arguments, "--trainer.numerics=exact", *options]) == 0
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["mismatch/k3_lag_0"] in (0.0, None)
        if line["staleness/max"] is not None:  # else nothing was trained
            assert (line["mismatch/proven_share"] == 1.0) == (line["staleness/max"] == 0)
    assert lines[0]["mismatch/equal_share"] == 1.0
    assert lines[0]["mismatch/max_abs"] == 0.0
    assert lines[0]["mismatch/proven_share"] == 1.0
    assert ("of older ones, of which nothing is proven" in caplog.text) == any("staleness" in each for each in options)


def test_a_run_that_ends_and_goes_on_has_the_bits_of_one_that_does_not(model, tmp_path):
    """Its engine has another prefix cache and other batches, which change no bit with exact numerics."""
    for name, numbers in (("whole", (3,)), ("cut", (1, 3))):
        for number in numbers:
            arguments = [str(RECIPE), f"--model={model}", f"--output={tmp_path / name}", f"--loop.num-steps={number}"]
            assert main(["train", *arguments, "--trainer.numerics=exact"]) == 0
    whole, cut = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "cut"))
    before = load_file(model / "model.safetensors")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert any(not torch.equal(whole[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "setting",
    [
        {"precision": Precision.FLOAT32, "engine": EngineConfig(kind=EngineKind.COLOCATED)},
        {"engine": EngineConfig(reuse_kv=True)},
        {"precision": Precision.BFLOAT16},
        {
            "precision": Precision.BFLOAT16,
            "engine": EngineConfig(kind=EngineKind.COLOCATED),
            "trainer": TrainerConfig(numerics=Numerics.EXACT, gradient_checkpointing=True),
        },
    ],
    ids=["precision", "engine.reuse_kv", "precision", "trainer.gradient_checkpointing"],
)
def test_runs_that_cannot_be_exact_are_refused(request, tmp_path, setting):
    name = request.node.callspec.id.rstrip("01")  # of two with one name
    with pytest.raises(InvalidInputError, match=rf"trainer\.numerics must be fast with {name} = .*, got exact"):
        Config(
            output=tmp_path,
            model=tmp_path,
            loop=LoopConfig(num_steps=1),
            **{"trainer": TrainerConfig(numerics=Numerics.EXACT), **setting},
        )
