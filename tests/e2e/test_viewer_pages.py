"""The viewer's pages in a browser: each view of an export, with hostile text; without Chromium they are skipped."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.recorded import make_row, make_trajectory, write_metrics, write_run, write_step
from unbroken.cli import main

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.slow,
]
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    assert main(["view", str(write_run(folder / "run")), "--export", str(folder / "page")]) == 0
    return folder / "page"


def show(page: Path, place: str, tmp_path: Path) -> str:
    """The page as it is once its scripts have run."""
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000", "--dump-dom"]
    url = f"{(page / 'index.html').as_uri()}#{place}"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def read(dom: str) -> str:
    """The text of a page."""
    return html.unescape(re.sub(r"<[^>]*>", " ", dom))


def test_the_run_view_has_curves_evaluations_and_steps(page, tmp_path):
    dom = show(page, "run", tmp_path)
    assert dom.count("<polyline") == 1
    assert "evaluation: reward/mean" in dom
    assert 'href="#step/0/1"' in dom


def test_the_step_view_has_groups_strips_and_rollouts(page, tmp_path):
    dom = show(page, "step/0/1", tmp_path)
    assert "3 of 3 rollouts" in read(dom)
    assert dom.count('class="bar') == 3
    assert "fork: rewritten_history" in dom
    assert "Group g0" in dom


def test_a_link_to_an_id_shows_its_branch_and_what_is_known_of_it(page, tmp_path):
    dom = show(page, "rollout/0/1/1/1/1/2", tmp_path)
    assert 'class="cell selected" data-n="2"' in dom
    text = " ".join(read(dom).split())
    assert "leaves branch 0 at 1: rewritten_history" in text
    assert "position 2 id 6" in text
    assert "sampler logprob 0 trainer logprob -0.125 difference -0.125 ratio 0.8825" in text
    assert "turn 1" in text


@pytest.mark.parametrize("place", ["step/0/1", "rollout/0/1/1", "rollout/0/1/2"])
def test_hostile_text_is_shown_as_text(page, tmp_path, place):
    dom = show(page, place, tmp_path)
    assert "<script>hacked" not in dom
    assert "<img" not in dom
    text = read(dom)
    assert "<script>hacked()</script></script><img src=x onerror=hacked()>" in text
    assert "\\u202eright to left \\u0000" in text
    assert "\u202e" not in dom


def test_only_the_visible_lines_of_64k_ids_are_in_the_page(tmp_path):
    write_metrics(tmp_path / "run", 1)
    write_step(tmp_path / "run", 0, [make_trajectory("g0/0", [make_row(range(65536), num_prompt=100)])])
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path / "page")]) == 0
    dom = show(tmp_path / "page", "rollout/0/0/0/0/0/65000", tmp_path / "profile")
    assert 'class="cell selected" data-n="65000"' in dom
    assert 50 < dom.count("data-n=") < 2000


def test_a_place_that_is_not_there_says_so(page, tmp_path):
    assert "the export has no run/0/step/7" in read(show(page, "step/0/7", tmp_path))
