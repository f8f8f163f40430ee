"""A run's own diagnosis, step by step, and that of a folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.errors import InvalidInputError
from unbroken.runs.diagnosis.evidence import (
    Ending,
    Evidence,
    Numbers,
    RolloutNote,
    choose_evenly,
    read_evidence,
    read_object,
    read_run,
)
from unbroken.runs.diagnosis.rules import Finding, diagnose
from unbroken.runs.folder import DIAGNOSIS_FILE, RECIPE_FILE

if TYPE_CHECKING:
    from unbroken.rollout.trajectory import TrajectoryGroup


class Diary:
    """Diagnoses a run while it runs: says what is found for the first time, and keeps in its folder what is found now.

    `diagnosis.json` has the findings of the newest step, and all that were said, with when: a run that continues
    says none of them again.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """`folder` is the run's; `say` shows a line."""
        self._folder = folder
        self._say = say
        self._evidence: Evidence | None = None
        """None before the first step, whose metrics are in the file by then, with those of earlier starts."""
        self._notes: tuple[RolloutNote, ...] = ()
        self._said: dict[str, str] = {}
        self._kept: list[Finding] | None = None

    def see_rollouts(self, groups: Sequence[TrajectoryGroup]) -> None:
        """See the rollouts of the step whose metrics come next."""
        from unbroken.runs.records.record import make_record

        pairs = [[(group, member) for member in group.trajectories] for group in groups]
        records = (make_record(group.group_id, member, [], data=group.data) for group, member in choose_evenly(pairs))
        self._notes = tuple(map(RolloutNote.of, records))

    def see_step(self, step: Numbers, *, is_last: bool) -> None:
        """See the metrics of a step, which are in the run's file already. `is_last`: no more steps come."""
        if self._evidence is None:
            self._evidence = self._read_start()
        else:
            self._evidence = self._evidence.add_step(step)
        self._evidence = replace(self._evidence, notes=self._notes)
        if is_last:
            self._evidence = replace(self._evidence, ending=Ending(status="finished"))
        findings = diagnose(self._evidence)
        new = [each for each in findings if each.name not in self._said]
        for each in new:
            self._say(format_finding(each, self._folder))
        number = self._evidence.num_steps
        self._said |= {each.name: f"after {number} step{'s' * (number != 1)}: {each.sentence}" for each in new}
        if findings != self._kept:
            self._kept = findings
            self._write()

    def _read_start(self) -> Evidence:
        """The evidence so far, without what was said: it is neither found again nor said twice."""
        evidence = read_run(self._folder, Ending(status="running"))
        self._said = dict(evidence.said)
        return replace(evidence, said={})

    def _write(self) -> None:
        """Write the file; a disk on which it cannot be written ends no run, as the metrics and checkpoints do."""
        value = {"findings": [asdict(each) for each in self._kept or ()], "said": self._said}
        part = self._folder / f".{DIAGNOSIS_FILE}.part"
        with suppress(OSError):
            part.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
            part.replace(self._folder / DIAGNOSIS_FILE)


def format_finding(finding: Finding, folder: Path | None) -> str:
    """A finding as lines of text: what is wrong, what to do, and where to look on; of a preflight without a folder."""
    if folder is None:
        return f"preflight: {finding.sentence}\n    do: {finding.advice}\n    see: {finding.link}"
    return (
        f"diagnosis: {finding.sentence}\n"
        f"    do: {finding.advice.replace('RUN', shlex.quote(str(folder)))}\n"
        f"    see: unbroken view {shlex.quote(str(folder))}    {finding.link}"
    )


def diagnose_folder(folder: Path) -> tuple[Evidence, list[Finding]]:
    """The evidence in a folder, and what is found in it.

    Raises:
        InvalidInputError: it holds neither a run nor an evaluation.
    """
    evidence = read_evidence(folder)
    is_known = evidence.num_steps or evidence.notes or evidence.ending.status != "unknown"
    if not is_known and read_object(folder, RECIPE_FILE) is None:
        found = f"it has no {RECIPE_FILE}, no metrics and no rollouts" if folder.is_dir() else "there is no such folder"
        raise InvalidInputError(f"RUN must be the output folder of a run or an evaluation, got {folder}: {found}")
    return evidence, diagnose(evidence)
