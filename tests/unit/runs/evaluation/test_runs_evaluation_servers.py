"""Evaluations on servers of their own: they get the version that is evaluated, and training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import letters_recipe
from support.evaluations import count_steps, read_evaluations, wait_for_steps
from support.processes import run_two
from support.served import Served, save_tiny_model, served
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.config import EngineConfig, EngineKind, EvaluationConfig, WeightTransport
from unbroken.runs.evaluation.background import EvaluationServers
from unbroken.runs.evaluation.evaluator import Evaluator
from unbroken.runs.export.files import read_info
from unbroken.timeline import Track, read_timeline

pytestmark = pytest.mark.e2e

RECIPE = Path(letters_recipe.__file__)
ASYNCHRONOUS = "--loop.max-staleness=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def evaluation_server(model: Path, weights: Path, *options: str) -> Iterator[Served]:
    with served(model, "--weights-dir", str(weights), *options, engine="transformers") as found:
        yield found


def words(output: Path, model: Path, server: Served, *options: str, transport: str = "files") -> list[str]:
    found = ["train", str(RECIPE), f"--output={output}", f"--model={model}", "--loop.num-steps=8"]
    found += ["--evaluation.num-problems=3", "--evaluation.every=3", "--evaluation.engine.kind=server"]
    found += [f"--evaluation.engine.urls={server.url}", f"--evaluation.engine.transport={transport}"]
    found.append("--checkpoints.every=1")  # versions are numbers of steps then, also after a kill
    if transport == "files":
        found.append(f"--evaluation.engine.weights-dir={output.parent / 'weights'}")
    return [*found, *options]


def versions(line: dict) -> tuple[int, int]:
    return line["policy_version/min"], line["policy_version/max"]


@pytest.mark.parametrize(("loop", "transport"), [(ASYNCHRONOUS, "files"), ("--loop.max-staleness=0", "broadcast")])
def test_a_version_is_evaluated_while_the_next_ones_are_trained(tmp_path, model, monkeypatch, loop, transport):
    """An evaluation that waits until two more steps are made ends only if they are, and still has one version."""
    output = tmp_path / "run"
    wait_for_steps(monkeypatch, output)
    with evaluation_server(model, tmp_path / "weights") as server:
        assert main(words(output, model, server, loop, "--export.every=1", transport=transport)) == 0
    lines = read_evaluations(output)
    assert [(line["step"], *versions(line), line["num_lost"]) for line in lines] == [
        (step, step, step, 0) for step in (0, 3, 6, 8)
    ]
    best = max(lines[1:], key=lambda line: line["reward/mean"])
    info = read_info(output / "best")
    assert (info.step, info.evaluation["reward/mean"]) == (best["step"], best["reward/mean"])
    kept = load_file(output / "best" / "model.safetensors")
    of_step = load_file(output / "models" / f"step-{best['step']:08}" / "model.safetensors")
    assert all((kept[name] == of_step[name]).all() for name in of_step)
    assert not (output / "best-candidate").exists()
    check_timeline(output)


def check_timeline(output: Path) -> None:
    """Steps begin and end within the slice of the evaluation after step 3, on its own row."""
    events = read_timeline(output / "timeline" / "rank-0.json")
    row = [event for event in events if event.get("tid") == Track.EVALUATION.number and event["ph"] in "BE"]
    names = [event["name"] for event in row if event["ph"] == "B"]
    assert names == ["load version 3", "evaluate evaluation", "load version 6", "evaluate evaluation", "load version 8"]
    began, ended = row[2]["ts"], row[3]["ts"]
    assert (row[2]["args"], row[3]["ph"]) == ({"num_steps": 3}, "E")
    steps = [event["ts"] for event in events if event["ph"] == "B" and event["name"].startswith("step ")]
    assert sum(began < ts < ended for ts in steps) >= 1


def test_an_evaluation_whose_server_restarts_is_made_again_with_the_weights_that_follow(tmp_path, model, monkeypatch):
    """The restarted server has its first weights, and they are not evaluated in place of those of step 3."""
    output = tmp_path / "run"
    sample = Evaluator.sample
    with ExitStack() as stack:
        server = stack.enter_context(evaluation_server(model, tmp_path / "weights"))
        restarted = []

        async def restarts(self):
            if count_steps(output) >= 3 and not restarted:
                server.process.kill()
                server.process.wait(timeout=60)
                port = server.url.rpartition(":")[2]
                restarted.append(stack.enter_context(evaluation_server(model, tmp_path / "weights", "--port", port)))
            return await sample(self)

        monkeypatch.setattr(Evaluator, "sample", restarts)
        assert main(words(output, model, server)) == 0
    lines = read_evaluations(output)
    assert [line["num_lost"] for line in lines] == [0, *[1] * (len(lines) - 1)]
    assert all(versions(line) == (line["step"], line["step"]) for line in lines)
    steps = [line["step"] for line in lines]
    assert steps[0] == 0
    assert 4 <= steps[1] <= 6
    assert steps[-1] == 8


def test_an_evaluation_begins_after_the_first_step_at_which_its_server_is_back(tmp_path, model, monkeypatch):
    output = tmp_path / "run"
    sample, find_fault = Evaluator.sample, EvaluationServers.find_fault
    faults = []
    with ExitStack() as stack:
        server = stack.enter_context(evaluation_server(model, tmp_path / "weights"))

        async def dies(self):
            if count_steps(output) >= 3 and not faults:
                server.process.kill()
                server.process.wait(timeout=60)
            return await sample(self)

        async def returns_later(self):
            if len(faults) == 1:
                port = server.url.rpartition(":")[2]
                stack.enter_context(evaluation_server(model, tmp_path / "weights", "--port", port))
            fault = await find_fault(self)
            if fault is not None or faults:
                faults.append((fault, count_steps(output)))
            return fault

        monkeypatch.setattr(Evaluator, "sample", dies)
        monkeypatch.setattr(EvaluationServers, "find_fault", returns_later)
        assert main(words(output, model, server, ASYNCHRONOUS)) == 0
    (away, _), (back, begun), *_ = faults
    assert "is healthy" in away
    assert back is None
    lines = read_evaluations(output)
    assert [(line["step"], *versions(line), line["num_lost"]) for line in lines][:2] == [
        (0, 0, 0, 0),
        (begun, begun, begun, 1),
    ]


def test_a_killed_run_continues_with_the_server_that_has_a_version_of_it(tmp_path, model, monkeypatch):
    class KilledError(Exception):
        pass

    output = tmp_path / "run"
    sample = Evaluator.sample

    async def killed(self):
        if count_steps(output) >= 3:
            raise KilledError
        return await sample(self)

    with evaluation_server(model, tmp_path / "weights") as server:
        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "sample", killed)
            assert main(words(output, model, server, ASYNCHRONOUS)) == 1
        assert [line["step"] for line in read_evaluations(output)] == [0]
        assert main(words(output, model, server, ASYNCHRONOUS)) == 0
    lines = read_evaluations(output)
    assert all(versions(line) == (line["step"], line["step"]) and line["num_lost"] == 0 for line in lines)
    assert 3 <= lines[1]["step"] <= 6
    assert lines[-1]["step"] == 8


def test_a_server_that_stays_away_does_not_end_the_run(tmp_path, model, monkeypatch, caplog):
    output = tmp_path / "run"
    sample = Evaluator.sample
    with evaluation_server(model, tmp_path / "weights") as server:

        async def dies(self):
            if count_steps(output) >= 3:
                server.process.kill()
                server.process.wait(timeout=60)
            return await sample(self)

        monkeypatch.setattr(Evaluator, "sample", dies)
        options = [ASYNCHRONOUS, "--loop.outages.wait-s=0.2"]
        assert main(words(output, model, server, *options)) == 0
    assert [line["step"] for line in read_evaluations(output)] == [0]
    assert count_steps(output) == 8
    assert (output / "final").exists()
    assert not (output / "best-candidate").exists()
    assert "is left out: its servers stayed away" in caplog.text
    assert "there is no evaluation after" in caplog.text


AGENT_RECIPE = """
import httpx
from support.letters_recipe import Config, share_of_letters
from unbroken.rollout.agents.session import AgentTask
from unbroken.runs.collector import Problems
from unbroken.runs.training import train_model

async def attempt(session):
    async with httpx.AsyncClient(headers={"Authorization": "Bearer " + session.api_key}, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "Write."}]}
        answer = await client.post(session.openai_base_url + "/chat/completions", json=body)
    return share_of_letters([answer.json()["choices"][0]["message"]])

def task(number):
    return AgentTask(agent=attempt, task={})

async def run(config):
    await train_model(config, model=config.model, train_on=Problems(agent=task), evaluate_on=Problems(agent=task))
"""


def test_agents_are_evaluated_through_a_gateway_of_their_own(tmp_path, model):
    recipe, output = tmp_path / "recipe.py", tmp_path / "run"
    recipe.write_text(AGENT_RECIPE)
    with evaluation_server(model, tmp_path / "weights") as server:
        command, _, *options = words(output, model, server, ASYNCHRONOUS)
        assert main([command, str(recipe), *options]) == 0
    found = [(line["step"], line["num_without_reward"], *versions(line)) for line in read_evaluations(output)]
    assert found == [(step, 0, step, step) for step in (0, 3, 6, 8)]
    assert (output / "sessions" / "evaluation-0").exists()


def test_two_processes_evaluate_their_parts_on_servers_of_their_own(tmp_path, model):
    output = tmp_path / "run"
    with evaluation_server(model, tmp_path / "weights") as server:
        run_two("unbroken", *words(output, model, server, "--loop.max-staleness=1", "--rollouts.sampling.max-tokens=8"))
    found = [(line["step"], line["num_rollouts"], *versions(line)) for line in read_evaluations(output)]
    assert found == [(step, 3, step, step) for step in (0, 3, 6, 8)]


def server_config(url: str, **options) -> EngineConfig:
    return EngineConfig(kind=EngineKind.SERVER, urls=(url,), **{"transport": WeightTransport.BROADCAST, **options})


def test_only_servers_of_their_own_are_taken():
    with pytest.raises(InvalidInputError, match=r"engine\.kind must be server for evaluations, got embedded"):
        EvaluationConfig(engine=EngineConfig())
    config = EvaluationConfig(engine=server_config("http://a"))
    config.check_engine(server_config("http://b"))
    with pytest.raises(InvalidInputError, match=r"urls must be other servers than engine\.urls, got \['http://a'\]"):
        config.check_engine(server_config("http://a"))
    files = {"transport": WeightTransport.FILES, "weights_dir": Path("w")}
    config = EvaluationConfig(engine=server_config("http://a", **files))
    with pytest.raises(InvalidInputError, match=r"weights_dir must be another folder than engine\.weights_dir"):
        config.check_engine(server_config("http://b", **files))
