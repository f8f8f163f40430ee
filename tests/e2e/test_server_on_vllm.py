"""The real server on real vLLM, with the real clients: `unbroken serve`, TRL's client, the token client's contract."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from support.effort import num_cases
from support.forks import run_python
from support.served import Served, save_tiny_model, served
from support.servers import encode, server_tokenizer
from unbroken.client import AsyncClient
from unbroken.types import SamplingParams

TRL_CLIENT = Path(sys.prefix) / "trl-client"
"""Where `make setup` puts a TRL between 1.0 and 1.10."""
NUM_ROUNDS = num_cases(2)
"""How often each client asks its questions while all others ask theirs."""
NUM_TRAINER_STEPS = 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[Served]:
    with served(model_folder, as_command=True) as running:
        yield running


@pytest.fixture(scope="module")
def trl(server: Served) -> dict[str, Any]:
    script = Path(__file__).parent / "clients" / "trl_client.py"
    done = run_python(script, server.url, TRL_CLIENT, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_trls_client_is_one_of_the_versions_of_this_dialect(trl: dict[str, Any]) -> None:
    major, minor = (int(part) for part in trl["version"].split(".")[:2])
    assert (1, 0) <= (major, minor) <= (1, 10)


def test_trls_client_generates_from_texts_and_ids(trl: dict[str, Any]) -> None:
    assert trl["texts"]["prompt_ids"] == [encode("hello"), encode("you")]
    assert trl["ids"]["prompt_ids"] == [[5, 6, 7], [8], [9, 10]]
    assert len(trl["ids"]["completion_ids"]) == 6
    for answer, num_logprobs in ((trl["texts"], {1}), (trl["ids"], {1}), (trl["five"], {5, 6})):
        for ids, logprobs, named in zip(
            answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
        ):
            assert 1 <= len(ids) <= 6
            assert len(ids) == len(logprobs) == len(named)
            assert {len(row) for row in logprobs} <= num_logprobs
            assert all(token_id in row for token_id, row in zip(ids, named, strict=True))
            assert all(row == sorted(row, reverse=True) for row in logprobs)
    assert trl["none"]["logprobs"] is None
    assert trl["empty"] == {**trl["empty"], "prompt_ids": [], "completion_ids": []}
    assert trl["seeded"][0]["completion_ids"] == trl["seeded"][1]["completion_ids"]
    texts = [server_tokenizer().decode(ids) for ids in trl["regex"]["completion_ids"]]
    assert all(set(text.removesuffix("<|im_end|>")) <= {"a", "b"} for text in texts)


def test_trls_client_chats_in_our_rendering(trl: dict[str, Any]) -> None:
    def rendered(**options: Any) -> list[int]:
        messages = [{"role": "user", "content": "hi"}]
        ids: list[int] = server_tokenizer().apply_chat_template(messages, add_generation_prompt=True, **options)[
            "input_ids"
        ]
        return ids

    assert trl["chat"]["prompt_ids"] == [rendered()] * 2
    assert trl["thinking"]["prompt_ids"] == [rendered(enable_thinking=False)]
    assert len(trl["tools"]["prompt_ids"][0]) > len(rendered())
    assert "add" in server_tokenizer().decode(trl["tools"]["prompt_ids"][0])


def test_trls_client_scores_at_the_temperature_it_asks_for(trl: dict[str, Any], server: Served) -> None:
    assert [len(row) for row in trl["scores"]["logprobs"]] == [2, 1]
    assert [len(position) for row in trl["scores"]["logprobs"] for position in row] == [3, 3, 3]
    assert len(trl["scores_default"]["logprobs"][0][0]) == 100

    async def score() -> Any:
        async with AsyncClient(server.url) as client:
            return [await client.score([[5, 6, 7, 8]], temperature=t) for t in (1.0, 0.5)]

    cold, warm = (one[0].logprobs for one in asyncio.run(score()))
    found = np.array(trl["scores_warm"]["actual_logprobs"][0])[:, 0]
    np.testing.assert_allclose(found, warm, atol=1e-5)
    assert np.abs(cold - warm).max() > 0.1


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty ids", "at least one id"),
        ("large id", "prompt_ids must lie in"),
        ("negative id", "greater than or equal to 0"),
        ("mixed", "prompts"),
        ("long", "This model's maximum context length is 2048 tokens"),
        ("regex", "regex"),
        ("logprobs", "num_top_logprobs"),
        ("key", "unheard_of"),
    ],
)
def test_what_hung_the_original_server_is_refused_at_once(trl: dict[str, Any], case: str, message: str) -> None:
    assert trl["refused"][case].startswith("Request failed: 400")
    assert message in trl["refused"][case]
    assert len(trl["after"]["completion_ids"]) == 3


def test_the_token_client_carries_ids_over_three_turns(server: Served) -> None:
    """The contract of the client that prime-rl's dialect was made for, step by step."""
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    http = httpx.Client(base_url=server.url, timeout=60)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = sdk.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, logprobs=True, extra_body={"return_token_ids": True}
    )
    prefix = first.prompt_token_ids + first.choices[0].token_ids
    for _ in range(2):
        messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]
        dummy = {"role": "assistant", "reasoning_content": "", "content": "x"}
        asked = {"model": "tiny", "tools": None}
        both = http.post("/tokenize", json={**asked, "messages": [dummy, messages[-1]]}).json()["tokens"]
        only = http.post("/tokenize", json={**asked, "messages": [dummy], "add_generation_prompt": False}).json()
        tokens = prefix + both[only["count"] :]
        body = {
            "model": "tiny", "messages": messages, "tools": None, "tokens": tokens, "temperature": 1.0, "n": 1,
            "max_completion_tokens": 8, "logprobs": True, "return_token_ids": True, "top_k": -1, "min_p": 0.0,
        }  # fmt: skip
        answer = http.post("/v1/chat/completions/tokens", json=body, headers={"X-Session-ID": "s"}).json()
        choice = openai.types.chat.ChatCompletion.model_validate(answer, strict=True).choices[0]
        assert answer["prompt_token_ids"] == tokens
        assert len(choice.token_ids) == len(choice.logprobs.content)
        assert choice.finish_reason in ("stop", "length", "tool_calls")
        prefix = tokens + choice.token_ids
    http.close()


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"enum": ["left", "right"]}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key in (("turn", "side"), ("look", "where"))
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "look"])
async def test_calls_that_are_required_come_in_the_models_own_format(server: Served, choice: str, stream: bool) -> None:
    """A model of random weights writes whole calls, and its logprobs are those among the ids that were allowed."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": choice if choice == "required" else {"type": "function", "function": {"name": choice}},
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True},
    }
    for seed in range(4):
        if stream:
            names, reason = [], None
            async for event in await client.chat.completions.create(**asked, seed=seed, stream=True):
                for part in event.choices:
                    names += [call.function.name for call in part.delta.tool_calls or ()]
                    reason = part.finish_reason or reason
            assert (len(names), reason) == (1, "tool_calls")
            assert names[0] in ("turn", "look") if choice == "required" else names == ["look"]
            continue
        answer = await client.chat.completions.create(**asked, seed=seed, logprobs=True)
        (part,) = answer.choices
        assert part.finish_reason == "tool_calls", part
        (call,) = part.message.tool_calls
        assert call.function.name in ("turn", "look") if choice == "required" else call.function.name == "look"
        (value,) = json.loads(call.function.arguments).values()
        assert value in ("left", "right")
        logprobs = [entry.logprob for entry in part.logprobs.content]
        assert len(logprobs) == len(part.token_ids)
        assert all(logprob <= 1e-4 for logprob in logprobs)
        opening, end = encode("<tool_call>"), encode("<|im_end|>")
        assert [part.token_ids[0], part.token_ids[-1]] == [*opening, *end]
        assert abs(logprobs[0]) < 1e-4  # nothing else was allowed
    await client.close()


async def test_under_mixed_load_every_answer_belongs_to_its_asker(server: Served) -> None:
    """Six clients at once: the greedy answers and scores of each are those of a quiet first pass."""
    askers = [_Asker(kind, number) for number, kind in enumerate(["generate", "chat", "score"] * 2)]
    known = [await asker.ask(server.url) for asker in askers]
    assert all(len({json.dumps(answer) for answer in answers}) > 1 for answers in known)
    found = await asyncio.gather(*(asker.ask(server.url, num_rounds=NUM_ROUNDS) for asker in askers))
    assert found == [answers * NUM_ROUNDS for answers in known]


class _Asker:
    """One client with questions of its own."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.prompts = [[20 + 7 * number + k, 100 + k, 200 + number] for k in range(8)]

    async def ask(self, url: str, *, num_rounds: int = 1) -> list[Any]:
        """The answers to all questions, one after the other."""
        async with AsyncClient(url, max_retries=0) as client:
            return [await self._ask(client, prompt) for _ in range(num_rounds) for prompt in self.prompts]

    async def _ask(self, client: AsyncClient, prompt: list[int]) -> Any:
        greedy = SamplingParams(max_tokens=12, temperature=0)
        if self.kind == "generate":
            (result,) = await client.generate([prompt], greedy)
            assert result.prompt_ids.tolist() == prompt
            return result.sequences[0].completion_ids.tolist()
        if self.kind == "score":
            (scored,) = await client.score([prompt])
            return np.round(scored.logprobs.astype(float), 3).tolist()
        messages = [{"role": "user", "content": f"question {prompt}"}]
        answer = await client.chat(messages, max_tokens=12, temperature=0)
        return [answer["prompt_token_ids"], answer["choices"][0]["token_ids"]]


async def test_health_is_answered_while_a_long_batch_runs(server: Served) -> None:
    """How fast is not measured here: tests are not timed."""
    async with AsyncClient(server.url) as client, httpx.AsyncClient(base_url=server.url, timeout=60) as probe:
        prompts = [[5 + k % 500, 6, 7] for k in range(64)]
        # Half a million ids take minutes: the batch runs when it is cancelled, however slow the probes are.
        batch = asyncio.create_task(client.generate(prompts, SamplingParams(max_tokens=2000), n=4))
        while "unbroken_completions_in_flight 256.0" not in (await probe.get("/metrics")).text:
            assert not batch.done(), batch
            await asyncio.sleep(0.02)
        for _ in range(5):
            assert (await probe.get("/health")).status_code == 200
        assert not batch.done(), batch
        batch.cancel()


@pytest.fixture(scope="module")
def trainer(server: Served, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """TRL's own `GRPOTrainer` in server mode, over gloo; `tests/gpu/trl_native.py` does the same over NCCL."""
    script = Path(__file__).parent / "clients" / "trl_native_trainer.py"
    arguments = [server.url, model_folder, tmp_path_factory.mktemp("out"), "cpu", NUM_TRAINER_STEPS]
    done = run_python(script, *arguments, timeout=300, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def distance(rows: list[list[float]], others: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(rows, others, strict=True) for a, b in zip(one, other, strict=True))


def test_trls_trainer_trains_in_server_mode(trainer: dict[str, Any]) -> None:
    assert tuple(map(int, trainer["trl"].split(".")[:2])) >= (1, 11)
    assert len(trainer["history"]) == NUM_TRAINER_STEPS
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in trainer["history"])
    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in trainer["history"]]
    assert ratios == pytest.approx([1.0] * NUM_TRAINER_STEPS, abs=1e-3)  # TRL's logprobs are the server's


def test_i4_each_row_that_trl_trains_has_the_ids_and_logprobs_that_the_server_sampled(trainer: dict[str, Any]) -> None:
    rows = trainer["rows"]
    assert rows["sampled"] == rows["trained"] == rows["exact"] == NUM_TRAINER_STEPS * 8
    assert len(rows["apart"]) == NUM_TRAINER_STEPS
    assert max(rows["apart"]) < 1e-3


def test_i6_each_update_is_a_version_that_scores_as_the_trainer_does(trainer: dict[str, Any]) -> None:
    before, trained, after = trainer["before"], trainer["trained"], trainer["after"]
    assert [one["version"] for one in (before, trained, after)] == [0, NUM_TRAINER_STEPS, NUM_TRAINER_STEPS + 1]
    assert distance(before["server"], before["trainer"]) < 1e-3
    assert distance(after["server"], after["trainer"]) < 1e-3
    assert distance(before["server"], trained["server"]) > 0.01
    assert distance(trained["server"], after["server"]) > 0.01


def test_a_refused_update_reaches_trl_as_an_error_and_leaves_the_weights(trainer: dict[str, Any]) -> None:
    assert "no weight named 'oops'" in trainer["refused"]
    assert trainer["left"] == {"server": trainer["after"]["server"], "version": trainer["after"]["version"]}
