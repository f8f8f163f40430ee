"""Environments of NeMo Gym against a server of ours that speaks its protocol. `make clients` has the package's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from support.env_rollouts import call, fail_env, play_env, texts
from support.fake_renderer import CALL, CALL_END, END, encode
from support.nemo_gym_server import CounterServer, make_example, save_examples
from support.processes import free_port
from support.servers import listening
from unbroken.errors import EnvServerError, InvalidInputError
from unbroken.integrations.nemo_gym import Examples, NeMoGymEnv
from unbroken.rollout.env import Env
from unbroken.rollout.trajectory import TrajectoryStatus


@pytest.fixture
def server() -> CounterServer:
    return CounterServer()


@pytest_asyncio.fixture
async def url(server) -> AsyncIterator[str]:
    async with listening(server.make_app()) as url:
        yield url


async def test_calls_go_to_the_session_of_the_rollout_and_the_verifier_gives_the_reward(tmp_path, server, url):
    file = save_examples(tmp_path)
    first = call("increment_counter", count=4)[:-1] + call("get_counter_value")
    trajectory = await play_env(NeMoGymEnv(url, file), first, "It is 7.")
    assert texts(trajectory, "tool") == ['{"success":true}', '{"count":7}']
    assert trajectory.reward == 1.0
    assert server.calls == ["increment 4", "read"]
    assert server.closed == list(server.counters)
    assert len(server.closed) == 1
    (tool, _) = trajectory.tools
    assert tool["function"]["name"] == "increment_counter"
    assert tool["function"]["parameters"]["required"] == ["count"]


async def test_rollouts_at_the_same_time_have_sessions_of_their_own(tmp_path, server, url):
    file = save_examples(tmp_path)
    counts = [4, 5, 4, 6]
    rollouts = [play_env(NeMoGymEnv(url, file), call("increment_counter", count=k), "Done.") for k in counts]
    trajectories = await asyncio.gather(*rollouts)
    assert [each.reward for each in trajectories] == [1.0, 0.0, 1.0, 0.0]
    assert len({*server.closed}) == 4


async def test_the_verifier_gets_the_example_and_the_whole_response(tmp_path, server, url):
    example = make_example(instructions="Count.")
    broken = [CALL, *encode("{"), CALL_END, END]
    replies = [encode("I add.") + call("increment_counter", count=4), broken, "Seven."]
    trajectory = await play_env(NeMoGymEnv(url, save_examples(tmp_path, example)), *replies)
    (body,) = server.verified
    assert {**body, "response": None} == {**example, "response": None}
    items = body["response"]["output"]
    assert body["response"]["status"] == "completed"
    first, made, answer, empty, failure, last = items
    assert first["content"][0]["text"] == "I add."
    assert (made["name"], json.loads(made["arguments"])) == ("increment_counter", {"count": 4})
    assert (answer["type"], answer["call_id"], answer["output"]) == (
        "function_call_output",
        made["call_id"],
        '{"success":true}',
    )
    assert last["content"][0]["text"] == "Seven."
    assert empty["content"][0]["text"] == ""
    assert failure["role"] == "user"
    assert failure["content"].startswith("These tool calls could not be read:")
    assert texts(trajectory, "system") == ["Count."]


async def test_a_reply_that_was_cut_is_incomplete(tmp_path, server, url):
    trajectory = await play_env(NeMoGymEnv(url, save_examples(tmp_path)), "word " * 200)
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    (body,) = server.verified
    assert body["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_what_the_server_refuses_is_the_answer_and_counted(tmp_path, server, url):
    file = save_examples(tmp_path)
    trajectory = await play_env(NeMoGymEnv(url, file), call("increment_counter", count="x"), call("verify"), "Hm.")
    refused, unknown = texts(trajectory, "tool")
    assert "valid integer" in refused
    assert unknown.startswith("Error: there is no tool 'verify'")  # a model must not verify itself
    assert trajectory.counters["tool_errors/invalid_arguments"] == 1
    assert trajectory.counters["tool_errors/unknown_tool"] == 1
    assert len(server.verified) == 1


async def test_training_has_another_order_in_each_epoch_and_an_evaluation_has_its_own_file(tmp_path, url):
    examples = [make_example(f"Problem {k}.") for k in range(8)]
    file = save_examples(tmp_path, *examples)
    other = tmp_path / "other.jsonl"
    other.write_text("\n" + json.dumps(make_example("Other.")) + "\n\n")

    async def first(number: int, **options) -> str:
        env = NeMoGymEnv(url, file, number, **options)
        start = await env.start()
        await env.close()
        return start.messages[0]["content"]

    epochs = [[await first(8 * epoch + k) for k in range(8)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [[f"Problem {k}." for k in range(8)]] * 2
    assert epochs[0] != epochs[1]
    assert [await first(k, split="evaluation") for k in range(9)] == [
        *(f"Problem {k}." for k in range(8)),
        "Problem 0.",
    ]
    assert await first(0, split="evaluation", evaluation_file=other) == "Other."
    assert await first(0) == await first(0)
    assert await first(0) != await first(0, seed=1)


async def test_all_items_of_an_input_are_messages(tmp_path, url):
    items = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Two."}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA"},
            ],
        },
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "I read."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_counter_value", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    env = NeMoGymEnv(url, save_examples(tmp_path, make_example(input=items)))
    start = await env.start()
    await env.close()
    assert start.messages == [
        {"role": "system", "content": "One.\n\nTwo."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I read.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_counter_value", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ({"reward": "high"}, "must answer /verify with a reward, got"),
        ({}, "must answer /verify with a reward, got {}"),
        ({"reward": "nan"}, "reward must be one number, got 'nan'"),
        ({"reward": 1e39}, "reward must be finite in float32, got 1e+39"),
        (b'{"reward": NaN}', "numbers in JSON must be finite, got NaN"),
        (b'{"reward": 1, "x": 1e999}', "must be finite in float64"),
        (b'{"reward": 1, "x": ' + b"[" * 200 + b"]" * 200 + b"}", "must be nested at most 100 deep"),
        (b"[" * 100_000, "it must be JSON: RecursionError"),
        (b'{"reward": 1}' + b" " * (100 << 20), "must answer /verify with at most 104857600 bytes"),
        ({"reward": 0.0, "mask_sample": True, "failure_reason": "no judge"}, "could not verify the rollout: no judge"),
    ],
)
async def test_a_verifier_without_a_valid_reward_fails_the_rollout(tmp_path, server, url, verdict, message):
    server.verdict = verdict
    trajectory = await fail_env(NeMoGymEnv(url, save_examples(tmp_path)))
    assert isinstance(trajectory.error, EnvServerError)
    assert message in str(trajectory.error)
    assert trajectory.reward is None
    assert len(server.closed) == 1


async def test_what_the_server_says_of_a_seed_is_the_error(tmp_path, url):
    example = make_example()
    del example["initial_count"]
    trajectory = await fail_env(NeMoGymEnv(url, save_examples(tmp_path, example)))
    assert "answered /seed_session with 422" in str(trajectory.error)
    assert "initial_count is missing" in str(trajectory.error)


async def test_a_server_that_is_not_there_is_named(tmp_path):
    trajectory = await fail_env(NeMoGymEnv(f"http://127.0.0.1:{free_port()}", save_examples(tmp_path)))
    assert isinstance(trajectory.error, EnvServerError)
    assert "cannot be reached for /seed_session: ConnectError" in str(trajectory.error)
    assert isinstance(trajectory.error.__cause__, httpx.ConnectError)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ws://x", "http://"])
def test_a_url_is_checked(tmp_path, url):
    with pytest.raises(InvalidInputError, match="url must begin with http:// or https://"):
        NeMoGymEnv(url, save_examples(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "must have at least one line"),
        ("{", "line 1: it must be JSON"),
        ('{"question": "?"}', r"line 1 must have responses_create_params.input, the first messages"),
        ('{"responses_create_params": {"input": [{"type": "video"}]}}', r"line 1, input\[0\] must be a message"),
        (
            '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}}',
            r"line 1, input\[0\]\[0\] must be a text or an image",
        ),
        (
            '{"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}',
            r"line 1, tools\[0\] must be a function with a name",
        ),
        ('{"responses_create_params": {"input": "x", "tools": ["look"]}}', r"line 1, tools\[0\] must be a function"),
        (
            '{"responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "a", "parameters": 1}'
            "]}}",
            r"line 1, tools\[0\].parameters must be an object, got 1",
        ),
        ('{"responses_create_params": {"input": "x", "tools": 5}}', r"line 1, tools must be a list, got 5"),
        ('{"responses_create_params": {"input": 5}}', "line 1, input must be a text or a list, got 5"),
    ],
)
def test_lines_that_are_no_examples_are_named(tmp_path, line, message):
    file = tmp_path / "examples.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidInputError, match=message):
        NeMoGymEnv("http://x", file)


def test_a_line_of_examples_ends_with_a_line_feed_only(tmp_path):
    file = tmp_path / "examples.jsonl"
    lines = [json.dumps(make_example(text), ensure_ascii=False) for text in ("one\u2028two\x85three", "four")]
    file.write_bytes("\r\n".join(lines).encode())
    examples = Examples(file)
    assert len(examples) == 2
    assert "one\u2028two\x85three" in json.dumps(examples[0].row, ensure_ascii=False)
    assert examples[1].place.endswith("line 2")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="no such file"):
        NeMoGymEnv("http://x", tmp_path / "examples.jsonl")
    assert isinstance(NeMoGymEnv("http://x", save_examples(tmp_path)), Env)
