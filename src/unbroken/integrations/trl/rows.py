"""The rows that TRL trains on: one for each prompt, with exactly the given and the sampled ids.

The prompt 5 6, the sampled 7 8, a tool's answer 9, and the sampled 4 become:

    prompt_ids 5 6    completion_ids 7 8 9 4    env_mask 1 1 0 1    logprobs -.1 -.2 nan -.3

TRL takes exactly one row for each trajectory. A trajectory that cannot be trained on becomes a row with one filler id
outside the loss and no reward (`rewards`), so that its siblings' baseline is computed without it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.training.metrics.writer import counter_metrics
from unbroken.training.objective.samples import TRAINABLE
from unbroken.types import TrainingSample


class TrlDropReason(StrEnum):
    """Why a trajectory is not trained on although its status allows it. The names are metrics, and stable."""

    FORKED = "forked"
    """It has several branches, which are several rows, but TRL takes one."""
    NOTHING_SAMPLED = "nothing_sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRow:
    """A row for TRL, with C ids after the prompt."""

    prompt_ids: list[int]
    """The ids before the first sampled id."""
    completion_ids: list[int]
    """[C] the ids from the first sampled id to the last."""
    env_mask: list[int]
    """[C] 1 where the id was sampled and the loss covers it."""
    logprobs: list[float]
    """[C] of the sampled ids; NaN for other ids, which TRL takes as unknown."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, filler_id: int) -> TrlRow:
        """Make a trajectory's row; one filler id if it is not trained on. Raises `InvalidInputError` for images."""
        if drop_reason(trajectory) is not None:
            return cls(prompt_ids=[filler_id], completion_ids=[filler_id], env_mask=[0], logprobs=[float("nan")])
        (sample,) = _samples(trajectory)
        if sample.images:
            raise InvalidInputError(
                f"a row for TRL must hold no images, got {len(sample.images)} in trajectory "
                f"{trajectory.trajectory_id}: TRL would process the data set's images itself, differently from the "
                "engine. Use unbroken's own trainer"
            )
        start = int(np.flatnonzero(sample.sampled_mask)[0])
        return cls(
            prompt_ids=sample.token_ids[:start].tolist(),
            completion_ids=sample.token_ids[start:].tolist(),
            env_mask=sample.loss_mask[start:].astype(int).tolist(),
            logprobs=sample.rollout_logprobs[start:].tolist(),
        )


def drop_reason(trajectory: Trajectory) -> TrlDropReason | TrajectoryStatus | None:
    """Why a trajectory is not trained on, or None if it is."""
    if trajectory.status not in TRAINABLE:
        return trajectory.status
    num_rows = len(_samples(trajectory))
    if num_rows == 0:
        return TrlDropReason.NOTHING_SAMPLED
    return None if num_rows == 1 else TrlDropReason.FORKED


def _samples(trajectory: Trajectory) -> list[TrainingSample]:
    return export_samples(trajectory.tree, advantage=0.0)


TrlReward: TypeAlias = Callable[..., Any]
"""Called by TRL with `prompts`, `completions`, `completion_ids`, the data set's columns and `trajectory`."""

_MARK = "_unbroken_on_trained_rows"


def on_trained_rows(reward: TrlReward) -> TrlReward:
    """Wrap a plain or async reward function of TRL: rewards of rows that are not trained on become None.

    TRL leaves a row out of its group's baseline only if every reward function returns None for it. A reward for the
    filler of such a row would shift its siblings' advantages, so only functions with this mark are accepted.

    The function gets all of TRL's arguments, and `trajectory`: TRL decodes a whole conversation as if it were one reply
    into `completions`; the real messages are in `trajectory[k].messages`. The wrapper also logs the trajectories'
    counters.
    """

    @functools.wraps(reward)
    def score(**given: Any) -> list[float | None]:
        return _mask_untrained(reward(**given), **given)

    @functools.wraps(reward)
    async def score_async(**given: Any) -> list[float | None]:
        return _mask_untrained(await reward(**given), **given)

    marked = score_async if inspect.iscoroutinefunction(reward) else score
    setattr(marked, _MARK, True)
    return marked


@on_trained_rows
def env_reward(*, trajectory: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """The rewards of the environments."""
    return [one.reward for one in trajectory]


def check_rewards_skip(reward_funcs: Sequence[Any]) -> None:
    """Raise `InvalidInputError` if a reward function may not return None for rows that are not trained on."""
    for k, function in enumerate(reward_funcs):
        if not getattr(function, _MARK, False):
            # A reward function may be any callable, such as a `partial` or a reward model, which have no name.
            name = getattr(function, "__name__", type(function).__name__)
            raise InvalidInputError(
                f"reward_funcs[{k}] must be env_reward or a function with on_trained_rows, got {name}: it would score "
                "rows that are not trained on, and shift the baseline of their group"
            )


def _mask_untrained(
    rewards: Sequence[float | None],
    *,
    trajectory: Sequence[Trajectory],
    log_metric: Callable[[str, float], None],
    **_: Any,
) -> list[float | None]:
    reasons = [drop_reason(one) for one in trajectory]
    counters = Counters()
    for one, reason in zip(trajectory, reasons, strict=True):
        counters.merge(one.counters)
        if reason is not None:
            counters.count(Event.DROPPED_ROW, reason)
    for name, count in counter_metrics(counters).items():
        log_metric(name, float(count or 0))
    if len(rewards) != len(reasons):
        return list(rewards)  # TRL raises its own error, which names the function
    return [None if reason is not None else value for value, reason in zip(rewards, reasons, strict=True)]
