"""Profile some steps of a run: one trace for each process, for https://ui.perfetto.dev or chrome://tracing.

--profile-steps 3:5    OUTPUT/profiles/steps-3-4.rank-0.json.gz    steps 3 and 4, by the name `step 3` and so on
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError

FOLDER = "profiles"
_logger = logging.getLogger(__name__)


def parse_steps(text: str | None) -> range:
    """The steps of `FIRST:STOP`, as in Python without the last one; an `InvalidInputError` begins with the field."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(match[1]), int(match[2])) if match is not None else range(0)
    if not steps:
        raise InvalidInputError(
            f"profile_steps must be FIRST:STOP with FIRST below STOP, such as 3:5 for the steps 3 and 4, got {text!r}"
        )
    return steps


class StepProfiler:
    """Profiles the steps of a range: all threads of this process and its GPU, but no engine in another process."""

    def __init__(self, steps: range, folder: Path, *, rank: int) -> None:
        """Write into `folder` once the steps are over."""
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._profile: Any = None
        self._done: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if it is a step of the range."""
        if number not in self._steps:
            yield
            return
        from torch.profiler import record_function

        if self._profile is None:
            self._profile = _start()
        self._done.append(number)
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was profiled, also if the run ends before the last of the steps. Idempotent."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._folder / f"steps-{self._done[0]}-{self._done[-1]}.rank-{self._rank}.json.gz"
        part = path.with_name(f".part.{path.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(part))
            part.replace(path)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            _logger.warning("the profile cannot be written to %s: %s", path, error)
        else:
            _logger.warning("profile in %s", path)


def _start() -> Any:
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    # The trainer and the embedded engine compute in other threads.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    profile = torch.profiler.profile(activities=activities, experimental_config=every_thread)
    profile.start()
    return profile
