"""Two policies and a frozen copy on vLLM: over a server that outlives a killed run, then in the process of the run.

The server has newer versions than the checkpoint when the run begins again: all adapters are published above them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.served import served
from support.vllm_session import SMALL_VLLM
from support.watched_run import WatchedRun, read_lines
from unbroken.cli import main
from unbroken.client import Client
from unbroken.demo.model import build_model, build_tokenizer
from unbroken.runs.records.files import find_records, read_records

pytest.importorskip("vllm", reason="needs vLLM")
NUM_STEPS = 4

ENVIRONMENT = """
from unbroken import Continue, Done, EnvStart

SPEAKERS = ("solver", "critic", "solver@past", "critic")


class Talk:
    def __init__(self, number, split):
        self.number, self.said = number, []

    async def start(self):
        return EnvStart(messages=[{"role": "user", "content": f"say {self.number}"}], policy=SPEAKERS[0])

    async def step(self, reply):
        self.said.append(reply.message["content"] or "")
        if len(self.said) == len(SPEAKERS):
            return Done()
        return Continue(messages=[{"role": "user", "content": "and you"}], policy=SPEAKERS[len(self.said)])

    async def reward(self, messages):
        shares = [sum(map(str.isalpha, said)) / max(len(said), 1) for said in self.said]
        return {"solver": shares[0], "critic": -sum(shares[1::2])}

    async def close(self):
        pass
"""
TASK = f"""
environment = "talk.py:Talk"
policies.names = ["solver", "critic"]
policies.copy_every = 2
lora.rank = 8
loop.num_steps = {NUM_STEPS}
checkpoints.every = 2
evaluation.num_problems = 0
rollouts.problems_per_step = 2
rollouts.group_size = 4
rollouts.sampling.max_tokens = 8
trainer.optimizer.learning_rate = 1e-2
"""


def test_policies_on_vllm_keep_their_logprobs_through_a_kill_and_another_engine(tmp_path: Path, capsys) -> None:
    model, output, weights = tmp_path / "model", tmp_path / "run", tmp_path / "weights"
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0, num_heads=2).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    (tmp_path / "task.toml").write_text(TASK)
    words = ["train", str(tmp_path / "task.toml"), "--model", str(model), "--output", str(output), "--preflight=false"]
    lora = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "17"]  # two versions of 2 policies and 6 copies
    with served(model, "--weights-dir", str(weights), *lora) as server, Client(server.url) as client:
        over_http = ["--engine.kind=server", "--engine.urls", server.url, "--engine.weights-dir", str(weights)]
        refused = [str(tmp_path / "refused") if word == str(output) else word for word in words]
        assert main([*refused, *over_http, "--policies.names", '["one","two","three"]']) == 1
        needs = r"at most 8 adapters at once .* got 9, .* 2 frozen copies .*--max-loras is 17, and N adapters need 2 N"
        assert re.search(needs, capsys.readouterr().err)
        assert main([*refused, *over_http, "--lora.rank=9"]) == 1
        assert "lora.rank must be at most 8 with this engine, got 9" in capsys.readouterr().err
        run = WatchedRun(output, *words, *over_http)
        run.wait_until(lambda: len(run.steps()) >= 3)
        run.process.kill()
        run.process.wait(60)
        before = client.model("tiny")["policy_version"]
        assert before >= 3
        assert main([*words, *over_http]) == 0
        printed = capsys.readouterr().out
        assert "engine: one policy with the trainer" in printed
        # Of versions that were left out, after the checkpoint and before the server's next one, there are copies too.
        newest = client.model("tiny")["policy_version"]
        assert newest > before
        names = {each["id"] for each in client.models()}
        copies = {f"{name}@{version}" for name in ("solver", "critic") for version in range(2, newest + 1, 2)}
        assert names == {"tiny", "solver", "critic", *copies}
    inside = ["--engine.kind=colocated", "--engine.options", json.dumps([*SMALL_VLLM, "--max-model-len", "512"])]
    assert main([*words, *inside, f"--loop.num-steps={NUM_STEPS + 1}"]) == 0
    assert "engine: one policy with the trainer" in capsys.readouterr().out
    lines = read_lines(output / "metrics" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    for line in lines:
        for name in ("solver", "critic"):
            assert line[f"policy/{name}/num_rows"] > 0
            assert line[f"policy/{name}/mismatch_k3"] < 1e-10
    solver, critic = (load_file(output / "final" / name / "adapter_model.safetensors") for name in ("solver", "critic"))
    changed = [key for key in solver if "lora_B" in key]
    assert all(solver[key].any() and critic[key].any() for key in changed)
    assert all(np.abs(solver[key] - critic[key]).max() > 1e-3 for key in changed)
    speakers = [
        [turn["policy"] for turn in record["turns"]]
        for path in find_records(output / "rollouts").values()
        for record in read_records(path)
        if record["kind"] == "trajectory"
    ]
    assert len({each[2] for each in speakers} & {"solver@0", "solver@2", "solver@4", "solver@6"}) > 1
    assert {(each[0], each[1], each[3]) for each in speakers} == {("solver", "critic", "critic")}
