"""Seconds until pages of a large run are there in headless Chromium, by the clock and of CPU: a run of drawn rollouts.

python bench/viewer.py                               500 steps of 256 rollouts
python bench/viewer.py --steps 50 --pictures FOLDER  also a PNG of each page, 1,400 and 400 px wide
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import Browser, open_browser
from support.recorded import make_row, make_trajectory, make_turn, write_metrics, write_step

NUM_MADE = 10
"""Steps that differ; the others are links to them."""
VIEWS = {
    "table, never opened before": "table/0?",
    "again": "table/0?",
    "sorted": "table/0?sort=-reward",
    "filtered and sorted": "table/0?reward=..0.5&is=truncated&sort=-ids",
    "searched, the first time": "table/0?q={0}",
    "searched": "table/0?q={1}",
    "run": "run",
    "step": "step/0/7",
    "rollout": "rollout/0/7/9",
}
FIRST = "document.querySelector('.rows tbody tr, .rollouts li, .charts, .rollout .cell') !== null"
ALL = "!(document.querySelector('#count')?.innerText ?? '').includes('steps read')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=256, help="of each step, a multiple of 8")
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = make_run(Path(folder), arguments.steps, arguments.rollouts)
        command = [sys.executable, "-m", "unbroken", "view", f"{folder}/run"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            show_views(server.pid, server.stdout.readline().strip(), words, arguments.pictures)
        finally:
            server.kill()


def show_views(server: int, url: str, words: list[str], pictures: Path | None) -> None:
    """Print a line for each view."""
    print(f"{'seconds':28}first lines   all   CPU of server  of page   load")
    with open_browser() as browser:
        browser.call("Performance.enable", timeDomain="threadTicks")
        for name, place in VIEWS.items():
            measure(browser, server, name, f"{url}#{place.format(*words)}")
            for width in (1400, 400):
                if pictures is None:
                    continue
                browser.open(f"{url}#{place.format(*words)}", width=width, height=900)
                browser.wait(FIRST)
                pictures.mkdir(exist_ok=True)
                browser.take_picture(pictures / f"{name.replace(', ', '-').replace(' ', '-')}-{width}.png")


def measure(browser: Browser, server: int, name: str, url: str) -> None:
    """Open a page and print its times."""
    start, before = time.monotonic(), read_cpu_s(server)
    browser.open(url, width=1400, height=900)
    browser.wait(FIRST)
    first = time.monotonic() - start
    browser.wait(ALL)
    total = time.monotonic() - start
    metrics = {each["name"]: each["value"] for each in browser.call("Performance.getMetrics")["metrics"]}
    cpu, page = read_cpu_s(server) - before, metrics["TaskDuration"]
    print(f"{name:28}{first:11.2f}{total:6.2f}{cpu:16.2f}{page:9.2f}{os.getloadavg()[0]:7.1f}", flush=True)


def read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_run(folder: Path, num_steps: int, num_rollouts: int) -> list[str]:
    """Write the run; returns two words that are in some of its rollouts."""
    rng, draw = np.random.default_rng(0), random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]
    made = []
    for step in range(NUM_MADE):
        members = [make_member(rng, draw, words, f"g{n // 8}/{n % 8}") for n in range(num_rollouts)]
        head = {"num_rollouts": num_rollouts, "rewards": [num_rollouts, 0.5, 0.5]}
        made.append(write_step(folder / "made", step, members, **head))
    write_metrics(folder / "run", num_steps)
    (folder / "run" / "rollouts").mkdir()
    for step in range(num_steps):
        os.link(made[step % NUM_MADE], folder / "run" / "rollouts" / f"step-{step:08}.rank-0.jsonl.gz")
    return sorted(words, key=len)[-2:]


def make_member(rng: np.random.Generator, draw: random.Random, words: list[str], name: str) -> dict[str, Any]:
    """A rollout of 150 to 400 sampled ids, with half as many words."""
    num_ids = int(rng.integers(150, 400))
    message = {"role": "assistant", "content": " ".join(draw.choices(words, k=num_ids // 2))}
    rollout: dict[str, Any] = make_trajectory(
        name,
        [make_row(rng.integers(0, 150_000, 40 + num_ids).tolist(), num_prompt=40)],
        status="completed" if draw.random() < 0.97 else "timeout",
        reward=float(draw.random() < 0.6),
        reward_parts={"exact": float(draw.random() < 0.6), "format": draw.random()},
        wall_time_s=draw.random() * 9,
        data={"index": 0, "columns": {"prompt": words[0], "answer": str(draw.randint(0, 999))}},
        messages=[{"role": "user", "content": " ".join(draw.choices(words, k=30))}, message],
        turns=[make_turn(num_ids, message, finish_reason="length" if draw.random() < 0.1 else "stop")],
    )
    return rollout


if __name__ == "__main__":
    main()
