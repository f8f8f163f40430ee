"""Draw docs/figures/exact.svg, the figure of the README, and learning.svg: `python tools/draw_figure.py`.

`python tools/draw_figure.py --real FOLDER` draws real.svg from the results of `bench/real.py --output FOLDER`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "figures"

# `unbroken drift` of a real model, SmolLM2-135M-Instruct (docs/lab-notes/learning.md, 2026-11-28).
DRIFT = {
    "unbroken": 0.0,
    "retokenised, conversations with a tool": 85.9,
    "retokenised, chats of three turns": 66.7,
}
"""Percent of rollouts whose trained ids are not the ids that were sampled."""

# `python bench/bridges.py --part cost --lengths 1000 16000 64000`, trl/qwen3, 131,072 ids, on two busy cores.
HISTORY = (2_747, 16_837, 64_513)
BRIDGE_MS = (3.6, 6.7, 15.3)
RENDER_MS = (14.3, 100, 341)
"""Milliseconds for the next prompt, by tokens of history."""

# `python bench/retokenising.py`: the demo's task, five seeds, and with `--shape 110m` (docs/lab-notes/learning.md).
LEARNING = {
    "Mean reward, 0.1M weights, CPU": {
        "exact tokens": (
            "51 55 70 89 92 94 94 97 96 95 96 96 98 97 96 96 94 97 97 94",
            "0.96 in the last 5 steps",
        ),
        "usual, template's JSON": (
            "51 55 69 87 91 94 92 97 95 95 97 97 97 97 96 96 95 97 97 93",
            "0.96 in the last 5 steps",
        ),
        "usual, compact JSON": (
            "50 51 63 75 80 86 88 93 94 94 95 96 96 93 95 95 88 82 74 52",
            "3 of 5 runs collapsed",
        ),
    },
    "Mean reward, 110M weights, H200": {
        "exact tokens": (
            "48 63 77 90 92 96 95 96 96 95 97 97 98 98 97 98 96 97 97 95",
            "0.97 in the last 5 steps",
        ),
        "usual, template's JSON": (
            "47 61 72 87 93 96 95 96 96 95 96 97 98 98 97 97 96 97 97 95",
            "0.96 in the last 5 steps",
        ),
        "usual, compact JSON": (
            "45 50 41 55 64 69 71 74 75 68 71 63 60 45 27 13 8 6 4 2",
            "5 of 5 runs collapsed",
        ),
    },
}
"""Hundredths, mean over each two steps and five seeds, and a note, by what the trainer gets."""

WIDTH, HEIGHT = 880, 250
OURS, USUAL, TEXT, FAINT = "#0f766e", "#c2410c", "#24292f", "#d0d7de"
BETWEEN = "#b08800"


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


def draw_learning(left: float, title: str, curves: dict[str, tuple[str, str]]) -> list[str]:
    """Draw one half of the figure of learning, with a line for each way of making training rows."""
    right, top, bottom = left + 215, 60, 205
    values = {label: [int(each) / 100 for each in numbers.split()] for label, (numbers, _) in curves.items()}
    highest = math.ceil(max(map(max, values.values())))
    num_steps = 2 * len(next(iter(values.values())))
    shapes = [
        text(left - 30, 32, title, size=15),
        f'<path d="M{left} {top} V{bottom} H{right}" fill="none" stroke="{FAINT}"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = bottom - (bottom - top) * share
        shapes += [
            f'<path d="M{left} {y:g} H{right}" stroke="{FAINT}" opacity="0.5"/>',
            text(left - 8, y + 4, f"{highest * share:g}", anchor="end", size=11),
        ]
    ends = {}
    for color, (label, of_kind) in zip((OURS, BETWEEN, USUAL), values.items(), strict=True):
        points = [
            (left + (right - left) * (2 * k + 1) / num_steps, bottom - (bottom - top) * value / highest)
            for k, value in enumerate(of_kind)
        ]
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        ends[label] = points[-1][1], color
    for row, (label, (_, color)) in enumerate(sorted(ends.items(), key=lambda item: item[1])):
        y = top + 20 + 48 * row
        shapes += [
            text(right + 12, y, label, color=color, size=12),
            text(right + 12, y + 15, curves[label][1], size=11),
        ]
    ticks = [
        text(left + (right - left) * k / 2, bottom + 16, f"{num_steps * k // 2}", anchor="middle") for k in range(3)
    ]
    return [*shapes, *ticks, text(left, bottom + 36, "steps")]


REAL = {"fast": ("unbroken", OURS), "exact": ("unbroken, exact numerics", BETWEEN), "trl": ("TRL", USUAL)}
"""The sides of bench/real.py, with their labels and colours."""
TASKS = {"sums": "sums, one turn", "tool": "calculator, up to 8 turns"}
NUM_POINTS = 60
Curve = Sequence[tuple[float, list[float]]]
"""Steps or seconds, and the rewards, or the k3, of all seeds there."""


def draw_real(folder: Path) -> tuple[list[str], int]:
    """Draw a row for each task: reward over steps, and k3, or over seconds where all sides had the GPU for themselves.

    Return the shapes and the height of the figure. Runs that were cut are left out: their curves would end early.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
    import real

    results, shapes, height = real.read_results(folder), [], 0
    for task, name in TASKS.items():
        whole = [each for each in results if each["task"] == task and len(each["rewards"]) == each["steps"]]
        sides = {side: real.choose_curves([each for each in whole if each["side"] == side]) for side in REAL}
        sides = {side: found for side, found in sides.items() if found}
        if not sides:
            continue
        alone = {side: [each for each in found if each["jobs"] == 1] for side, found in sides.items()}
        steps = range(max(each["steps"] for each in whole))
        rewards = {side: find_curve(found, steps, real.reward_at) for side, found in sides.items()}
        row = draw_panel(60, f"Reward, {name}", "steps", rewards, note_rewards(rewards))
        if all(alone.values()):
            longest_s = {side: min(sum(each["wall_s"]) for each in found) for side, found in alone.items()}
            over_seconds = {
                side: find_curve(
                    found, [longest_s[side] * k / NUM_POINTS for k in range(NUM_POINTS)], real.reward_after
                )
                for side, found in alone.items()
            }
            row += draw_panel(485, "the same over the wall clock", "seconds", over_seconds, note_rewards(over_seconds))
        else:
            k3 = {side: find_curve(found, steps, k3_at) for side, found in sides.items()}
            row += draw_panel(485, "k3 of trainer and sampler", "steps", k3, note_k3(sides))
        shapes += [f'<g transform="translate(0 {height})">', *row, "</g>"]
        height += HEIGHT
    return shapes, height


def find_curve(results: Sequence[Any], places: Sequence[float], find: Any) -> Curve:
    """The values of all runs at each place that all have reached."""
    curve = [(place, [find(each, place) for each in results]) for place in places]
    return [(place, values) for place, values in curve if values and None not in values]


def k3_at(result: Any, step: int) -> float | None:
    """The k3 of a step; None if nothing was compared in it."""
    k3: float | None = result["k3"][step]
    return k3


def note_rewards(curves: Mapping[str, Curve]) -> dict[str, str]:
    """Say for each side where its curve ends."""
    notes = {}
    for side, curve in curves.items():
        last = curve[-1][1] if curve else [0.0]
        notes[side] = f"{sum(last) / len(last):.2f} at the end, {len(last)} seed{'s' if len(last) > 1 else ''}"
    return notes


def note_k3(sides: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Say for each side what k3 its steps have."""
    notes = {}
    for side, found in sides.items():
        k3 = [value for each in found for value in each["k3"] if value is not None] or [0.0]
        notes[side] = f"median {statistics.median(k3):.2g}, largest {max(k3):.2g}" if max(k3) else "0 in every step"
    return notes


def draw_panel(left: float, title: str, unit: str, curves: Mapping[str, Curve], notes: Mapping[str, str]) -> list[str]:
    """Draw a line for each side, the mean over seeds, in an area from the least to the most of them."""
    right, top, bottom = left + 200, 60, 205
    longest = max((curve[-1][0] for curve in curves.values() if curve), default=1.0) or 1.0
    most = max((value for curve in curves.values() for _, of in curve for value in of), default=1.0) or 1.0
    unit_of_most = 10 ** math.floor(math.log10(most))
    highest = math.ceil(most / unit_of_most) * unit_of_most

    def place(at: float, value: float) -> str:
        return f"{left + (right - left) * at / longest:g},{bottom - (bottom - top) * value / highest:g}"

    shapes = [
        text(left - 30, 32, title, size=15),
        f'<path d="M{left} {top} V{bottom} H{right}" fill="none" stroke="{FAINT}"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y, end = bottom - (bottom - top) * share, "end" if share == 1 else "middle"
        shapes.append(f'<path d="M{left} {y:g} H{right}" stroke="{FAINT}" opacity="0.5"/>')
        shapes.append(text(left - 8, y + 4, f"{highest * share:.2g}", anchor="end", size=11))
        shapes.append(text(left + (right - left) * share, bottom + 16, f"{longest * share:.0f}", anchor=end, size=11))
    for row, (side, (label, color)) in enumerate(REAL.items()):
        curve = curves.get(side)
        if not curve:
            continue
        area = [place(at, min(of)) for at, of in curve] + [place(at, max(of)) for at, of in reversed(curve)]
        line = [place(at, sum(of) / len(of)) for at, of in curve]
        y = top + 20 + 48 * row
        shapes += [
            f'<polygon points="{" ".join(area)}" fill="{color}" opacity="0.15"/>',
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{color}" stroke-width="2"/>',
            text(right + 12, y, label, color=color, size=12),
            text(right + 12, y + 15, notes[side], size=11),
        ]
    return [*shapes, text(left, bottom + 34, unit, size=11)]


def write(name: str, shapes: list[str], height: int = HEIGHT) -> None:
    """Write a figure."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    body = "\n".join(shapes)
    (FOLDER / name).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


def main() -> None:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="draw real.svg from this folder of results, and nothing else")
    folder = parser.parse_args().real
    if folder is not None:
        write("real.svg", *draw_real(folder))
        return
    write("exact.svg", draw_drift_bars() + draw_cost_lines())
    halves = zip((60, 500), LEARNING.items(), strict=True)
    write("learning.svg", [shape for left, (title, curves) in halves for shape in draw_learning(left, title, curves)])


if __name__ == "__main__":
    main()
