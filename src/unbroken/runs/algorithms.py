"""The objective of a run, from the names on its command line: an algorithm, or its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from unbroken.errors import InvalidInputError
from unbroken.runs.python_files import FunctionName, load_function

if TYPE_CHECKING:
    from unbroken.training.objective.online_dpo import OnlineDpo
    from unbroken.training.objective.policy_gradient import PolicyGradient

T = TypeVar("T")


class Algorithm(StrEnum):
    """How rewards are turned into a loss; docs/algorithms.md has the formulas."""

    GRPO = "grpo"
    """The advantage is the reward minus the group's mean, divided by the group's standard deviation."""
    DR_GRPO = "dr_grpo"
    """grpo without the division, and a loss that is divided by trainer.max_trajectory_tokens; none: all that a rollout
    can sample."""
    DAPO = "dapo"
    """grpo that replaces groups of equal rewards (loop.max_replacements 3), with a wider upper clip and equal weights
    of tokens, which are the defaults of grpo too; and punishes long trajectories: without trainer.overlong, in the last
    fifth of what a rollout can sample."""
    RLOO = "rloo"
    """The advantage is the reward minus the mean of the other rewards in the group."""
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    """The advantage is the reward minus the mean of all rewards of the step, divided by their standard deviation."""
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    """The advantage is the reward minus the group's mean, divided by the standard deviation over the step."""
    GSPO = "gspo"
    """grpo with one ratio for a whole trajectory."""
    GSPO_TOKEN = "gspo_token"
    """gspo for advantages that differ within a trajectory."""
    CISPO = "cispo"
    """grpo whose ratio is clipped without taking the gradient from a token."""
    SAPO = "sapo"
    """grpo with a soft gate instead of a clip."""
    DISTILLATION = "distillation"
    """The advantage of each token is its teacher's logprob minus the policy's; rewards are only measured."""
    ONLINE_DPO = "online_dpo"
    """DPO on pairs of a better and a worse trajectory of a group, with the run's first model as the reference."""


class Pairing(StrEnum):
    """How online DPO pairs the trajectories of a group."""

    BEST_AND_WORST = "best_and_worst"
    """One pair: the best and the worst."""
    OUTSIDE_IN = "outside_in"
    """The best with the worst, the second best with the second worst, and so on while their rewards differ."""


def make_objective(
    algorithm: Algorithm, *, advantages: FunctionName | None, loss: FunctionName | None, pairs: Pairing
) -> PolicyGradient | OnlineDpo:
    """The objective of an algorithm, with other advantages or another loss if they are given.

    Raises `InvalidInputError` for an unknown name, or for a part that online DPO would ignore.
    """
    from unbroken.training.objective.advantages import ADVANTAGES, StepAdvantages, TurnAdvantages
    from unbroken.training.objective.losses import LOSSES, PolicyLoss
    from unbroken.training.objective.online_dpo import OnlineDpo
    from unbroken.training.objective.pairs import best_and_worst, outside_in
    from unbroken.training.objective.policy_gradient import ALGORITHMS

    if algorithm is Algorithm.ONLINE_DPO:
        for name, given in (("advantages", advantages), ("loss", loss)):
            if given is not None:
                raise InvalidInputError(f"{name} must be left out with algorithm online_dpo, got {given!s}")
        return OnlineDpo(pairs=outside_in if pairs is Pairing.OUTSIDE_IN else best_and_worst)
    parts: dict[str, Any] = {}
    if advantages is not None:
        kinds = (StepAdvantages, TurnAdvantages)
        parts["advantages"] = _find("advantages", advantages, ADVANTAGES, kinds)
    if loss is not None:
        parts["loss"] = _find("loss", loss, LOSSES, (PolicyLoss,))
    return dataclasses.replace(ALGORITHMS[algorithm.value], **parts)


def _find(field: str, name: FunctionName, known: Mapping[str, T], kinds: tuple[type[Any], ...]) -> T:
    if not name.is_reference:
        if name not in known:
            raise InvalidInputError(
                f"{field} must be one of {', '.join(known)}, or written module:function or file.py:function, got "
                f"{str(name)!r}"
            )
        return known[name]
    found: T = load_function(name, field=field, kinds=kinds)
    return found
