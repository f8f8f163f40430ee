"""Several policies in one trainer: each row is scored and trained by its own, and checkpoints have all of them."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from support.fake_renderer import VOCAB_SIZE, FakeRenderer
from support.models import tiny_qwen3
from support.steps import train
from unbroken.counters import Counters
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.messages import get_text
from unbroken.rollout.env import Continue, Done, EnvStart, Reply
from unbroken.rollout.limits import Limits
from unbroken.rollout.policies import PoliciesConfig
from unbroken.rollout.runner import run_group
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.records.recorder import _TrainedRows
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, LoraUpdates, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.policies import PolicyTrainers
from unbroken.training.trainer import Trainer
from unbroken.types import Numerics, SamplingParams, TrainingSample
from unbroken.weights.base import InProcessPublisher

METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"
POLICIES = PoliciesConfig(names=("solver", "critic"), copy_every=2, num_copies=2)
CONFIG = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=3e-2), lora_updates=LoraUpdates.ADAPTER, max_policy_k3=1e-6
)


class Duel:
    """Two turns of the solver with one of the critic, or of a frozen copy of it, between them."""

    def __init__(self, other: str) -> None:
        self._other, self._num_turns, self._said = other, 0, ["", ""]

    async def start(self) -> EnvStart:
        return EnvStart(messages=[{"role": "user", "content": "say"}], policy="solver")

    async def step(self, reply: Reply) -> Any:
        self._said[self._num_turns % 2] += get_text(reply.message["content"])
        self._num_turns += 1
        if self._num_turns == 3:
            return Done()
        policy = self._other if self._num_turns == 1 else "solver"
        return Continue(messages=[{"role": "user", "content": "and you"}], policy=policy)

    async def reward(self, messages: Sequence[Any]) -> Mapping[str, float]:
        """Who says more letters wins."""
        shares = [sum(map(str.isalpha, said)) / 12 for said in self._said]
        rewards = {"solver": shares[0] - shares[1]}
        return rewards if "@" in self._other else {**rewards, "critic": shares[1] - shares[0]}

    async def close(self) -> None:
        pass


def adapted(names: Sequence[str] = POLICIES.names, *, lora_alpha: int = 8) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = LoraConfig(r=4, lora_alpha=lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(tiny_qwen3(vocab_size=VOCAB_SIZE), settings, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, settings)
    return model


class Pair:
    """A trainer and the engine that samples for it."""

    def __init__(self, numerics: Numerics = Numerics.FAST) -> None:
        own = TransformersEngineConfig(numerics=numerics)
        self.engine = TransformersEngine(tiny_qwen3(vocab_size=VOCAB_SIZE), config=own)
        # With a scaling that is no power of two: B times it is rounded.
        model = adapted(lora_alpha=8 if numerics is Numerics.FAST else 3)
        config = replace(CONFIG, numerics=numerics)
        self.trainer = PolicyTrainers(model, config, policies=POLICIES, accelerator=Accelerator(cpu=True))

    async def sample(self, seed: int, *, other: str = "critic", n: int = 8) -> TrajectoryGroup:
        return await run_group(
            lambda: Duel(other),
            n,
            engine=self.engine,
            renderer=FakeRenderer(),
            sampling=SamplingParams(max_tokens=6, seed=seed),
            limits=Limits(),
            group_id=str(seed),
            policies=POLICIES,
        )

    async def step(self, seed: int, *, other: str = "critic") -> TrajectoryGroup:
        """Make a step, and publish."""
        group = await self.sample(seed, other=other)
        units = await self.trainer.make_units([group], Counters())
        self.stats = await asyncio.to_thread(self.trainer.step, units)
        publisher = InProcessPublisher(self.engine)
        await publisher.publish(self.trainer.named_weights(), policy_version=self.trainer.policy_version)
        return group

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """The parameters of one policy, and of the base."""
        found = self.trainer._model.named_parameters()
        return {key: each.detach().clone() for key, each in found if f".{name}." in key}


def rows_of(group: TrajectoryGroup) -> list[TrainingSample]:
    return [row for each in group.trajectories for row in export_samples(each.tree, 0.0)]


def score_by_hand(matrices: Mapping[str, torch.Tensor], rows: Sequence[TrainingSample]) -> list[np.ndarray]:
    """Logprobs by transformers alone, in float64: W + B A in the place of each weight, a row at a time."""
    model = tiny_qwen3(vocab_size=VOCAB_SIZE).double()
    with torch.no_grad():
        for name in [key.removesuffix(".lora_A.weight") for key in matrices if key.endswith(".lora_A.weight")]:
            a, b = (matrices[f"{name}.lora_{part}.weight"].double() for part in "AB")
            model.get_submodule(name).weight += b @ a
        found = []
        for row in rows:
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            found.append(np.concatenate([[np.nan], logprobs.numpy()]))
    return found


async def test_each_rows_logprobs_are_its_own_policys_by_an_independent_reference_in_float64() -> None:
    pair = Pair()
    for seed in range(3):
        await pair.step(seed)
    published = {name: dict[str, torch.Tensor]() for name in ("solver", "critic", "critic@2")}
    for full, tensor in pair.trainer.named_weights():
        policy, _, key = full.rpartition("/")
        published.setdefault(policy, {})[key] = tensor.detach().clone()
    rows = [*rows_of(await pair.sample(10)), *rows_of(await pair.sample(11, other="critic@2"))]
    for name, other in (("solver", "critic"), ("critic", "solver"), ("critic@2", "critic")):
        own = [row for row in rows if row.policy == name]
        assert len(own) >= 8
        assert mismatch_of_rows(own, score_by_hand(published[name], own)).k3 < 1e-10
        assert mismatch_of_rows(own, pair.trainer.logprobs(own)).k3 < 1e-10
        assert (
            mismatch_of_rows(own, score_by_hand(published[other], own)).k3 > 1e-5
        )  # the reference can tell them apart
    together = pair.trainer.logprobs(rows)
    assert mismatch_of_rows(rows, together).k3 < 1e-10
    await pair.engine.close()


async def test_a_policys_update_is_that_of_a_trainer_which_has_it_alone() -> None:
    pair = Pair()
    await pair.step(0)  # now the two differ
    single = adapted(("critic",))
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(dict(pair.trainer._model.named_parameters())[name])
    group = await pair.sample(1)
    units = await pair.trainer.make_units([group], Counters())
    own = [unit for unit in units if unit.policy == "critic"]
    alone = Trainer(single, CONFIG, policy_version=1, accelerator=Accelerator(cpu=True))
    expected = alone.step(own)
    before = pair.read("solver")
    stats = pair.trainer.step(own)
    assert {key: torch.equal(each, before[key]) for key, each in pair.read("solver").items()} == dict.fromkeys(
        before, True
    )
    trained = stats.policies["critic"]
    assert trained is not None
    assert (trained.loss, trained.grad_norm) == (expected.loss, expected.grad_norm)
    assert stats.policies["solver"] is None
    metrics = step_metrics(stats)
    assert (metrics["policy/solver/num_rows"], metrics["policy/solver/loss"]) == (0, None)
    assert metrics["policy/critic/num_rows"] == len(own)
    named = {f"policy/NAME/{name.rpartition('/')[2]}" for name in metrics if name.startswith("policy/")}
    assert named == set(re.findall(r"`(policy/NAME/\w+)`", METRICS.read_text()))
    await pair.engine.close()


async def test_with_exact_numerics_rows_of_all_policies_and_copies_in_one_batch_have_the_trainers_bits() -> None:
    pair = Pair(Numerics.EXACT)
    found = []
    for seed in range(3):
        await pair.step(seed)  # it ends the run where a bit differs
        found.append(pair.stats.mismatch)
    assert [(each.equal_share, each.k3) for each in found] == [(1.0, 0.0)] * 3
    others = ("critic", "critic@2", "critic@0")
    groups = await asyncio.gather(*(pair.sample(10 + k, other=other) for k, other in enumerate(others)))
    rows = [row for group in groups for row in rows_of(group)]
    assert {row.policy for row in rows} == {"solver", *others}
    assert mismatch_of_rows(rows, pair.trainer.logprobs(rows)).equal_share == 1.0
    await pair.engine.close()


async def test_advantages_compare_what_one_policy_said_by_its_own_rewards() -> None:
    pair = Pair()
    group = await pair.sample(0)
    units = await pair.trainer.make_units([group], Counters())
    for name, sign in (("solver", 1.0), ("critic", -1.0)):
        own = [unit for unit in units if unit.policy == name]
        assert [unit.reward for unit in own] == [sign * each.parts["solver"].reward for each in group.trajectories]
        advantages = [float(row.advantages[row.loss_mask][0]) for unit in own for row in unit.rows]
        assert abs(sum(advantages)) < 1e-5
        assert all(row.policy == name for unit in own for row in unit.rows)
    await pair.engine.close()


async def test_no_id_of_a_frozen_copy_is_trained_and_copies_stay_as_they_were() -> None:
    pair = Pair()
    for seed in range(2):
        await pair.step(seed)
    frozen = {key: each.clone() for key, each in pair.trainer._copies["critic@2"].items()}
    group = await pair.sample(5, other="critic@past")
    assert {each.turns[1].policy for each in group.trajectories} <= {"critic@0", "critic@2"}
    units = await pair.trainer.make_units([group], Counters())
    assert {unit.policy for unit in units} == {"solver"}
    before = pair.read("critic")
    pair.trainer.step(units)
    assert all(torch.equal(each, before[key]) for key, each in pair.read("critic").items())
    assert all(torch.equal(each, frozen[key]) for key, each in pair.trainer._copies["critic@2"].items())
    pair.trainer.step(units)
    assert set(pair.trainer._copies) == {"solver@2", "critic@2", "solver@4", "critic@4"}
    await pair.engine.close()


async def test_what_a_frozen_copy_said_is_recorded_as_not_trained_also_where_the_policy_said_the_same() -> None:
    pair = Pair()
    units = await pair.trainer.make_units([await pair.sample(0)], Counters())
    (trained, *_) = units[0].rows
    found = _TrainedRows(pair.trainer, units)
    assert found.find(replace(trained, advantages=np.zeros_like(trained.advantages))) is trained
    assert found.find(replace(trained, policy="solver@0")) is None
    await pair.engine.close()


class Source(GroupSource):
    groups_per_step = 1

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    async def sample(self, number: int) -> TrajectoryGroup:
        """Many at once: what a batch holds depends on the time, and with exact numerics no bit on what it holds."""
        return await self._pair.sample(8 * number, other="critic@past" if number % 3 == 2 else "critic")


async def run(folder: Path, num_steps: int) -> Pair:
    pair = Pair(Numerics.EXACT)
    with MetricsWriter(folder / "metrics") as metrics:
        await train(
            Source(pair),
            trainer=pair.trainer,
            publisher=InProcessPublisher(pair.engine),
            metrics=metrics,
            config=LoopConfig(num_steps=num_steps),
            checkpoints=Checkpoints(folder / "checkpoints", every=3, every_s=None),
        )
    await pair.engine.close()
    return pair


async def test_a_run_that_continues_has_the_bits_of_one_that_was_not_ended(tmp_path: Path) -> None:
    whole = await run(tmp_path / "whole", 4)
    await run(tmp_path / "ended", 3)
    again = await run(tmp_path / "ended", 4)
    assert again.trainer.policy_version == whole.trainer.policy_version == 4
    for name in POLICIES.names:
        assert all(torch.equal(each, again.read(name)[key]) for key, each in whole.read(name).items())
    assert (
        again.trainer._copies.keys()
        == whole.trainer._copies.keys()
        == {f"{name}@{version}" for name in POLICIES.names for version in (2, 4)}
    )
    for name, matrices in whole.trainer._copies.items():
        assert all(torch.equal(each, again.trainer._copies[name][key]) for key, each in matrices.items())


async def test_after_a_kill_copies_of_numbers_that_were_left_out_are_the_policy_as_it_is(tmp_path: Path) -> None:
    """The engine had version 6 of steps that are lost, so that the run goes on after version 3 with 7."""
    pair = Pair()
    for seed in range(3):
        await pair.step(seed)
    pair.trainer.save(tmp_path / "saved")
    again = Pair()
    again.trainer.load(tmp_path / "saved")
    again.trainer.policy_version = 7
    await InProcessPublisher(again.engine).publish(again.trainer.named_weights(), policy_version=7)
    assert set(again.engine.adapters) == set(POLICIES.list_adapters(7)) == {
        f"{name}{copy}" for name in POLICIES.names for copy in ("", "@4", "@6")
    }  # fmt: skip
    now = dict(again.trainer.named_weights())
    for name in POLICIES.names:
        own = {key.rpartition("/")[2]: each for key, each in now.items() if key.startswith(f"{name}/")}
        for frozen in (f"{name}@4", f"{name}@6"):
            assert all(torch.equal(each, now[f"{frozen}/{key}"]) for key, each in own.items())
    rows = rows_of(await again.sample(5, other="critic@4"))
    assert mismatch_of_rows(rows, again.trainer.logprobs(rows)).k3 < 1e-10
    await again.engine.close()
    await pair.engine.close()


async def test_a_copy_that_was_forgotten_is_not_made_anew(tmp_path: Path) -> None:
    """With more copies than before, one would be missing that is older than the checkpoint."""
    pair = Pair()
    for seed in range(6):
        await pair.step(seed)
    pair.trainer.save(tmp_path / "saved")
    more = replace(POLICIES, num_copies=3)
    trainer = PolicyTrainers(adapted(), CONFIG, policies=more, accelerator=Accelerator(cpu=True))
    trainer.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"copy solver@2 is gone: policies.copy_every and .* got 2 and 3"):
        trainer.named_weights()
    await pair.engine.close()


def test_a_policy_with_the_name_of_a_part_of_the_model_is_refused_as_peft_would_leave_out_matrices_of_others() -> None:
    names = ("critic", "q_proj")
    with pytest.raises(InvalidInputError, match=r"policies\.names must not be names of parts .* got \['q_proj'\]"):
        PolicyTrainers(adapted(names), CONFIG, policies=PoliciesConfig(names=names), accelerator=Accelerator(cpu=True))


async def test_a_checkpoint_of_other_policies_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    pair = Pair()
    pair.trainer.save(tmp_path / "saved")
    other = PoliciesConfig(names=("critic", "solver"))
    trainer = PolicyTrainers(adapted(), CONFIG, policies=other, accelerator=Accelerator(cpu=True))
    with pytest.raises(CheckpointError, match=r"of the policies \['solver', 'critic'\]"):
        trainer.load(tmp_path / "saved")
    copies = tmp_path / "saved" / "copies.safetensors"
    copies.write_bytes(copies.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="a whole checkpoint of several policies"):
        pair.trainer.load(tmp_path / "saved")
    await pair.engine.close()


def test_pairs_of_replies_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="must be a PolicyGradient"):
        PolicyTrainers(copy.deepcopy(adapted()), CONFIG, policies=POLICIES, objective=OnlineDpo())


def test_several_processes_are_refused() -> None:
    several: Any = SimpleNamespace(num_processes=2)
    with pytest.raises(InvalidInputError, match="policies must be left out with several processes, got 2"):
        PolicyTrainers(adapted(), CONFIG, policies=POLICIES, accelerator=several)
