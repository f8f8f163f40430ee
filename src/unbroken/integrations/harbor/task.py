"""Terminal tasks in Harbor's layout, read from their folders.

TASK/instruction.md             what the agent is asked to do
TASK/task.toml                  time-outs, variables, network
TASK/environment/Dockerfile     what it finds
TASK/tests/test.sh              writes the reward to /logs/verifier/reward.txt or reward.json
TASK/solution/solve.sh          solves the task, for a check of all this
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.dockerfile import Plan, read_dockerfile
from unbroken.integrations.harbor.fields import TaskFields, read_fields
from unbroken.integrations.harbor.findings import Findings

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""Lines that mark a benchmark's files, which agents are not shown."""
_MAX_HASHED_BYTES = 1 << 20
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "singularity-compose.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A task."""

    name: str
    folder: Path
    instruction: str
    fields: TaskFields
    plan: Plan
    """How its environment is made."""
    notes: tuple[str, ...] = ()
    """What it asks for that does not hold here."""

    @property
    def environment_folder(self) -> Path:
        """What COPY copies from."""
        return self.folder / "environment"

    @property
    def tests_folder(self) -> Path:
        """What the verifier sees as /tests."""
        return self.folder / "tests"

    @property
    def solution_folder(self) -> Path | None:
        """What a check of the task sees as /solution, if it has a solution."""
        folder = self.folder / "solution"
        return folder if (folder / "solve.sh").is_file() else None

    @property
    def workdir(self) -> str:
        """The folder in which agent and verifier start."""
        return self.fields.workdir or self.plan.workdir

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of all phases."""
        return {**self.plan.variables, **self.fields.variables}


def read_task(folder: Path, *, accept: Collection[str] = (), host: Mapping[str, str] | None = None) -> TerminalTask:
    """Read a task for a run without a container.

    Args:
        folder: the task's folder.
        accept: names of fields, instructions and files that would be refused, and are left out instead.
        host: variables of this machine for values such as `${KEY}`.

    Raises:
        InvalidInputError: a file is missing or cannot be read, or the task asks for what cannot be had here.
    """
    folder = folder.resolve()
    findings = Findings(folder, accept)
    if (folder / "task.yaml").is_file():
        raise findings.fail("it has the older form of terminal-bench, task.yaml: convert it by `harbor task migrate`")
    _check_links(folder, findings)
    fields = read_fields(_read_toml(folder / "task.toml", findings), findings, host=host or {})
    instruction = _read_instruction(folder / "instruction.md", findings)
    _check_files(folder, findings)
    dockerfile = folder / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        raise findings.fail("environment/Dockerfile is missing: it says what the agent finds")
    plan = read_dockerfile(_read_text(dockerfile, findings), findings)
    return TerminalTask(
        name=fields.name or folder.name,
        folder=folder,
        instruction=instruction,
        fields=fields,
        plan=plan,
        notes=tuple(findings.notes),
    )


def find_task_folders(folder: Path, *, names: Sequence[str] = ()) -> list[Path]:
    """The folders of the tasks of a data set, in the order of their names, or of the one task that `folder` is.

    `names` are patterns such as `sort-*`; without any, all tasks are meant.

    Raises:
        InvalidInputError: there is no task.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"environment must be harbor:FOLDER, a folder of tasks, got {folder}: no such folder")
    found = [folder] if _is_task(folder) else sorted(each for each in folder.iterdir() if _is_task(each))
    chosen = [each for each in found if not names or any(fnmatch.fnmatchcase(each.name, name) for name in names)]
    if not chosen:
        wanted = f" with a name like {', '.join(names)}" if names else ""
        raise InvalidInputError(f"environment must be harbor:FOLDER, but {folder} has no task{wanted}: no task.toml")
    return chosen


def describe_files(folder: Path) -> str:
    """A digest of a task's files; of large ones only the length counts."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        digest.update(file.read_bytes() if size <= _MAX_HASHED_BYTES else b"")
    return digest.hexdigest()[:16]


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def _check_links(folder: Path, findings: Findings) -> None:
    """Check that no link of the task brings other files of this machine into its sandbox."""
    for file in folder.rglob("*"):
        if file.is_symlink() and not file.resolve().is_relative_to(folder):
            raise findings.fail(f"{file.relative_to(folder)} must not be a link out of the task's folder")


def _check_files(folder: Path, findings: Findings) -> None:
    if not (folder / "tests" / "test.sh").is_file():
        raise findings.fail("tests/test.sh is missing: it gives the reward")
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            findings.refuse(f"environment/{name}", "services beside the agent need containers")
    if (folder / "trajectory.json").exists():
        findings.refuse("trajectory.json", "an agent cannot be given an earlier conversation")
    for name in ("environment/.dockerignore", "tests/.harborignore", "solution/.harborignore"):
        if (folder / name).exists():
            findings.refuse(name, "rules for files to leave out are not read")


def _read_instruction(file: Path, findings: Findings) -> str:
    lines = _read_text(file, findings).split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    text = "\n".join(lines).lstrip("\n")
    if not text.strip():
        raise findings.fail("instruction.md must have a text")
    return text


def _read_toml(file: Path, findings: Findings) -> dict[str, object]:
    try:
        return tomllib.loads(_read_text(file, findings))
    except tomllib.TOMLDecodeError as error:
        raise findings.fail(f"task.toml must be a TOML file: {error}") from None


def _read_text(file: Path, findings: Findings) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise findings.fail(f"{file.name} cannot be read: {error}") from None
