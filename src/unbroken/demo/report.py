"""The demo's report: an HTML page that opens without a network, the numbers as JSON, and a table in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unbroken.demo.comparison import Cause, Exact, Retokenized, Rollout, changed_positions
from unbroken.demo.result import DemoResult
from unbroken.ledger.nodes import Origin
from unbroken.rendering.base import TEMPLATE
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import TokenIds
from unbroken.viewer.reports import make_token, render_report


def write_report(result: DemoResult, tokenizer: Any, directory: Path) -> Path:
    """Write `report.html` and `summary.json` into `directory` and return the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    summary = json.dumps(result.summary(), indent=2, allow_nan=False)
    (directory / "summary.json").write_text(summary + "\n", encoding="utf-8")
    page = render_report(
        "unbroken.demo",
        "report.html.jinja",
        result=result,
        curves=make_curves(result),
        causes=[cause.value for cause in Cause],
        explanation=result.explanation,
        example=tokens_of_trajectory(result.example, tokenizer),
        usual=tokens_of_retokenized(result.example_retokenized, tokenizer),
        percent=lambda share: f"{100 * share:.1f} %",
    )
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def print_result(result: DemoResult) -> None:
    """Print the comparison as a table, and the success before and after."""
    table = Table(title="the same rollouts as sampled, and decoded, rendered, retokenised (by JSON style)")
    for column in ("pipeline", "rollouts", "other ids", "off > 20 %", "k3", "max diff"):
        table.add_column(column, justify="left" if column == "pipeline" else "right", no_wrap=True)
    rows: list[tuple[str, int, Exact | Retokenized]] = [("exact (ours)", result.num_compared, result.exact)]
    rows += [(f"usual, {style}", row.num_rollouts, row) for style, row in result.retokenized.items()]
    for name, count, row in rows:
        found = row.mismatch
        off, k3, max_abs = f"{found.share_off_20pct:.1%}", f"{found.k3:.1e}", f"{found.max_abs:.1e}"
        table.add_row(name, str(count), f"{row.share_differ:.1%}", off, k3, max_abs)
    console = Console()
    console.print(table)
    console.print(result.explanation)
    console.print(
        f"[bold]success at temperature 1: {result.success_before:.2f} -> {result.success_after:.2f}[/bold] "
        f"in {result.steps} GRPO steps, {result.rollouts:,} rollouts, {result.seconds:.0f} s"
    )


def make_curves(result: DemoResult) -> list[dict[str, Any]]:
    """The mean reward of each step, and the evaluations before and after training."""
    rewards = [[step, reward] for step, reward in enumerate(result.step_rewards, start=1)]
    return [
        {"name": "in training", "points": rewards},
        {"name": "before", "points": [[0, result.success_before]]},
        {"name": "after", "points": [[len(rewards), result.success_after]]},
    ]


def tokens_of_trajectory(trajectory: Trajectory, tokenizer: Any) -> list[dict[str, Any]]:
    """The ids of a trajectory's last branch, each with its origin, logprob and policy version."""
    path = trajectory.tree.path(trajectory.tree.leaves()[-1])
    tokens = []
    rows = zip(_texts(path.token_ids, tokenizer), path.origins, path.message_indices, strict=True)
    for position, (text, origin, message_index) in enumerate(rows):
        note = None
        if origin is Origin.SAMPLED:
            probability = f"logprob {path.rollout_logprobs[position]:.4f}"
            note = f"{probability}, policy version {path.policy_versions[position]}"
        is_tool_text = origin is Origin.BRIDGE and message_index != TEMPLATE
        kind = "message" if is_tool_text else origin.value
        tokens.append(make_token(int(path.token_ids[position]), text, kind, note=note))
    return tokens


def tokens_of_retokenized(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """The ids of the usual pipeline, and which differ from the sampled ids."""
    texts, changed = _texts(rollout.retokenized_ids, tokenizer), changed_positions(rollout)
    return [
        make_token(int(token_id), text, "prompt", is_changed=bool(is_changed))
        for text, token_id, is_changed in zip(texts, rollout.retokenized_ids, changed, strict=True)
    ]


def _texts(ids: TokenIds, tokenizer: Any) -> Sequence[str]:
    return [tokenizer.decode([int(i)]) for i in ids]
