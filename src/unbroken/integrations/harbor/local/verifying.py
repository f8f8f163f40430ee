"""The verifier of a task: its tests, which are copied in only then, and the reward that they write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import TaskError
from unbroken.integrations.harbor.local.files import find_file, make_folder, remove_folder, replace_folder
from unbroken.integrations.harbor.local.processes import Command, ProcessLimits, run_command
from unbroken.integrations.harbor.local.sandbox import Sandbox
from unbroken.integrations.harbor.runner import check_reward, choose_reward
from unbroken.integrations.harbor.task import TerminalTask
from unbroken.rollout.agents.processes import read_end

LOG_FOLDERS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
_TESTS, _VERIFIER_LOGS = "/tests", "/logs/verifier"
_MAX_REWARD_BYTES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a verifier says."""

    reward: float
    metrics: Mapping[str, float]
    """The other numbers of its reward.json."""


async def verify(
    task: TerminalTask,
    root: Path,
    sandbox: Sandbox,
    limits: ProcessLimits,
    *,
    variables: Mapping[str, str],
    log: Path,
    key: str,
    has_network: bool,
) -> Verdict:
    """Copy the tests into a root folder in which nothing runs any more, run them, and read the reward.

    Raises:
        TaskError: they took too long, or wrote no reward that can be read. That is no reward of 0.
    """
    await asyncio.to_thread(_bring_tests, task, root)
    script = sandbox.locate(root, f"{_TESTS}/test.sh")
    command = Command(
        words=("/bin/bash", "-c", '"$0"', script),
        root=root,
        workdir=task.workdir,
        variables={**variables, **task.fields.verifier_variables},
        output=log,
        errors=log,
        has_network=has_network,
    )
    try:
        status = await run_command(command, sandbox, limits, timeout_s=task.fields.verifier_timeout_s)
    except TimeoutError:
        raise TaskError(
            f"task {task.folder}: its tests took longer than verifier.timeout_sec, {task.fields.verifier_timeout_s:g} s"
        ) from None
    return read_reward(task, root, key=key, status=status, log=log)


def read_reward(task: TerminalTask, root: Path, *, key: str, status: int, log: Path) -> Verdict:
    """Read reward.json, or without one reward.txt; `status` and `log` are of the tests, for errors.

    Raises:
        TaskError: there is neither, or what is there is no finite number.
    """
    for name, parse in (("reward.json", _parse_json), ("reward.txt", _parse_text)):
        file = find_file(root, f"{_VERIFIER_LOGS}/{name}")
        if file is not None:
            with file.open("rb") as opened:
                text = opened.read(_MAX_REWARD_BYTES).decode(errors="replace")
            try:
                return parse(text, key)
            except (ValueError, RecursionError) as error:  # RecursionError: lists in lists, thousands deep
                raise TaskError(f"task {task.folder}: its tests wrote {name} {text[:200]!r}: {error}") from None
    raise TaskError(
        f"task {task.folder}: its tests must write {_VERIFIER_LOGS}/reward.txt or reward.json, and exited with "
        f"{status} without: {read_end(log)}"
    )


def _bring_tests(task: TerminalTask, root: Path) -> None:
    tests = replace_folder(root, _TESTS, task.tests_folder)
    (tests / "test.sh").chmod(0o755)
    remove_folder(root, _VERIFIER_LOGS)
    for path in LOG_FOLDERS:
        make_folder(root, path)


def _parse_text(text: str, key: str) -> Verdict:
    return Verdict(reward=check_reward(text.strip()), metrics={})


def _parse_json(text: str, key: str) -> Verdict:
    found = json.loads(text)
    if not isinstance(found, dict):
        return Verdict(reward=check_reward(found), metrics={})
    reward, metrics = choose_reward(found, key)
    return Verdict(reward=reward, metrics=metrics)
