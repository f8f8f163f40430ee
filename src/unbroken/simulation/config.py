"""What is simulated: rollouts, the times of the engine and the trainer, and the schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from unbroken.errors import InvalidInputError


def _check(**values: tuple[bool, str, object]) -> None:
    for name, (is_valid, rule, value) in values.items():
        if not is_valid:
            raise InvalidInputError(f"{name} must be {rule}, got {value}")


class Distribution(StrEnum):
    """Of the ids of a turn."""

    CONSTANT = "constant"
    """Always `median`."""
    LOGNORMAL = "lognormal"
    LIST = "list"
    """One of `values`, each as likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """Sampled ids of a turn."""

    distribution: Distribution = Distribution.LOGNORMAL
    median: int = 200
    sigma: float = 1.0
    """For lognormal: the standard deviation of the logarithm. With 1, the 95th percentile is five medians."""
    min_ids: int = 1
    max_ids: int = 4096
    """Shorter and longer ones are cut to these."""
    values: tuple[int, ...] = ()
    """For list."""

    def __post_init__(self) -> None:
        is_list = self.distribution is Distribution.LIST
        _check(
            median=(self.median >= 1, ">= 1", self.median),
            sigma=(self.sigma >= 0, ">= 0", self.sigma),
            min_ids=(self.min_ids >= 1, ">= 1", self.min_ids),
            max_ids=(self.max_ids >= self.min_ids, f">= min_ids ({self.min_ids})", self.max_ids),
            values=(
                is_list == bool(self.values) and all(value >= 1 for value in self.values),
                "numbers >= 1, given exactly with distribution list",
                self.values,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The rollouts of a step."""

    groups_per_step: int = 16
    group_size: int = 8
    prompt_ids: int = 200
    lengths: LengthConfig = field(default_factory=LengthConfig)
    num_turns: int = 1
    tool_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of a tool between two turns, evenly spread between these."""
    reply_ids: int = 0
    """Ids that a tool's reply adds to the prompt of the next turn."""

    def __post_init__(self) -> None:
        least, most = self.tool_s
        _check(
            groups_per_step=(self.groups_per_step >= 1, ">= 1", self.groups_per_step),
            group_size=(self.group_size >= 1, ">= 1", self.group_size),
            prompt_ids=(self.prompt_ids >= 1, ">= 1", self.prompt_ids),
            num_turns=(self.num_turns >= 1, ">= 1", self.num_turns),
            tool_s=(0 <= least <= most, "two seconds, the smaller one first", self.tool_s),
            reply_ids=(self.reply_ids >= 0, ">= 0", self.reply_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """How long an engine takes."""

    first_s: float = 0.0
    """Seconds that a turn waits before its first id, whatever else the engine does."""
    id_s: float = 0.01
    """Seconds for the next id of all requests."""
    id_s_per_request: float = 0.0
    """Added to `id_s` for each request that is sampled."""
    prompt_id_s: float = 0.0
    """Seconds for an id of a prompt that is not cached. Meanwhile no request gets a sampled id."""
    max_requests: int | None = None
    """Requests that are sampled at the same time; others wait. None: no maximum."""
    update_s: float = 0.0
    """How long the engine stands still for new weights, as a part of `trainer.publish_s`."""
    recomputes_kv: bool = True
    """Whether requests in flight compute their ids again after an update, at `prompt_id_s` each."""

    def __post_init__(self) -> None:
        names = ("first_s", "id_s", "id_s_per_request", "prompt_id_s", "update_s")
        _check(**{name: (getattr(self, name) >= 0, ">= 0", getattr(self, name)) for name in names})
        is_valid = self.max_requests is None or self.max_requests >= 1
        _check(
            max_requests=(is_valid, ">= 1 or none", self.max_requests),
            id_s=(self.id_s + self.id_s_per_request > 0, "> 0, or id_s_per_request", self.id_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """How long a trainer takes."""

    step_s: float = 1.0
    """Seconds of a step without any ids."""
    id_s: float = 0.0
    """Seconds for each id of the step's rollouts, those of prompts included."""
    snapshot_s: float = 0.0
    """Seconds to copy the weights that are published beside the next step; with staleness 0 there is no copy."""
    publish_s: float = 0.1
    """Seconds until the engine has new weights."""
    save_s: float = 0.0
    """Seconds of a checkpoint."""
    save_every: int = 1
    """Steps between two checkpoints."""
    end_s: float = 0.0
    """Seconds after each step, such as for metrics."""
    evaluation_s: float = 0.0
    """Seconds of an evaluation, for which the trainer waits with staleness 0; otherwise it runs beside the steps."""
    evaluation_every: int = 0
    """Steps between two evaluations; 0 for none."""

    def __post_init__(self) -> None:
        names = ("step_s", "id_s", "snapshot_s", "publish_s", "save_s", "end_s", "evaluation_s", "evaluation_every")
        _check(**{name: (getattr(self, name) >= 0, ">= 0", getattr(self, name)) for name in names})
        _check(save_every=(self.save_every >= 1, ">= 1", self.save_every))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What is simulated."""

    max_staleness: tuple[int, ...] = (0, 1, 2, 4)
    """Each is simulated; 0 samples and trains in turn."""
    num_steps: int = 50
    num_warmup: int = 5
    """Of these steps, those at the beginning that do not count."""
    adapt_ahead: bool = True
    """As loop.adapt_ahead of a run."""
    max_drops: int = 0
    """As loop.max_drops of a run."""
    max_groups_in_flight: int | None = None
    """As loop.max_groups_in_flight of a run."""
    publish_beside_step: bool = True
    """As loop.publish_beside_step of a run."""
    seed: int = 0
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineTimes = field(default_factory=EngineTimes)
    trainer: TrainerTimes = field(default_factory=TrainerTimes)
    timelines: Path | None = None
    """A folder for the timeline of each simulation, staleness-1.json and so on; none: no files."""

    def __post_init__(self) -> None:
        is_valid = len(self.max_staleness) > 0 and all(bound >= 0 for bound in self.max_staleness)
        _check(
            max_staleness=(is_valid, "one or more numbers >= 0", self.max_staleness),
            num_warmup=(
                self.num_warmup >= 1,
                ">= 1, for in the first step nothing is trained yet",
                self.num_warmup,
            ),
            num_steps=(self.num_steps > self.num_warmup, f"> num_warmup ({self.num_warmup})", self.num_steps),
            seed=(self.seed >= 0, ">= 0", self.seed),
        )
