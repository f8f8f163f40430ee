"""What is measured before and after a run: once, whole, and with the weights that it says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fake_renderer import END, VOCAB_SIZE, FakeRenderer, encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError, MetricsError, OutageError, RolloutError, ServerUnreachableError
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import RolloutConfig
from unbroken.runs.evaluation.evaluator import Evaluator, read_evaluations
from unbroken.runs.processes import Rank
from unbroken.runs.records.files import find_records, read_records
from unbroken.types import SamplingParams
from unbroken.weights.sources import TensorSource


async def reward(messages: Any) -> float:
    return float(messages[0]["content"])


def say(prompt_ids: Any) -> list[int]:
    return [*encode("ok"), END]


def evaluator(output: Path, script: Any = say, *, num_problems: int = 3) -> Evaluator:
    """Problem k is worth k."""
    sampler = Sampler(
        engine=ScriptedEngine(script, vocab_size=VOCAB_SIZE, allow_forks=True),
        renderer=FakeRenderer(),
        config=RolloutConfig(sampling=SamplingParams(max_tokens=8)),
        problems=Problems(env=lambda number: ToolEnv([{"role": "user", "content": str(number)}], [], reward)),
        seed=(0, 1),
    )
    return Evaluator(sampler=sampler, num_problems=num_problems, output=output, rank=Rank())


async def test_a_step_is_measured_once_for_a_number_of_problems(tmp_path):
    first = evaluator(tmp_path)
    measured = await first.evaluate(0)
    assert [each.reward for each in measured.trajectories] == [0.0, 1.0, 2.0]
    assert (again := await first.evaluate(0)).numbers["reward/mean"] == 1.0
    assert again.trajectories == ()
    assert (await first.evaluate(5)).numbers["reward/mean"] == 1.0
    assert (await evaluator(tmp_path, num_problems=5).evaluate(5)).numbers["reward/mean"] == 2.0
    found = [(line["step"], line["num_rollouts"], line["reward/mean"]) for line in read_evaluations(tmp_path)]
    assert found == [(0, 3, 1.0), (5, 3, 1.0), (5, 5, 2.0)]
    assert len(first.sampler.engine.requests) == 6


async def test_an_engine_of_newer_weights_tells_nothing_of_the_first_ones(tmp_path):
    late = evaluator(tmp_path)
    await late.sampler.engine.update_weights(TensorSource([]), policy_version=3)
    assert await late.evaluate(0) is None
    assert (await late.evaluate(3)).numbers["reward/mean"] == 1.0
    assert [line["step"] for line in read_evaluations(tmp_path)] == [3]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (EngineError("it is closed"), OutageError, r"lost its engine \(EngineError: it is closed\n"),
        (KeyError("x"), RolloutError, r"all 3 rollouts of the evaluation failed, the first with KeyError: 'x'"),
    ],
)
async def test_an_evaluation_of_which_nothing_is_left_is_no_reward_of_0(tmp_path, error, raised, message):
    def fail(prompt_ids: Any) -> list[int]:
        raise error

    with pytest.raises(raised, match=message):
        await evaluator(tmp_path, fail).evaluate(0)
    assert read_evaluations(tmp_path) == []


async def test_what_was_sampled_is_kept_and_an_evaluation_goes_on_with_the_rest(tmp_path):
    whole, _ = await evaluator(tmp_path / "whole", num_problems=4).evaluate_kept()
    before = evaluator(tmp_path / "part", num_problems=4)
    folder = tmp_path / "part" / "evaluations" / "evaluation"

    def end(number: int) -> Any:
        """Problem 1 fails by itself, 2 loses the engine once 0 and 1 are kept."""

        async def rewarded(messages: Any) -> float:
            while number == 2 and len(find_records(folder)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if number == 3:
                await asyncio.sleep(30)
            raise (EngineError("it is gone") if number == 2 else KeyError("x")) if number else InterruptedError

        return rewarded if number else reward

    def make(reward_of: Any) -> Problems:
        return Problems(env=lambda k: ToolEnv([{"role": "user", "content": str(k)}], [], reward_of(k)))

    with pytest.raises(OutageError, match=r"lost its engine \(EngineError: it is gone"):
        await replace(before, sampler=replace(before.sampler, problems=make(end))).evaluate_kept()
    assert list(find_records(folder)) == [(0, 1), (0, 2)]
    assert read_evaluations(tmp_path / "part") == []
    assert list(before.read_kept()) == [0]  # what failed is sampled again
    evaluation, samples = await before.evaluate_kept()
    assert evaluation.numbers == whole.numbers == read_evaluations(tmp_path / "part")[0]
    assert len(before.sampler.engine.requests) == 4 + 3
    assert [[sample.reward for sample in of_problem] for of_problem in samples] == [[0.0], [1.0], [2.0], [3.0]]
    ((key, path),) = find_records(folder).items()
    head, *records = read_records(path)
    assert (key, head["num_kept"], head["columns"]["reward"]) == ((0, 0), 4, [0.0, 1.0, 2.0, 3.0])
    assert [each["messages"][0]["content"] for each in records] == list("0123")
    assert (await before.evaluate_kept())[0] == evaluation


class GoneGateway:
    """Samples in the place of this process: its gateway does not answer."""

    async def sample_group(self, sampler: Sampler, number: int, *, size: int) -> TrajectoryGroup:
        raise ServerUnreachableError("http://127.0.0.1:1 cannot be reached")


async def test_a_gateway_that_is_gone_is_an_outage_which_a_run_waits_out(tmp_path):
    whole = evaluator(tmp_path)
    lost = replace(whole, sampler=replace(whole.sampler, elsewhere=GoneGateway()))
    with pytest.raises(OutageError, match=r"the evaluation lost its engine \(ServerUnreachableError: http"):
        await lost.evaluate(0)
    assert read_evaluations(tmp_path) == []


async def test_a_full_disk_leaves_what_was_there_and_the_number_is_measured_again(tmp_path, monkeypatch):
    await evaluator(tmp_path).evaluate(0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full_disk)
        with pytest.raises(MetricsError, match=r"cannot be written: .*No space left"):
            await evaluator(tmp_path).evaluate(5)
    assert [line["step"] for line in read_evaluations(tmp_path)] == [0]
    assert (await evaluator(tmp_path).evaluate(5)).numbers["reward/mean"] == 1.0


def full_disk(path: Path, text: str, encoding: str) -> None:
    with path.open("w", encoding=encoding) as file:
        file.write(text[: len(text) // 2])
    raise OSError(28, "No space left on device")


async def test_what_was_measured_is_a_line_of_json(tmp_path):
    await evaluator(tmp_path).evaluate(0)
    (line,) = (tmp_path / "evaluation.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 0, "set": "evaluation", "num_problems": 3, "num_samples": 1, "num_rollouts": 3, "num_without_reward": 0,
        "num_cut": 0, "reward/mean": 1.0, "reward/standard_error": pytest.approx(1 / 3**0.5), "pass@1": 2 / 3,
        "policy_version/min": 0, "policy_version/max": 0, "completion_tokens/mean": 3.0, "num_lost": 0,
    }  # fmt: skip


async def test_what_no_reward_function_has_an_opinion_on_is_left_out_of_the_mean(tmp_path):
    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        if number < 2:
            return group
        unscored = [replace(each, reward=None, status=TrajectoryStatus.UNSCORED) for each in group.trajectories]
        return replace(group, trajectories=tuple(unscored))

    whole = evaluator(tmp_path)
    problems = replace(whole.sampler.problems, score=score)
    measured = await replace(whole, sampler=replace(whole.sampler, problems=problems)).evaluate(0)
    assert measured.numbers["reward/mean"] == 0.5
    assert read_evaluations(tmp_path)[0]["num_without_reward"] == 1
