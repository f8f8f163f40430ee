"""Take the pictures of the viewer for README.md from a run: its curves, all its rollouts, and the ids of one.

    unbroken train recipes/lookup.py --output runs/lookup
    python tools/take_screenshots.py runs/lookup

Needs Chromium, which tests/support/browser.py drives. The pictures are written to docs/figures, with few colours so
that each has less than 150 kB. Look at them before a commit: they must show nothing of the machine they are from.
"""

from __future__ import annotations

import argparse
import io
import sys
import threading
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Browser, open_browser  # noqa: E402  # of the tests
from unbroken.viewer.resources import Resources, open_runs  # noqa: E402
from unbroken.viewer.server import ViewerServer  # noqa: E402

WIDTH, RUN_HEIGHT, TABLE_HEIGHT, ROLLOUT_HEIGHT = 1280, 860, 620, 780
TABLE = "table/0?reward=..0.5&sort=-ids"
MAX_BYTES = 150_000
NUM_COLORS = 64


def main() -> None:
    """Take all pictures, wide for the README; `--narrow FOLDER` also takes them 400 pixels wide, to look at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a run with rollouts")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--narrow", type=Path, help="folder for narrow pictures")
    arguments = parser.parse_args()
    resources = open_runs([arguments.run])
    step, rollout = choose_rollout(resources)
    places = {"viewer-run": "run", "viewer-table": TABLE, "viewer": f"rollout/0/{step}/{rollout}/0"}
    with ViewerServer(resources) as server, open_browser() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, place in places.items():
            height = RUN_HEIGHT if place == "run" else TABLE_HEIGHT if place == TABLE else ROLLOUT_HEIGHT
            take(browser, f"{server.url}#{place}", arguments.output / f"{name}.png", width=WIDTH, height=height)
            if arguments.narrow is not None:
                arguments.narrow.mkdir(parents=True, exist_ok=True)
                take(browser, f"{server.url}#{place}", arguments.narrow / f"{name}.png", width=400, height=900)


def choose_rollout(resources: Resources) -> tuple[int, int]:
    """The rollout with most turns of those that were scored and trained, in the last step that has any."""
    steps = [step for step in resources.get("run/0")["recorded_steps"] if isinstance(step, int)]
    for step in reversed(steps):
        members = resources.get(f"run/0/step/{step}")["trajectories"]
        if found := [each for each in members if each["is_trained"] and each["max_abs"] is not None]:
            return step, max(found, key=lambda each: (each["num_turns"], -each["index"]))["index"]
    raise SystemExit("the run must have rollouts that were scored and trained")


def take(browser: Browser, url: str, file: Path, *, width: int, height: int) -> None:
    """Take one picture; in that of a rollout the first id of the second turn is chosen."""
    browser.open(url, width=width, height=height)
    if "#table" in url:
        browser.wait(
            "document.querySelector('.rows') !== null && !document.querySelector('#count').innerText.includes('read')"
        )
    if "#rollout" in url:
        browser.wait("document.querySelector('.grid .cell') !== null")
        browser.press("j")
        browser.press("j")
    time.sleep(0.5)
    browser.take_picture(file)
    shrink(file)


def shrink(file: Path) -> None:
    """Write a picture with few colours."""
    picture = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
    picture.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(file, optimize=True)
    size = file.stat().st_size
    print(f"{file}: {picture.width} x {picture.height}, {size:,} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"{file} must have at most {MAX_BYTES:,} bytes, got {size:,}")


if __name__ == "__main__":
    main()
