"""Forks, sub-agents and failures change no weight: loss and gradient are those of the definition, id by id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.models import tiny_qwen3
from support.rows import trajectory
from support.slow_logprobs import slow_logprobs
from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import FailedRows, LossNormalization
from unbroken.training.model.batch import ScoredRow, collate
from unbroken.training.model.logprobs import TokenScores
from unbroken.training.objective.base import UpdateSize
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.types import FinishReason, SampledSequence, TrainingSample, VersionSpan, token_ids

VOCAB = 32


def give(tree: TokenTree, ids: list[int], parent: Position | None) -> Position:
    return tree.add_given(ids, Origin.PROMPT, parent=parent)


def sample(tree: TokenTree, ids: list[int], parent: Position) -> Position:
    sequence = SampledSequence(
        completion_ids=token_ids(ids),
        rollout_logprobs=np.full(len(ids), -1.0, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, stop=len(ids), policy_version=0),),
    )
    return tree.add_sampled(sequence, parent=parent)


def branching(rng: np.random.Generator, num_forks: int, num_conversations: int) -> TokenTree:
    """Conversations of two turns, each with forks: after a turn, and inside of one."""
    tree = TokenTree()

    def draw(least: int) -> list[int]:
        ids: list[int] = rng.integers(1, VOCAB, size=rng.integers(least, 6)).tolist()
        return ids

    for _ in range(num_conversations):
        first = sample(tree, draw(3), give(tree, draw(2), None))
        sample(tree, draw(2), give(tree, draw(1), first))
        for fork in range(num_forks):
            back = tree.step_back(first, fork)
            sample(tree, draw(2), give(tree, draw(1), back))
    return tree


@pytest.fixture
def groups() -> list[TrajectoryGroup]:
    rng = np.random.default_rng(3)
    failed = TrajectoryStatus.FAILED
    of_first = [
        trajectory(1.0, name="a", tree=branching(rng, 2, 2)),
        trajectory(0.0, name="b", tree=branching(rng, 0, 1)),
        trajectory(None, name="c", tree=branching(rng, 1, 1), status=failed),
        trajectory(0.5, name="d", tree=branching(rng, 1, 3)),
    ]
    of_second = [
        trajectory(1.0, name="e", tree=branching(rng, 0, 2)),
        trajectory(1.0, name="f", tree=branching(rng, 3, 1)),
        trajectory(None, name="g", tree=branching(rng, 0, 1), status=failed),
        trajectory(-0.25, name="h", tree=branching(rng, 0, 1)),
    ]
    return [
        TrajectoryGroup(group_id="1", trajectories=tuple(of_first)),
        TrajectoryGroup(group_id="2", trajectories=tuple(of_second)),
    ]


def define(
    model: Any, groups: list[TrajectoryGroup], failed: FailedRows, failed_reward: float, by_trajectory: bool
) -> torch.Tensor:
    """The loss by its definition: a term for each sampled id of a tree, given the path to it, and no rows.

    With `by_trajectory` each trajectory weighs the same, else each sampled id does.
    """
    terms: list[tuple[float, int, torch.Tensor]] = []
    for group in groups:
        rewards = {}
        for each in group.trajectories:
            if each.reward is not None:
                rewards[each.trajectory_id] = each.reward
            elif failed is not FailedRows.DROP:
                rewards[each.trajectory_id] = failed_reward
        baseline = sum(rewards.values()) / len(rewards)
        for each in group.trajectories:
            if each.reward is None and failed is not FailedRows.TRAIN:
                continue
            total, num_ids = sum_of_logprobs(model, each.tree)
            terms.append((rewards[each.trajectory_id] - baseline, num_ids, total))
    if by_trajectory:
        return -sum(advantage * total / num_ids for advantage, num_ids, total in terms) / len(terms)
    return -sum(advantage * total for advantage, _, total in terms) / sum(num_ids for _, num_ids, _ in terms)


def sum_of_logprobs(model: Any, tree: TokenTree) -> tuple[torch.Tensor, int]:
    """Over all sampled ids of a tree, each once."""
    total, num_ids = torch.zeros((), dtype=torch.float64), 0
    for number, node in enumerate(tree.nodes):
        if node.origin is not Origin.SAMPLED:
            continue
        size = len(node.token_ids)
        path = torch.tensor(tree.token_ids(Position(node=number, offset=size)).tolist())
        logprobs = model(path[None]).logits[0].double().log_softmax(-1)
        total = total + logprobs[-size - 1 : -1].gather(1, path[-size:, None]).sum()
        num_ids += size
    return total, num_ids


def mean_baseline(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


@pytest.mark.parametrize("normalization", [LossNormalization.TOKEN, LossNormalization.SEQUENCE])
@pytest.mark.parametrize("failed", FailedRows)
async def test_gradients_are_those_of_the_definition(
    groups: list[TrajectoryGroup], failed: FailedRows, normalization: LossNormalization
) -> None:
    model = tiny_qwen3().double()
    failed_reward = 0.0 if failed is FailedRows.DROP else -0.5
    expected = define(model, groups, failed, failed_reward, normalization is LossNormalization.SEQUENCE)
    config = TrainerConfig(normalization=normalization, failed=failed, failed_reward=failed_reward)
    objective = PolicyGradient(advantages=mean_baseline)
    units = await objective.make_units(groups, Counters(), config)
    loss = compute_loss(objective, model, units, config)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    found = torch.autograd.grad(loss, list(model.parameters()))
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    assert all(float((a - b).abs().max()) / largest < FLOAT32 for a, b in zip(found, wanted, strict=True))


FLOAT32 = 3e-7
"""Advantages and weights of tokens are float32; everything else is float64 here."""


def compute_loss(objective: PolicyGradient, model: Any, units: Any, config: TrainerConfig) -> torch.Tensor:
    """The loss of an update, a row at a time, whose old logprobs are the model's own."""
    by_unit = [[score(model, row) for row in objective.get_rows(unit)] for unit in units]
    rows = [row for of_unit in by_unit for row in of_unit]
    size = UpdateSize(len(units), sum(row.num_loss_tokens for row in rows), len(rows))
    update = objective.weigh(by_unit, config, size=size, score=lambda _: [])
    total = torch.zeros((), dtype=torch.float64)
    for number, (row, weight) in enumerate(zip(rows, update.weights, strict=True)):
        of_row = update.trajectories[number : number + 1]
        batch = collate([[row]], [weight], torch.device("cpu"), trajectories=of_row)
        (logprobs_N,) = slow_logprobs(model, [row.sample])
        scores = TokenScores(logprobs_N, torch.zeros_like(logprobs_N))
        total = total + objective.batch_loss(scores, batch, config).loss
    return total


def score(model: Any, row: TrainingSample) -> ScoredRow:
    old = np.full(len(row.token_ids), np.nan, np.float64)
    old[row.loss_mask] = slow_logprobs(model, [row])[0].detach().numpy()
    return ScoredRow(sample=row, old_logprobs=old)


@pytest.mark.parametrize(("failed", "dropped", "num_units"), [("drop", 2, 6), ("baseline", 2, 6), ("train", 0, 8)])
async def test_failed_attempts_are_dropped_counted_or_trained(
    groups: list[TrajectoryGroup], failed: str, dropped: int, num_units: int
) -> None:
    counters = Counters()
    config = TrainerConfig(failed=FailedRows(failed))
    units = await PolicyGradient(advantages=mean_baseline).make_units(groups, counters, config)
    assert len(units) == num_units
    assert counters["dropped_rows/failed"] == dropped


async def test_each_sampled_id_is_trained_once(groups: list[TrajectoryGroup]) -> None:
    objective = PolicyGradient(advantages=mean_baseline)
    units = await objective.make_units(groups, Counters(), TrainerConfig(failed=FailedRows.TRAIN))
    trained = sum(int(row.loss_mask.sum()) for unit in units for row in objective.get_rows(unit))
    trees = [each.tree for group in groups for each in group.trajectories]
    assert trained == sum(len(node.token_ids) for tree in trees for node in tree.nodes if node.origin is Origin.SAMPLED)


def test_settings_that_have_no_effect_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="failed_reward must be finite, and left out with failed drop"):
        TrainerConfig(failed_reward=-1.0)
    with pytest.raises(InvalidInputError, match="failed"):
        OnlineDpo().check_config(TrainerConfig(failed=FailedRows.TRAIN))
