"""Reward functions for TRL that return None for rows that are not trained on.

TRL leaves a row out of its group's baseline only if every reward function returns None for it. A reward for the filler
of such a row would shift its siblings' advantages, so only functions from this module are accepted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError
from unbroken.integrations.trl.rows import drop_reason
from unbroken.rollout.trajectory import Trajectory
from unbroken.training.metrics.writer import counter_metrics

TrlReward: TypeAlias = Callable[..., Any]
"""Called by TRL with `prompts`, `completions`, `completion_ids`, the data set's columns and `trajectory`."""

_MARK = "_unbroken_on_trained_rows"


def on_trained_rows(reward: TrlReward) -> TrlReward:
    """Wrap a plain or async reward function of TRL: rewards of rows that are not trained on become None.

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
