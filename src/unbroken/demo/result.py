"""What the demo found, as one value; `summary()` is what goes into summary.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unbroken.demo.comparison import Exact, Retokenized, Rollout
from unbroken.demo.task import JsonStyle
from unbroken.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """One run of the demo, whole."""

    seed: int
    num_parameters: int
    success_before: float
    """Share of right answers at temperature 1, before the first GRPO step."""
    success_after: float
    """The same on the same tasks, after the last one."""
    step_rewards: tuple[float, ...]
    """Mean reward of each step's rollouts."""
    seconds: float
    """Wall time of everything, the comparison included."""
    rollouts: int
    """Rollouts that GRPO sampled."""
    exact: Exact
    """Trainer against sampler on the rollouts of the last evaluation."""
    retokenized: dict[JsonStyle, Retokenized]
    """The same rollouts through the usual pipeline."""
    counters: dict[str, int]
    """Every event of training, as `event/reason`."""
    example: Trajectory
    """The rollout that the report shows."""
    example_retokenized: Rollout

    @property
    def steps(self) -> int:
        """Optimizer steps of GRPO."""
        return len(self.step_rewards)

    @property
    def num_compared(self) -> int:
        """Rollouts that both pipelines were compared on."""
        return sum(row.num_rollouts for row in self.retokenized.values())

    @property
    def honest_sentence(self) -> str:
        """Which part of the difference comes from the JSON style."""
        canonical, compact = (self.retokenized[style].share_differ for style in JsonStyle)
        return (
            f"Where the model writes tool calls in the template's own JSON style, {canonical:.1%} of the rollouts "
            f"change; where it was asked for compact JSON, {compact:.1%} do. So the larger number comes from the JSON "
            "style, which the template rewrites and this demo chose; only the smaller one is what tokenisation and "
            "truncation do by themselves."
        )

    def summary(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "seed": self.seed,
            "success_before": self.success_before,
            "success_after": self.success_after,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "rollouts": self.rollouts,
            "exact": _numbers(self.exact),
            "retokenized": {
                style.value: {
                    "num_rollouts": row.num_rollouts,
                    **_numbers(row),
                    "causes": row.causes,
                }
                for style, row in self.retokenized.items()
            },
            "counters": self.counters,
        }


def _numbers(row: Exact | Retokenized) -> dict[str, float]:
    found = row.mismatch
    return {
        "share_differ": row.share_differ,
        "k3": found.k3,
        "max_abs": found.max_abs,
        "share_off_20pct": found.share_off_20pct,
    }
