"""The result of the demo; `summary()` makes the contents of summary.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unbroken.demo.comparison import Exact, Retokenized, Rollout
from unbroken.demo.lookup import JsonStyle
from unbroken.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The numbers and the examples that the report shows."""

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
    exact: Exact
    """Trainer against sampler on the rollouts of the last evaluation."""
    retokenized: dict[JsonStyle, Retokenized]
    """The same rollouts through the usual pipeline."""
    counters: dict[str, int]
    """The events of training, by `event/reason`."""
    example: Trajectory
    example_retokenized: Rollout

    @property
    def steps(self) -> int:
        """Optimizer steps of GRPO."""
        return len(self.step_rewards)

    @property
    def num_compared(self) -> int:
        """Number of rollouts in the comparison."""
        return sum(row.num_rollouts for row in self.retokenized.values())

    @property
    def explanation(self) -> str:
        """How much of the difference comes from the JSON style."""
        canonical, compact = (self.retokenized[style].share_differ for style in JsonStyle)
        return (
            f"Where the model writes tool calls in the template's own JSON style, {canonical:.1%} of the rollouts "
            f"change; where it was asked for compact JSON, {compact:.1%} do. So the larger number comes from the JSON "
            "style, which the template rewrites and this demo chose; only the smaller one is what tokenisation and "
            "truncation do by themselves."
        )

    def summary(self) -> dict[str, Any]:
        """The numbers as JSON can hold them."""
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
