"""The demo's report: one HTML file that opens without a network, and the numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from unbroken.demo.charts import reward_curve
from unbroken.demo.comparison import Cause, Rollout, changed_positions
from unbroken.demo.result import DemoResult
from unbroken.ledger.nodes import Origin
from unbroken.rendering.base import TEMPLATE
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One id as the page shows it."""

    text: str
    origin: str
    """The CSS class."""
    title: str
    """What shows when the pointer rests on it."""


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
        honest_sentence=result.honest_sentence,
        example=show_trajectory(result.example, tokenizer),
        usual=show_retokenized(result.example_retokenized, tokenizer),
        percent=lambda share: f"{100 * share:.1f} %",
    )
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def show_trajectory(trajectory: Trajectory, tokenizer: Any) -> list[ShownToken]:
    """A trajectory's last branch with each id's origin, logprob and policy version."""
    path = trajectory.tree.path(trajectory.tree.leaves()[-1])
    shown = []
    rows = zip(_texts(path.token_ids, tokenizer), path.origins, path.message_indices, strict=True)
    for position, (text, origin, message_index) in enumerate(rows):
        title = f"id {path.token_ids[position]}"
        if origin is Origin.SAMPLED:
            probability = f"logprob {path.rollout_logprobs[position]:.4f}"
            title += f", {probability}, policy version {path.policy_versions[position]}"
        is_tool_text = origin is Origin.BRIDGE and message_index != TEMPLATE
        shown.append(ShownToken(text=text, origin="tool" if is_tool_text else origin.value, title=title))
    return shown


def show_retokenized(rollout: Rollout, tokenizer: Any) -> list[ShownToken]:
    """The ids of the usual pipeline, those outlined that are not the sampled ones."""
    return [
        ShownToken(text=text, origin="changed" if changed else "prompt", title=f"id {token_id}")
        for text, token_id, changed in zip(
            _texts(rollout.retokenized_ids, tokenizer), rollout.retokenized_ids, changed_positions(rollout), strict=True
        )
    ]


def _texts(ids: TokenIds, tokenizer: Any) -> Sequence[str]:
    return [tokenizer.decode([int(i)]).replace("\n", "↵") for i in ids]
