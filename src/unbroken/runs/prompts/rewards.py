"""Reward functions from a user's file, called once with all completions of a problem.

    def correct(completions, answer):                   # a function gets the arguments that it names
        return [float(a in c) for c, a in zip(completions, answer)]

As in TRL, every argument is a list with an entry for each completion, and the function returns a list of as many
numbers. It may be async. A judge is such a function too. None instead of a number means no opinion: the sum leaves it
out. A completion on which no function has an opinion is not compared with its siblings, and is trained on only for its
distance to a reference, if there is one.

Instead of a number a function may give rewards for parts of a completion (process rewards), by the places of its
sampled ids, of which `completion_ids` has the list: spans `[(0, 12, 0.5), (12, 30, 1.0)]`, or one number for each id.
`turn_grpo` and `turn_returns` make advantages of these for each id; with other advantages their sum counts.

Worked example, two functions with the weights 1 and 0.5 and four completions: [1, 0, 1, None] and [0.2, 0.4, None,
None] give the rewards [1.1, 0.2, 1] and leave the last completion out.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from unbroken.counters import count_costs
from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.numbers import to_finite_float32
from unbroken.messages import Message, copy_containers, get_text
from unbroken.rollout.failures import format_error, format_frames, must_propagate
from unbroken.rollout.trajectory import SpanReward, Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.runs.python_files import ModelName, load_object
from unbroken.threads import run_in_daemon_thread
from unbroken.training.objective.samples import keep_trainable

_logger = logging.getLogger(__name__)
OWN_ARGUMENTS = ("prompts", "completions", "messages", "completion_ids", "statuses")
"""Arguments that a reward function may name besides the columns of the data set."""
OWN_REWARD = "environment"
"""The name of an environment's own reward, among those of functions."""


_Known: TypeAlias = float | tuple[SpanReward, ...]
"""What a function returned for a completion: a reward, or rewards of spans."""
_Given: TypeAlias = _Known | None
"""The same, or no opinion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """A reward function or a reward model. The reward is the sum over all of them, each times its weight."""

    function: Path | None = None
    """Written file.py:name."""
    model: ModelName | None = None
    """Instead of a function: a sequence classifier with one output, a folder or its name on the hub, which scores whole
    conversations in its own chat template."""
    batch_size: int = 8
    """For a model: conversations that it scores at the same time."""
    weight: float = 1.0
    timeout_s: float = 600.0
    """How long it may take for the completions of one prompt, in seconds, each time."""
    max_retries: int = 3
    """How often it is called again, each time, if a connection fails or times out inside it."""
    retry_wait_s: float = 1.0
    """Wait before the first of these calls; it doubles each time."""

    def __post_init__(self) -> None:
        if (self.function is None) == (self.model is None):
            raise InvalidInputError(
                f"exactly one of function and model must be given, got function={self.function}, model={self.model}"
            )
        if self.batch_size < 1:
            raise InvalidInputError(f"batch_size must be >= 1, got {self.batch_size}")
        if not math.isfinite(self.weight):
            raise InvalidInputError(f"weight must be a finite number, got {self.weight}")
        check_retries(self.max_retries, retry_wait_s=self.retry_wait_s, timeout_s=self.timeout_s)


def check_retries(max_retries: int, *, retry_wait_s: float, timeout_s: float) -> None:
    """Refuse a number of retries, a wait before the first or a limit of each try that is out of range."""
    if type(max_retries) is not int or max_retries < 0:
        raise InvalidInputError(f"max_retries must be a whole number >= 0, got {max_retries!r}")
    if not (math.isfinite(retry_wait_s) and retry_wait_s >= 0):
        raise InvalidInputError(f"retry_wait_s must be a finite number >= 0, got {retry_wait_s}")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidInputError(f"timeout_s must be a finite number > 0, got {timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of the data set."""

    place: str
    """The row's number and data set, for error messages."""
    prompt: str | Sequence[Message]
    num_prompt_messages: int | None
    """None if an agent writes its own: then all before its first reply."""
    row: Mapping[str, Any]
    """All columns."""


class _RewardFunction:
    """A reward function from a file, or a reward model."""

    def __init__(self, config: RewardConfig, columns: Sequence[str], *, field: str) -> None:
        """Load it; raises `InvalidInputError` if it does not exist, or needs an unknown argument."""
        self.name, self._function = _load(config, field)
        self.weight = config.weight
        self._file = self.name if config.function is None else config.function.name
        self._config = config
        if not callable(self._function):
            raise InvalidInputError(f"{field}.function must name a function, got {self._function!r}")
        self._accepts = _accepted_arguments(self._function, {*OWN_ARGUMENTS, *columns}, self._file)
        self._sees_status = "statuses" in inspect.signature(self._function).parameters

    async def __call__(self, problem: Problem, trajectories: Sequence[Trajectory]) -> list[_Given]:
        """Score each trajectory, or None without an opinion; a `RewardError` names the function and the row.

        A function that does not name `statuses` is not asked about time-outs, which have 0.

        Raises:
            RewardError: the function failed (for a failed connection: each time), took too long, or did not return one
                finite number, rewards of spans of its ids, or None for each.
        """
        is_asked = [self._sees_status or each.status is not TrajectoryStatus.TIMEOUT for each in trajectories]
        asked = list(compress(trajectories, is_asked))
        scores = iter(await self._score(problem, asked) if asked else [])
        return [next(scores) if asks else 0.0 for asks in is_asked]

    async def _score(self, problem: Problem, trajectories: Sequence[Trajectory]) -> list[_Given]:
        place = f"reward function {self._file}, {problem.place}"
        for retry in range(self._config.max_retries + 1):
            try:
                returned = await self._call(problem, trajectories, place)
                return _check_returned(returned, [each.num_sampled for each in trajectories], place)
            except _ConnectionFailedError as error:
                if retry == self._config.max_retries:
                    tries = f", {retry + 1} times in all (max_retries is {retry})" if retry else ""
                    raise RewardError(f"{error}{tries}{format_frames(error)}") from error.__cause__
                wait_s = self._config.retry_wait_s * 2**retry
                _logger.warning("%s; calling it again in %g s", error, wait_s)
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _call(self, problem: Problem, trajectories: Sequence[Trajectory], place: str) -> Any:
        """Call the function once, with copies of all arguments."""
        arguments = {name: value for name, value in _arguments(problem, trajectories).items() if self._accepts(name)}
        call = functools.partial(self._function, **arguments)
        clock = asyncio.timeout(self._config.timeout_s)
        try:
            async with clock:
                returned = call() if inspect.iscoroutinefunction(self._function) else await run_in_daemon_thread(call)
                return await returned if inspect.isawaitable(returned) else returned
        except BaseException as error:
            if must_propagate(error):
                raise
            if isinstance(error, TimeoutError) and clock.expired():
                raise RewardError(
                    f"{place}: it did not return within {self._config.timeout_s:g} s (timeout_s)"
                ) from error
            if _is_connection_failure(error):
                raise _ConnectionFailedError(f"{place}: it failed with {format_error(error)}") from error
            raise RewardError(f"{place}: it failed with {format_error(error)}{format_frames(error)}") from error


def _load(config: RewardConfig, field: str) -> tuple[str, Any]:
    """The name for the metrics, and the function."""
    if config.function is not None:
        return load_object(config.function, field=f"{field}.function")
    from unbroken.runs.prompts.reward_model import RewardModel

    assert config.model is not None, "RewardConfig asks for one of both"
    return Path(config.model).name, RewardModel(config.model, batch_size=config.batch_size)


class _ConnectionFailedError(RewardError):
    """A connection failed inside a reward function."""


class Rewards:
    """The sum of several reward functions."""

    def __init__(self, configs: Sequence[RewardConfig], columns: Sequence[str], *, add_to_own: bool = False) -> None:
        """Load them. With `add_to_own` their sum is added to the reward that an environment gave.

        Raises `InvalidInputError` if there are none, two share a name, or one cannot be used.
        """
        if not configs:
            raise InvalidInputError('rewards must hold at least one function: [[rewards]] function = "rewards.py:name"')
        self._functions = [_RewardFunction(config, columns, field=f"rewards[{k}]") for k, config in enumerate(configs)]
        self._add_to_own = add_to_own
        own = {OWN_REWARD: 1.0} if add_to_own else {}
        self._weights = {**own, **{function.name: function.weight for function in self._functions}}
        names = [function.name for function in self._functions] + [OWN_REWARD] * add_to_own
        if len(set(names)) < len(names):
            raise InvalidInputError(f"rewards must be functions with different names, which metrics show, got {names}")

    async def score(self, problem: Problem, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with these rewards; trajectories that cannot be trained on get none.

        Those on which no function has an opinion become `TrajectoryStatus.UNSCORED`.
        """
        trajectories = keep_trainable(group)
        if not trajectories:
            return group
        with count_costs() as costs:
            values = {function.name: await function(problem, trajectories) for function in self._functions}
        has_spans = any(isinstance(value, tuple) for of_function in values.values() for value in of_function)
        scored = {}
        for k, trajectory in enumerate(trajectories):
            given = {name: value for name, of_function in values.items() if (value := of_function[k]) is not None}
            spans = self._list_spans(trajectory, given) if has_spans else ()
            scored[trajectory.trajectory_id] = replace(self._set_reward(trajectory, given), span_rewards=spans)
        members = tuple(scored.get(each.trajectory_id, each) for each in group.trajectories)
        return replace(group, trajectories=members, reward_costs=costs)

    def _list_spans(self, trajectory: Trajectory, given: Mapping[str, _Known]) -> tuple[SpanReward, ...]:
        """All that a trajectory is rewarded for, with weights, but for its turns: a number is for all ids."""
        num_ids = trajectory.num_sampled
        sources: list[tuple[float, _Known]] = [(self._weights[name], value) for name, value in given.items()]
        if self._add_to_own:
            assert trajectory.reward is not None, "those that can be trained on have a reward"
            sources.insert(0, (1.0, trajectory.reward - sum(trajectory.turn_rewards)))
        spans = []
        for weight, value in sources if num_ids else ():
            of_source = value if isinstance(value, tuple) else (SpanReward(0, num_ids, value),)
            spans += [span._replace(reward=weight * span.reward) for span in of_source]
        return tuple(sorted(spans, key=lambda span: (span.stop, span.start)))

    def _set_reward(self, trajectory: Trajectory, given: Mapping[str, _Known]) -> Trajectory:
        if not given and not self._add_to_own:
            return replace(trajectory, reward=None, status=TrajectoryStatus.UNSCORED)
        parts = {name: _sum_spans(value) if isinstance(value, tuple) else value for name, value in given.items()}
        reward = sum(function.weight * parts[function.name] for function in self._functions if function.name in parts)
        if self._add_to_own:
            assert trajectory.reward is not None, "those that can be trained on have a reward"
            reward += trajectory.reward
            parts = {OWN_REWARD: trajectory.reward, **parts}
        # One of the environment's with the name of a function would be taken for its opinion.
        others = {name: value for name, value in trajectory.reward_parts.items() if name not in self._weights}
        parts = {**others, **parts}
        return replace(trajectory, reward=reward, reward_parts=parts, reward_weights=self._weights)


def _arguments(problem: Problem, trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """All arguments that a function may name, each a list with an entry for each trajectory."""
    conversations = [copy_containers(list(trajectory.messages)) for trajectory in trajectories]
    completions: list[Any]
    if isinstance(problem.prompt, str):
        completions = [_last_text(trajectory) for trajectory in trajectories]
    else:
        completions = [messages[_count_prompt_messages(problem, messages) :] for messages in conversations]
    size = len(trajectories)
    return {
        **{name: [value] * size for name, value in problem.row.items()},
        "prompts": [problem.prompt] * size,
        "completions": completions,
        "messages": conversations,
        "completion_ids": [_list_sampled(trajectory) for trajectory in trajectories],
        "statuses": [trajectory.status.value for trajectory in trajectories],
    }


def _list_sampled(trajectory: Trajectory) -> list[int]:
    """The ids that rewards have places in: those given to close reasoning are left out, as nothing can reward them."""
    sequences = [turn.sequence for turn in trajectory.turns]
    return [i for each in sequences for i in each.completion_ids[each.sampled_mask].tolist()]


def _count_prompt_messages(problem: Problem, messages: Sequence[Message]) -> int:
    if problem.num_prompt_messages is not None:
        return problem.num_prompt_messages
    replies = (number for number, message in enumerate(messages) if message["role"] == "assistant")
    return next(replies, len(messages))


def _last_text(trajectory: Trajectory) -> str:
    """The text of the model's last turn, without its reasoning and tool calls; an agent may have asked for none."""
    return get_text(trajectory.turns[-1].message["content"]) if trajectory.turns else ""


def _accepted_arguments(function: Callable[..., Any], known: set[str], name: str) -> Callable[[str], bool]:
    """Return a test for the arguments that the function accepts; those that it needs must be `known`."""
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        is_missing = not is_named or parameter.name not in known
        if is_needed and is_missing and parameter.kind is not parameter.VAR_POSITIONAL:
            raise InvalidInputError(
                f"reward function {name} needs the argument {parameter.name!r}, which is not a column of the data "
                f"set: the arguments are {', '.join(sorted(known))}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lambda argument: True
    names = {parameter.name for parameter in parameters}
    return lambda argument: argument in names


def _check_returned(returned: Any, num_ids: Sequence[int], place: str) -> list[_Given]:
    """The returned values as one finite number, rewards of spans, or None, for each completion of so many ids."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    size = len(num_ids)
    if not isinstance(values, (list, tuple)) or len(values) != size:
        why = ": does it end without `return`?" if values is None else ""
        raise RewardError(
            f"{place}: it must return a list of {size} numbers, one for each completion, got {values!r}{why}"
        )
    return [
        _check_given(value, size, f"{place}, completion {k}")
        for k, (value, size) in enumerate(zip(values, num_ids, strict=True))
    ]


def _check_given(value: Any, num_ids: int, place: str) -> _Given:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return to_finite_float32(value, name=f"{place}: the reward", error=RewardError)
    if any(isinstance(item, (list, tuple)) for item in value):
        return _check_spans(value, num_ids, place)
    if len(value) != num_ids:
        raise RewardError(
            f"{place}: rewards of ids must be one number for each of its {num_ids} sampled ids (completion_ids), or "
            f"spans (start, stop, reward); got {len(value)}. None is no opinion"
        )
    numbers = [
        to_finite_float32(item, name=f"{place}: the reward of id {k}", error=RewardError)
        for k, item in enumerate(value)
    ]
    return tuple(SpanReward(k, k + 1, number) for k, number in enumerate(numbers))


def _check_spans(spans: Sequence[Any], num_ids: int, place: str) -> tuple[SpanReward, ...]:
    checked: list[SpanReward] = []
    for k, span in enumerate(spans):
        name = f"{place}: span {k}"
        if not isinstance(span, (list, tuple)) or len(span) != 3 or not all(map(_is_integer, span[:2])):
            raise RewardError(f"{name} must be (start, stop, reward) with two integers, got {span!r}")
        start, stop, reward = int(span[0]), int(span[1]), span[2]
        if not 0 <= start < stop <= num_ids:
            raise RewardError(
                f"{name} must lie in its {num_ids} sampled ids (completion_ids), 0 <= start < stop <= {num_ids}, got "
                f"{span!r}"
            )
        if checked and start < checked[-1].stop:
            raise RewardError(f"{name} must begin where span {k - 1} ends, {checked[-1].stop}, or later, got {span!r}")
        reward = to_finite_float32(reward, name=f"{name}: the reward", error=RewardError)
        checked.append(SpanReward(start, stop, reward))
    return tuple(checked)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _sum_spans(spans: Sequence[SpanReward]) -> float:
    return math.fsum(span.reward for span in spans)


def _is_connection_failure(error: BaseException) -> bool:
    """Whether an exception, or a cause of it, says that a connection failed or took too long: a later try may succeed.

    Clients of HTTP raise their own exceptions from such a cause. An `OSError` of a file is not meant: it has a name.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.filename is None:  # ConnectionError and TimeoutError are kinds of it
            return True
        seen = seen.__cause__
    return False
