"""The models that come out of a run, and of its checkpoints: whole folders, equal to each other, and named errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import letters_recipe
from support.hub import Hub, serve_hub
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.config import ExportConfig, LoraConfig, RunConfig
from unbroken.training.config import LoopConfig

RECIPE = Path(letters_recipe.__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    settings = {"eos_token_id": [0, 3], "temperature": 0.6}  # transformers would not save a temperature alone
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/short.jinja").write_text("{{ messages[0].content }}")
    return folder


def train(output: Path, model: Path, *options: str) -> int:
    return main(["train", str(RECIPE), f"--output={output}", f"--model={model}", *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> Path:
    """A run of five steps that keeps the newest two of the models after every step."""
    output = tmp_path_factory.mktemp("whole") / "run"
    options = (
        "--loop.num-steps=5",
        "--export.every=1",
        "--export.num-kept=2",
        "--checkpoints.every=1",
        "--checkpoints.num-kept=5",
    )
    assert train(output, model, *options) == 0
    return output


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, model) -> Path:
    """A run with LoRA."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    assert train(output, model, "--loop.num-steps=2", "--lora.rank=4") == 0
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def adapter_contents(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files, and the config apart: PEFT writes its set of modules in an order that differs between processes."""
    files = contents(folder)
    config = json.loads(files.pop("adapter_config.json"))
    return files, {**config, "target_modules": sorted(config["target_modules"])}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_the_final_model_has_the_files_of_the_first_one_and_other_weights(whole, model):
    final, first = contents(whole / "final"), contents(model)
    assert final.keys() == first.keys() | {"README.md", "unbroken.json"}
    text = [name for name in first if name not in ("model.safetensors", "config.json", "generation_config.json")]
    assert [final[name] for name in text] == [first[name] for name in text]
    assert json.loads(final["config.json"]) == json.loads(first["config.json"])
    ours, theirs = (json.loads(each["generation_config.json"]) for each in (final, first))
    assert {name: ours[name] for name in theirs} == theirs
    assert final["model.safetensors"] != first["model.safetensors"]
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
    about = json.loads(final["unbroken.json"])
    assert (about["step"], about["source"]) == (5, str(model))


def test_models_of_some_steps_are_kept(whole):
    kept = sorted(path.name for path in (whole / "models").iterdir())
    assert kept == ["step-00000004", "step-00000005"]
    last, final = contents(whole / "models/step-00000005"), contents(whole / "final")
    assert last == final
    assert contents(whole / "models/step-00000004")["model.safetensors"] != final["model.safetensors"]


def test_a_finished_run_writes_its_model_once_and_again_if_it_is_gone(whole, model):
    options = ("--loop.num-steps=5", "--export.every=0", "--checkpoints.every=1", "--checkpoints.num-kept=5")
    before, written = contents(whole / "final"), (whole / "final/model.safetensors").stat().st_mtime_ns
    assert train(whole, model, *options) == 0
    assert (whole / "final/model.safetensors").stat().st_mtime_ns == written
    shutil.rmtree(whole / "final")
    (whole / f".final-{'0' * 32}").mkdir()  # of a process that was killed while it wrote
    assert train(whole, model, *options) == 0
    assert contents(whole / "final") == before
    assert not list(whole.glob(".final-*"))


def test_a_checkpoint_becomes_the_model_that_the_run_wrote(whole, tmp_path, capsys):
    for step in (4, 5):
        checkpoint = whole / f"checkpoints/step-{step:08}"
        assert main(["export", str(checkpoint), str(tmp_path / str(step))]) == 0
        assert contents(tmp_path / str(step)) == contents(whole / f"models/step-{step:08}")
    assert main(["export", str(whole), str(tmp_path / "newest")]) == 0
    assert contents(tmp_path / "newest") == contents(whole / "final")
    assert f"model of {whole}/checkpoints/step-00000005 in {tmp_path}/newest" in capsys.readouterr().out


def test_a_changed_config_is_that_of_the_final_model_and_of_a_checkpoints(model, tmp_path):
    settings = "--model-settings.kwargs={rms_norm_eps = 0.01}"
    assert train(tmp_path / "run", model, "--loop.num-steps=1", settings, "--checkpoints.every=1") == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    final, exported = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("run/final", "exported"))
    assert final == exported
    assert final["rms_norm_eps"] == 0.01


def test_a_checkpoint_of_adapters_becomes_an_adapter_or_a_whole_model(adapted, model, tmp_path):
    assert main(["export", str(adapted), str(tmp_path / "adapter")]) == 0
    assert adapter_contents(tmp_path / "adapter") == adapter_contents(adapted / "final")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= contents(adapted / "final").keys()
    config = json.loads((adapted / "final/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)
    assert main(["export", str(adapted), str(tmp_path / "merged"), "--merged", "--dtype=bfloat16"]) == 0
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"
    base, merged = weights(model), weights(tmp_path / "merged")
    assert base.keys() == merged.keys()
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(adapted / "final").merge_and_unload()
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight.bfloat16(), merged[name].bfloat16()), name
    assert any(not torch.equal(base[name].bfloat16(), merged[name].bfloat16()) for name in base)


def test_merged_models_come_out_of_a_run_by_choice(tmp_path, model):
    options = ("--loop.num-steps=1", "--lora.rank=4", "--export.merged=true")
    assert train(tmp_path / "run", model, *options) == 0
    assert weights(tmp_path / "run/final").keys() == weights(model).keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExportConfig(every=-1), "every must be >= 0, got -1"),
        (lambda: ExportConfig(num_kept=0), "num_kept must be >= 1 or none, got 0"),
        (
            lambda: RunConfig(output=Path("x"), loop=LoopConfig(num_steps=1), export=ExportConfig(merged=True)),
            "export.merged must be false without lora, got true",
        ),
    ],
)
def test_wrong_settings_are_refused(make, message):
    assert LoraConfig(rank=1)
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_wrong_arguments_of_an_export_are_refused_by_name(whole, adapted, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()

    def error_of(*arguments: Any) -> str:
        assert main(["export", *map(str, arguments)]) == 1
        return capsys.readouterr().err

    assert f"FOLDER must be new or empty, and {full} holds files" in error_of(whole, full)
    assert f"CHECKPOINT must be a checkpoint's folder or that of a run with one, got {full}" in error_of(full, "x")
    gone = tmp_path / "gone"
    assert "--model must be the folder or hub name of a Qwen3ForCausalLM" in error_of(whole, "x", "--model", gone)
    assert "merged must be False for a Qwen3ForCausalLM" in error_of(whole, "x", "--merged")
    other = save_tiny_model(tmp_path / "other", hidden_size=32)
    assert "frozen weights have the checksum" in error_of(adapted, "x", "--model", other)
    assert "must hold the weights of this model" in error_of(whole, "x", "--model", other)
    assert not (Path.cwd() / "x").exists()


def test_a_checkpoint_whose_model_has_moved_asks_for_it(adapted, model, tmp_path, capsys):
    moved = shutil.copytree(model, tmp_path / "moved")
    checkpoint = shutil.copytree(adapted / "checkpoints/step-00000002", tmp_path / "step-00000002")
    state = json.loads((checkpoint / "state.json").read_text())
    state["model"]["source"] = str(tmp_path / "gone")
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 1
    assert f"--model must be the folder or hub name of the model that was trained, which was at {tmp_path}/gone" in (
        capsys.readouterr().err
    )
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--model", str(moved)]) == 0
    exported = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert exported["base_model_name_or_path"] == str(moved)


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A hub that this process talks to; huggingface_hub reads the variables when it is imported."""
    with serve_hub() as hub:
        for name, value in {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", hub.environment["HF_TOKEN"])
        yield hub


@pytest.mark.e2e
def test_a_model_is_pushed_to_the_hub(adapted, tmp_path):
    """Through huggingface_hub, against a server with the hub's HTTP API, by a command with the usual variables."""
    command = [sys.executable, "-m", "unbroken", "export", str(adapted), "--push-to-hub", "me/mine", "--private"]
    with serve_hub() as hub:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), **hub.environment}
        pushed = subprocess.run([*command, str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert pushed.returncode == 0, pushed.stderr
    assert f"model at {hub.url}/me/mine/commit/1" in pushed.stdout
    (created,) = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "mine", "private")
    local = contents(tmp_path / "out")
    del local["unbroken.json"]  # it has paths of this machine
    assert hub.files == {f"me/mine/{name}": data for name, data in local.items()}
    assert hub.summaries == ["Checkpoint step-00000002"]


def test_an_export_that_the_hub_refuses_writes_nothing(adapted, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert main(["export", str(adapted), str(tmp_path / "refused"), "--push-to-hub", "me/mine", "--private"]) == 1
    error = capsys.readouterr().err
    assert "push_to_hub must be a repository that you may write to, got 'me/mine': " in error
    assert "401" in error
    assert hub.created == []
    assert not (tmp_path / "refused").exists()


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # huggingface_hub's own
def test_a_run_asks_the_hub_at_its_start_and_sends_the_final_model_at_its_end(model, hub, tmp_path, monkeypatch, capfd):
    options = ("--loop.num-steps=1", "--export.push-to-hub=me/mine")
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_wrong")
        assert train(tmp_path / "refused", model, *options) == 1
    assert "push_to_hub must be a repository that you may write to, got 'me/mine': " in capfd.readouterr().err
    assert not (tmp_path / "refused/checkpoints").exists()
    assert train(tmp_path / "run", model, *options) == 0
    assert f"model at {hub.url}/me/mine/commit/1" in capfd.readouterr().out
    local = contents(tmp_path / "run/final")
    assert hub.files == {f"me/mine/{name}": data for name, data in local.items() if name != "unbroken.json"}
    assert hub.summaries == ["1 steps of training"]
