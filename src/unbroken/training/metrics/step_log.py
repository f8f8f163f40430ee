"""The log of a run's steps: the seconds of each part of a step, who was idle, and how much memory is left."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from unbroken.training.metrics.writer import Metrics
from unbroken.weights.base import WeightUpdate


def loop_time_s() -> float:
    """The time of the event loop: in tests a virtual one."""
    return asyncio.get_running_loop().time()


class IdleTimes:
    """How long trainer and sampler were idle between two steps, and how many groups waited, in one process.

    Worked example, in seconds: the trainer waits from 0 to 2 and takes a step's groups, groups are in flight from 0 to
    5, none may start from 4 to 6, and at 8 the next groups are taken. Since 2 the trainer did not wait, nothing was in
    flight for 3 of 6 s (0.5), and 2 of 6 s were held.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """The times begin with the first level that is set. The clock is by default that of the event loop."""
        self._clock = clock or loop_time_s
        self._levels: dict[str, float] = {"waits": 0, "held": 0, "in_flight": 0, "queued": 0}
        self._sums: dict[str, float] = {}
        self._started_s: float | None = None
        self._last_s = 0.0

    def set(self, **levels: float) -> None:
        """Change levels from now on: `waits` and `held` are 0 or 1, `in_flight` and `queued` are numbers of groups."""
        self._advance()
        self._levels.update(levels)

    def take(self) -> tuple[float, Mapping[str, float | None]]:
        """The seconds since the last call, and the metrics of this time; these are None in no time at all."""
        now_s = self._advance()
        total_s = now_s - (now_s if self._started_s is None else self._started_s)
        sums, self._sums, self._started_s = self._sums, {}, now_s
        names = {
            "idle/trainer": "waits",
            "idle/sampler": "nothing",
            "idle/sampler_held": "held",
            "sampler/in_flight_mean": "in_flight",
            "sampler/queued_mean": "queued",
        }
        return total_s, {name: sums.get(level, 0.0) / total_s if total_s > 0 else None for name, level in names.items()}

    def _advance(self) -> float:
        now_s = self._clock()
        if self._started_s is None:
            self._started_s = self._last_s = now_s
        seconds, self._last_s = now_s - self._last_s, now_s
        for name, level in {**self._levels, "nothing": self._levels["in_flight"] == 0}.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds * level
        return now_s


_STEP_SPANS = ("log", "after_step", "units", "sleep", "records", "score", "metrics")
"""Parts that a `StepLog` measures."""
_OTHER_PARTS = ("collect", "outages", "train", "checkpoint", "publish")
"""Parts that are measured where the work is done."""


class StepLog:
    """The metrics of a run's steps, as they come: those of the update, and the seconds of each part of a step.

    The parts add up. Worked example, in seconds: the metrics of the step before were complete at 10.0, and those of
    this one are at 11.0.

        log 0.02   after_step 0.03   collect 0.5   sleep 0.05   train 0.2   publish 0.1   other 0.1   ──►   wall 1.0
    """

    def __init__(self, *, is_ahead: bool, metrics: Metrics | None = None) -> None:
        """The first step begins now. `metrics` are those of the step after which a run continues."""
        self.sampling_s = 0.0
        """In which the step's groups, or as many others, were sampled."""
        self._is_ahead = is_ahead
        self._metrics: dict[str, float | int | None] = dict(metrics or {})
        self._beside: Metrics = {}
        """Of the last publication beside a step that has ended."""
        self._lost_after_step: Mapping[str, float] = {}
        """Outages in what came after the step before: metrics of the next step, as the time after a step is."""
        self._spans: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        """Begin the times anew: a run continues."""
        self._began_s = self._made_s = self._ended_s = time.perf_counter()
        self._spans.clear()

    @property
    def metrics(self) -> Metrics:
        """What is known of the step so far, for its checkpoint."""
        return {**self._metrics, "seconds/checkpoint": None}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a part. Blocks are not nested, or they would count twice."""
        assert name in _STEP_SPANS
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._spans[name] += time.perf_counter() - began_s

    def begin(self, waited_s: float, *, since_last_s: float, lost: Mapping[str, float]) -> None:
        """Begin a step when its groups are taken.

        Without `max_staleness` the step begins when it waits for them, and they take what it waits, without outages.
        With it, the step begins once the one before is made, and they take the time between two steps.
        """
        self.sampling_s = waited_s - lost["seconds/outages"]
        self._began_s = time.perf_counter() - waited_s
        if self._is_ahead:
            self._began_s, self.sampling_s = self._made_s, since_last_s
        self._metrics = {name: number + self._lost_after_step.get(name, 0) for name, number in lost.items()}
        self._metrics["seconds/collect"] = waited_s if self._is_ahead else self.sampling_s

    def end_update(self, metrics: Metrics) -> None:
        """The update is made, with these metrics."""
        self._metrics = {**metrics, **self._metrics, "seconds/step": time.perf_counter() - self._began_s}

    def end_checkpoint(self, seconds: float) -> None:
        """It took so long until a checkpoint was copied, or known not to be due."""
        self._metrics["seconds/checkpoint"] = seconds
        self._add("seconds/step", seconds)

    def end_making(self) -> None:
        """The step is made: with `max_staleness` the next one begins now."""
        self._made_s = time.perf_counter()

    def end_publication(self, update: WeightUpdate, *, lost_s: float) -> None:
        """The weights were published before the next step, and engines were waited for for `lost_s`."""
        self._metrics |= _update_metrics(update)
        self._add("seconds/outages", lost_s)
        self._add("seconds/step", update.seconds + lost_s)

    def end_publication_beside(self, update: WeightUpdate) -> None:
        """A copy of the weights was published beside a step, which is counted in the step that it ends in."""
        self._beside = _update_metrics(update)

    def end_step(self) -> Metrics:
        """End the step, and return all its metrics."""
        now_s = time.perf_counter()
        wall_s, self._ended_s = now_s - self._ended_s, now_s
        spans: Metrics = {f"seconds/{name}": self._spans[name] for name in _STEP_SPANS}
        self._spans.clear()
        known = {**self._take(), **spans}
        found = sum(known.get(f"seconds/{name}") or 0.0 for name in (*_STEP_SPANS, *_OTHER_PARTS))
        other: Metrics = {"seconds/other": None if self._is_ahead else wall_s - found, "seconds/wall": wall_s}
        return {**known, **other, **measure_machine()}

    def end_step_of_another(self) -> Metrics:
        """As `end_step`, of a step that another process has made, before a kill: with the same names."""
        unknown = [f"seconds/{name}" for name in (*_STEP_SPANS, "other", "wall")]
        return {**self._take(), **dict.fromkeys([*unknown, *measure_machine()])}

    def end_after_step(self, lost: Mapping[str, float]) -> None:
        """What comes after a step is done; of its seconds, those of outages are a part by themselves."""
        self._lost_after_step = lost
        self._spans["after_step"] -= lost["seconds/outages"]

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = (self._metrics.get(name) or 0) + seconds

    def _take(self) -> Metrics:
        logged = {**self._metrics, **self._beside}
        self._beside = {}
        collect_s, step_s = (logged.get(name) for name in ("seconds/collect", "seconds/step"))
        share = None if collect_s is None or not step_s else collect_s / step_s
        # A step that collects first, and samples nothing after that. With `max_staleness` they are measured.
        serial: Metrics = {"idle/trainer": share, "idle/sampler": None if share is None else 1 - share}
        return {**serial, **logged}


def _update_metrics(update: WeightUpdate) -> Metrics:
    """The metrics of an update of the engines' weights."""
    return {
        "weights/num_bytes": update.num_bytes,
        "weights/num_missed": len(update.missed_by),
        "seconds/publish": update.seconds,
    }


_KERNEL_MEMORY, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_KIB = 1024


def measure_machine() -> Metrics:
    """The memory of this process, what is left to it, and how busy the cores are; None for what nothing says."""
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "memory/peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB,
        "memory/available_share": min(_list_available_shares(), default=None),
        "memory/gpu_peak_bytes": torch.cuda.max_memory_allocated() if is_on_gpu else None,
        "idle/machine_load": os.getloadavg()[0] / (os.cpu_count() or 1),
    }


def _list_available_shares() -> Iterator[float]:
    """The available share of the machine's memory, and of the container's where it has a bound."""
    with suppress(OSError, ValueError, LookupError):
        lines = (line.split() for line in _KERNEL_MEMORY.read_text("ascii").splitlines())
        sizes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        yield sizes["MemAvailable:"] / sizes["MemTotal:"]
    with suppress(OSError, ValueError, ZeroDivisionError):  # "max" without a bound
        bound = int((_GROUP / "memory.max").read_text("ascii"))
        used = int((_GROUP / "memory.current").read_text("ascii"))
        stats = dict(line.split() for line in (_GROUP / "memory.stat").read_text("ascii").splitlines())
        # Files that were read count as used, and are dropped before any process is.
        yield 1 - max(0, used - int(stats.get("inactive_file", 0))) / bound
