"""The asynchronous loop with a real trainer, engine and publisher: it learns, and stays within the bound."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.steps import train
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline, TraceFile, read_timeline
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher

PROMPT = (1, 2)


class Bandit(GroupSource):
    """Samples ids after the prompt, of which each 9 is worth 1; every third group is four times as long."""

    groups_per_step = 2

    def __init__(self, engine: TransformersEngine, *, num_ids: int = 4) -> None:
        self.engine = engine
        self.num_ids = num_ids
        self.trained: list[int] = []

    async def sample(self, number: int) -> TrajectoryGroup:
        params = SamplingParams(max_tokens=self.num_ids * (4 if number % 3 == 0 else 1), seed=number)
        request = SampleRequest(request_id=f"{number}", prompt_ids=token_ids(PROMPT), params=params, n=32)
        sequences = (await self.engine.sample(request)).sequences
        rewards = [float((sequence.completion_ids == 9).mean()) for sequence in sequences]
        members = [
            trajectory(reward, prompt=PROMPT, completion=sequence, name=str(number))
            for reward, sequence in zip(rewards, sequences, strict=True)
        ]
        return group(*members)


def make_trainer(**changes) -> Trainer:
    return Trainer(tiny_qwen3(), TrainerConfig(optimizer=OptimizerConfig(learning_rate=3e-3), **changes))


async def run(directory, bandit: Bandit, *, num_steps: int = 16, max_staleness: int = 2, **options) -> list[dict]:
    async def on_rollouts(rollouts) -> None:
        bandit.trained += [int(each.trajectories[0].trajectory_id) for each in rollouts.groups]

    with MetricsWriter(directory) as metrics:
        await train(
            bandit,
            trainer=options.pop("trainer", None) or make_trainer(),
            publisher=InProcessPublisher(bandit.engine),
            metrics=metrics,
            config=LoopConfig(
                num_steps=num_steps, max_staleness=max_staleness, max_replacements=options.pop("max_replacements", None)
            ),
            observer=Callbacks(on_rollouts=on_rollouts, before_update=options.pop("before_update", None)),
            **options,
        )
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


async def test_a_bandit_is_learnt_from_weights_within_the_bound(tmp_path):
    max_staleness = 3  # others are on the virtual clock
    bandit = Bandit(TransformersEngine(tiny_qwen3()))
    timeline = Timeline(TraceFile(tmp_path / "timeline.json", max_bytes=None))
    logged = await run(tmp_path, bandit, num_steps=24, max_staleness=max_staleness, timeline=timeline)
    timeline.close()
    assert [line["step"] for line in logged] == list(range(24))
    assert sorted(bandit.trained) == list(range(48))
    assert logged[-1]["reward/mean"] > 0.3 > 0.1 > logged[0]["reward/mean"]
    trained = [line for line in logged if line["train/num_rows"]]
    assert max(line["staleness/max"] for line in trained) <= max_staleness
    assert max(line["staleness/mean"] for line in trained) > 0
    assert all(line["mismatch/k3_lag_0"] is None or line["mismatch/k3_lag_0"] < 1e-8 for line in trained)
    assert bandit.engine.policy_version == trained[-1]["train/policy_version"] == len(trained)
    await bandit.engine.close()
    for line in trained:
        lags = {lag: line.get(f"staleness/num_ids_lag_{lag}", 0) for lag in range(max_staleness + 1)}
        assert sum(lags.values()) == line["train/num_loss_tokens"]
        assert sum(lag * count for lag, count in lags.items()) == pytest.approx(
            line["staleness/mean"] * line["train/num_loss_tokens"]
        )
    shares = [line[name] for line in logged for name in ("idle/trainer", "idle/sampler", "idle/sampler_held")]
    assert all(0 <= share <= 1 for share in shares)
    events = read_timeline(tmp_path / "timeline.json")
    names = Counter(each["name"] for each in events if each["ph"] == "B")
    assert names["train"] == names["snapshot"] == len(trained)
    trainer_s = max(each["ts"] for each in events if "ts" in each) - min(each["ts"] for each in events if "ts" in each)
    assert sum(line["seconds/step"] for line in logged) == pytest.approx(trainer_s / 1e6, rel=0.2)


@pytest.mark.parametrize("old_logprobs", [OldLogprobs.SAMPLER, OldLogprobs.RECOMPUTE])
@pytest.mark.parametrize("more", [0, 1])
async def test_a_run_warns_once_of_more_staleness_than_holds(tmp_path, caplog, old_logprobs, more):
    bandit = Bandit(TransformersEngine(tiny_qwen3()))
    trainer = make_trainer(old_logprobs=old_logprobs)
    await run(tmp_path, bandit, num_steps=2, max_staleness=4 + more, trainer=trainer)
    await bandit.engine.close()
    warnings = [record.getMessage() for record in caplog.records if "max_staleness" in record.getMessage()]
    assert len(warnings) == more
    assert all("max_staleness is 5: runs of several seeds held up to 4" in each for each in warnings)


async def test_i6_an_id_that_was_sampled_after_an_update_has_the_logprob_of_the_newer_weights(tmp_path):
    """One sequence has ids of several versions; those of the trainer's own version agree with it to rounding."""
    bandit = Bandit(TransformersEngine(tiny_qwen3()), num_ids=40)
    seen = []
    sample = bandit.sample

    async def watched(number: int) -> TrajectoryGroup:
        sampled = await sample(number)
        seen.extend(len(set(node.policy_versions)) for t in sampled.trajectories for node in t.tree.nodes[1:])
        return sampled

    bandit.sample = watched
    logged = await run(tmp_path, bandit, max_staleness=4, num_steps=6)
    assert max(seen) > 1
    assert all(line["mismatch/k3_lag_0"] is None or line["mismatch/k3_lag_0"] < 1e-8 for line in logged)
    await bandit.engine.close()


async def test_a_run_goes_on_with_the_groups_that_were_not_trained(tmp_path):
    first, second, third = (Bandit(TransformersEngine(tiny_qwen3())) for _ in range(3))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    await run(tmp_path, first, num_steps=4, checkpoints=checkpoints)
    logged = await run(tmp_path, second, num_steps=9, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    assert [line["step"] for line in logged] == list(range(9))
    assert sorted(first.trained + second.trained) == list(range(18))
    await run(tmp_path, third, num_steps=11, max_staleness=0, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    assert sorted(first.trained + second.trained + third.trained) == list(range(22))
    for bandit in (first, second, third):
        await bandit.engine.close()


async def test_groups_of_equal_rewards_are_replaced_and_counted(tmp_path):
    class Easy(Bandit):
        async def sample(self, number: int) -> TrajectoryGroup:
            sampled = await super().sample(number)
            if number % 2:
                return sampled
            return group(*(replace(member, reward=1.0) for member in sampled.trajectories))

    bandit = Easy(TransformersEngine(tiny_qwen3()))
    logged = await run(tmp_path, bandit, num_steps=5, max_staleness=1, max_replacements=4)
    num_replaced = sum(line["groups/num_replaced"] for line in logged)
    assert sorted(bandit.trained) == list(range(10 + num_replaced))
    assert num_replaced >= 9
    assert all(line["train/num_rows"] == 64 for line in logged)
    assert sum(line["groups/num_replaced_tokens"] for line in logged) > 0
    assert all(line["groups/kept_reward_mean"] < line["reward/mean"] for line in logged if line["groups/num_replaced"])
    await bandit.engine.close()


async def test_what_cannot_sample_while_it_trains_is_refused(tmp_path):
    engine = TransformersEngine(tiny_qwen3())
    bandit = Bandit(engine)
    with pytest.raises(InvalidInputError, match=r"max_staleness must be 0 with an engine that sleeps"):
        await run(tmp_path, bandit, before_update=engine.sleep)
    with pytest.raises(InvalidInputError, match=r"must be a GroupSource \(groups_per_step, sample\)"):
        await train(
            bandit.sample,
            trainer=make_trainer(),
            publisher=None,
            metrics=None,
            config=LoopConfig(num_steps=1, max_staleness=1),
        )
    await engine.close()
