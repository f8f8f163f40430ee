"""Environments behind a server of the package openenv-core, or of one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import pytest

from support.env_rollouts import call, fail_env, play_env, texts
from support.processes import free_port
from support.server_processes import serve_openenv
from unbroken.errors import EnvServerError, InvalidInputError
from unbroken.integrations.openenv import OpenEnv, OpenEnvTools
from unbroken.rollout.env import Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import TrajectoryStatus

websockets = pytest.importorskip("websockets.asyncio.server", reason="needs websockets", exc_type=ModuleNotFoundError)

NUMBER = 514218651 % 10  # by the seed of problem 0, which is the same in every version


@pytest.fixture(scope="module")
def text_url() -> Iterator[str]:
    pytest.importorskip("openenv.core.env_server", reason="needs openenv-core", exc_type=ModuleNotFoundError)
    with serve_openenv("text") as url:
        yield url


@pytest.fixture(scope="module")
def tools_url() -> Iterator[str]:
    pytest.importorskip("openenv.core.env_server", reason="needs openenv-core", exc_type=ModuleNotFoundError)
    with serve_openenv("tools") as url:
        yield url


def test_both_are_environments():
    assert isinstance(OpenEnv("http://x", action="message"), Env)
    assert isinstance(OpenEnvTools("http://x"), Env)


async def test_replies_are_actions_and_the_reward_is_the_sum_of_the_turns(text_url):
    env = OpenEnv(text_url, action="message", observation="prompt", prompt="A game.")
    trajectory = await play_env(env, str((NUMBER + 1) % 10), str(NUMBER))
    assert texts(trajectory, "user") == ["A game.\n\nGuess my number from 0 to 9.", f"Not {(NUMBER + 1) % 10}."]
    assert trajectory.turn_rewards == (0.25, 1.0)
    assert trajectory.status is TrajectoryStatus.COMPLETED


async def test_the_first_observation_may_have_another_field_and_all_fields_are_json(text_url):
    wrong = str((NUMBER + 1) % 10)
    env = OpenEnv(text_url, action="message", first="words", reset={"largest": 5})
    trajectory = await play_env(env, wrong, limits=Limits(max_turns=1))
    assert texts(trajectory, "user")[0] == '["begin"]'
    env = OpenEnv(text_url, action="message", reset={"largest": 5})
    trajectory = await play_env(env, wrong, limits=Limits(max_turns=1))
    assert json.loads(texts(trajectory, "user")[0]) == {"prompt": "Guess my number from 0 to 5.", "words": ["begin"]}


async def test_rollouts_wait_for_a_session_of_the_server(text_url):
    envs = [OpenEnv(text_url, action="message", observation="prompt") for _ in range(5)]
    trajectories = await asyncio.gather(*(play_env(env, str(NUMBER)) for env in envs))
    assert [each.reward for each in trajectories] == [1.0] * 5


async def test_a_server_that_stays_full_is_an_error(text_url):
    held = [OpenEnv(text_url, action="message") for _ in range(2)]
    for env in held:
        await env.start()
    late = OpenEnv(text_url, action="message", wait_s=0.1)
    with pytest.raises(EnvServerError, match="CAPACITY_REACHED"):
        await late.start()
    for env in [*held, late]:
        await env.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action": "message", "observation": "board"}, r"must have the field 'board', it has \['prompt', 'words'\]"),
        ({"action": "move"}, "answered with VALIDATION_ERROR"),
    ],
)
async def test_fields_that_the_server_does_not_have_are_named(text_url, settings, message):
    env = OpenEnv(text_url, **settings)
    trajectory = await fail_env(env)
    assert isinstance(trajectory.error, EnvServerError)
    assert re.search(message, str(trajectory.error))


async def test_tools_of_an_environment(tools_url):
    question = [{"role": "user", "content": "What is 17 + 6?"}]
    env = OpenEnvTools(tools_url, messages=question, prompt="Use the tool.")
    both = call("add", a=17, b=6)[:-1] + call("add", a="x", b=6)
    trajectory = await play_env(env, both, call("add", a=1, b=1), call("add", a=2, b=2))
    assert texts(trajectory, "user") == ["What is 17 + 6?", "Use the tool."]
    total, error, *_ = texts(trajectory, "tool")
    assert total == "23"
    assert error.startswith("Error")
    assert trajectory.tools[0]["function"]["description"] == "Add two numbers."
    assert trajectory.turn_rewards == (1.0, 0.5, 0.5)
    assert len(trajectory.turns) == 3


@pytest.mark.parametrize(
    ("url", "message"),
    [("127.0.0.1:8000", "url must begin with"), ("ftp://x", "url must begin with"), ("http://", "url must begin with")],
)
def test_a_url_is_checked(url, message):
    with pytest.raises(InvalidInputError, match=message):
        OpenEnv(url, action="message")


async def test_a_server_that_is_not_there_is_named():
    env = OpenEnv(f"http://127.0.0.1:{free_port()}", action="message")
    with pytest.raises(EnvServerError, match=r"the OpenEnv server ws://127.0.0.1:\d+/ws cannot be reached"):
        await env.start()
    await env.close()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["no json"], "it must be JSON: JSONDecodeError"),
        (['{"type": "observation", "data": {"observation": {"x": NaN}}}'], "numbers in JSON must be finite, got NaN"),
        (['{"type": "observation", "data": {"observation": {"x": [1e999]}}}'], "must be finite in float64"),
        (['{"type": "observation", "data": {"observation": {}, "reward": 1' + "0" * 400 + "}}"], "finite in float64"),
        (['{"type": "observation", "data": ' + "[" * 200 + "]" * 200 + "}"], "must be nested at most 100 deep"),
        (["[" * 100_000], "it must be JSON: RecursionError"),
        (['{"type": "state", "data": {}}'], "must answer with an observation, got"),
        (["[1]"], "must answer with an observation, got"),
        (['{"type": "error", "data": {"message": "on fire", "code": "SESSION_ERROR"}}'], "SESSION_ERROR: on fire"),
        ([], "did not answer: ConnectionClosed"),
        (
            ['{"type": "observation", "data": {"observation": {}, "reward": "much"}}'],
            "must give a finite number as reward, got 'much'",
        ),
        (
            ['{"type": "observation", "data": {"observation": {}, "done": "false"}}'],
            "must give true or false as done, got 'false'",
        ),
        (['{"type": "observation", "data": {"observation": {}, "done": true}}'], "ended the episode at its reset"),
    ],
)
async def test_a_server_that_breaks_the_protocol_is_an_error(answers, message):
    async def answer(socket):
        await socket.recv()
        for each in answers:
            await socket.send(each)

    async with websockets.serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        env = OpenEnv(f"http://127.0.0.1:{port}", action="message")
        with pytest.raises(EnvServerError, match=message):
            await env.start()
        await env.close()


async def test_an_answer_that_comes_late_is_not_taken_for_the_next_one():
    observation, may_answer = '{"type": "observation", "data": {"observation": {"text": "x"}}}', asyncio.Event()

    async def answer(socket):
        await socket.recv()
        await socket.send(observation)
        await socket.recv()
        await may_answer.wait()
        await socket.send(observation)

    async with websockets.serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        env = OpenEnv(f"http://127.0.0.1:{port}", action="message")
        await env.start()
        env._episode.client._timeout_s = 0.1
        with pytest.raises(EnvServerError, match=r"did not answer within 0\.1 s"):
            await env._episode.client.step({})
        may_answer.set()
        await asyncio.sleep(0.1)
        with pytest.raises(EnvServerError, match="still owes an answer"):
            await env._episode.client.step({})
        await env.close()
