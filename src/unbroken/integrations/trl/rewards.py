"""Reward functions for TRL that know which rows are not trained on, and say so with a reward of None.

TRL leaves a row out of its group's baseline only if every reward function gives it None. One that scores such a row,
by what its filler decodes to, would shift the advantages of the siblings: so only functions from here are accepted.
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
"""What TRL calls with `prompts`, `completions`, `completion_ids`, the data set's columns, and `trajectory`, a list."""

_MARK = "_unbroken_on_trained_rows"


def on_trained_rows(reward: TrlReward) -> TrlReward:
    """A reward function of TRL's kind, plain or async, whose rewards of rows that are not trained on become None.

    It gets all that TRL gives reward functions, and with it `trajectory`: `completions` are what TRL decoded, a whole
    conversation as if it were one reply, while `trajectory[k].messages` are the messages that there were. It also logs
    the counters of the trajectories.
    """

    @functools.wraps(reward)
    def scored(**given: Any) -> list[float | None]:
        return _only_trained(reward(**given), **given)

    @functools.wraps(reward)
    async def scored_async(**given: Any) -> list[float | None]:
        return _only_trained(await reward(**given), **given)

    marked = scored_async if inspect.iscoroutinefunction(reward) else scored
    setattr(marked, _MARK, True)
    return marked


@on_trained_rows
def env_reward(*, trajectory: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """What each episode's environment rewarded it with."""
    return [one.reward for one in trajectory]


def check_rewards_skip(reward_funcs: Sequence[Any]) -> None:
    """Check that all of a trainer's reward functions leave out what is not trained on.

    Raises:
        InvalidInputError: one does not.
    """
    for k, function in enumerate(reward_funcs):
        if not getattr(function, _MARK, False):
            name = getattr(function, "__name__", type(function).__name__)
            raise InvalidInputError(
                f"reward_funcs[{k}] must be env_reward or what on_trained_rows makes, got {name}: it would score rows "
                "that are not trained on, and shift the baseline of their group"
            )


def _only_trained(
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
        return list(rewards)  # TRL's own error about it names the function
    return [None if reason is not None else value for value, reason in zip(rewards, reasons, strict=True)]
