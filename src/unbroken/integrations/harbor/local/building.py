"""The environment of a task: its root folder, made from the instructions of its Dockerfile, and copies of it."""

from __future__ import annotations

import asyncio
import shutil
from enum import StrEnum
from pathlib import Path, PurePosixPath

from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor.dockerfile import Copy, Run
from unbroken.integrations.harbor.fields import NetworkMode
from unbroken.integrations.harbor.local.files import find_link, make_folder
from unbroken.integrations.harbor.local.processes import Command, ProcessLimits, run_command
from unbroken.integrations.harbor.local.sandbox import Sandbox
from unbroken.integrations.harbor.task import TerminalTask
from unbroken.rollout.agents.processes import read_end


class RunInstructions(StrEnum):
    """What is done with the RUN instructions of a Dockerfile."""

    REFUSE = "refuse"
    """A task that has one is refused."""
    SANDBOX = "sandbox"
    """They are run in the task's sandbox, on this machine's programs. They cannot install into /usr."""
    SKIP = "skip"
    """They are left out: what they would install is on this machine already."""


def check_plan(task: TerminalTask, sandbox: Sandbox, *, run: RunInstructions) -> None:
    """Check that the task's Dockerfile can be followed.

    Raises:
        InvalidInputError: it has RUN, which is refused, or copies into a folder of this machine's own.
    """
    for step in task.plan.steps:
        if isinstance(step, Run):
            if run is RunInstructions.REFUSE:
                raise InvalidInputError(
                    f"task {task.folder} has RUN {step.words[-1][:80]!r} in its Dockerfile. "
                    'environment_arguments.run = "sandbox" runs such commands in the sandbox, on this machine\'s '
                    'programs; "skip" leaves them out; or run the task in containers (docs/environments.md)'
                )
        else:
            _check_is_own(task, "COPY", step.destination, sandbox)
    _check_is_own(task, "WORKDIR", task.workdir, sandbox)


def _check_is_own(task: TerminalTask, name: str, path: str, sandbox: Sandbox) -> None:
    # Without a sandbox nothing is hidden, and a task's paths are below its own root.
    if sandbox.own_network and not sandbox.is_hidden(Path(path)):
        raise InvalidInputError(
            f"task {task.folder} has {name} {path}, a folder of this machine's own, which no task may change: run it "
            "in containers (docs/environments.md)"
        )


async def build_root(
    task: TerminalTask, root: Path, sandbox: Sandbox, limits: ProcessLimits, *, run: RunInstructions, has_network: bool
) -> None:
    """Follow the Dockerfile's instructions in the empty folder `root`.

    Raises:
        TaskError: one of them failed.
    """
    for number, step in enumerate(task.plan.steps):
        if isinstance(step, Copy):
            await asyncio.to_thread(_copy, step, task, root)
        elif run is RunInstructions.SANDBOX:
            await _run(step, task, root, sandbox, limits, log=root.with_name(f"run-{number}.log"), net=has_network)
    make_folder(root, task.workdir)


async def copy_root(source: Path, target: Path) -> None:
    """Copy a root folder, with links as they are."""
    await asyncio.to_thread(shutil.copytree, source, target, symlinks=True)


async def _run(
    step: Run, task: TerminalTask, root: Path, sandbox: Sandbox, limits: ProcessLimits, *, log: Path, net: bool
) -> None:
    command = Command(
        words=step.words,
        root=root,
        workdir=step.workdir,
        variables=step.variables,
        output=log,
        errors=log,
        has_network=net and task.fields.agent_network is NetworkMode.PUBLIC,
    )
    try:
        status = await run_command(command, sandbox, limits, timeout_s=task.fields.build_timeout_s)
    except TimeoutError:
        raise TaskError(
            f"task {task.folder}: RUN {step.words[-1][:80]!r} took longer than its environment.build_timeout_sec, "
            f"{task.fields.build_timeout_s:g} s"
        ) from None
    if status != 0:
        raise TaskError(f"task {task.folder}: RUN {step.words[-1][:80]!r} exited with {status}: {read_end(log)}")


def _copy(step: Copy, task: TerminalTask, root: Path) -> None:
    sources = [found for pattern in step.sources for found in _find(pattern, task)]
    is_folder = step.destination.endswith("/") or len(sources) > 1 or (root / step.destination.lstrip("/")).is_dir()
    for source in sources:
        is_inside = is_folder and not source.is_dir()
        target = str(PurePosixPath(step.destination, source.name)) if is_inside else step.destination
        files = [source, *source.rglob("*")]
        for file in files:
            _check_no_link(task, root, str(PurePosixPath(target, file.relative_to(source))))
        place = make_folder(root, str(PurePosixPath(target).parent)) / PurePosixPath(target).name
        if source.is_dir():
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, place)
        if step.mode is not None:
            for file in files:
                if file.is_file() and (file is source or not file.is_symlink()):
                    (place / file.relative_to(source)).chmod(step.mode)


def _check_no_link(task: TerminalTask, root: Path, path: str) -> None:
    # An instruction that was run in the sandbox can have made a link to anything on this machine.
    link = find_link(root, path)
    if link is not None:
        raise TaskError(
            f"task {task.folder}: COPY to {path} would follow {link}, a link that an earlier instruction made: run the "
            "task in containers (docs/environments.md)"
        )


def _find(pattern: str, task: TerminalTask) -> list[Path]:
    context = task.environment_folder
    relative = pattern.strip("/") or "."
    if any(character in relative for character in "*?["):
        found = sorted(context.glob(relative))
    else:
        found = [each for each in [context / relative] if each.exists()]
    inside = [each for each in found if each.resolve().is_relative_to(context.resolve())]
    if not inside or len(inside) < len(found):
        raise TaskError(f"task {task.folder}: COPY {pattern} must name files in its environment folder, and finds none")
    return inside
