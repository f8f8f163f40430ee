"""Terminal tasks: folders of them, and trials of the package harbor, which a stand-in replaces, as attempts."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.agent_players import TASK
from support.attempts import sample_attempts
from support.gateways import scripted
from support.served import save_tiny_model
from support.terminal_tasks import STAND_IN, TASK_TOML, write_notes_task
from unbroken.cli import main
from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor import (
    ContainerConfig,
    ContainerRunner,
    CreationConfig,
    Creations,
    TerminalConfig,
    TerminalTasks,
    describe_files,
    find_task_folders,
)
from unbroken.rollout.agents.session import AgentSession
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.runs.config import RolloutConfig
from unbroken.runs.prompts.environments import PackageProblems, PackageSettings

HERE: Mapping[str, Any] = {"containers": {"gateway_host": "127.0.0.1"}}


@pytest.fixture(autouse=True)
def _harbor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "harbor"]:
        del sys.modules[name]


async def attempt(folder: Path, *, limits: Limits | None = None, **end: Any) -> Trajectory:
    task = write_notes_task(folder / "notes", **end)
    settings = PackageSettings(arguments=HERE, logs=folder / "agents")
    problems = PackageProblems(f"harbor:{task}", settings, seed=0).make(evaluation=False)
    config = RolloutConfig(limits=limits or Limits())
    group = await sample_attempts(folder, scripted("Done.<|im_end|>"), problems, config, size=1)
    return group.trajectories[0]


async def test_an_attempt_is_a_trial_whose_agent_has_a_session_as_its_model(tmp_path: Path) -> None:
    done = await attempt(tmp_path, rewards={"reward": 0.5, "words": 3})
    assert (done.error, done.status, done.reward) == (None, TrajectoryStatus.COMPLETED, 0.5)
    assert dict(done.reward_parts) == {"agent_timed_out": 0.0, "agent_failed": 0.0, "words": 3.0}
    assert [message["content"] for message in done.messages] == [TASK, "Done."]


@pytest.mark.parametrize(
    ("exception", "part"), [("AgentTimeoutError", "agent_timed_out"), ("NonZeroAgentExitCodeError", "agent_failed")]
)
async def test_what_an_agent_did_before_it_failed_is_verified_all_the_same(
    tmp_path: Path, exception: str, part: str
) -> None:
    done = await attempt(tmp_path, exception=exception, rewards={"reward": 1})
    assert (done.status, done.reward, done.reward_parts[part]) == (TrajectoryStatus.COMPLETED, 1.0, 1.0)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"exception": "EnvironmentStartTimeoutError", "rewards": {"reward": 1}}, "trial failed: EnvironmentStartTime"),
        ({"exception": "VerifierTimeoutError"}, "Harbor's trial failed: VerifierTimeoutError: so it ended"),
        ({}, "Harbor's trial failed: it gave no reward"),
        ({"rewards": {"score": 1}}, "it must have 'reward', or environment_arguments.reward must name one of score"),
        ({"rewards": {"reward": float("nan")}}, "a reward must be a finite number, got nan"),
        ({"rewards": {"reward": "much"}}, "a reward must be a finite number, got 'much'"),
    ],
)
async def test_a_trial_that_failed_by_no_fault_of_the_agent_has_no_reward(
    tmp_path: Path, end: dict[str, Any], words: str
) -> None:
    done = await attempt(tmp_path, **end)
    assert (done.status, done.reward) == (TrajectoryStatus.FAILED, None)
    assert isinstance(done.error, TaskError)
    assert words in str(done.error)


class Clock:
    """`time.monotonic` and `asyncio.sleep`, without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._sleep = asyncio.sleep
        monkeypatch.setattr("unbroken.integrations.harbor.time.monotonic", lambda: self.now)
        monkeypatch.setattr("unbroken.integrations.harbor.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await self._sleep(0)


def make_session() -> AgentSession:
    return AgentSession(session_id="s", api_key="k", openai_base_url="", anthropic_base_url="", model="m", task={})


async def test_containers_are_made_so_many_at_once_and_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    creations = Creations(CreationConfig(at_once=3, per_s=4))
    making, most, begun, ready = 0, 0, [], asyncio.Event()

    async def make() -> None:
        nonlocal making, most
        async with creations.admit(make_session()) as start:
            begun.append(clock.now)
            making, most = making + 1, max(most, making + 1)
            await ready.wait()
            making -= 1
            await start()
            await asyncio.Event().wait()  # the agent works on, and holds up no other

    tasks = [asyncio.create_task(make()) for _ in range(10)]
    for _ in range(50):
        await clock.sleep(0)
    assert (len(begun), most) == (3, 3)
    ready.set()
    for _ in range(200):
        await clock.sleep(0)
    assert [moment - begun[0] for moment in begun] == pytest.approx([0.25 * number for number in range(10)])
    assert most == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(60), creations.admit(make_session()):  # a cancellation leaves no place taken
        pass


async def test_after_failures_in_a_row_one_container_is_tried_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    creations = Creations(CreationConfig(failures=3, pause_s=30, wait_s=100, per_s=1000))

    async def make(*, fails: bool) -> float:
        async with creations.admit(make_session()) as start:
            if not fails:
                await start()
            return clock.now

    began = clock.now
    moments = [await make(fails=True) - began for _ in range(6)]
    assert moments == pytest.approx([0, 0, 0, 30, 60, 90], abs=0.1)
    assert "3 containers in a row failed: one is tried each 30 s" in caplog.text
    with pytest.raises(TaskError, match=r"no container could be made for 100 s \(containers\.creation\.wait_s\): 6 "):
        await make(fails=True)
    clock.now += 30  # one is tried all the same
    at = [await make(fails=False) - clock.now for _ in range(4)]
    assert at == pytest.approx([0] * 4, abs=0.1)
    assert "containers can be made again" in caplog.text


async def test_the_time_in_which_a_container_is_made_is_not_the_attempts(tmp_path: Path) -> None:
    limits = Limits(timeout_s=2.0)
    done = await attempt(tmp_path, limits=limits, creation_s=2.5, rewards={"reward": 0.5})
    assert (done.error, done.status, done.reward) == (None, TrajectoryStatus.COMPLETED, 0.5)


@pytest.mark.parametrize(("name", "value"), [("at_once", 0), ("failures", 1.5), ("per_s", 0), ("wait_s", float("inf"))])
def test_wrong_numbers_of_containers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"creation\.{name} must be .*, got {value}"):
        CreationConfig(**{name: value})


def test_harbors_config_of_a_trial_has_the_agent_the_session_and_what_is_filled_in(tmp_path: Path) -> None:
    session = AgentSession(
        session_id="s",
        api_key="k",
        openai_base_url="http://10.0.0.1:80/s/s/v1",
        model="m",
        task={"instruction": "x"},
        anthropic_base_url="http://10.0.0.1:80/s/s",
    )
    options = {"kwargs": {"a": 1}, "env": {"URL": "{anthropic_base_url}", "OPENAI_API_KEY": "other"}}
    config = ContainerConfig(agent="mine:Agent", model="x/{model}", agent_options=options, environment={"type": "e"})
    runner = ContainerRunner(config, trials=tmp_path / "trials", agent_timeout_s=7, reward="reward")
    made = runner.make_trial_config(tmp_path / "task", session)
    assert (made.task.path, made.trial_name, made.trials_dir) == (tmp_path / "task", "s", tmp_path / "trials")
    assert (made.agent.name, made.agent.import_path, made.agent.model_name) == (None, "mine:Agent", "x/m")
    assert (made.agent.override_timeout_sec, made.agent.kwargs, made.environment.type) == (7, {"a": 1}, "e")
    assert made.agent.env["URL"] == "http://10.0.0.1:80/s/s"
    assert (made.agent.env["OPENAI_API_KEY"], made.agent.env["OPENAI_API_BASE"]) == ("k", session.openai_base_url)
    assert "UNBROKEN_TASK" not in made.agent.env
    wrong = ContainerRunner(
        ContainerConfig(environment={"kind": "docker"}), trials=tmp_path, agent_timeout_s=None, reward="reward"
    )
    with pytest.raises(
        InvalidInputError, match=r"environment_arguments\.containers must be as Harbor.s config: .*kind"
    ):
        wrong.make_trial_config(tmp_path, session)


def test_a_task_that_harbor_cannot_read_is_refused_with_its_words(tmp_path: Path) -> None:
    task = write_notes_task(tmp_path / "task")
    (task / "task.toml").write_text("x =")
    runner = ContainerRunner(ContainerConfig(), trials=tmp_path, agent_timeout_s=None, reward="reward")
    with pytest.raises(InvalidInputError, match=f"task {task}: TOMLDecodeError: Invalid value"):
        runner.read(task)


def test_a_folder_of_tasks_or_of_one_task(tmp_path: Path) -> None:
    for name in ("sort-b", "sort-a", "count"):
        write_notes_task(tmp_path / name)
    (tmp_path / "README.md").write_text("no task")
    assert [folder.name for folder in find_task_folders(tmp_path)] == ["count", "sort-a", "sort-b"]
    assert [folder.name for folder in find_task_folders(tmp_path, names=["sort-*"])] == ["sort-a", "sort-b"]
    assert find_task_folders(tmp_path / "count") == [tmp_path / "count"]
    for folder, words in ((tmp_path / "none", "no such folder"), (tmp_path / "count" / "tests", "has no task")):
        with pytest.raises(InvalidInputError, match=words):
            find_task_folders(folder)
    with pytest.raises(InvalidInputError, match="no task with a name like x"):
        find_task_folders(tmp_path, names=["x"])


def test_a_digest_says_whether_a_file_of_a_task_changed(tmp_path: Path) -> None:
    first, second = write_notes_task(tmp_path / "a"), write_notes_task(tmp_path / "b")
    assert describe_files(first) == describe_files(second)
    (second / "task.toml").write_text(TASK_TOML + "\n")
    assert describe_files(first) != describe_files(second)


def test_tasks_are_split_for_evaluation_and_their_time_must_fit(tmp_path: Path) -> None:
    for name in ("data/a", "data/b", "data/held-c", "other/d"):
        write_notes_task(tmp_path / name)
    runner = ContainerRunner(ContainerConfig(), trials=tmp_path, agent_timeout_s=None, reward="reward")

    def split(**config: Any) -> list[int]:
        tasks = TerminalTasks(tmp_path / "data", runner.read, TerminalConfig(**config), max_attempt_s=600)
        return [len(tasks.rows(evaluation=evaluation)) for evaluation in (False, True)]

    assert split() == [3, 3]
    assert split(evaluation_tasks=("held-*",)) == [2, 1]
    assert split(evaluation=Path("../other"), tasks=("a",)) == [1, 1]
    with pytest.raises(InvalidInputError, match="evaluation_tasks must leave tasks to train on"):
        split(evaluation_tasks=("*",))
    tasks = TerminalTasks(tmp_path / "data", runner.read, TerminalConfig(), max_attempt_s=60)
    with pytest.raises(InvalidInputError, match=r"rollouts\.limits\.timeout_s must be longer than the agent of task"):
        tasks.rows(evaluation=False)


def test_i4_one_command_trains_on_a_folder_of_terminal_tasks(tmp_path: Path) -> None:
    for name, reward in (("count", 0.25), ("again", 0.5)):
        write_notes_task(tmp_path / "tasks" / name, rewards={"reward": reward})
    output = tmp_path / "run"
    words = [
        "train", "--env", f"harbor:{tmp_path / 'tasks'}", f"--model={save_tiny_model(tmp_path / 'model')}",
        f"--output={output}", '--environment-arguments={containers = {gateway_host = "127.0.0.1"}}',
        "--loop.num-steps=1", "--rollouts.problems-per-step=2", "--rollouts.group-size=2",
        "--rollouts.sampling.max-tokens=8",
    ]  # fmt: skip
    assert main(words) == 0
    (line,) = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert line["reward/mean"] == 0.375
    assert line["rollout/turns_mean"] == 1
    assert re.search("harbor", (output / "recipe.json").read_text())
