"""The report's chart as inline SVG, so that the page opens without a network."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 36


def reward_curve(rewards: Sequence[float], *, before: float, after: float) -> Markup:
    """Draw the mean reward of each step as a line, and the evaluations `before` and `after` training as dots."""
    num_steps = len(rewards)
    line = " ".join(f"{_x(k + 1, num_steps):.1f},{_y(r):.1f}" for k, r in enumerate(rewards))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="mean reward per step" class="chart">',
        *(_horizontal(level) for level in (0.0, 0.25, 0.5, 0.75, 1.0)),
        *(_tick(step, num_steps) for step in range(0, num_steps + 1, max(1, num_steps // 8))),
        f'<polyline points="{line}" class="line"/>',
        _dot(0, num_steps, before, f"before: {before:.2f}"),
        _dot(num_steps, num_steps, after, f"after: {after:.2f}"),
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">GRPO step</text>',
        "</svg>",
    ]
    return Markup("\n".join(parts))


def _x(step: int, num_steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / num_steps


def _y(value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)


def _horizontal(level: float) -> str:
    y = _y(level)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{level:.2f}</text>'
    )


def _tick(step: int, num_steps: int) -> str:
    return f'<text x="{_x(step, num_steps):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'


def _dot(step: int, num_steps: int, value: float, label: str) -> str:
    x, y = _x(step, num_steps), _y(value)
    anchor = "start" if step == 0 else "end"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="dot"/>'
        f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="{anchor}" class="label">{label}</text>'
    )
