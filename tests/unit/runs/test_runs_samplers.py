"""Runs whose rollouts are in processes of their own: the same rollouts, agents, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import letters_recipe, templates
from support.evaluations import read_evaluations
from support.forks import ForkedPython
from support.processes import free_port, run_two
from support.served import save_tiny_model, served
from support.vision import save_vision_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError, ToolsNotShownError
from unbroken.runs.collector import Problems
from unbroken.runs.config import EngineConfig, RendererConfig, RolloutConfig, RunConfig
from unbroken.runs.python_files import FunctionName
from unbroken.runs.recipe import OpenRecipe, Task
from unbroken.runs.records.files import find_records, read_records
from unbroken.runs.samplers import SamplerOpener, SamplerProcesses
from unbroken.runs.training import train_model
from unbroken.training.config import LoopConfig

pytestmark = pytest.mark.usefixtures("forked_commands")

ONE, TWO = "--rollouts.samplers=1", "--rollouts.samplers=2"
SMALL_STEPS = "--trainer.optimizer.learning-rate=1e-9"
"""Of runs that are compared id by id: larger ones make another id of a rounding, which differs from run to run."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def engine_options(model: Path, weights: Path) -> Iterator[list[str]]:
    """Start a server; yields the options that make it an engine of a run."""
    with served(model, "--weights-dir", str(weights), engine="transformers") as server:
        yield ["--engine.kind=server", f"--engine.urls={server.url}", f"--engine.weights-dir={weights}"]


def make_no_env(number: int) -> Any:
    """Of problems that nobody samples."""
    raise AssertionError(number)


def test_a_sampler_whose_code_or_data_has_other_contents_is_another_one_by_name(tmp_path):
    code, rewards = tmp_path / "recipe.py", tmp_path / "rewards.py"
    for each in (code, rewards):
        each.write_text("a = 1")

    def identify(*, source: str = "rows") -> dict[str, str]:
        problems = Problems(env=make_no_env, source=source)
        config = RunConfig(output=tmp_path, loop=LoopConfig(num_steps=1), curriculum=FunctionName(f"{rewards}:a"))
        opener = SamplerOpener(config=config, source="a/model", train_on=problems, evaluate_on=[], part="0")
        return opener.identify(OpenRecipe(name="recipe.py", words=(), code=str(code)))

    first = identify()
    assert identify() == first
    changed = [name for name, value in identify(source="others").items() if first[name] != value]
    assert [name.partition(" (")[0] for name in changed] == ["the problems to train on"]
    for each, name in ((code, "recipe.py, the recipe's code"), (rewards, rewards)):
        before = identify()
        each.write_text("a = 2")
        assert [key for key, value in identify().items() if before[key] != value] == [f"the SHA-256 of {name}"]


NOTING_RECIPE = """
import os
from support.letters_recipe import Config, share_of_letters
from unbroken.rollout.tool_env import ToolEnv
from unbroken.runs.collector import Problems
from unbroken.runs.recipe import Task

async def make_task(config):
    noted = config.output.with_suffix(".processes")

    def env(number):
        with noted.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        return ToolEnv([{"role": "user", "content": f"Write {number}."}], [], share_of_letters)

    return Task(model=config.model, train_on=Problems(env=env), evaluate_on=Problems(env=env))
"""
"""Of the letters, with a file that has the process of each rollout."""


def read_samples(output: Path) -> list[Any]:
    """The recorded rollouts, but for what differs from run to run, such as times and the trainer's roundings."""
    names = ("trajectory", "status", "reward", "counters", "messages")
    return [
        [record[name] for name in names] + [[row["token_ids"], row["images"]] for row in record["rows"]]
        for path in find_records(output / "rollouts").values()
        for record in read_records(path)
        if record["kind"] == "trajectory"
    ]


@pytest.mark.parametrize(
    ("samplers", "num_processes"), [(ONE, 2), pytest.param(TWO, 4, marks=pytest.mark.e2e)], ids=["one", "two"]
)
def test_rollouts_are_those_that_the_trainers_process_would_sample(tmp_path, model, samplers, num_processes):
    """Also in a run that goes on, and whose servers get an adapter."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(NOTING_RECIPE)
    found = []
    for name, own in (("here", []), ("elsewhere", [samplers])):
        output = tmp_path / name
        with engine_options(model, tmp_path / f"weights-{name}") as engine:
            words = ["train", str(recipe), f"--output={output}", f"--model={model}", *engine, *own]
            words += ["--evaluation.num-problems=2", "--lora.rank=4", "--trainer.lora-updates=adapter", SMALL_STEPS]
            for num_steps in (1, 2):
                assert main([*words, f"--loop.num-steps={num_steps}"]) == 0
        processes = set(output.with_suffix(".processes").read_text().split())
        assert len(processes - {str(os.getpid())}) == (0 if name == "here" else num_processes)
        evaluations = [(line["step"], line["reward/mean"]) for line in read_evaluations(output)]
        found.append((evaluations, read_samples(output)))
    assert len(found[0][1]) > 0
    assert found[0] == found[1]


PICTURES_RECIPE = """
from support.pictures_recipe import Config, PictureEnv
from support.vision import picture
from unbroken.rollout.env import EnvStart
from unbroken.runs.collector import Problems
from unbroken.runs.recipe import Task

class Env(PictureEnv):
    async def start(self):
        parts = [{"type": "image", "image": picture(28, 28, seed=7)}, {"type": "text", "text": "What is it?"}]
        return EnvStart(messages=[{"role": "user", "content": parts}])

async def make_task(config):
    problems = Problems(env=Env, has_images=True)
    return Task(model=config.model, train_on=problems, evaluate_on=problems)
"""


@pytest.mark.e2e
def test_images_of_prompts_and_answers_come_to_the_trainer_as_they_are(tmp_path):
    pytest.importorskip("torchvision", reason="the image processors of transformers need it")
    recipe, model = tmp_path / "recipe.py", save_vision_model(tmp_path / "model")
    recipe.write_text(PICTURES_RECIPE)
    found = []
    for name, own in (("here", []), ("elsewhere", [ONE])):
        output = tmp_path / name
        with engine_options(model, tmp_path / f"weights-{name}") as engine:
            words = [
                "train",
                str(recipe),
                f"--output={output}",
                f"--model={model}",
                "--rollout-log.groups=2",
                SMALL_STEPS,
            ]
            assert main([*words, *engine, *own]) == 0
        lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
        assert max(line["mismatch/max_abs"] for line in lines) < 1e-4
        images = sorted(path.name for path in (output / "rollouts" / "images").iterdir())
        found.append((images, read_samples(output)))
    assert len(found[0][0]) == 5  # that of all prompts, and one of each problem
    assert len(found[0][1]) == 8
    assert found[0] == found[1]


AGENT_RECIPE = """
import os
from pathlib import Path
import httpx
from support.letters_recipe import Config, share_of_letters
from unbroken.rollout.agents.session import AgentTask
from unbroken.runs.collector import Problems
from unbroken.runs.recipe import Task

async def make_task(config):
    noted = config.output / "processes"

    async def attempt(session):
        with noted.open("a") as file:
            file.write(f"{os.getpid()} {session.openai_base_url.split('/s/')[0]}\\n")
        async with httpx.AsyncClient(headers={"Authorization": "Bearer " + session.api_key}, timeout=60) as client:
            body = {"messages": [{"role": "user", "content": "Write."}]}
            answer = await client.post(session.openai_base_url + "/chat/completions", json=body)
        return share_of_letters([answer.json()["choices"][0]["message"]])

    tasks = Problems(agent=lambda number: AgentTask(agent=attempt, task={}))
    return Task(model=config.model, train_on=tasks, evaluate_on=tasks)
"""


@pytest.mark.e2e
def test_agents_and_their_gateway_are_in_the_process_while_training_goes_on(tmp_path, model):
    recipe, output = tmp_path / "recipe.py", tmp_path / "run"
    recipe.write_text(AGENT_RECIPE)
    with engine_options(model, tmp_path / "weights") as engine:
        words = ["train", str(recipe), f"--output={output}", f"--model={model}", "--loop.num-steps=4", ONE]
        words += ["--loop.max-staleness=1", "--evaluation.num-problems=2", "--evaluation.every=2"]
        assert main([*words, *engine]) == 0
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/policy_version"] for line in lines] == [1, 2, 3, 4]
    assert max(line["mismatch/k3"] for line in lines if line["staleness/max"] == 0) < 1e-6
    assert [(line["step"], line["policy_version/min"]) for line in read_evaluations(output)] == [
        (step, step) for step in (0, 2, 4)
    ]
    noted = {tuple(line.split()) for line in (output / "processes").read_text().splitlines()}
    assert len({process for process, _ in noted}) == 1
    assert str(os.getpid()) not in {process for process, _ in noted}
    assert len({gateway for _, gateway in noted}) == 1


@pytest.mark.e2e
@pytest.mark.parametrize(("num_servers", "losses"), [(1, [0, 0, 1, 0]), (2, [0, 0, 0, 0])])
def test_a_server_that_restarts_with_its_first_weights_is_not_sampled_from(
    tmp_path, model, monkeypatch, num_servers, losses
):
    """With another server nothing is lost: the process knows which weights its servers must have."""
    output, weights, sample_group = tmp_path / "run", tmp_path / "weights", SamplerProcesses.sample_group
    with ExitStack() as stack:
        serve = partial(served, model, "--weights-dir", str(weights), engine="transformers")
        servers = [stack.enter_context(serve()) for _ in range(num_servers)]
        port = servers[0].url.rpartition(":")[2]
        restarted = []

        async def restarts(self, sampler, number, *, size):
            if number == 4 and not restarted:  # in the third step
                servers[0].process.kill()
                servers[0].process.wait(timeout=60)
                restarted.append(stack.enter_context(serve("--port", port)))
            return await sample_group(self, sampler, number, size=size)

        monkeypatch.setattr(SamplerProcesses, "sample_group", restarts)
        words = ["train", letters_recipe.__file__, f"--output={output}", f"--model={model}", "--loop.num-steps=4"]
        words += ["--engine.kind=server", f"--engine.urls={','.join(each.url for each in servers)}"]
        assert main([*words, f"--engine.weights-dir={weights}", ONE]) == 0
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["outages/num_losses"] for line in lines] == losses
    assert [line["staleness/max"] for line in lines] == [0] * 4
    assert [line["train/num_rows"] for line in lines] == [16] * 4


@pytest.mark.e2e
def test_each_of_two_trainer_processes_has_its_own(tmp_path, model):
    output = tmp_path / "run"
    with engine_options(model, tmp_path / "weights") as engine:
        words = ["train", letters_recipe.__file__, f"--output={output}", f"--model={model}", "--loop.num-steps=3"]
        words += ["--loop.max-staleness=1", "--rollouts.sampling.max-tokens=8", "--evaluation.num-problems=3"]
        run_two("unbroken", *words, *engine, ONE)
    assert [(line["step"], line["num_rollouts"]) for line in read_evaluations(output)] == [(0, 3), (3, 3)]
    trajectories = {record[0] for record in read_samples(output)}
    assert trajectories == {f"0-0-{problem}/{member}" for problem in range(6) for member in range(8)}


@pytest.mark.e2e
def test_samplers_of_other_machines_join_and_leave_and_others_are_refused(tmp_path, model):
    recipe, output, key, port = tmp_path / "recipe.py", tmp_path / "run", tmp_path / "key", free_port()
    recipe.write_text(NOTING_RECIPE)
    key.write_text("a secret\n")
    samplers, num_steps = [], 50

    def join(name: str, *options: str) -> ForkedPython:
        words = ["sampler", "--connect", f"127.0.0.1:{port}", "--key-file", key, "--name", name]
        words += [recipe, f"--model={model}", f"--output={tmp_path / 'elsewhere'}", "--engine.kind=server"]
        words += ["--engine.urls=http://other", "--engine.weights-dir=other", SMALL_STEPS, *options]
        samplers.append(ForkedPython("unbroken", *words, output=tmp_path / name))
        return samplers[-1]

    def wait_for_groups(number: int) -> None:
        until_s = time.monotonic() + 120
        while not (noted.exists() and len(noted.read_text().split()) >= number):
            assert time.monotonic() < until_s
            assert train.poll() is None, (tmp_path / "train.log").read_text()
            time.sleep(0.05)

    noted = tmp_path / "elsewhere.processes"  # of the samplers' own output folder
    with ExitStack() as stack:
        engine = stack.enter_context(engine_options(model, tmp_path / "weights"))
        first = join("first")  # before the trainer is there
        train = ForkedPython(
            "unbroken", "train", recipe, f"--output={output}", f"--model={model}", *engine, SMALL_STEPS,
            f"--loop.num-steps={num_steps}",
            f"--rollouts.listen=127.0.0.1:{port}", f"--rollouts.key-file={key}", output=tmp_path / "train.log",
        )  # fmt: skip
        stack.callback(train.kill)
        stack.callback(lambda: [each.kill() for each in samplers])
        wait_for_groups(16)
        other = join("other", "--seed=3")
        assert other.wait(120) == 1
        assert "seed is 3 there, and 0 in the trainer" in (tmp_path / "other").read_text()
        second = join("second")
        while not ((tmp_path / "second").exists() and "second is ready" in (tmp_path / "second").read_text()):
            assert second.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 128 + signal.SIGTERM
        assert train.wait(240) == 0, (tmp_path / "train.log").read_text()
        assert second.wait(60) == 0, (tmp_path / "second").read_text()
    assert "unbroken: terminated; the trainer gives its groups to other samplers" in (tmp_path / "first").read_text()
    expected = {f"0-0-{number}/{member}" for number in range(2 * num_steps) for member in range(8)}
    assert {record[0] for record in read_samples(output)} == expected
    assert not (tmp_path / "elsewhere" / "recipe.json").exists()


@pytest.mark.parametrize("kind", ["embedded", "colocated"])
def test_an_engine_in_the_trainers_process_is_refused(kind):
    with pytest.raises(InvalidInputError, match=f"samplers must be 0 with engine.kind {kind}"):
        RunConfig(
            output=Path("x"),
            loop=LoopConfig(num_steps=1),
            engine=EngineConfig(kind=kind),
            rollouts=RolloutConfig(samplers=1),
        )


def test_samplers_of_other_machines_are_refused_where_they_do_not_reach_the_engine():
    with pytest.raises(InvalidInputError, match=r"rollouts.listen must be left out with engine.kind started"):
        RunConfig(
            output=Path("x"),
            loop=LoopConfig(num_steps=1),
            engine=EngineConfig(kind="started"),
            rollouts=RolloutConfig(listen="127.0.0.1:7600", key_file=Path("key")),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samplers": -1}, "samplers must be >= 0, got -1"),
        ({"listen": "127.0.0.1:7600"}, "key_file must be given exactly with listen"),
        ({"key_file": Path("key")}, "key_file must be given exactly with listen"),
        ({"listen": "127.0.0.1", "key_file": Path("key")}, "listen must be HOST:PORT"),
        ({"listen": "a:70000", "key_file": Path("key")}, "listen must be HOST:PORT"),
    ],
)
def test_wrong_settings_of_samplers_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        RolloutConfig(**options)


async def test_a_script_that_no_sampler_could_open_is_refused(tmp_path, model):
    config = letters_recipe.Config(
        output=tmp_path / "run", model=model, engine=EngineConfig(kind="started"), rollouts=RolloutConfig(samplers=1)
    )
    problems = Problems(env=lambda number: pytest.fail("nothing is sampled"))
    with pytest.raises(InvalidInputError, match=r"rollouts.samplers must be 0 .* a script that calls train_model"):
        await train_model(config, Task(model=model, train_on=problems, evaluate_on=problems))


@pytest.mark.parametrize("shows", [False, True])
def test_a_template_that_leaves_out_tools_or_variables_is_refused_before_a_model_is_loaded(tmp_path, model, shows):
    """Not so if it shows them, or if the user says that the messages do."""
    schema: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(templates.QWEN if shows else templates.CHATML)

    def load(**settings):
        problems = Problems(env=lambda number: pytest.fail("nothing is sampled"), tools=[schema])
        opener = SamplerOpener(
            config=letters_recipe.Config(output=tmp_path / "run", model=folder, **settings),
            source=folder,
            train_on=Problems(env=problems.env),
            evaluate_on=[problems],
            part="0",
        )
        return opener.load_renderer(None)

    load(rollouts=RolloutConfig(tools_in_messages=True))
    if shows:
        load()
    else:
        with pytest.raises(ToolsNotShownError, match=r"does not show tools .* rollouts\.tools_in_messages = true"):
            load()
    with pytest.raises(InvalidInputError, match=r"renderer\.template_kwargs must have .* got enable_thinking"):
        load(renderer=RendererConfig(template_kwargs={"enable_thinking": False}))
