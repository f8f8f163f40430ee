"""Attempts of agents become trajectories: exact ids, rewards from whoever gives them, and endings with names."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.gateways import CALL, CHAT, TOOLS, USER, running_gateway, scripted
from support.servers import encode, scripted_engine
from support.waits import wait_until
from unbroken.client import AsyncClient
from unbroken.counters import Effort, count_effort
from unbroken.engines.scripted import ScriptedReply
from unbroken.errors import InvalidInputError, ServerUnreachableError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.agents.command import CommandAgent, CommandReward, run_process
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.agents.session import Agent, AgentOutcome, AgentSession
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.server.process import host_app
from unbroken.types import KeptIds, SamplingParams

ANSWER = "It is 17.<|im_end|>"


@asynccontextmanager
async def gateway_client(folder: Path, *replies: str, queue_s: float | None = None) -> AsyncIterator[AsyncClient]:
    async with (
        running_gateway(scripted(*replies, queue_s=queue_s), folder) as gateway,
        host_app(gateway.app) as url,
        AsyncClient(url) as client,
    ):
        yield client


async def attempt(client: AsyncClient, agent: Agent, *, limits: Limits | None = None, **options: Any) -> Trajectory:
    group = await run_agent_group(
        agent,
        1,
        gateway=client.sessions,
        task={"cell": 4},
        sampling=SamplingParams(temperature=0.8, max_tokens=100, seed=3),
        limits=limits or Limits(),
        **options,
    )
    return group.trajectories[0]


async def ask(session: AgentSession, messages: list[Any]) -> dict[str, Any]:
    """What an agent does, with any SDK."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(base_url=session.openai_base_url, headers=headers) as client:
        answer = await client.post(CHAT.removeprefix("/v1"), json={"messages": messages, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message


async def look_and_answer(session: AgentSession) -> float:
    first = await ask(session, [USER])
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "17"}
    last = await ask(session, [USER, first, result])
    return float(last["content"] == "It is 17.") + session.task["cell"]


async def test_an_attempt_is_a_trajectory_with_the_ids_that_were_sampled(tmp_path: Path) -> None:
    async with gateway_client(tmp_path, CALL, ANSWER) as client:
        trajectory = await attempt(client, look_and_answer)
        again = await client.sessions.get((await client._calls.get("/v1/sessions"))["sessions"][0]["session_id"])
    (row,) = export_samples(trajectory.tree, 0.5)
    assert row.token_ids[row.loss_mask].tolist() == encode(CALL) + encode(ANSWER)
    assert row.temperature == 0.8
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.COMPLETED, 5.0)
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.tools == tuple(TOOLS)
    assert [len(turn.parsed.tool_calls) for turn in trajectory.turns] == [1, 0]
    assert trajectory.counters.as_dict() == {"bridges/derived": 1, "history/kept": 1, "status/completed": 1}
    assert again["outcome"] == {"reward": 5.0, "metrics": {}, "status": "completed"}


async def test_the_time_in_the_queue_of_an_attempt_is_that_of_its_turns(tmp_path: Path) -> None:
    async with gateway_client(tmp_path, CALL, ANSWER, queue_s=0.5) as client:
        assert (await attempt(client, look_and_answer)).queue_s == 1.0
    async with gateway_client(tmp_path, CALL, ANSWER) as client:
        assert (await attempt(client, look_and_answer)).queue_s is None


async def test_what_attempts_sampled_is_counted_before_their_group_ends(tmp_path: Path) -> None:
    effort = Effort()
    async with gateway_client(tmp_path, CALL, ANSWER) as client:
        with count_effort(effort):
            trajectory = await attempt(client, look_and_answer)
    assert effort.num_ids == trajectory.num_sampled == len(encode(CALL)) + len(encode(ANSWER))


async def test_metrics_of_an_agent_are_parts_of_the_reward_and_kept_with_its_session(tmp_path: Path) -> None:
    async with gateway_client(tmp_path, ANSWER) as client:

        async def solve(session: AgentSession) -> AgentOutcome:
            await ask(session, [USER])
            return AgentOutcome(reward=0.5, metrics={"files": 2, "ok": True})

        async def measure_badly(session: AgentSession) -> AgentOutcome:
            return AgentOutcome(reward=0.5, metrics={"files": float("nan")})

        solved, failed = await attempt(client, solve), await attempt(client, measure_badly)
        kept = (await client._calls.get("/v1/sessions"))["sessions"][0]["outcome"]
    assert (solved.reward, solved.reward_parts) == (0.5, {"files": 2.0, "ok": 1.0})
    assert kept == {"reward": 0.5, "metrics": {"files": 2.0, "ok": 1.0}, "status": "completed"}
    assert "the agent's metric 'files' must be" in str(failed.error)


async def test_an_agent_samples_from_the_distribution_that_the_run_asks_for(tmp_path: Path) -> None:
    engine = scripted(ANSWER)
    own = {"temperature": 0.1, "top_p": 0.2, "presence_penalty": 1.0, "max_tokens": 7}

    async def insist(session: AgentSession) -> float:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=session.openai_base_url, headers=headers) as client:
            answer = await client.post("/chat/completions", json={"messages": [USER], **own})
        return float(answer.status_code == 200)

    async with running_gateway(engine, tmp_path) as gateway, host_app(gateway.app) as url, AsyncClient(url) as client:
        params = SamplingParams(temperature=0.8, top_k=5, max_tokens=9)
        group = await run_agent_group(insist, 1, gateway=client.sessions, task={}, sampling=params, limits=Limits())
    (request,) = engine.requests
    assert group.rewards == (1.0,)
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.8, 1.0, 5)
    assert (request.params.presence_penalty, request.params.max_tokens) == (0.0, 7)


async def test_the_rows_of_an_agents_session_have_the_ids_that_its_engine_kept(tmp_path: Path) -> None:
    """From the engine through the gateway's store, its tree and its samples to the trainer's rows."""
    ids, sets = [5, 6, 7], [[5, 8], [], [6, 7, 9]]
    engine = scripted_engine(lambda _: ScriptedReply(completion_ids=ids, kept_ids=KeptIds.of(sets)))

    async def chat(session: AgentSession) -> float:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=session.openai_base_url, headers=headers) as client:
            return float((await client.post("/chat/completions", json={"messages": [USER]})).status_code == 200)

    async with running_gateway(engine, tmp_path) as gateway, host_app(gateway.app) as url, AsyncClient(url) as client:
        params = SamplingParams(top_p=0.9, max_tokens=3, return_kept_ids=True)
        group = await run_agent_group(chat, 1, gateway=client.sessions, task={}, sampling=params, limits=Limits())
        (listed,) = await client.sessions.list()
        (exported,) = await client.sessions.samples(listed["session_id"])
    assert group.rewards == (1.0,)
    (row,) = export_samples(group.trajectories[0].tree, 1.0)
    assert row.kept_ids.to_lists()[-3:] == sets
    assert exported.kept_ids.to_lists() == row.kept_ids.to_lists()
    assert sum(row.kept_ids.sizes[:-3]) == 0


async def test_the_rows_of_an_agents_session_say_what_its_turns_were_sampled_under(tmp_path: Path) -> None:
    """The run's and, where the run has none, the agent's own; a format whose sets the engine cannot say is refused."""
    engine = scripted_engine(lambda _: ScriptedReply(completion_ids=[5, 6, 7]))
    numbers: dict[str, Any] = {"min_tokens": 2, "allowed_token_ids": (5, 6, 7), "bad_words_ids": ((5, 9), (8,))}
    params = SamplingParams(logit_bias=((5, -1.5),), presence_penalty=0.25, return_kept_ids=True, **numbers)
    answers: list[httpx.Response] = []

    async def chat(session: AgentSession) -> float:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=session.openai_base_url, headers=headers) as client:
            for own in ({"presence_penalty": 1.0}, {"response_format": {"type": "json_object"}}):
                answers.append(await client.post("/chat/completions", json={"messages": [USER], **own}))
        return 1.0

    engine.takes_structured_output = True
    async with running_gateway(engine, tmp_path) as gateway, host_app(gateway.app) as url, AsyncClient(url) as client:
        group = await run_agent_group(chat, 1, gateway=client.sessions, task={}, sampling=params, limits=Limits())
        (listed,) = await client.sessions.list()
        (exported,) = await client.sessions.samples(listed["session_id"])
    assert [answer.status_code for answer in answers] == [200, 400]
    assert "return_kept_ids with structured_output needs" in answers[1].text
    (request,) = engine.requests
    (row,) = export_samples(group.trajectories[0].tree, 1.0)
    (span,) = row.controls
    assert span.controls == request.params.controls
    assert span.controls.stop_token_ids == tuple(sorted(request.params.stop_token_ids)) != ()
    assert (span.controls.logit_bias, span.controls.presence_penalty) == (((5, -1.5),), 0.25)
    assert {name: getattr(span.controls, name) for name in numbers} == numbers
    assert row.token_ids[span.start : span.stop].tolist() == [5, 6, 7]
    assert exported.controls == row.controls


async def test_siblings_have_sessions_and_seeds_of_their_own(tmp_path: Path) -> None:
    engine = scripted(ANSWER)
    async with running_gateway(engine, tmp_path) as gateway, host_app(gateway.app) as url, AsyncClient(url) as client:

        async def ask_once(session: AgentSession) -> float:
            await ask(session, [USER])
            return 1.0

        group = await run_agent_group(
            ask_once,
            3,
            gateway=client.sessions,
            task={},
            sampling=SamplingParams(seed=1),
            limits=Limits(),
            group_id="g",
        )
    assert [each.trajectory_id for each in group.trajectories] == ["g/0", "g/1", "g/2"]
    assert group.rewards == (1.0, 1.0, 1.0)
    assert len({request.params.seed for request in engine.requests}) == 3
    assert len({request.session_id for request in engine.requests}) == 3


async def test_an_exception_ends_only_its_attempt_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    async def fail(session: AgentSession) -> float:
        await ask(session, [USER])
        raise ValueError("no such file")

    async with gateway_client(tmp_path, CALL) as client:
        trajectory = await attempt(client, fail)
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, ValueError)
    assert trajectory.num_sampled == len(encode(CALL))


async def test_an_attempt_that_takes_too_long_is_cancelled(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    async def sleep(session: AgentSession) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    async with gateway_client(tmp_path, CALL) as client:
        trajectory = await attempt(client, sleep, limits=Limits(timeout_s=1.0))
    assert (trajectory.status, trajectory.reward, trajectory.error) == (TrajectoryStatus.TIMEOUT, 0.0, None)
    assert trajectory.counters["limits/time"] == 1
    assert cancelled.is_set()


async def test_an_agent_that_waits_for_the_engine_uses_up_none_of_its_time(tmp_path: Path) -> None:
    async def think(session: AgentSession) -> float:
        await ask(session, [USER])
        return 1.0

    async with gateway_client(tmp_path, CALL) as client:
        await client.pause()
        work = asyncio.create_task(attempt(client, think, limits=Limits(timeout_s=1.0)))

        async def waits() -> bool:
            found = await client.sessions.list()
            return bool(found) and (await client.sessions.get(found[0]["session_id"]))["in_flight"] == 1

        await wait_until(waits)
        await asyncio.sleep(1.1)
        await client.resume()
        trajectory = await work
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.COMPLETED, 1.0)
    assert 1.0 < trajectory.engine_s <= trajectory.wall_time_s


async def test_a_time_out_keeps_the_reward_that_its_agent_gave_and_the_turns_that_ended(tmp_path: Path) -> None:
    async with gateway_client(tmp_path, CALL) as client:

        async def judged(session: AgentSession) -> None:
            await ask(session, [USER])
            await client.sessions.finish(session.session_id, {"reward": 0.5})
            await asyncio.sleep(60)

        trajectory = await attempt(client, judged, limits=Limits(timeout_s=2.0))
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.TIMEOUT, 0.5)
    assert trajectory.num_sampled == len(encode(CALL))


async def test_a_cancelled_attempt_leaves_no_session(tmp_path: Path) -> None:
    is_sampling = asyncio.Event()

    async def think(session: AgentSession) -> float:
        await ask(session, [USER])
        is_sampling.set()
        await asyncio.sleep(60)
        return 1.0

    async with gateway_client(tmp_path, CALL) as client:
        work = asyncio.create_task(attempt(client, think))
        await is_sampling.wait()
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        assert await client.sessions.list() == []


async def test_an_attempt_that_is_cancelled_while_its_session_is_made_leaves_none(tmp_path: Path) -> None:
    async def think(session: AgentSession) -> float:
        await asyncio.sleep(60)
        return 1.0

    async with gateway_client(tmp_path, CALL) as client:
        attempts = [asyncio.create_task(attempt(client, think)) for _ in range(20)]
        for k, work in enumerate(attempts):
            await asyncio.sleep(0.001 * (k % 4))
            work.cancel()
        await asyncio.wait(attempts)
        assert all(work.cancelled() for work in attempts)
        assert await client.sessions.list() == []


async def test_the_reward_may_come_from_finish_or_later_or_not_at_all(tmp_path: Path) -> None:
    async with gateway_client(tmp_path, ANSWER) as client:

        async def judged(session: AgentSession) -> None:
            await client.sessions.finish(session.session_id, {"reward": 0.25, "metrics": {"files": 2}})

        async def silent(session: AgentSession) -> None:
            await ask(session, [USER])

        assert (await attempt(client, judged)).reward == 0.25
        assert (await attempt(client, silent)).status is TrajectoryStatus.UNSCORED
        later = await attempt(client, silent, is_scored_later=True)
        assert (later.status, later.reward) == (TrajectoryStatus.COMPLETED, 0.0)


PROGRAM = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": str(json.loads(os.environ["UNBROKEN_TASK"]))}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print(0.75)
"""


async def test_a_command_finds_model_and_task_in_its_environment(tmp_path: Path) -> None:
    agent = CommandAgent(command=[sys.executable, "-c", PROGRAM], reward=CommandReward.OUTPUT, logs=tmp_path / "logs")
    async with gateway_client(tmp_path / "store", ANSWER) as client:
        trajectory = await attempt(client, agent)
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.COMPLETED, 0.75)
    assert trajectory.messages[0]["content"] == "{'cell': 4}"
    (log,) = (tmp_path / "logs").glob("*.log")
    assert log.read_text() == "It is 17.\n0.75\n"


async def test_a_command_gets_no_key_of_the_trainer_and_its_output_is_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker's key was in the environment of every agent, and so in logs that all users could read."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "LC_TIME", "MINE"):
        monkeypatch.setenv(name, f"the {name}")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    session = AgentSession(session_id="s", api_key="k", openai_base_url="", anthropic_base_url="", model="m", task={})
    await CommandAgent(
        command=[sys.executable, "-c", code], environment={"LEVEL": "3"}, inherit=["MINE"], logs=tmp_path
    )(session)
    found = json.loads((tmp_path / "s.log").read_text())
    assert (found["MINE"], found["LC_TIME"], found["LEVEL"]) == ("the MINE", "the LC_TIME", "3")
    assert (found["PATH"], found["HOME"]) == (os.environ["PATH"], os.environ["HOME"])
    assert found["OPENAI_API_KEY"] == "k"
    assert not {"WANDB_API_KEY", "HF_TOKEN", "PYTEST_CURRENT_TEST"} & set(found)
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("s.log", "s.err")] == [0o600, 0o600]  # noqa: PTH116


@pytest.mark.parametrize(("code", "reward"), [("", 1.0), ("raise SystemExit(3)", 0.0)])
async def test_a_commands_exit_can_be_its_reward(tmp_path: Path, code: str, reward: float) -> None:
    async with gateway_client(tmp_path, ANSWER) as client:
        agent = CommandAgent(command=[sys.executable, "-c", code], reward=CommandReward.EXIT)
        assert (await attempt(client, agent)).reward == reward


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.stderr.write('no model'); raise SystemExit(2)", "exited with 2: no model"),
        ("print('done')", "must be a finite number, got 'done'"),
        ("print('nan')", "must be a finite number, got 'nan'"),
        ("", "must be a finite number, got ''"),
    ],
)
async def test_a_command_that_gives_no_reward_fails_with_its_words(tmp_path: Path, code: str, words: str) -> None:
    async with gateway_client(tmp_path, ANSWER) as client:
        agent = CommandAgent(command=[sys.executable, "-c", code], reward=CommandReward.OUTPUT)
        trajectory = await attempt(client, agent)
    assert trajectory.status is TrajectoryStatus.FAILED
    assert words in str(trajectory.error)


def test_the_key_of_a_session_is_in_the_environment_of_a_command_and_not_in_what_is_printed_of_it() -> None:
    session = AgentSession(
        session_id="s",
        api_key="secret",
        openai_base_url="http://h/s/secret/v1",
        anthropic_base_url="http://h/s/secret",
        model="m",
        task={},
    )
    assert "secret" not in repr(session)
    assert session.environment()["OPENAI_BASE_URL"] == "http://h/s/secret/v1"
    assert session.environment()["UNBROKEN_SESSION_ID"] == "s"
    assert session.environment()["GOOGLE_GEMINI_BASE_URL"] == session.fill("{gemini_base_url}") == "http://h/s/secret"
    assert session.environment()["GEMINI_API_KEY"] == "secret"


async def test_a_cancelled_command_takes_its_process_tree_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    session = AgentSession(session_id="s", api_key="k", openai_base_url="", anthropic_base_url="", model="m", task={})
    work = asyncio.create_task(CommandAgent(command=[sys.executable, "-c", code])(session))
    await wait_until(alive.exists)
    work.cancel()
    await asyncio.wait([work])
    alive.unlink()
    await asyncio.sleep(0.5)
    assert not alive.exists()


def find_open_files() -> set[tuple[str, str]]:
    """Files, pipes and sockets: their numbers and what they are. A collection may close others meanwhile."""
    return {(link.name, str(link.readlink())) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


async def test_a_command_that_will_not_end_is_killed_also_if_it_is_cancelled_twice(tmp_path: Path) -> None:
    """As by the end of the run, while it is being ended because of its time-out."""
    script = "trap '' TERM; echo $$; while true; do sleep 0.05; done"
    files = {"folder": tmp_path, "output": tmp_path / "out", "errors": tmp_path / "err"}
    already_open = find_open_files()
    work = asyncio.create_task(run_process(["bash", "-c", script], variables={"PATH": os.environ["PATH"]}, **files))
    await wait_until(lambda: files["output"].exists() and files["output"].read_text().endswith("\n"))
    process = int(files["output"].read_text())
    for _ in range(2):
        work.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await work
    await wait_until(lambda: not Path(f"/proc/{process}").exists())
    await wait_until(lambda: find_open_files() <= already_open)


async def test_a_command_that_is_cancelled_while_it_starts_leaves_no_file_open_and_no_process(tmp_path: Path) -> None:
    files = {"folder": tmp_path, "output": tmp_path / "out", "errors": tmp_path / "err"}
    script = "(while true; do : > alive; sleep 0.02; done) & wait"
    already_open = find_open_files()
    for num_turns_of_loop in range(12):
        work = asyncio.create_task(run_process(["bash", "-c", script], variables={"PATH": os.environ["PATH"]}, **files))
        for _ in range(num_turns_of_loop):
            await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251  # the process goes on, and the loop does not know yet that it has started
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        (tmp_path / "alive").unlink(missing_ok=True)
        await asyncio.sleep(0.1)
        assert not (tmp_path / "alive").exists(), num_turns_of_loop
    assert find_open_files() <= already_open


async def test_a_gateway_that_is_gone_is_the_error_of_its_client_which_a_run_waits_out() -> None:
    async def agent(session: AgentSession) -> float:
        raise AssertionError("there is no session")

    async with AsyncClient("http://127.0.0.1:9", max_retries=0) as client:
        with pytest.raises(ServerUnreachableError, match="no answer from"):
            await run_agent_group(
                agent, 3, gateway=client.sessions, task={}, sampling=SamplingParams(max_tokens=4), limits=Limits()
            )


def test_a_command_must_be_a_list_of_words() -> None:
    with pytest.raises(InvalidInputError, match="command must be a list of words, the program first, got 'solve'"):
        CommandAgent(command="solve")


def test_a_variable_that_a_command_is_to_inherit_must_be_set() -> None:
    with pytest.raises(InvalidInputError, match=r"agent\.inherit must name environment variables that are set, got 'N"):
        CommandAgent(command=["solve"], inherit=["NOT_SET_HERE"])
