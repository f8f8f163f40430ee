"""A judge behind a URL: what it is asked, what is kept, what counts against the budget, and what ends a run."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.judges import Answer, fails, says, serve_judge
from support.rewarded import group_of
from unbroken.counters import count_costs
from unbroken.errors import InvalidInputError, RewardError
from unbroken.runs.prompts.judge import METRICS, Judge
from unbroken.runs.prompts.rewards import Problem, RewardConfig, Rewards
from unbroken.training.metrics.rollouts import RolloutNumbers, rollout_metrics

PROMPT = "{question} {completion}"


def judge_at(url: str, **options: Any) -> Judge:
    return Judge(url, "m", **{"prompt": PROMPT, "retry_wait_s": 0.0, "max_retries": 2, **options})


async def score(judge: Judge, *completions: Any, question: str = "2 + 2?") -> list[float | None]:
    size = len(completions)
    return await judge(completions=completions, prompts=["p"] * size, question=[question] * size, statuses=["x"] * size)


async def test_equal_completions_are_asked_about_once_and_known_replies_never_again(tmp_path):
    asked: list[dict[str, Any]] = []
    with serve_judge(lambda text: says(str(len(text))), asked) as url, count_costs() as costs:
        judge = judge_at(url, cache=tmp_path / "judge.sqlite", api_key="secret", options={"max_tokens": 4})
        assert await score(judge, "4", "four", "4") == [8.0, 11.0, 8.0]
        again = judge_at(url, cache=tmp_path / "judge.sqlite", options={"max_tokens": 4})
        assert await score(again, "four", "5") == [11.0, 8.0]
        assert await score(judge_at(url, cache=tmp_path / "judge.sqlite"), "4") == [8.0]
    seconds = costs.pop("judge/seconds")
    assert seconds > 0
    assert costs == {"judge/requests": 4, "judge/cached": 1, "judge/failed": 0}
    asked.sort(key=lambda body: body["messages"][0]["content"])
    assert asked[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "2 + 2? 4"}],
        "max_tokens": 4,
        "path": "/v1/chat/completions",
        "authorization": "Bearer secret",
    }
    assert [each["temperature"] for each in asked if "temperature" in each] == [0]
    assert b"secret" not in (tmp_path / "judge.sqlite").read_bytes()


async def test_what_fails_or_does_not_parse_is_asked_again_and_counted(tmp_path):
    answers = iter([fails(500), says("good"), says("0.7", finish_reason="length"), says(" 0.75\n")])
    with serve_judge(lambda _: next(answers), []) as url, count_costs() as costs:
        assert await score(judge_at(url, max_retries=3), "a") == [0.75]
    assert (costs["judge/requests"], costs["judge/failed"]) == (4, 3)


@pytest.mark.parametrize(
    ("answer", "num_asked", "message"),
    [
        (says("good"), 3, r"failed at try 3: the reply 'good' does not parse: could not convert string to float"),
        (says("nan"), 3, r"failed at try 3: the reply 'nan' must give a finite number, got nan"),
        (says("0.", finish_reason="length"), 3, r"the reply '0.' was cut: give options a greater max_tokens"),
        ((200, {"choices": []}), 3, r"the answer must be a chat completion with a text, got"),
        ((200, {"choices": [{"message": {"content": None}}]}), 3, r"the answer must be a chat completion with a text"),
        (fails(500), 3, r"failed at try 3: HTTP 500: status 500"),
        (says("9e99"), 3, r"failed at try 3: the reply '9e99' must give a finite number, got 9e\+99"),
        (says("1 \ud800"), 3, r"the reply '1 \\ud800' has half a character"),
        (fails(400), 1, r"refuses the request: status 400"),
        (fails(401), 1, r"/v1 failed: HTTP 401: status 401"),
        (fails(302), 1, r"/v1 failed: HTTP 302: status 302"),
    ],
)
async def test_what_fails_each_time_ends_the_run_with_function_row_and_reply(tmp_path, answer, num_asked, message):
    asked: list[dict[str, Any]] = []
    with serve_judge(lambda _: answer, asked) as url:
        rewards = rewards_of(tmp_path, url)
        with pytest.raises(RewardError, match=r"^reward function rewards.py:judge, row 5 of sums: (?s:.*)" + message):
            await rewards.score(problem(), await group_of("a"))
    assert len(asked) == num_asked


async def test_a_server_that_stays_full_is_asked_as_often_as_the_retries_say():
    """And not as often again for each of these."""
    asked: list[dict[str, Any]] = []
    with serve_judge(lambda _: fails(503), asked) as url, pytest.raises(RewardError, match=r"failed: HTTP 503"):
        await score(judge_at(url, max_retries=1), "a")
    assert len(asked) == 2


async def test_equal_requests_of_several_prompts_at_a_time_are_sent_once(tmp_path):
    asked: list[dict[str, Any]] = []
    with serve_judge(lambda _: says(str(len(asked))), asked) as url:
        judge = judge_at(url, cache=tmp_path / "judge.sqlite")
        assert await asyncio.gather(*(score(judge, "a") for _ in range(4))) == [[1.0]] * 4
    assert len(asked) == 1


async def test_two_processes_that_ask_the_same_at_a_time_have_the_same_reward(tmp_path):
    """The reply that was kept first, which is also that of a run that continues."""
    both, asked = threading.Barrier(2), []

    def answer(text: str) -> Answer:
        return says(str(both.wait(10)))

    with serve_judge(answer, asked) as url:
        judges = [judge_at(url, cache=tmp_path / "judge.sqlite") for _ in range(2)]
        first, second = await asyncio.gather(*(score(judge, "a") for judge in judges))
        assert first == second == await score(judges[0], "a")
    assert len(asked) == 2


async def test_a_key_that_a_server_repeats_is_in_no_error():
    repeats = 401, {"error": {"message": "unknown key secret-1"}}
    with serve_judge(lambda _: repeats, []) as url, pytest.raises(RewardError, match=r"HTTP 401: unknown key \*\*\*$"):
        await score(judge_at(url, api_key="secret-1"), "a")


async def test_a_judge_that_is_not_there_is_named_and_tried_as_often_as_it_says(tmp_path, caplog):
    """And not again by the retries of the reward function."""
    with serve_judge(lambda _: says("1"), []) as url:
        pass
    with pytest.raises(RewardError, match=rf"the judge {url} failed: no answer from {url} in 2 tries"):
        await rewards_of(tmp_path, url, max_retries=1).score(problem(), await group_of("a"))
    assert "calling it again" not in caplog.text


async def test_a_spent_budget_ends_the_run_over_restarts_and_processes_and_cached_replies_cost_nothing(tmp_path):
    cache = tmp_path / "judge.sqlite"
    with serve_judge(lambda _: says("1"), []) as url:
        assert await score(judge_at(url, cache=cache, max_requests=3), "a", "b") == [1.0, 1.0]
        again = judge_at(url, cache=cache, max_requests=3)
        assert await score(again, "a", "b", "c") == [1.0] * 3
        message = r"budget is spent: .*judge\.sqlite has sent 3 requests, of 30 tokens, with max_requests 3\. Give more"
        with pytest.raises(RewardError, match=message):
            await score(again, "d")
        with pytest.raises(RewardError, match="with max_total_tokens 30"):
            await score(judge_at(url, cache=cache, max_total_tokens=30), "d")
        assert await score(judge_at(url, cache=cache, max_requests=4, max_total_tokens=31), "d", "a") == [1.0, 1.0]
        alone = judge_at(url, max_requests=1)
        assert await score(alone, "a") == [1.0]
        with pytest.raises(RewardError, match="this process has sent 1 requests"):
            await score(alone, "a")


async def test_concurrent_requests_keep_the_budget_to_the_request(tmp_path):
    asked: list[dict[str, Any]] = []
    with serve_judge(lambda _: says("1"), asked) as url:
        judges = [judge_at(url, cache=tmp_path / "judge.sqlite", max_requests=10) for _ in range(2)]
        calls = (score(judges[k % 2], *(f"{k}-{each}" for each in range(3))) for k in range(6))
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(each, RewardError) for each in results)
    ((requests,),) = sqlite3.connect(tmp_path / "judge.sqlite").execute("SELECT requests FROM spent")
    assert requests == 10
    assert len(asked) <= 10


async def test_tokens_that_nobody_counts_are_no_budget(tmp_path):
    with serve_judge(lambda _: says("1", total_tokens=None), []) as url:
        assert await score(judge_at(url), "a") == [1.0]
        with pytest.raises(RewardError, match=r"must answer with usage\.total_tokens"):
            await score(judge_at(url, max_total_tokens=100), "a")


async def test_no_more_requests_are_in_flight_than_allowed_over_several_prompts():
    lock, now, most = threading.Lock(), Counter[str](), []

    def answer(text: str) -> Answer:
        with lock:
            now["n"] += 1
            most.append(now["n"])
        threading.Event().wait(0.02)
        with lock:
            now["n"] -= 1
        return says("1")

    with serve_judge(answer, []) as url:
        judge = judge_at(url, max_concurrent=2)
        await asyncio.gather(*(score(judge, "a", "b", question=f"{k}?") for k in range(4)))
    assert max(most) == 2


async def test_a_parse_that_has_changed_asks_again_instead_of_failing_on_what_was_kept(tmp_path):
    with serve_judge(lambda text: says("grade: 3"), []) as url, count_costs() as costs:
        cache = tmp_path / "judge.sqlite"
        assert await score(judge_at(url, cache=cache, parse=lambda reply: float(reply.split()[1])), "a") == [3.0]
        assert await score(judge_at(url, cache=cache, parse=lambda reply: None), "a") == [None]
        with pytest.raises(RewardError, match="does not parse"):
            await score(judge_at(url, cache=cache), "a")
    assert (costs["judge/cached"], costs["judge/requests"]) == (1, 4)


async def test_the_prompt_has_columns_conversations_and_braces_and_an_unknown_name_is_refused():
    asked: list[dict[str, Any]] = []
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    with serve_judge(lambda _: says("1"), asked) as url:
        await score(judge_at(url, prompt='{{"q": {question}}} {completion}'), conversation, question="{completion}")
        await score(judge_at(url, prompt=lambda values: f"{values['prompt']}:{values['question']}"), "a")
        with pytest.raises(
            RewardError, match="prompt must name completion, prompt, question, statuses in braces, got qu"
        ):
            await score(judge_at(url, prompt="{qu}"), "a")
    assert [each["messages"][0]["content"] for each in asked] == [
        '{"q": {completion}} user: a\n\nassistant: b',
        "p:2 + 2?",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_requests": 0}, "max_requests must be a number >= 1, got 0"),
        ({"max_concurrent": 0}, "max_concurrent must be a number >= 1, got 0"),
        ({"max_concurrent": 2.5}, "max_concurrent must be a whole number, got 2.5"),
        ({"max_requests": "100"}, "max_requests must be a whole number, got '100'"),
        ({"api_key": ""}, "api_key must be None, or printable ASCII without spaces around it"),
        ({"api_key": "secret "}, r"api_key must be None, .* around it: it is sent in a header$"),
        ({"retry_wait_s": float("nan")}, "retry_wait_s must be a finite number >= 0, got nan"),
        ({"timeout_s": 0.0}, "timeout_s must be a finite number > 0"),
        ({"max_retries": "3"}, "max_retries must be a whole number >= 0, got '3'"),
        ({"prompt": "{question"}, "prompt must have names in braces"),
        ({"cache": "nowhere/judge.sqlite"}, "cache must be a file that can be written, got nowhere/judge.sqlite"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(InvalidInputError, match=message):
        judge_at("http://127.0.0.1:1/v1", **options)


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "http://me:secret@localhost/v1", "http://localhost/v1?key=secret"]
)
def test_an_address_is_checked_before_it_is_asked_and_a_secret_in_it_is_not_shown(url):
    with pytest.raises(InvalidInputError, match="url must be http://HOST") as caught:
        judge_at(url)
    assert "secret" not in str(caught.value)


def test_certificates_are_checked_however_https_is_written():
    assert judge_at("HTTPS://Judge.example/v1/").url == "https://judge.example/v1"


def test_a_file_that_is_no_cache_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("not a database, but long enough to have a header")
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE mine (x)")
    other.commit()
    other.close()
    for name in ("notes.txt", "other.sqlite"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(InvalidInputError, match=rf"cache must be a judge's cache, .*{name}"):
            judge_at("http://127.0.0.1:1/v1", cache=tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


async def test_what_a_judge_counts_is_in_the_metrics_of_a_step(tmp_path):
    with serve_judge(lambda text: says(str(len(text))), []) as url:
        rewards = rewards_of(tmp_path, url)
        groups = [await rewards.score(problem(), await group_of(*completions)) for completions in ("ab", "bc")]
    numbers = [RolloutNumbers.of([group], group.counters) for group in groups]
    metrics = rollout_metrics(RolloutNumbers.merge(numbers), collect_s=1.0)
    found = {name: metrics[name] for name in METRICS}
    assert found.pop("judge/seconds") > 0
    assert found == {"judge/requests": 4, "judge/cached": 0, "judge/failed": 0}


def problem() -> Problem:
    return Problem(place="row 5 of sums", prompt="3 + 4?", num_prompt_messages=2, row={"question": "3 + 4?"})


def rewards_of(folder: Path, url: str, *, max_retries: int = 2) -> Rewards:
    (folder / "rewards.py").write_text(
        "from unbroken.runs.prompts.judge import Judge\n"
        f"judge = Judge({url!r}, 'm', prompt={PROMPT!r}, retry_wait_s=0.0, max_retries={max_retries})\n"
    )
    return Rewards([RewardConfig(function=folder / "rewards.py:judge", max_retries=2, retry_wait_s=0.0)], ("question",))
