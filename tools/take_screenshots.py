"""Take the pictures of the viewer for README.md and docs/viewer.md, from a run and from small ones that are made up.

    unbroken train recipes/lookup.py --output runs/lookup
    python tools/take_screenshots.py runs/lookup

Of the run: its curves, all its rollouts, and the ids of one. Made up, because their texts have Markdown and LaTeX: one
problem in two runs, two rollouts of it side by side, a note, and the diagnosis of a run whose rewards are all 0. Needs
Chromium, which tests/support/browser.py drives. The pictures are written to docs/figures, with few colours so that each
has less than 150 kB. Look at them before a commit: they must show nothing of the machine they are from.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Browser, open_browser  # noqa: E402  # of the tests
from support.recorded import make_row, make_trajectory, make_turn, write_step  # noqa: E402
from unbroken.viewer.resources import Resources, open_runs  # noqa: E402
from unbroken.viewer.server import ViewerServer  # noqa: E402

WIDTH, NARROW = 1280, 420
TABLE = "table/0?reward=..0.5&sort=-ids"
MAX_BYTES = 150_000
NUM_COLORS = 64
NUM_STEPS, GROUP_SIZE = 16, 4
RIGHT = r"""Let $b$ be the number of boxes and $a$ the apples in **each** of them. The total is

$$T = \sum_{i=1}^{b} a + c = b \cdot a + c$$

| who | apples |
|:----|-------:|
| Tom | {boxes} |
| Ann | {more} |

1. Tom has \(b \times a = {boxes}\) apples.
2. Ann has *{more}* more.

The answer is \boxed{{total}}."""
WRONG = r"""Tom has $b + a = {sum}$ apples, because a box *is* an apple:

```python
total = {b} + {a}
```

The answer is **{sum}**."""


class Picture(NamedTuple):
    """What is taken: a place in the page, the height of the window, and a script that prepares the page."""

    name: str
    place: str
    height: int
    script: str = ""


def main() -> None:
    """Take all pictures, wide for the docs; `--narrow FOLDER` also takes them 420 pixels wide, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a run with rollouts")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--narrow", type=Path, help="folder for narrow pictures")
    arguments = parser.parse_args()
    resources = open_runs([arguments.run])
    step, rollout = choose_rollout(resources)
    press = "document.querySelectorAll('.turns button')[1]?.click()"
    scroll = "document.getElementById('fold-Sampler-against-trainer').scrollIntoView(); scrollBy(0, -60)"
    own = [Picture("viewer-run", "run", 860), Picture("viewer-table", TABLE, 620)]
    own.append(Picture("viewer-curves", "run?smooth=10&log=1", 560, scroll))
    take_all(resources, [*own, Picture("viewer", f"rollout/0/{step}/{rollout}/0", 780, press)], arguments)
    with tempfile.TemporaryDirectory() as folder:
        made = [write_example(Path(folder) / name, rate) for name, rate in (("apples", 0.45), ("apples-rloo", 0.25))]
        examples = open_runs(made)
        last = NUM_STEPS - 1
        note = {"labels": ["arithmetic", "check"], "text": "It adds where it must multiply."}
        examples.write_note(f"run/0/step/1/rollout/{find_wrong(examples, 1)}/note", json.dumps(note).encode())
        problem = examples.get("run/0/step/1")["trajectories"][0]["problem"]
        places = [
            Picture("viewer-problem", f"problem/{problem}", 620),
            Picture("viewer-pair", f"pair/0/{last}/0/1/1/{find_wrong(examples, 1, run=1)}", 640),
            Picture(
                "viewer-note",
                f"rollout/0/1/{find_wrong(examples, 1)}",
                400,
                "document.querySelector('.noted').open = true",
            ),
        ]
        take_all(examples, places, arguments)
        stuck = open_runs([write_example(Path(folder) / "apples-stuck", 0.0)])
        take_all(stuck, [Picture("viewer-diagnosis", "run", 480)], arguments)


def choose_rollout(resources: Resources) -> tuple[int, int]:
    """The rollout with most turns of those that were scored and trained, in the last step that has any."""
    steps = [step for step in resources.get("run/0")["recorded_steps"] if isinstance(step, int)]
    for step in reversed(steps):
        members = resources.get(f"run/0/step/{step}")["trajectories"]
        if found := [each for each in members if each["is_trained"] and each["max_abs"] is not None]:
            return step, max(found, key=lambda each: (each["num_turns"], -each["index"]))["index"]
    raise SystemExit("the run must have rollouts that were scored and trained")


def find_wrong(resources: Resources, step: int, *, run: int = 0) -> int:
    """The first rollout of a step that has no reward."""
    return next(each["index"] for each in resources.get(f"run/{run}/step/{step}")["trajectories"] if not each["reward"])


def write_example(folder: Path, rate: float) -> Path:
    """A run of three problems whose rollouts are right more often with each step; with a rate of 0 they never are."""
    random = Random(folder.name)
    lines = []
    for step in range(NUM_STEPS):
        members = [
            make_rollout(step, problem, member, is_right=random.random() < min(0.95, rate * step / 4))
            for problem in range(3)
            for member in range(GROUP_SIZE)
        ]
        rewards = [each["reward"] for each in members]
        mean = sum(rewards) / len(rewards)
        write_step(
            folder,
            step,
            members,
            num_groups=3,
            num_kept=3,
            num_rollouts=len(members),
            rewards=[len(members), mean, 0.4],
        )
        numbers = {"mean": mean, "min": min(rewards), "max": max(rewards)}
        counted = {"rollout/num_trainable": len(members), "rollout/num_trajectories": len(members), "counters/forks": 0}
        lines.append({"step": step, **{f"reward/{name}": value for name, value in numbers.items()}, **counted})
    (folder / "metrics").mkdir()
    (folder / "metrics/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_rollout(step: int, problem: int, member: int, *, is_right: bool) -> dict[str, Any]:
    """A rollout of a problem about apples."""
    boxes, apples, more = 3 + problem, 4 + problem, 5 + problem
    words = {
        "boxes": boxes * apples,
        "more": more,
        "total": boxes * apples + more,
        "b": boxes,
        "a": apples,
        "sum": boxes + apples,
    }
    answer = RIGHT if is_right else WRONG
    for name, value in words.items():
        answer = answer.replace(f"{{{name}}}", str(value))
    question = f"Tom has {boxes} boxes of {apples} apples, and Ann has {more} more. How many apples are there?"
    said = {"role": "assistant", "content": answer}
    return make_trajectory(
        f"{step}-{problem}/{member}",
        [make_row(range(20), num_prompt=8)],
        reward=float(is_right),
        reward_parts={"exact": float(is_right)},
        data={"index": problem, "columns": {"question": question, "answer": str(words["total"])}},
        messages=[{"role": "user", "content": question}, said],
        turns=[make_turn(12, said)],
    )


def take_all(resources: Resources, pictures: list[Picture], arguments: argparse.Namespace) -> None:
    """Take pictures of runs, and narrow ones if they are wanted."""
    with serve(resources) as url, open_browser() as browser:
        for each in pictures:
            take(browser, url, each, arguments.output / f"{each.name}.png", width=WIDTH, height=each.height)
            for dark in (False, True) if arguments.narrow is not None else ():
                arguments.narrow.mkdir(parents=True, exist_ok=True)
                file = arguments.narrow / f"{each.name}{'-dark' if dark else ''}.png"
                take(browser, url, each, file, width=NARROW, height=900, dark=dark)


@contextmanager
def serve(resources: Resources) -> Iterator[str]:
    """The URL of the pages during the block."""
    with ViewerServer(resources) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def take(
    browser: Browser, url: str, picture: Picture, file: Path, *, width: int, height: int, dark: bool = False
) -> None:
    """Take one picture, once all that it shows is there."""
    browser.open(f"{url}#{picture.place}", width=width, height=height, dark=dark)
    if picture.place == TABLE:
        browser.wait(
            "document.querySelector('.rows') !== null && !document.querySelector('#count').innerText.includes('read')"
        )
    if picture.place.startswith("rollout"):
        browser.wait("document.querySelector('.grid .cell') !== null")
    if picture.script:
        browser.run(picture.script)
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
