"""The command `unbroken agent NAME TASK`: one rollout of a known agent, recorded as a row that can be trained on.

The task becomes a data set of one row, OUTPUT/task.jsonl, which `unbroken eval` evaluates: it opens the engine and the
gateway, checks the policy, keeps the rollout, and continues where an earlier call with the same output ended.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.rollout.agents.known import KNOWN_AGENTS

_DEFAULTS = {
    "--rollouts.sampling.max-tokens": "4096",
    "--rollouts.limits.max-turns": "200",
    "--rollouts.limits.max-tokens": "200000",
    "--rollouts.limits.timeout-s": "3600",
}
"""Other defaults than those of training: an agent works for longer than an environment of a few turns."""
_EPILOG = """\
unbroken agent codex "Fix the failing test." --model MODEL --workspace . --check "pytest -q"
unbroken agent claude-code "Fix the failing test." --url http://127.0.0.1:8000 --workspace . --check "pytest -q"
Settings of a run follow as --FIELD VALUE, e.g. --rollouts.sampling.temperature 0.6 (unbroken eval TASK --help)."""


def add_agent_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    agent = commands.add_parser(
        "agent",
        help="run a known agent on a task, in a copy of a folder: its reward, and a row to train on",
        description="Run an agent that is installed here on a task, with a model or a server, in a copy of a folder.\n"
        "A command checks its work: the reward. All ids are recorded as the engine sampled them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = agent.add_argument
    add("name", metavar="NAME", choices=tuple(KNOWN_AGENTS), help=", ".join(KNOWN_AGENTS))
    add("task", metavar="TASK", nargs="+", help="what it is to do, in words")
    which = agent.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="MODEL", help="a model's folder, a run or its checkpoint, or a hub's name")
    which.add_argument("--url", metavar="SERVER", help="instead, a server: `unbroken serve`, or vLLM")
    add(
        "--check",
        required=True,
        metavar="COMMAND",
        help="run in the agent's folder after it: the reward is 1 if it exits with 0, else 0",
    )
    add(
        "--workspace",
        metavar="FOLDER",
        type=Path,
        help="a folder, which the agent works in a copy of (default: an empty one)",
    )
    add("--image", metavar="IMAGE", help="of docker or podman: agent and check run in containers of it")
    add("--output", metavar="FOLDER", type=Path, help="gets the rollout (default: runs/agent-NAME-TIME)")
    add("--tokenizer", metavar="FOLDER", help="for a server that does not say where its model is")
    agent.set_defaults(run=run_agent)


def run_agent(arguments: argparse.Namespace) -> int:
    """Run the agent, and print what was recorded; returns the exit status."""
    try:
        check = shlex.split(arguments.check)
    except ValueError as error:  # a quote without its other
        raise InvalidInputError(f"--check must be a command, got {arguments.check!r}: {error}") from None
    if not check:
        raise InvalidInputError(f"--check must be a command, got {arguments.check!r}")
    output = arguments.output or Path("runs") / f"agent-{arguments.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    own = {
        "--output": str(output),
        "--agent.name": arguments.name,
        "--agent.check": json.dumps(check, ensure_ascii=False),
    }
    if arguments.workspace is not None:
        own["--agent.workspace"] = str(arguments.workspace)
    if arguments.image is not None:
        own["--agent.image"] = arguments.image
    options = _join(own, arguments.others)
    arguments.advice = f"; the same command with --output {output} begins the task again"
    try:
        from rich.console import Console

        from unbroken.runs.evaluate import evaluate_task

        report = evaluate_task(
            str(_write_task(output, " ".join(arguments.task))),
            options,
            Console(stderr=True, markup=False),
            models=[arguments.model or arguments.url],
            tokenizer=arguments.tokenizer,
            num_samples=1,
        )
    except ModuleNotFoundError as error:
        raise missing_extra(error, "running an agent needs the train extra", "train") from error
    print(describe_rollout(_read_rollout(output), output, model=report["models"][0]["name"]))
    return 0


def _join(own: Mapping[str, str], others: Sequence[str]) -> list[str]:
    """The options of an evaluation: those of the command, those given, and defaults for what is not given."""
    given = {word.partition("=")[0].replace("_", "-") for word in others if word.startswith("--")}
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in given}
    return [word for pair in {**own, **defaults}.items() for word in pair] + list(others)


def _write_task(output: Path, task: str) -> Path:
    """Write the data set of a task; raises `InvalidInputError` if the folder has another one."""
    from unbroken.runs.folder import TASK_FILE, make_folder

    file, line = output / TASK_FILE, json.dumps({"prompt": [{"role": "user", "content": task}]}) + "\n"
    make_folder(output)
    try:
        if file.exists() and file.read_text("utf-8") != line:
            raise InvalidInputError(f"--output must be a new or empty folder, or that of the same task, got {output}")
        file.write_text(line, "utf-8")
    except OSError as error:
        raise InvalidInputError(f"--output must be a folder that can be written, got {output}: {error}") from error
    return file


def _read_rollout(output: Path) -> tuple[Path, dict[str, Any]]:
    """The file of the only rollout of an output, and its record."""
    from unbroken.runs.collector import DEFAULT_SET
    from unbroken.runs.evaluation.evaluator import FOLDER
    from unbroken.runs.records.files import find_records, read_records

    path = find_records(output / FOLDER / DEFAULT_SET)[0, 0]
    _, record = read_records(path)
    return path, record


def describe_rollout(rollout: tuple[Path, Mapping[str, Any]], output: Path, *, model: str) -> str:
    """What was rewarded, what is proven of the rows, counted in the file, and where they are."""
    path, record = rollout
    turns, rows = record["turns"], record["rows"]
    num_sampled = sum(turn["num_sampled"] for turn in turns)
    num_proven = sum(map(count_proven, rows))
    num_bridged = sum(number for name, number in record["counters"].items() if name.startswith("bridges/"))
    forks = [turn["fork"] for turn in turns if turn["fork"]]
    return "\n".join(
        (
            f"reward {record['reward']:g}: {_explain(record)}",
            f"{num_proven} of {num_sampled} ids that {model} sampled are in a row, each once and at its place, with "
            f"its logprob and policy version ({len(turns)} turns, {len(rows)} rows)",
            f"{num_bridged} turns continue the ids of the turn before; forks: {', '.join(forks) or 'none'}",
            f"rollout: {path} (unbroken view {output})",
            f"rows:    unbroken export {output} rows.parquet --kind evaluation",
            f"what the agent and the check wrote: {output / 'agents'}",
        )
    )


def count_proven(row: Mapping[str, Any]) -> int:
    """The sampled ids of a row that it would train, if it has a logprob and a policy version for each sampled id."""
    sampled = [part for part in row["segments"] if part["origin"] == "sampled"]
    spans = {(start, stop) for start, stop, _ in row["policy_versions"]}
    places = {k for part in sampled for k in range(part["start"], part["stop"])}
    versioned = {k for start, stop in spans for k in range(start, stop)}
    loss = {k for start, stop in row["loss"] for k in range(start, stop)}
    # A completion may have given ids inside, which have neither (`SampledSequence`), and which no loss may have.
    has_all = len(row["rollout_logprobs"]) == len(versioned) and loss <= versioned <= places
    return len(loss) if has_all else 0


def _explain(record: Mapping[str, Any]) -> str:
    if record["status"] != "completed":
        return f"the agent did not end by itself ({record['status']}), so nothing was checked"
    failed = ", after the agent had exited with an error" if record["reward_parts"].get("agent_failed") else ""
    return f"the check {'passed' if record['reward'] == 1 else 'failed'}{failed}"
