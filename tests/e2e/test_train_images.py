"""Recipes with images on tiny random models: from a TOML file, and from an environment that answers with pictures."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from support import pictures_recipe
from support.vision import picture, save_vision_model
from support.vision_families import save_family
from unbroken.cli import main
from unbroken.runs.records.files import find_records, read_records

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

RECIPE = """
data = {file = "prompts.jsonl", images = "pictures"}
loop.num_steps = 3
seed = 2
trainer.optimizer.learning_rate = 1e-3
rollout_log.groups = 2
rollout_log.scored_groups = 2
evaluation.num_problems = 4
[rollouts]
problems_per_step = 2
group_size = 4
sampling.max_tokens = 8
limits.max_turns = 1
[[rewards]]
function = "rewards.py:letters"
[[rewards]]
function = "rewards.py:saw"
"""
REWARDS = '''
def letters(completions):
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]

def saw(messages, pictures):
    """The messages have the images of their row, and the column has what `datasets` gives."""
    for conversation, names in zip(messages, pictures):
        content = conversation[0]["content"]
        shown = [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
        assert len(shown) == len(names), (conversation, names)
    return [0.0] * len(messages)
'''


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


def write_recipe(folder: Path) -> Path:
    """A TOML recipe, whose rows have two images, one, and none."""
    folder.mkdir()
    for seed in (1, 2):
        picture(56, 28 * seed, seed=seed).save(folder / f"{seed}.png")
    rows: list[dict[str, Any]] = [
        {"prompt": "Which is larger?", "pictures": ["1.png", "2.png"]},
        {"prompt": "What is it?", "pictures": ["2.png"]},
        {"prompt": "Say something.", "pictures": []},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]


def rows_with_images(output: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(trajectory, row) of all recorded rows with images."""
    members = [member for path in find_records(output / "rollouts").values() for member in list(read_records(path))[1:]]
    return [(member, row) for member in members for row in member["rows"] if row["images"]]


def check_logprobs(row: dict[str, Any]) -> None:
    """Sampler and trainer agree on the ids of a row."""
    np.testing.assert_allclose(row["rollout_logprobs"], row["trainer_logprobs"], atol=1e-4)


def test_a_toml_file_trains_on_images(tmp_path, model):
    recipe, output = write_recipe(tmp_path / "recipe"), tmp_path / "run"
    words = ["train", str(recipe), f"--output={output}", f"--model={model}", "--loop.num-steps=2"]
    assert main(words) == 0
    assert main([*words[:-1], "--loop.num-steps=3"]) == 0  # continues
    found = lines(output)
    assert [line["step"] for line in found] == [0, 1, 2]
    for line in found:
        assert line["mismatch/max_abs"] < 1e-4
        assert line["train/grad_norm"] > 0
    kept = rows_with_images(output)
    assert {len(row["images"]) for _, row in kept} == {1, 2}
    files = {hashlib.sha256(data).hexdigest(): data for data in map(Path.read_bytes, recipe.parent.glob("*.png"))}
    for member, row in kept:
        check_logprobs(row)
        parts = [part for part in member["messages"][0]["content"] if part["type"] == "image"]
        assert [part["sha256"] for part in parts] == [image["sha256"] for image in row["images"]]
        for image in row["images"]:
            assert (output / "rollouts" / "images" / image["sha256"]).read_bytes() == files[image["sha256"]]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, output / "final"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("visual" in name for name in changed)
    AutoModelForImageTextToText.from_pretrained(output / "final")
    assert (output / "final" / "preprocessor_config.json").exists()
    evaluated = [json.loads(line) for line in (output / "evaluation.jsonl").read_text().splitlines()]
    assert [line["num_rollouts"] for line in evaluated][:1] == [4]
    assert all(line["num_without_reward"] == 0 for line in evaluated)


def test_a_teacher_with_a_hint_sees_the_images_of_its_row(tmp_path, model):
    """The first row has its own prompt in the column: from the policy's own weights it is at rounding's distance."""
    recipe, output = write_recipe(tmp_path / "recipe"), tmp_path / "run"
    hints = ["Which is larger?", "It is noise. What is it?"]
    data = [json.loads(line) for line in (recipe.parent / "prompts.jsonl").read_text().splitlines()]
    rows = [{**row, "hint": hint} for row, hint in zip(data, hints, strict=False)]
    (recipe.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = ["--algorithm=distillation", f"--teacher.models={model}", "--teacher.prompt=hint", "--data.shuffle=false"]
    steps = ["--loop.num-steps=2", "--rollouts.problems-per-step=1"]
    words = ["train", str(recipe), f"--output={output}", f"--model={model}", *teacher, *steps]
    assert main(words) == 0
    found = lines(output)
    assert [line["teacher/token_share"] for line in found] == [1, 1]
    assert abs(found[0]["teacher/kl"]) < 1e-4 < abs(found[1]["teacher/kl"])


def test_an_environment_may_answer_with_images(tmp_path, model):
    (tmp_path / "recipe.toml").write_text(f'recipe = "{pictures_recipe.__file__}"\nimages = true\n')
    output = tmp_path / "run"
    words = ["--trainer.kl-weight=0.1", "--lora.rank=2", "--lora.modules=q_proj,v_proj"]
    words += ["--rollout-log.groups=1"]
    assert main(["train", str(tmp_path / "recipe.toml"), f"--output={output}", f"--model={model}", *words]) == 0
    kept = rows_with_images(output)
    assert len(kept) == 4
    for member, row in kept:
        assert [each["bridge"] for each in member["turns"]] == [False, True]
        check_logprobs(row)


def test_two_processes_with_parts_of_the_model_train_adapters_alone(tmp_path, model):
    """What is below the adapters is frozen also where it was gathered before them: else the model is not written."""
    recipe, output = write_recipe(tmp_path / "recipe"), tmp_path / "run"
    words = ["train", str(recipe), f"--output={output}", f"--model={model}"]
    words += ["--trainer.parallel.fsdp=2", "--lora.rank=2", "--lora.modules=q_proj,v_proj"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "unbroken"]
    done = subprocess.run(
        [*launch, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert max(line["mismatch/max_abs"] for line in lines(output)) < 1e-4
    assert (output / "final" / "adapter_model.safetensors").exists()


def test_a_family_that_the_embedded_engine_refuses_is_sent_to_vllm(tmp_path, capsys):
    recipe, model = write_recipe(tmp_path / "recipe"), save_family(tmp_path / "gemma", "gemma3")
    assert main(["train", str(recipe), f"--output={tmp_path / 'run'}", f"--model={model}"]) == 1
    printed = capsys.readouterr().err
    assert "gives other logits with a cache of slots than without" in printed
    assert "there is vLLM: engine.kind colocated" in printed
