"""Recipes of tinker-cookbook, unmodified, on `unbroken serve --tinker`, with a tiny model and data under their names.

tinker-cookbook is in an environment of its own (`make clients`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.client_runs import client_command, client_environment
from support.served import Served, save_tiny_model, served

pytestmark = pytest.mark.clients
MODEL, ANSWERER = "Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"
"""The second is the one name that twenty_questions has its answers from."""
ROWS = {
    "openai/gsm8k": [{"question": f"What is {k % 5} plus 1?", "answer": f"#### {k % 5 + 1}"} for k in range(192)],
    "HuggingFaceH4/no_robots": [
        {"messages": [{"role": "user", "content": f"Say {k % 5}."}, {"role": "assistant", "content": f"{k % 5}!"}]}
        for k in range(64)
    ],
    "Anthropic/hh-rlhf": [
        {"chosen": f"\n\nHuman: {k}?\n\nAssistant: yes", "rejected": f"\n\nHuman: {k}?\n\nAssistant: no"}
        for k in range(64)
    ],
    "zwhe99/DeepMath-103K": [{"question": f"What is {k}?", "final_answer": str(k)} for k in range(64)],
    "Salesforce/wikitext": [{"text": "before the war and after it was over\n" * 40}] * 2000,
}
"""The hub's data sets, as folders of the working directory."""
CONFIGS = {"openai/gsm8k": "main", "Salesforce/wikitext": "wikitext-103-raw-v1"}
SMALL = ("lora_rank=8", "max_tokens=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    save_tiny_model(folder / MODEL)
    for name, rows in ROWS.items():
        config = CONFIGS.get(name, "default")
        (folder / name).mkdir(parents=True)
        files = []
        for split in ("train", "test"):
            files.append({"split": split, "path": f"{split}.jsonl"})
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        card = json.dumps({"configs": [{"config_name": config, "data_files": files}]})
        (folder / name / "README.md").write_text(f"---\n{card}\n---\n")
    return folder


def start(folder: Path, model: str) -> Any:
    return served(
        folder / model, "--served-model-name", model, "--tinker", "--tinker-store", str(folder / f"{model}-store"),
        "--tinker-max-models", "64", engine="transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with start(folder, MODEL) as running:
        yield running


def run(server: Served, folder: Path, recipe: str, *options: str, model: str = MODEL) -> list[dict[str, Any]]:
    """Run a recipe to its end; returns the metrics of its steps."""
    log = folder / "logs" / recipe
    environment = client_environment("tinker-cookbook", folder / "cache") | {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-reader",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    words = ["-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={model}", f"log_path={log}", *options]
    done = subprocess.run(
        client_command("tinker-cookbook", *words),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (log / "checkpoints.jsonl").exists()
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_sl_loop_learns(server, folder):
    metrics = run(
        server, folder, "sl_loop", "lora_rank=8", "batch_size=16", "learning_rate=1e-2", "max_steps=4", "save_every=2"
    )
    assert metrics[-1]["train_mean_nll"] < metrics[0]["train_mean_nll"]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("rl_loop", ("batch_size=4", "group_size=2", "max_steps=2", *SMALL)),
        ("rl_basic", ("max_steps=1", *SMALL)),
        ("math_rl.train", ("env=arithmetic", "group_size=4", "groups_per_batch=8", "max_steps=2", *SMALL)),
        ("preference.dpo.train", ("renderer_name=qwen3", "batch_size=8", "max_steps=2")),
        (
            "distillation.on_policy_distillation",
            (f"teacher_model={MODEL}", "groups_per_batch=4", "group_size=2", "max_steps=2", "eval_every=0", *SMALL),
        ),
        (
            "multiplayer_rl.guess_number.train",
            ("renderer_name=qwen3", "group_size=2", "batch_size=2", "max_steps=1", "eval_every=0", "max_tokens=16"),
        ),
        (
            "multiplayer_rl.text_arena.train",
            (
                *("renderer_name=qwen3", "batch_size=4", "num_train_datapoints=8", "num_test_datapoints=2"),
                *("max_steps=1", "max_tokens=8", "eval_every=0"),
            ),
        ),
        (
            "rl_numerics_check.train",
            (
                *("renderer_name=qwen3", "group_size=2", "groups_per_batch=2", "max_steps=1", "lora_rank=8"),
                *("max_tokens=24", "max_trajectory_tokens=1900", "task.page_chars=400", "task.num_pages_min=2"),
                "task.num_pages_max=3",
            ),
        ),
    ],
)
def test_recipes_run_unmodified(server, folder, recipe, options):
    assert run(server, folder, recipe, *options)


def test_twenty_questions_is_played_on_a_server_of_the_model_that_answers(folder):
    save_tiny_model(folder / ANSWERER)
    options = ("renderer_name=qwen3", "group_size=2", "batch_size=1", "max_steps=1", "max_tokens=8", "eval_every=0")
    with start(folder, ANSWERER) as server:
        assert run(server, folder, "multiplayer_rl.twenty_questions.train", *options, model=ANSWERER)
