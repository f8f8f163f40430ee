"""The result of the demo, and its forms: a table in the terminal, `summary.json`, and a page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.demo.lookup import JsonStyle
from unbroken.reports import Report, ReportTable, format_percent, write_file
from unbroken.retokenising.changes import Cause
from unbroken.training.metrics.mismatch import Mismatch
from unbroken.viewer.reports import SideBySide, render_page


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRollouts:
    """The ids of a set of rollouts as a trainer would get them, and as they were sampled."""

    num_rollouts: int
    share_differ: float
    """Share of rollouts in which at least one id that is trained on is another."""
    mismatch: Mismatch
    causes: Mapping[Cause, int]
    """The number of rollouts that differ, by cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The numbers and the example that the report shows."""

    seed: int
    num_parameters: int
    success_before: float
    """Share of right answers at temperature 1, before the first GRPO step."""
    success_after: float
    """The same after the last step, on the same tasks."""
    step_rewards: tuple[float, ...]
    seconds: float
    """Wall time of the whole demo, the comparison included."""
    rollouts: int
    """Rollouts sampled for training."""
    exact: ComparedRollouts
    """Trainer against sampler on the rollouts of the last evaluation."""
    retokenised: Mapping[JsonStyle, ComparedRollouts]
    """The same rollouts through the usual pipeline."""
    counters: dict[str, int]
    """The events of training, by `event/reason`."""
    example: SideBySide

    @property
    def steps(self) -> int:
        """Optimizer steps of GRPO."""
        return len(self.step_rewards)

    @property
    def rows(self) -> list[tuple[str, ComparedRollouts]]:
        """What is compared, each with its name."""
        return [("exact (ours)", self.exact), *((f"retokenised, {s} JSON", row) for s, row in self.retokenised.items())]

    @property
    def explanation(self) -> str:
        """How much of the difference comes from the JSON style."""
        canonical, compact = (format_percent(self.retokenised[style].share_differ) for style in JsonStyle)
        return (
            f"Where the model writes tool calls in the template's own JSON style, {canonical} of the rollouts "
            f"change; where it was asked for compact JSON, {compact} do. So the larger number comes from the JSON "
            "style, which the template rewrites and this demo chose; only the smaller one is what tokenisation and "
            "truncation do by themselves."
        )

    def to_json(self) -> dict[str, Any]:
        """The contents of `summary.json`."""
        return {
            "seed": self.seed,
            "success_before": self.success_before,
            "success_after": self.success_after,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "rollouts": self.rollouts,
            "exact": _get_numbers(self.exact),
            "retokenized": {
                style.value: {"num_rollouts": row.num_rollouts, **_get_numbers(row), "causes": dict(row.causes)}
                for style, row in self.retokenised.items()
            },
            "counters": self.counters,
        }


def make_report(result: DemoResult) -> Report:
    """The success before and after, and the comparison."""
    success = (
        f"success at temperature 1: {result.success_before:.2f} -> {result.success_after:.2f} "
        f"in {result.steps} GRPO steps, {result.rollouts:,} rollouts, {result.seconds:.0f} s"
    )
    table = ReportTable(
        title="the same rollouts as sampled, and decoded, rendered, retokenised",
        columns=("", "rollouts", "other ids", "off > 20 %", "k3", "max diff"),
        rows=[
            (
                name,
                str(row.num_rollouts),
                format_percent(row.share_differ),
                format_percent(row.mismatch.share_off_20pct),
                f"{row.mismatch.k3:.1e}",
                f"{row.mismatch.max_abs:.1e}",
            )
            for name, row in result.rows
        ],
    )
    conclusions = [success, result.explanation]
    return Report(title="unbroken demo", conclusions=conclusions, tables=[table], values=result.to_json())


def write_report(result: DemoResult, folder: Path) -> None:
    """Write `report.html` and `summary.json` into a folder."""
    write_file(folder / "summary.json", make_report(result).to_json())
    page = render_page(
        "unbroken.demo",
        "report.html.jinja",
        result=result,
        curves=_make_curves(result),
        causes=list(Cause),
        ratio_rows=[(name, row.mismatch) for name, row in result.rows],
    )
    write_file(folder / "report.html", page)


def _make_curves(result: DemoResult) -> list[dict[str, Any]]:
    """The mean reward of each step, and the evaluations before and after training."""
    rewards = [[step, reward] for step, reward in enumerate(result.step_rewards, start=1)]
    return [
        {"name": "in training", "points": rewards},
        {"name": "before", "points": [[0, result.success_before]]},
        {"name": "after", "points": [[len(rewards), result.success_after]]},
    ]


def _get_numbers(row: ComparedRollouts) -> dict[str, float]:
    found = row.mismatch
    return {
        "share_differ": row.share_differ,
        "k3": found.k3,
        "max_abs": found.max_abs,
        "share_off_20pct": found.share_off_20pct,
    }
