"""The table of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.simulation.schedule import Outcome

_COLUMNS = (
    "max_staleness",
    "s/step",
    "groups/s",
    "speed-up",
    "idle trainer",
    "idle sampler",
    "held",
    "mean",
    "max",
    "given up",
)
_ROW = "{:>13}  {:>8}  {:>8}  {:>8}  {:>12}  {:>12}  {:>5}  {:>5}  {:>3}  {:>8}"
LEGEND = """\
speed-up      over the first line
idle trainer  share of the time in which the trainer waits for groups
idle sampler  share in which nothing is sampled; held: in which no group may start, because of max_staleness
mean, max     staleness of the ids that were trained, in policy versions
given up      share of all groups that were cancelled or dropped because they became too old"""


def format_table(outcomes: Sequence[Outcome]) -> str:
    """A line for each outcome, compared with the first."""
    lines = [_ROW.format(*_COLUMNS)]
    for each in outcomes:
        shares = [f"{each.mean_idle(f'idle/{name}'):.0%}" for name in ("trainer", "sampler", "sampler_held")]
        lines.append(
            _ROW.format(
                each.max_staleness,
                f"{each.step_s:.3f}",
                f"{each.groups_per_s:.2f}",
                f"{outcomes[0].step_s / each.step_s:.2f}",
                *shares,
                f"{each.mean_staleness:.2f}",
                max(each.ids_by_staleness),
                f"{each.given_up_share:.1%}",
            )
        )
    return "\n".join(lines)
