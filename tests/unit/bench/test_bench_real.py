"""The tasks of bench/real.py, and what its tables and its figure make of results."""

from __future__ import annotations

import json
import math

import pytest

import real
import real_task


def play(task: str, answer: int, *replies: str) -> tuple[float, list[str | None]]:
    episode = real_task.Episode(task, real_task.Problem(messages=(), answer=answer))
    given = [episode.reply(text) for text in replies]
    return episode.reward, given


def test_all_sides_get_the_same_problems_and_each_seed_others():
    for task in real_task.MAX_TURNS:
        first = [real_task.make_problem(task, 0, number) for number in range(20)]
        assert first == [real_task.make_problem(task, 0, number) for number in range(20)]
        assert first != [real_task.make_problem(task, 1, number) for number in range(20)]


@pytest.mark.parametrize(("text", "reward"), [("27", 1.0), ("It is 27.", 1.0), ("27 or 28", 0.0), ("none", 0.0)])
def test_a_sum_is_worth_its_last_number(text, reward):
    assert play("sums", 27, text) == (reward, [None])


def test_the_example_in_the_prompt_is_played_as_it_stands_there():
    texts = [message["content"] for message in real_task.make_problem("tool", 0, 0).messages[1:-1]]
    questions = [place for place, text in enumerate(texts) if text.startswith("What is")]
    for first, end in zip(questions, [*questions[1:], len(texts)], strict=True):
        replies, given = texts[first + 1 : end : 2], texts[first + 2 : end : 2]
        answer = int(replies[-1].removeprefix("ANSWER: "))
        assert play("tool", answer, *replies) == (1.0, [*given, None])


def test_what_the_calculator_cannot_read_is_answered_by_an_error_and_the_episode_goes_on():
    reward, given = play("tool", 5, "hello", "CALC: 2 + 3 * 4", "CALC: two + 3", "CALC: 2 + 3 = 5", "ANSWER: 6")
    assert reward == 0.0
    assert [text.split(":")[0] for text in given[:-1]] == ["ERROR", "ERROR", "ERROR", "RESULT"]


def result(side: str, seed: int, *, jobs: int = 1, num_steps: int = 20, wall_s: float = 0.5) -> dict:
    steps = range(num_steps)
    return {
        "task": "sums", "side": side, "seed": seed, "jobs": jobs, "device": "CPU", "model": "m", "steps": num_steps,
        "startup_s": 9.0, "rewards": [step / 100 for step in steps], "wall_s": [wall_s] * num_steps,
        "arrived_s": [9.0 + wall_s * (step + 1) for step in steps], "k3": [None, *[1e-3] * (num_steps - 1)],
        "max_abs": [None, *[0.5] * (num_steps - 1)],
        "parts": {part: [wall_s * {"train": 0.99, "other": 0.01}.get(part, 0.0)] * num_steps for part in real.PARTS},
    }  # fmt: skip


def test_a_run_is_described_by_what_its_parts_and_the_clock_outside_say():
    described = real.describe(result("fast", 0))
    assert described["known_share"] == pytest.approx(0.99)
    assert described["clock_share"] == pytest.approx(1.0)
    assert (described["k3"], described["max_abs"], described["wall_s"]) == (1e-3, 0.5, 0.5)
    assert described["parts"] == {"train": pytest.approx(0.495), "other": pytest.approx(0.005)}


def test_rewards_are_found_by_step_and_by_seconds():
    run = result("fast", 0)
    assert real.reward_at(run, 0) == 0.0
    assert real.reward_at(run, 10) == pytest.approx(0.08)
    assert real.reward_at(run, 20) is real.reward_after(run, 0.4) is real.reward_after(run, 11.0) is None
    assert real.reward_after(run, 5.6) == real.reward_at(run, 10)


def test_several_calls_add_up_and_times_of_runs_that_shared_a_gpu_are_left_out(tmp_path, capsys):
    runs = [result("fast", 0, num_steps=5), result("fast", 0), result("fast", 1, jobs=3, wall_s=7.0), result("trl", 0)]
    (tmp_path / real.FILE).write_text("".join(json.dumps(each) + "\n" for each in runs))
    real.report(tmp_path)
    curves, times = capsys.readouterr().out.split("reward by seconds")
    assert "fast (2)" in curves
    assert "fast (1)" in times
    assert "fast (2)" not in times
    assert math.isclose(float(times.split("step / TRL's")[1].split()[0]), 1.0)
