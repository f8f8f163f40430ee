"""The demo's report: an HTML page that opens without a network, the numbers as JSON, and a table in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table

from unbroken.demo.charts import reward_curve
from unbroken.demo.comparison import Cause, Exact, Retokenized, Rollout, changed_positions
from unbroken.demo.result import DemoResult
from unbroken.ledger.nodes import Origin
from unbroken.rendering.base import TEMPLATE
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A token id as the page shows it: its text, its CSS class, and a title under the mouse pointer."""

    text: str
    origin: str
    title: str


def write_report(result: DemoResult, tokenizer: Any, directory: Path) -> Path:
    """Write `report.html` and `summary.json` into `directory` and return the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    summary = json.dumps(result.summary(), indent=2, allow_nan=False)
    (directory / "summary.json").write_text(summary + "\n", encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("unbroken.demo", package_path=""), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html.jinja").render(
        result=result,
        chart=reward_curve(result.step_rewards, before=result.success_before, after=result.success_after),
        causes=[cause.value for cause in Cause],
        explanation=result.explanation,
        example=spans_of_trajectory(result.example, tokenizer),
        usual=spans_of_retokenized(result.example_retokenized, tokenizer),
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


def spans_of_trajectory(trajectory: Trajectory, tokenizer: Any) -> list[TokenSpan]:
    """The ids of a trajectory's last branch, each with its origin, logprob and policy version."""
    path = trajectory.tree.path(trajectory.tree.leaves()[-1])
    spans = []
    rows = zip(_texts(path.token_ids, tokenizer), path.origins, path.message_indices, strict=True)
    for position, (text, origin, message_index) in enumerate(rows):
        title = f"id {path.token_ids[position]}"
        if origin is Origin.SAMPLED:
            probability = f"logprob {path.rollout_logprobs[position]:.4f}"
            title += f", {probability}, policy version {path.policy_versions[position]}"
        is_tool_text = origin is Origin.BRIDGE and message_index != TEMPLATE
        spans.append(TokenSpan(text=text, origin="tool" if is_tool_text else origin.value, title=title))
    return spans


def spans_of_retokenized(rollout: Rollout, tokenizer: Any) -> list[TokenSpan]:
    """The ids of the usual pipeline; those that differ from the sampled ids are outlined."""
    return [
        TokenSpan(text=text, origin="changed" if changed else "prompt", title=f"id {token_id}")
        for text, token_id, changed in zip(
            _texts(rollout.retokenized_ids, tokenizer), rollout.retokenized_ids, changed_positions(rollout), strict=True
        )
    ]


def _texts(ids: TokenIds, tokenizer: Any) -> Sequence[str]:
    return [tokenizer.decode([int(i)]).replace("\n", "↵") for i in ids]
