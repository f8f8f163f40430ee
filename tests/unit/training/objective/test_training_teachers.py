"""Teachers: whole updates against the formula in float64, and what they may not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.models import tiny_qwen3
from support.rows import group, random_rows, row, trajectory
from support.slow_logprobs import slow_logprobs
from unbroken.counters import Counters
from unbroken.errors import InvalidInputError, TrainingError
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.training.config import OldLogprobs, Packing, SharedPrefixes, TrainerConfig
from unbroken.training.loss_config import KlConfig, KlPlace, ZeroVarianceRows
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.advantages import ADVANTAGES
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.teachers import Teachers, TeacherTask
from unbroken.training.trainer import Trainer
from unbroken.types import (
    ControlSpan,
    KeptIds,
    LogitControls,
    Numerics,
    TopLogprobs,
    TrainingSample,
    token_ids,
)


def make_trainer(teachers: Teachers, *, algorithm: str = "grpo", weight: float = 1.0, **changes: Any) -> Trainer:
    config = TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=30, teacher_weight=weight, **changes)
    return Trainer(tiny_qwen3(), config, objective=ALGORITHMS[algorithm], teachers=teachers)


def sampled_rows(num_rows: int = 5, **changes: Any) -> list[TrainingSample]:
    """Rows as the trainer's own weights would have sampled them."""
    rows = [replace(each, **changes) for each in random_rows(np.random.default_rng(3), num_rows)]
    logprobs = Trainer(tiny_qwen3(), TrainerConfig(numerics=Numerics.EXACT)).logprobs(rows)
    return [replace(each, rollout_logprobs=values) for each, values in zip(rows, logprobs, strict=True)]


def unscored_trajectory() -> Trajectory:
    return replace(trajectory(None), status=TrajectoryStatus.UNSCORED)


def in_float64(rows: Sequence[TrainingSample]) -> list[torch.Tensor]:
    return [torch.from_numpy(each.rollout_logprobs[each.loss_mask].astype(np.float64)) for each in rows]


@pytest.mark.parametrize("old_logprobs", OldLogprobs)
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_an_update_is_that_of_the_reverse_divergence_at_each_token(old_logprobs, weight):
    rows, teacher, slow = random_rows(np.random.default_rng(5), 6), tiny_qwen3(seed=1), tiny_qwen3()
    logprobs, wanted = slow_logprobs(slow, rows), [each.detach() for each in slow_logprobs(teacher, rows)]
    is_own = old_logprobs is OldLogprobs.RECOMPUTE
    old = [each.detach() for each in logprobs] if is_own else in_float64(rows)
    num_tokens = sum(map(len, logprobs))
    loss = torch.zeros((), dtype=torch.float64)
    for each, own, before, other in zip(rows, logprobs, old, wanted, strict=True):
        advantages = torch.from_numpy(each.advantages[each.loss_mask]).double() - weight * (before - other)
        ratio = (own - before).exp()
        loss = loss - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum() / num_tokens
    loss.backward()
    trainer = make_trainer(Teachers(models={"teacher": teacher}), weight=weight, old_logprobs=old_logprobs)
    before_step = {name: tensor.double().clone() for name, tensor in trainer.named_weights()}
    stats = trainer.step(rows)
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    gaps = torch.cat(old) - torch.cat(wanted)
    metrics = step_metrics(stats)
    assert metrics["teacher/kl"] == pytest.approx(float(gaps.mean()), rel=1e-5)
    assert metrics["teacher/worse_share"] == pytest.approx(float((gaps > 0).double().mean()))
    assert metrics["teacher/token_share"] == 1
    largest = max(float(parameter.grad.abs().max()) for parameter in slow.parameters())
    for name, tensor in trainer.named_weights():
        moved = before_step[name] - tensor.double()
        assert float((moved - slow.get_parameter(name).grad).abs().max()) < 2e-4 * largest, name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_policy_itself_is_at_no_distance_from_itself_with_exact_numerics(temperature):
    teachers = Teachers(models={"teacher": tiny_qwen3()})
    trainer = make_trainer(teachers, numerics=Numerics.EXACT)
    rows = sampled_rows(temperature=temperature)
    logprobs = trainer.logprobs(rows)
    rows = [replace(each, rollout_logprobs=values) for each, values in zip(rows, logprobs, strict=True)]
    metrics = step_metrics(trainer.step(rows))
    assert metrics["teacher/kl"] == metrics["teacher/worse_share"] == 0


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
def test_with_fast_numerics_it_is_at_the_distance_of_rounding_however_rows_are_packed(packing):
    rows = sampled_rows()
    metrics = step_metrics(make_trainer(Teachers(models={"teacher": tiny_qwen3()}), packing=packing).step(rows))
    assert abs(metrics["teacher/kl"]) < 1e-6


def test_without_weight_the_distance_is_only_measured():
    rows = random_rows(np.random.default_rng(5), 6)
    trainer = make_trainer(Teachers(models={"teacher": tiny_qwen3(seed=1)}), weight=0.0)
    alone = Trainer(tiny_qwen3(), TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=30))
    assert step_metrics(trainer.step(rows))["teacher/kl"] != 0
    alone.step(rows)
    assert all(map(torch.equal, *([tensor for _, tensor in each.named_weights()] for each in (trainer, alone))))


async def test_without_weight_it_is_measured_beside_a_distance_to_the_reference_in_the_rewards():
    changes: dict[str, Any] = {"kl_weight": 0.5, "kl": KlConfig(place=KlPlace.REWARD), "optimizer": SUBTRACT_GRADIENT}
    with pytest.raises(
        InvalidInputError, match=r"kl\.place must be loss with a teacher whose teacher_weight is above 0"
    ):
        PolicyGradient().check_config(TrainerConfig(teacher_weight=0.1, **changes))
    stats = []
    for teachers in (Teachers(models={"teacher": tiny_qwen3(seed=1)}), None):
        config = TrainerConfig(teacher_weight=None if teachers is None else 0.0, **changes)
        trainer = Trainer(tiny_qwen3(), config, reference=tiny_qwen3(seed=2), teachers=teachers)
        units = await trainer.make_units([group(trajectory(1.0), trajectory(0.0))], Counters())
        stats.append((trainer.step(units), dict(trainer.named_weights())))
    (measured, weights), (alone, expected) = stats
    assert measured.loss == alone.loss
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert step_metrics(measured)["teacher/kl"] != 0


def test_a_teacher_with_its_own_prompt_scores_the_same_completion_after_it():
    teacher, sample = tiny_qwen3(seed=1), row([1, 2, 3, 7, 8], sampled=[3, 4])
    (expected,) = slow_logprobs(teacher, [row([9, 1, 2, 3, 4, 7, 8], sampled=[5, 6])])
    task = TeacherTask(teacher="teacher", prompt_ids=token_ids([9, 1, 2, 3, 4]))
    trainer = make_trainer(Teachers(models={"teacher": teacher}), weight=0.5)
    (scored,) = trainer._score_units([TrajectoryRows(rows=(sample,), task=task)])[0]
    found = scored.sample.advantages[scored.sample.loss_mask]
    assert found == pytest.approx(1.0 - 0.5 * (-4.0 - expected.detach().numpy()), rel=1e-5)
    assert scored.sample.token_ids.tolist() == [1, 2, 3, 7, 8]


async def test_a_group_chooses_its_teacher_or_none():
    models = {"first": tiny_qwen3(seed=1), "second": tiny_qwen3(seed=2)}
    groups = [replace(group(trajectory(1.0), trajectory(0.0)), group_id=name) for name in ("first", "second", "none")]
    tasks = {name: TeacherTask(teacher=name) for name in models}
    trainer = make_trainer(Teachers(models=models, choose=lambda group: tasks.get(group.group_id)))
    units = await trainer.make_units(groups, Counters())
    scored = [row for of_unit in trainer._score_units(units) for row in of_unit]
    assert [each.teacher and each.teacher.teacher for each in scored] == ["first"] * 2 + ["second"] * 2 + [None] * 2
    for name, part in (("first", scored[:2]), ("second", scored[2:4])):
        (expected,) = slow_logprobs(tiny_qwen3(seed={"first": 1, "second": 2}[name]), [part[0].sample])
        assert part[0].teacher.logprobs[part[0].sample.loss_mask] == pytest.approx(expected.detach().numpy(), rel=1e-5)
    metrics = step_metrics(trainer.step(units))
    assert metrics["teacher/token_share"] == pytest.approx(2 / 3)
    assert metrics["teacher/token_share/first"] == pytest.approx(1 / 3)
    assert metrics["teacher/kl"] == pytest.approx((metrics["teacher/kl/first"] + metrics["teacher/kl/second"]) / 2)


async def test_a_rollout_that_is_not_shown_to_be_the_teachers_own_keeps_its_reward_and_is_counted():
    task = TeacherTask(teacher="teacher", prompt_ids=token_ids([9, 1]), unproven={"b": "other_ids"})
    trainer = make_trainer(Teachers(models={"teacher": tiny_qwen3(seed=1)}, choose=lambda group: task))
    members = (trajectory(1.0, name="a"), trajectory(0.0, name="b"))
    first, second = await trainer.make_units([group(*members)], counters := Counters())
    assert (first.task, second.task) == (task, None)
    assert counters.as_dict() == {"teacher_skips/other_ids": 1}
    assert second.rows[0].advantages[second.rows[0].loss_mask].any()
    assert step_metrics(trainer.step([first, second]))["teacher/token_share"] == 0.5


async def test_a_teacher_alone_trains_on_groups_of_equal_rewards_and_without_any():
    trainer = make_trainer(Teachers(models={"teacher": tiny_qwen3(seed=1)}), algorithm="distillation")
    units = await trainer.make_units([group(trajectory(1.0))], counters := Counters())
    assert counters.total("dropped_rows") == 0
    (unit,) = units
    assert not unit.rows[0].advantages.any()
    assert not trainer.objective.can_lack_variance(trainer.config)


def test_ids_that_were_given_inside_a_turn_have_no_teacher_and_the_others_keep_their_own_rewards():
    teacher, given = tiny_qwen3(seed=1), row([1, 2, 7, 5, 8, 9], sampled=[2, 4, 5])  # 5 closes the reasoning
    sample = replace(given, advantages=np.float32([0, 0, 2, 0, -1, 0]))  # of spans
    (expected,) = slow_logprobs(teacher, [sample])
    trainer = make_trainer(Teachers(models={"teacher": teacher}), weight=0.5)
    (scored,) = trainer._score_units([sample])[0]
    wanted = np.zeros(6)
    wanted[[2, 4, 5]] = np.array([2, -1, 0]) - 0.5 * (-4.0 - expected.detach().numpy())
    assert scored.sample.advantages == pytest.approx(wanted, rel=1e-5)
    metrics = step_metrics(trainer.step([sample]))
    assert metrics["teacher/token_share"] == 1
    assert metrics["teacher/kl"] == pytest.approx(float((-4.0 - expected.detach()).mean()), rel=1e-5)


def rewarded(*parts: float) -> Trajectory:
    """With two reward functions of weight 1."""
    names = ("first", "second")
    given = {"reward_parts": dict(zip(names, parts, strict=True)), "reward_weights": dict.fromkeys(names, 1.0)}
    return replace(trajectory(sum(parts)), **given)


@pytest.mark.parametrize("advantages", ["grpo", "gdpo", "zero"])
async def test_every_rollout_of_a_step_is_scored_once_whatever_its_reward_and_the_number_of_updates(advantages):
    groups = [
        group(rewarded(1.0, 0.0), rewarded(0.0, 0.5)),
        replace(group(rewarded(1.0, 1.0), rewarded(1.0, 1.0)), group_id="equal"),
        replace(group(unscored_trajectory(), unscored_trajectory()), group_id="unscored"),
    ]
    teachers = Teachers(models={"teacher": tiny_qwen3(seed=1)})
    config = TrainerConfig(optimizer=SUBTRACT_GRADIENT, teacher_weight=1.0, num_iterations=2, num_minibatches=2)
    objective = PolicyGradient(advantages=ADVANTAGES[advantages])
    trainer = Trainer(tiny_qwen3(), config, objective=objective, teachers=teachers)
    units = await trainer.make_units(groups, counters := Counters())
    assert counters.total("dropped_rows") == 0
    stats = trainer.step(units)
    assert stats.teachers["teacher"].num_tokens == 6 * 2
    assert step_metrics(stats)["teacher/token_share"] == 1


def test_what_the_loss_clips_is_not_said_where_the_teacher_decides_the_sign():
    trainer = make_trainer(Teachers(models={"teacher": tiny_qwen3(seed=1)}))
    assert trainer.find_left_out([[row([1, 2, 3], sampled=[2])]], [np.float32([np.nan, np.nan, -1])]) is None


def test_advantages_of_zero_need_something_else_to_train_on():
    for config in (TrainerConfig(), TrainerConfig(teacher_weight=1.0, zero_variance=ZeroVarianceRows.DROP)):
        with pytest.raises(InvalidInputError, match=r"advantages zero .* must have another term to train on"):
            ALGORITHMS["distillation"].check_config(config)
    ALGORITHMS["distillation"].check_config(TrainerConfig(kl_weight=0.1))


def test_a_teacher_is_refused_where_it_could_not_be_exact():
    teacher = Teachers(models={"teacher": tiny_qwen3(seed=1)})
    with pytest.raises(InvalidInputError, match="take gspo_token"):
        make_trainer(teacher, algorithm="gspo")
    with pytest.raises(InvalidInputError, match=r"exactly with TrainerConfig\.teacher_weight"):
        Trainer(tiny_qwen3(), TrainerConfig(), teachers=teacher)
    with pytest.raises(InvalidInputError, match="teacher_weight must be left out with OnlineDpo"):
        OnlineDpo().check_config(TrainerConfig(teacher_weight=1.0))
    model = tiny_qwen3()
    with pytest.raises(InvalidInputError, match="a teacher must be a copy"):
        Trainer(model, TrainerConfig(teacher_weight=1.0), teachers=Teachers(models={"teacher": model}))
    small = make_trainer(Teachers(models={"teacher": tiny_qwen3(vocab_size=32)}))
    with pytest.raises(
        InvalidInputError, match="teacher 'teacher' must have an embedding for each id of a row, got id 40"
    ):
        small.step([row([1, 40, 3], sampled=[2])])
    two_turns = TrajectoryRows(
        rows=(row([1, 2, 3, 4], sampled=[1, 3]),), task=TeacherTask(teacher="teacher", prompt_ids=token_ids([5]))
    )
    with pytest.raises(InvalidInputError, match="must have rows of one turn"):
        make_trainer(teacher).step([two_turns])


RESHAPED = {
    "controls": {"controls": (ControlSpan(start=2, stop=3, controls=LogitControls(logit_bias=((40, 1.0),))),)},
    "kept_ids": {"kept_ids": KeptIds.of([(), (), (3, 40)])},
}
"""What an agent may ask for in the middle of a run, whatever its settings say."""


@pytest.mark.parametrize("what", RESHAPED)
def test_rows_of_another_distribution_are_refused_by_whoever_scores_the_models_own(what):
    class Elsewhere:
        vocab_size, max_ids = 64, None

        def score(self, rows, *, num_top):
            raise AssertionError("it was asked")

    sample = replace(row([1, 2, 3], sampled=[2]), **RESHAPED[what])
    for teachers in (Teachers(models={"t": tiny_qwen3(seed=1)}, top_k=4), Teachers(models={"t": Elsewhere()})):
        with pytest.raises(InvalidInputError, match=f"must have rows without {what}"):
            make_trainer(teachers).step([sample])
    small = make_trainer(Teachers(models={"t": tiny_qwen3(vocab_size=32)}))
    with pytest.raises(InvalidInputError, match="teacher 't' must have an embedding for each id of a row, got id 40"):
        small.step([sample])


def slow_distributions(model: Any, rows: Sequence[TrainingSample]) -> list[torch.Tensor]:
    """Of each row [L, V] float64 the logprobs of all ids at its loss tokens."""
    model.double().eval()
    found = []
    for each in rows:
        logits_TV = model(input_ids=torch.from_numpy(each.token_ids.astype(np.int64))[None]).logits[0]
        places = torch.from_numpy(np.flatnonzero(each.loss_mask)) - 1
        found.append(torch.log_softmax(logits_TV[places] / each.temperature, -1))
    return found


def slow_forward_kl(own_LV: torch.Tensor, teacher_LV: torch.Tensor, top_k: int) -> torch.Tensor:
    """[L] of the teacher's `top_k` ids and the rest, which is added up id by id."""
    order_LV = teacher_LV.argsort(-1, descending=True)
    own_LV, teacher_LV = own_LV.gather(-1, order_LV), teacher_LV.gather(-1, order_LV)
    terms_LK = teacher_LV[:, :top_k].exp() * (teacher_LV - own_LV)[:, :top_k]
    rest_L, own_rest_L = (each[:, top_k:].exp().sum(-1) for each in (teacher_LV, own_LV))
    return terms_LK.sum(-1) + rest_L * (rest_L.log() - own_rest_L.log())


@pytest.mark.parametrize(("top_k", "temperature", "algorithm"), [(1, 1.0, "grpo"), (5, 0.7, "distillation")])
def test_an_update_is_that_of_the_forward_divergence_over_the_most_likely_ids_and_the_rest(
    top_k, temperature, algorithm
):
    rows = sampled_rows(6, temperature=temperature)
    if algorithm == "distillation":
        rows = [replace(each, advantages=np.zeros_like(each.advantages)) for each in rows]
    teacher, slow = tiny_qwen3(seed=1), tiny_qwen3()
    own, wanted = slow_distributions(slow, rows), [each.detach() for each in slow_distributions(teacher, rows)]
    num_tokens = sum(map(len, own))
    loss, whole, mass = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for each, own_LV, teacher_LV in zip(rows, own, wanted, strict=True):
        ids = torch.from_numpy(each.token_ids[each.loss_mask].astype(np.int64))[:, None]
        logprobs, advantages = own_LV.gather(-1, ids)[:, 0], torch.from_numpy(each.advantages[each.loss_mask]).double()
        kl_L = slow_forward_kl(own_LV, teacher_LV, top_k)
        loss = loss + ((kl_L * 0.3) - (logprobs - logprobs.detach()).exp() * advantages).sum() / num_tokens
        whole += float(kl_L.detach().sum()) / num_tokens
        mass += float(teacher_LV.topk(top_k).values.exp().sum()) / num_tokens
    loss.backward()
    teachers = Teachers(models={"teacher": tiny_qwen3(seed=1)}, top_k=top_k)
    trainer = make_trainer(teachers, weight=0.3, algorithm=algorithm)
    before_step = {name: tensor.double().clone() for name, tensor in trainer.named_weights()}
    stats = trainer.step(rows)
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    metrics = step_metrics(stats)
    assert metrics["teacher/forward_kl"] == pytest.approx(whole, rel=1e-5)
    assert metrics["teacher/top_mass"] == pytest.approx(mass, rel=1e-5)
    assert metrics["mismatch/k3"] < 1e-8  # of the sampled ids, whatever else is scored
    largest = max(float(parameter.grad.abs().max()) for parameter in slow.parameters())
    for name, tensor in trainer.named_weights():
        moved = before_step[name] - tensor.double()
        assert float((moved - slow.get_parameter(name).grad).abs().max()) < 2e-4 * largest, name


@pytest.mark.parametrize("top_k", [3, 64])  # 64: all ids, of which nothing is left
def test_the_policy_itself_has_its_own_most_likely_ids_with_exact_numerics(top_k):
    trainer = make_trainer(Teachers(models={"teacher": tiny_qwen3()}, top_k=top_k), numerics=Numerics.EXACT)
    metrics = step_metrics(trainer.step(sampled_rows(temperature=0.7)))
    assert metrics["teacher/forward_kl"] == metrics["teacher/kl"] == 0
    assert metrics["mismatch/equal_share"] == 1
    assert metrics["teacher/top_mass"] == pytest.approx(1, abs=1e-6) or top_k == 3


async def test_rows_without_a_teacher_learn_no_ids_beside_rows_that_have_one():
    groups = [replace(group(trajectory(1.0), trajectory(0.0)), group_id=name) for name in ("teacher", "none")]
    choose = {"teacher": TeacherTask(teacher="teacher")}

    def make() -> Trainer:
        models = {"teacher": tiny_qwen3(seed=1)}
        return make_trainer(Teachers(models=models, choose=lambda each: choose.get(each.group_id), top_k=4))

    trainer = make()
    units = await trainer.make_units(groups, Counters())
    targets = [row.targets for rows in trainer._score_units(units) for row in rows]
    assert [each.ids.shape for each in targets] == [(2, 4)] * 4
    assert [np.isfinite(each.values["teacher"]).any() for each in targets] == [True, True, False, False]
    stats = trainer.step(units)
    assert step_metrics(stats)["teacher/token_share"] == 0.5
    alone = make()
    assert stats.forward_kl == pytest.approx(alone.step(await alone.make_units(groups[:1], Counters())).forward_kl)


def test_ids_of_the_teacher_that_the_policy_does_not_have_count_with_the_rest():
    rows, teacher = sampled_rows(), tiny_qwen3(seed=1, vocab_size=80)

    class Larger:
        vocab_size, max_ids = 80, None

        def score(self, rows, *, num_top):
            found = slow_distributions(teacher, rows)
            return [self._give(each, values.detach(), num_top) for each, values in zip(rows, found, strict=True)]

        def _give(self, sample, values_LV, num_top):
            logprobs = np.full(len(sample.token_ids), np.nan, np.float32)
            ids = sample.token_ids[sample.sampled_mask].astype(np.int64)
            logprobs[sample.sampled_mask] = values_LV.gather(-1, torch.from_numpy(ids)[:, None])[:, 0].numpy()
            top = values_LV.topk(num_top)
            return logprobs, TopLogprobs(token_ids=top.indices.numpy(), logprobs=top.values.numpy())

    num_top = 40
    metrics = step_metrics(make_trainer(Teachers(models={"larger": Larger()}, top_k=num_top)).step(rows))
    expected = []
    for own_LV, teacher_LV in zip(
        slow_distributions(tiny_qwen3(), rows), slow_distributions(teacher, rows), strict=True
    ):
        for own_V, teacher_V in zip(own_LV.detach(), teacher_LV.detach(), strict=True):
            ids = [each for each in teacher_V.topk(num_top).indices.tolist() if each < 64]
            assert len(ids) < num_top
            inside = sum(teacher_V[each].exp() * (teacher_V[each] - own_V[each]) for each in ids)
            rest, own_rest = (1 - sum(values_V[each].exp() for each in ids) for values_V in (teacher_V, own_V))
            expected.append(float(inside + rest * (rest.log() - own_rest.log())))
    assert metrics["teacher/forward_kl"] == pytest.approx(float(np.mean(expected)), rel=1e-4)


def test_most_likely_ids_are_refused_where_rows_share_passes_and_beyond_the_vocabulary():
    models = {"teacher": tiny_qwen3(seed=1)}
    with pytest.raises(InvalidInputError, match="shared_prefixes must be auto or never"):
        make_trainer(Teachers(models=models, top_k=2), shared_prefixes=SharedPrefixes.ALWAYS)
    with pytest.raises(InvalidInputError, match="top_k must be <= 64, all ids that the teacher 'teacher' has, got 65"):
        make_trainer(Teachers(models=models, top_k=65))
    larger = tiny_qwen3()
    larger.resize_token_embeddings(80)
    with pytest.raises(InvalidInputError, match=r"top_k must be <= 64, all ids, with .* got 65"):
        make_trainer(Teachers(models={"larger": larger}, top_k=65))
    far = FarTeacher()  # has 64
    with pytest.raises(InvalidInputError, match="top_k must be <= 64, all ids that the teacher 'far' has, got 65"):
        Teachers(models={"larger": larger, "far": far}, choose=lambda group: None, top_k=65)
    with pytest.raises(InvalidInputError, match=r"Teachers\.top_k must be >= 0, got -1"):
        Teachers(models=models, top_k=-1)


class FarTeacher:
    vocab_size, max_ids = 64, 4

    def score(self, rows, *, num_top):
        return [(np.where(each.sampled_mask, -np.inf, np.nan).astype(np.float32), None) for each in rows]


def test_a_teacher_elsewhere_is_asked_too_and_an_infinite_distance_makes_no_update():
    trainer = make_trainer(Teachers(models={"far": FarTeacher()}))
    with pytest.raises(TrainingError, match="gives id 3 at position 2 of 3 the logprob -inf"):
        trainer.step([row([1, 2, 3], sampled=[2])])
    with pytest.raises(InvalidInputError, match="must have room for each row, got one of 5 ids, and its context is 4"):
        trainer.step([row([1, 2, 3, 4, 5], sampled=[2])])
    assert trainer.policy_version == 0
