"""Metrics of a step's rollouts over all processes (docs/metrics.md): rewards, lengths, groups and counters (I8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.counters import Counters
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.metrics.writer import Metrics, counter_metrics
from unbroken.training.objective.advantages import all_equal
from unbroken.training.objective.comparison import MIN_GROUP_SIZE
from unbroken.training.objective.samples import keep_trainable

_Floats = NDArray[np.float64]
_STATISTICS: dict[str, Callable[[_Floats], Any]] = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNumbers:
    """Numbers of one process's rollouts; `merge` concatenates those of several."""

    rewards: _Floats
    """[members that could be trained on]"""
    kept_rewards: _Floats
    """[those of them whose groups were not replaced]"""
    replaced_tokens: _Floats
    """[replaced groups] ids sampled in all turns."""
    reward_parts: Mapping[str, _Floats]
    """`Trajectory.reward_parts` of the same members, by name: [those that have it]"""
    prompt_tokens: _Floats
    """[trajectories] ids of the first prompt."""
    completion_tokens: _Floats
    """[trajectories] ids sampled in all turns."""
    turns: _Floats
    """[trajectories]"""
    given_ids: _Floats
    """[turns] ids that were given inside it, to close its reasoning."""
    tool_calls: _Floats
    """[trajectories] calls that the policy tried to make, including those that did not parse or failed."""
    rollout_s: _Floats
    """[trajectories]"""
    engine_s: _Floats
    """[trajectories] waiting for the engine, in its queue and while it sampled."""
    queue_s: _Floats
    """[trajectories whose engine reports it] `Trajectory.queue_s`"""
    reward_costs: Mapping[str, float]
    """`TrajectoryGroup.reward_costs` of all groups together."""
    group_sizes: _Floats
    """[groups] members that were compared with each other; 0 if too few were left."""
    group_stds: _Floats
    """[groups with compared members] standard deviation of their rewards."""
    counters: Counters

    @staticmethod
    def of(
        groups: Sequence[TrajectoryGroup], counters: Counters, *, replaced: Sequence[TrajectoryGroup] = ()
    ) -> RolloutNumbers:
        """The numbers of one process's groups, those that were replaced included, and the `counters` of all."""
        sampled = [*groups, *replaced]
        members = list(chain.from_iterable(group.trajectories for group in sampled))
        left = [keep_trainable(group) for group in sampled]
        trainable = list(chain.from_iterable(left))
        rewards = [_read("reward", group) for group in left]
        queues = [member.queue_s for member in members if member.queue_s is not None]
        compared = [of_group for of_group in rewards if _num_compared(of_group) > 0]
        return RolloutNumbers(
            rewards=_join(rewards),
            kept_rewards=_join(rewards[: len(groups)]),
            replaced_tokens=_read("num_sampled", replaced),
            reward_parts=_by_name(member.reward_parts for member in trainable),
            prompt_tokens=_floats(map(_num_prompt_ids, members)),
            completion_tokens=_read("num_sampled", members),
            turns=_floats(len(member.turns) for member in members),
            given_ids=_floats(
                map(attrgetter("sequence.num_given"), chain.from_iterable(map(attrgetter("turns"), members)))
            ),
            tool_calls=_floats(map(_num_tool_calls, members)),
            rollout_s=_read("wall_time_s", members),
            engine_s=_read("engine_s", members),
            queue_s=_floats(queues),
            reward_costs=_sum_by_name(map(attrgetter("reward_costs"), sampled)),
            group_sizes=_floats(map(_num_compared, rewards)),
            group_stds=_floats(map(_std, compared)),
            counters=counters,
        )

    @staticmethod
    def merge(processes: Sequence[RolloutNumbers]) -> RolloutNumbers:
        """Concatenate the numbers of all processes."""
        counters = Counters()
        for process in processes:
            counters.merge(process.counters)
        others = ("counters", "reward_parts", "reward_costs")
        arrays = [field.name for field in fields(RolloutNumbers) if field.name not in others]
        merged = {name: np.concatenate([getattr(process, name) for process in processes]) for name in arrays}
        names = sorted({name for process in processes for name in process.reward_parts})
        parts = {
            name: np.concatenate([process.reward_parts.get(name, _floats(())) for process in processes])
            for name in names
        }
        costs = _sum_by_name(map(attrgetter("reward_costs"), processes))
        return RolloutNumbers(**merged, reward_parts=parts, reward_costs=costs, counters=counters)


def rollout_metrics(numbers: RolloutNumbers, *, collect_s: float) -> Metrics:
    """The metrics of a step's rollouts, which took `collect_s` to sample."""
    num_sampled = float(numbers.completion_tokens.sum())
    return {
        **_statistics("reward", numbers.rewards, "mean", "std", "min", "max"),
        **{f"reward/{name}_mean": float(values.mean()) for name, values in numbers.reward_parts.items()},
        **numbers.reward_costs,
        "rollout/num_trajectories": len(numbers.turns),
        "rollout/num_trainable": len(numbers.rewards),
        "rollout/num_tool_calls": int(numbers.tool_calls.sum()),
        "rollout/num_sampled_tokens": int(num_sampled),
        **_statistics("rollout/prompt_tokens", numbers.prompt_tokens, "mean", "max"),
        **_statistics("rollout/completion_tokens", numbers.completion_tokens, "mean", "min", "max"),
        **_statistics("rollout/turns", numbers.turns, "mean", "max"),
        "rollout/given_ids": int(numbers.given_ids.sum()),
        "rollout/closed_turns": float((numbers.given_ids > 0).mean()) if len(numbers.given_ids) else None,
        **_statistics("seconds/rollout", numbers.rollout_s, "mean", "max"),
        **_statistics("seconds/engine", numbers.engine_s, "mean", "max"),
        **_statistics("seconds/queue", numbers.queue_s, "mean", "max"),
        "groups/num": len(numbers.group_sizes),
        "groups/num_compared": len(numbers.group_stds),
        "groups/num_zero_variance": int((numbers.group_stds == 0).sum()),
        "groups/num_replaced": len(numbers.replaced_tokens),
        "groups/num_replaced_tokens": int(numbers.replaced_tokens.sum()),
        **_statistics("groups/size", numbers.group_sizes[numbers.group_sizes > 0], "mean", "min"),
        **_statistics("groups/reward_std", numbers.group_stds, "mean"),
        **_statistics("groups/kept_reward", numbers.kept_rewards, "mean"),
        "tokens_per_s/generation": num_sampled / collect_s if collect_s > 0 else None,
        **counter_metrics(numbers.counters),
    }


def _statistics(name: str, values: _Floats, *kinds: str) -> Metrics:
    """`NAME_mean` and so on (`NAME/mean` if the name has one part); None without values, or if one is not finite."""
    separator = "_" if "/" in name else "/"
    are_numbers = len(values) > 0 and bool(np.isfinite(values).all())
    return {f"{name}{separator}{kind}": float(_STATISTICS[kind](values)) if are_numbers else None for kind in kinds}


def _join(arrays: Sequence[_Floats]) -> _Floats:
    """[N], empty without arrays."""
    return np.concatenate([_floats(()), *arrays])


def _num_compared(rewards: _Floats) -> int:
    """The members of a group that are compared with each other; 0 if too few are left."""
    return len(rewards) if len(rewards) >= MIN_GROUP_SIZE else 0


def _std(rewards: _Floats) -> float:
    """The standard deviation, exactly 0 if rewards are equal up to rounding: numpy gives 1e-17 for three times 0.1."""
    return 0.0 if all_equal(rewards) else float(np.std(rewards))


def _floats(values: Any) -> _Floats:
    return np.asarray(list(values), dtype=np.float64)


def _read(name: str, items: Iterable[TrajectoryGroup | Trajectory]) -> _Floats:
    """[N] a number that each of N rollouts or groups has."""
    return _floats(map(attrgetter(name), items))


def _by_name(parts: Iterable[Mapping[str, float]]) -> dict[str, _Floats]:
    values: dict[str, list[float]] = {}
    for of_member in parts:
        for name, value in of_member.items():
            values.setdefault(name, []).append(value)
    return {name: _floats(of_name) for name, of_name in values.items()}


def _sum_by_name(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for of_group in costs:
        for name, value in of_group.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _num_prompt_ids(trajectory: Trajectory) -> int:
    nodes = trajectory.tree.nodes
    return len(nodes[0].token_ids) if nodes else 0


def _num_tool_calls(trajectory: Trajectory) -> int:
    return sum(len(turn.parsed.tool_calls) for turn in trajectory.turns)
