"""A real model learns a task, is evaluated beside what it was, exported, and serves an agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pyarrow.parquet
import pytest
from safetensors import safe_open

from support.served import served
from unbroken.cli import main

pytestmark = pytest.mark.real

TASK = Path(__file__).with_name("task.toml")
NUM_STEPS = 4
KEY = "the control key of this test"


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a few LoRA steps."""
    output = tmp_path_factory.mktemp("run") / "run"
    arguments = ["--model", str(model), "--output", str(output), "--loop.num-steps", str(NUM_STEPS)]
    assert main(["train", str(TASK), *arguments]) == 0
    return output


@pytest.fixture(scope="module")
def merged(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was trained, as a model of its own."""
    folder = tmp_path_factory.mktemp("merged") / "model"
    assert main(["export", str(trained), str(folder), "--merged"]) == 0
    return folder


def test_the_reward_of_a_few_lora_steps_rises_and_sampler_and_trainer_agree_in_each(trained):
    steps = [json.loads(line) for line in (trained / "metrics" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps]
    assert len(rewards) == NUM_STEPS
    assert rewards[0] < 0.25
    assert rewards[-1] > rewards[0] + 0.2
    assert all(step["mismatch/k3"] < 1e-8 for step in steps)


def test_the_evaluation_of_both_models_shows_what_was_learned(model, trained, tmp_path, capsys):
    models = ("--model", str(model), "--model", str(trained))
    sizes = ("--problems", "16", "--samples", "2", "--output", str(tmp_path / "evaluation"))
    assert main(["eval", str(TASK), *models, *sizes, "--json"]) == 0
    before, after = (find_reward(each) for each in json.loads(capsys.readouterr().out)["models"])
    assert after > before + 0.1


def find_reward(of_model: Any) -> float:
    return float(of_model["sets"]["evaluation"]["measures"]["reward/mean"]["value"])


def test_rows_and_a_merged_model_are_exported(model, trained, merged, tmp_path):
    file = tmp_path / "rows.parquet"
    assert main(["export", str(trained), str(file)]) == 0
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert len(rows) == NUM_STEPS * 8 * 8
    assert all(len(row["token_ids"]) == len(row["rollout_logprobs"]) for row in rows)
    with safe_open(model / "model.safetensors", "np") as old, safe_open(merged / "model.safetensors", "np") as new:
        assert set(old.keys()) == set(new.keys())
        changed = {name for name in old.keys() if not np.array_equal(old.get_tensor(name), new.get_tensor(name))}  # noqa: SIM118
    assert len(changed) == 30 * 7, "the linear modules of all layers"


def test_an_agent_of_the_openai_sdk_talks_to_the_trained_model_in_a_session(merged, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    options = ("--sessions", str(tmp_path / "sessions"), "--api-key-file", str(key_file))
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        served(merged, *options, engine="transformers", as_command=True) as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=120) as control,
    ):
        created = control.post("/v1/sessions", json={"sampling": {"temperature": 1.0, "max_tokens": 16}}).json()
        messages: list[Any] = []
        with openai.OpenAI(base_url=created["openai_base_url"], api_key=created["api_key"], max_retries=0) as agent:
            for question in ("Is a dog an animal? Reply with one word: yes or no.", "Is a stone one?", "And a cat?"):
                messages.append({"role": "user", "content": question})
                answer = agent.chat.completions.create(model="any", messages=messages).choices[0].message
                messages.append({"role": "assistant", "content": answer.content})
        assert all(message["content"] for message in messages)
        session = f"/v1/sessions/{created['session_id']}"
        control.post(f"{session}/finish", json={"reward": 1.0}).raise_for_status()
        state = control.get(session).json()
        assert state["status"] == "finished", state
        assert state["forks"] == [], "every turn continues the ids of the one before"
        (row,) = control.get(f"{session}/samples", params={"advantage": 1.0}).json()["samples"]
    assert sum(row["sampled_mask"]) > 3
