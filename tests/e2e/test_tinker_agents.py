"""A loop over the Tinker API whose rollouts an agent makes at a gateway: it samples the weights that are trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.agent_programs import CLAUDE_CODE, CODEX, Program, make_environment
from support.served import Served, gateway_over, save_tiny_model, served
from support.tinker_loops import KEY, no_leaks  # noqa: F401
from unbroken import Client
from unbroken.integrations.tinker import make_data
from unbroken.types import TrainingSample

pytestmark = [
    pytest.mark.e2e,
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning")
    ),
]
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "tinker-agents.md"
MAX_K3 = 1e-10


@contextmanager
def serving(folder: Path, **sizes: int) -> Iterator[tuple[Served, Served]]:
    """A server with the Tinker API that requires provenance, and a gateway over it with the client's key."""
    model = save_tiny_model(folder / "model", **sizes)
    options = ("--tinker", "--tinker-store", str(folder / "tinker"), "--tinker-provenance", "require")
    with (
        served(model, *options, "--tinker-sessions", str(folder / "sessions"), engine="transformers") as server,
        gateway_over(server, model, folder / "sessions", "--upstream-key", KEY) as gateway,
    ):
        yield server, gateway


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    with serving(tmp_path_factory.mktemp("small")) as running:
        yield running


def train(servers: tuple[Served, Served], *, seed: int) -> tuple[tinker.ServiceClient, tinker.TrainingClient]:
    service = tinker.ServiceClient(base_url=servers[0].url, api_key=KEY)
    return service, service.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()


def run_agent(created: dict[str, Any]) -> None:
    """Two turns in each dialect, under the names that agents have for their models; one of them is streamed."""
    chat, key = [{"role": "user", "content": "Say a word."}], {"authorization": f"Bearer {created['api_key']}"}
    with httpx.Client(base_url=created["openai_base_url"], headers=key, timeout=60) as agent:
        for model in ("gpt-5.5", created["model"]):
            answer = agent.post("/chat/completions", json={"model": model, "messages": chat})
            assert answer.status_code == 200, answer.text
            chat += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Again."}]
            asked = {"model": "gpt-5.5-codex", "input": f"Say {model}.", "stream": model == "gpt-5.5"}
            assert agent.post("/responses", json=asked).status_code == 200
            for habit in ("claude-sonnet-4-5", "claude-haiku-4-5"):
                body = {
                    "model": habit,
                    "max_tokens": 8,
                    "messages": [{"role": "user", "content": f"Say {habit} {model}"}],
                }
                assert agent.post("/messages", json=body).status_code == 200


def compute_k3(rows: list[TrainingSample], logprobs: list[np.ndarray]) -> float:
    """The mean of exp(d) - 1 - d over sampled ids, d their logprobs' differences, for logprobs [T - 1] of each row."""
    differences = [
        each.astype(np.float64)[row.sampled_mask[1:]] - row.rollout_logprobs[1:][row.sampled_mask[1:]]
        for row, each in zip(rows, logprobs, strict=True)
    ]
    joined = np.concatenate(differences)
    return float(np.mean(np.expm1(joined) - joined))


@pytest.mark.parametrize("follows", [False, True], ids=["by the checkpoint's path", "by the run, which is followed"])
def test_the_turns_of_an_agent_are_of_the_trained_weights_after_each_update(
    servers: tuple[Served, Served], follows: bool
) -> None:
    service, training = train(servers, seed=int(follows))
    base = service.create_sampling_client(base_model="tiny").result()
    from_base: list[float] = []
    with Client(servers[1].url) as client:
        for step in range(4):
            path = training.save_weights_for_sampler(f"s{step}").result(60).path
            run = path.rpartition("/sampler_weights/")[0]
            policy = run if follows else path
            created = client.sessions.create({"policy": policy, "sampling": {"temperature": 1.0, "max_tokens": 8}})
            assert created["model"] == policy
            run_agent(created)
            rows = client.sessions.samples(created["session_id"], advantage=1.0 if step % 2 else -1.0)
            tree = client.sessions.tree(created["session_id"])
            assert {turn["policy"] for turn in tree["turns"]} == {policy}
            assert {version for turn in tree["turns"] for _, _, version in turn["policy_versions"]} == {step}
            data = make_data(created["session_id"], rows, tree)
            outputs = training.forward(data, "importance_sampling").result(60).loss_fn_outputs
            assert compute_k3(rows, [each["logprobs"].to_numpy() for each in outputs]) <= MAX_K3
            scores = [base.compute_logprobs(types.ModelInput.from_ints(row.token_ids.tolist())) for row in rows]
            from_base.append(compute_k3(rows, [np.array(each.result(60)[1:], np.float32) for each in scores]))
            metrics = training.forward_backward(data, "importance_sampling").result(60).metrics
            assert metrics["provenance_proven:sum"] == sum(int(row.sampled_mask.sum()) for row in rows)
            assert metrics["provenance_logprobs_changed:sum"] == metrics["provenance_version_lag:max"] == 0
            training.optim_step(types.AdamParams(learning_rate=3e-2)).result(60)
    assert from_base[0] <= MAX_K3
    assert min(from_base[1:]) > 1e3 * MAX_K3, "the weights must have changed"


@pytest.mark.clients
@pytest.mark.parametrize(
    ("program", "num_updates"), [(CODEX, 3), (CLAUDE_CODE, 1)], ids=lambda each: getattr(each, "name", None)
)
def test_the_turns_of_agents_that_others_wrote_are_of_the_trained_weights(
    program: Program, num_updates: int, tmp_path: Path
) -> None:
    """Their prompts have 25,000 to 52,000 ids of this tokenizer, so Claude Code, which asks four times, makes one."""
    with serving(tmp_path, max_position_embeddings=200_000) as both, Client(both[1].url) as client:
        _, training = train(both, seed=1)
        for step in range(num_updates + 1):
            policy = training.save_weights_for_sampler(f"s{step}").result(60).path
            created = client.sessions.create({"policy": policy, "sampling": {"temperature": 1.0, "max_tokens": 8}})
            home, url = tmp_path / str(step), created["anthropic_base_url"]
            home.mkdir()
            subprocess.run(  # its status says that the answer, of 8 random ids, is no answer
                program.command(url, home),
                env=make_environment(program, url, home),
                cwd=home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=200,
                check=False,
            )
            rows = client.sessions.samples(created["session_id"], advantage=1.0)
            data = make_data(created["session_id"], rows, client.sessions.tree(created["session_id"]))
            trained = training.forward_backward(data, "importance_sampling").result(300)
            assert compute_k3(rows, [each["logprobs"].to_numpy() for each in trained.loss_fn_outputs]) <= MAX_K3
            assert trained.metrics["provenance_proven:sum"] == sum(int(row.sampled_mask.sum()) for row in rows) > 0
            training.optim_step(types.AdamParams(learning_rate=3e-2)).result(60)


CLAUDE = """#!{python}
import os, sys
import httpx
key = {{"authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}}
with httpx.Client(base_url=os.environ["ANTHROPIC_BASE_URL"], headers=key, timeout=60) as client:
    for model in ("claude-haiku-4-5", "claude-sonnet-4-5"):
        messages = [{{"role": "user", "content": sys.argv[-1]}}]
        body = {{"model": model, "max_tokens": 6, "stream": True, "messages": messages}}
        assert client.post("/v1/messages", json=body).status_code == 200
print("391")
"""


def test_the_block_of_the_documentation_runs(
    servers: tuple[Served, Served], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = re.findall(r"```python\n(import os.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    program = tmp_path / "claude"
    program.write_text(CLAUDE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("UNBROKEN_KEY", "any")
    for written, here in (("8000", servers[0].url), ("8001", servers[1].url)):
        text = text.replace(f"http://127.0.0.1:{written}", here)
    exec(text.replace("path/to/model", "tiny").replace("tml-mine", KEY), {"__name__": "block"})
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [step for step, *_ in steps] == ["0", "1", "2"]
    assert all(float(proven) > 0 for *_, proven in steps)


def test_names_mean_the_same_weights_at_the_gateway_and_at_the_server_or_are_refused(
    servers: tuple[Served, Served],
) -> None:
    service, training = train(servers, seed=5)
    paths = [training.save_weights_for_sampler("a0").result(60).path]
    spanless = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\] must have spans"):
        training.forward_backward([spanless], "cross_entropy").result(60)
    ids, params = types.ModelInput.from_ints([1, 2, 3, 4]), types.SamplingParams(max_tokens=8, stop=[])
    sampled = service.create_sampling_client(model_path=paths[0]).result().sample(ids, 2, params).result(60)
    data = make_data(ids, sampled.sequences, [1.0, -0.5])
    metrics = training.forward_backward(data, "importance_sampling").result(60).metrics
    assert metrics["provenance_proven:sum"] == 16
    training.optim_step(types.AdamParams(learning_rate=3e-2)).result(60)
    paths.append(training.save_weights_for_sampler("a1").result(60).path)
    run = paths[0].rpartition("/sampler_weights/")[0]
    body = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 4, "seed": 3}
    for door in (servers[0].url, servers[1].url):
        with httpx.Client(base_url=door, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as agent:

            def ask(model: str, agent: httpx.Client = agent) -> httpx.Response:
                return agent.post("/v1/chat/completions", json={**body, "model": model, "return_token_ids": True})

            versions = {paths[0]: 0, paths[1]: 1, run: 1, f"{run}@latest": 1, f"{run}@0": 0, f"{run}@1": 1, "tiny@0": 0}
            for name, version in versions.items():
                answer = ask(name)
                assert answer.status_code == 200, (name, answer.text)
                spans = answer.json()["choices"][0]["policy_versions"]
                assert [each[2] for each in spans] == [version], (name, spans)
                assert agent.get(f"/v1/models/{name.replace('/', '%2F')}").json()["policy_version"] == version
            for name in (f"{run}@2", f"{paths[0]}x", f"{paths[0]}@1", "tinker://nobody@latest", "tiny@3", "gpt-5"):
                refused = ask(name)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), name
            assert paths[1] in ask(f"{run}@2").json()["error"]["message"]
    by_path, by_version, newest = (
        service.create_sampling_client(model_path=name).result().compute_logprobs(ids).result(60)
        for name in (paths[0], f"{run}@0", f"{run}@latest")
    )
    assert by_path == by_version != newest
    with pytest.raises(tinker.NotFoundError, match="this key has no checkpoint"):
        service.create_sampling_client(model_path=f"{run}@9").result()
    with httpx.Client(base_url=servers[0].url, headers={"authorization": "Bearer tml-other"}, timeout=60) as other:
        assert other.post("/v1/chat/completions", json={**body, "model": paths[0]}).status_code == 404
        assert other.post("/v1/weights", json={"policy_version": 5, "folder": "/tmp"}).status_code == 400
    with Client(servers[1].url) as client:
        pinned = client.sessions.create({"policy": run, "follow": False})
        assert pinned["model"] == f"{run}@1"
        with pytest.raises(ValueError, match="does not exist: this server has"):
            client.sessions.create({"policy": f"{run}@7"})
