"""Draw docs/figures/exact.svg, the figure of the README, from the measurements below: `python tools/draw_figure.py`."""

from __future__ import annotations

from pathlib import Path

OUTPUT = Path(__file__).parent.parent / "docs" / "figures" / "exact.svg"

# `make demo`, mean of five seeds (docs/lab-notes/learning.md, "the demo over five fresh seeds").
DRIFT = {
    "unbroken": 0.0,
    "retokenised, calls in the template's own JSON": 1.4,
    "retokenised, calls in compact JSON": 100.0,
}
"""Percent of rollouts whose trained ids are not the ids that were sampled."""

# `python bench/bridges.py --part cost --lengths 1000 16000 64000`, trl/qwen3, 131,072 ids, on two busy cores.
HISTORY = (2_747, 16_837, 64_513)
BRIDGE_MS = (3.6, 6.7, 15.3)
RENDER_MS = (14.3, 100, 341)
"""Milliseconds for the next prompt, by tokens of history."""

WIDTH, HEIGHT = 880, 250
OURS, USUAL, TEXT, FAINT = "#0f766e", "#c2410c", "#24292f", "#d0d7de"


def text(x: float, y: float, words: str, *, size: int = 13, color: str = TEXT, anchor: str = "start") -> str:
    """Make one line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{words}</text>'


def draw_drift_bars() -> list[str]:
    """Draw the left half: one bar per way of making training rows."""
    shapes = [text(20, 32, "Rollouts trained on other ids than were sampled", size=15)]
    for row, (label, percent) in enumerate(DRIFT.items()):
        y, color = 62 + 60 * row, OURS if row == 0 else USUAL
        shapes += [
            text(20, y, label),
            f'<rect x="20" y="{y + 8}" width="330" height="16" fill="{FAINT}" opacity="0.5"/>',
            f'<rect x="20" y="{y + 8}" width="{330 * percent / 100:g}" height="16" fill="{color}"/>',
            text(360, y + 21, f"{percent:g} %", color=color),
        ]
    return shapes


def draw_cost_lines() -> list[str]:
    """Draw the right half: milliseconds by length of history."""
    left, right, top, bottom = 500, 770, 60, 205
    longest, slowest = HISTORY[-1], RENDER_MS[-1]

    def place(tokens: int, milliseconds: float) -> tuple[float, float]:
        x = left + (right - left) * tokens / longest
        return x, bottom - (bottom - top) * milliseconds / slowest

    shapes = [
        text(left - 20, 32, "Milliseconds for the next turn's prompt", size=15),
        f'<path d="M{left} {top} V{bottom} H{right}" fill="none" stroke="{FAINT}"/>',
    ]
    for label, color, costs in (("full rendering", USUAL, RENDER_MS), ("bridge", OURS, BRIDGE_MS)):
        points = [place(tokens, cost) for tokens, cost in zip(HISTORY, costs, strict=True)]
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        shapes += [f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{color}"/>' for x, y in points]
        x, y = points[-1]
        shapes += [text(x + 10, y - 10, label, color=color), text(x + 10, y + 5, f"{costs[-1]:g} ms", color=color)]
    ticks = [text(place(tokens, 0)[0], bottom + 18, f"{tokens / 1000:.0f}k", anchor="middle") for tokens in HISTORY]
    return [*shapes, *ticks, text(left, bottom + 36, "tokens of history")]


def main() -> None:
    """Write the figure."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    shapes = "\n".join(draw_drift_bars() + draw_cost_lines())
    OUTPUT.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>\n{shapes}\n</svg>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
