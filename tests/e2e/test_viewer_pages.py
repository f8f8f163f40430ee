"""The viewer's pages in a browser: each view, filters, links, keys, hostile text; without Chromium they are skipped."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator

import pytest

from support.browser import CHROMIUM, Browser, open_browser
from support.recorded import make_row, make_trajectory, write_metrics, write_run, write_step
from unbroken.cli import main
from unbroken.viewer.resources import open_runs
from unbroken.viewer.server import ViewerServer

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.slow,
]
HOSTILE = "<script>hacked()</script></script><img src=x onerror=hacked()> \\u202eright to left \\u0000"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The URL of an export."""
    folder = tmp_path_factory.mktemp("view")
    run, other = write_run(folder / "run"), write_run(folder / "other")
    assert main(["view", str(run), str(other), "--export", str(folder / "page")]) == 0
    return (folder / "page" / "index.html").as_uri()


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(started) -> Iterator[Browser]:
    """A browser whose pages must have thrown nothing, and tried nothing that their policy refuses."""
    started.errors.clear()
    yield started
    assert started.errors == []


@pytest.fixture
def server(tmp_path) -> Iterator[ViewerServer]:
    with ViewerServer(open_runs([write_run(tmp_path / "run")])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def read(browser: Browser, selector: str = "main") -> str:
    return " ".join(browser.run(f"document.querySelector({selector!r}).innerText").split())


def count(browser: Browser, selector: str) -> int:
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def selected(browser: Browser) -> str:
    return browser.run("document.querySelector('.cell.selected').dataset.n")


def test_the_run_view_has_curves_of_each_run_evaluations_and_steps(browser, page):
    browser.open(f"{page}#run")
    assert count(browser, "polyline") == 2
    assert "evaluation: reward/mean" in read(browser)
    assert count(browser, 'a[href="#step/1/1"]') == 1


def test_the_step_view_has_groups_strips_and_rollouts(browser, page):
    browser.open(f"{page}#step/0/1")
    assert "3 of 3 rollouts" in read(browser)
    assert "Group g0 reward 0.5, ± 0.5" in read(browser)
    assert count(browser, ".strip .bar") == 3
    assert "fork: rewritten_history" in read(browser)


def test_rollouts_are_chosen_by_text_reward_and_flags_and_sorted(browser, page):
    browser.open(f"{page}#step/0/1")
    browser.type(".filters [type=search]", "ANSWER IS")
    assert "2 of 3 rollouts" in read(browser, "#count")
    assert read(browser, "mark") == "answer is"
    browser.type(".filters [type=number]", "0.5")
    assert "1 of 3 rollouts" in read(browser, "#count")
    browser.type(".filters [type=search]", "")
    browser.type(".filters [type=number]", "")
    for n, name in ((0, "g0/1"), (1, "g0/2"), (2, "g0/1")):
        browser.run(f"document.querySelectorAll('.filters [type=checkbox]')[{n}].click()")
        assert read(browser, ".rollouts .name") == name
        assert "1 of 3 rollouts" in read(browser, "#count")
        browser.run(f"document.querySelectorAll('.filters [type=checkbox]')[{n}].click()")
    sort = "document.querySelector('.sort select')"
    browser.run(f"{sort}.value = 'reward'; {sort}.dispatchEvent(new Event('change'))")
    names = "[...document.querySelectorAll('.rollouts .name')].map((node) => node.innerText)"
    assert browser.run(names) == ["g0/0", "g0/1", "g0/2"]
    browser.click(".sort button")
    assert browser.run(names) == ["g0/1", "g0/0", "g0/2"]


def test_a_link_to_an_id_shows_its_branch_and_what_is_known_of_it(browser, page):
    browser.open(f"{page}#rollout/0/1/1/1/1/2")
    browser.wait("document.querySelector('.cell.selected') !== null")
    assert selected(browser) == "2"
    assert "leaves branch 0 at 1: rewritten_history; 2 there, 9 here" in read(browser, ".branches")
    known = read(browser, ".inspector")
    assert "position 2 id 6" in known
    assert "turn 1 sampler logprob 0 trainer logprob -0.125 difference -0.125 ratio 0.8825" in known
    assert read(browser, ".message.on pre") == "b"


def test_keys_go_through_rollouts_turns_ids_branches_and_colours(browser, page):
    browser.open(f"{page}#rollout/0/1/0")
    browser.press("j")
    assert selected(browser) == "2"
    browser.press("ArrowRight")
    assert browser.run("location.hash") == "#rollout/0/1/0/0/0/3"
    color = "document.querySelector('.cell[data-n=\"4\"]').style.backgroundColor"
    before = browser.run(color)
    browser.press("2")
    assert browser.run(color) != before
    assert read(browser, ".streams .on") == "rollout logprob"
    browser.press("n")
    browser.wait("document.querySelector('main h1').innerText.startsWith('g0/1')")
    browser.press("b")
    assert read(browser, ".branches .on") == "branch 1"
    assert read(browser, ".streams .on") == "rollout logprob"
    browser.press("p")
    browser.wait("document.querySelector('main h1').innerText.startsWith('g0/0')")


@pytest.mark.parametrize("place", ["step/0/1", "rollout/0/1/1", "rollout/0/1/2"])
def test_hostile_text_is_shown_as_text(browser, page, place):
    browser.open(f"{page}#{place}")
    assert HOSTILE in read(browser)
    assert count(browser, "main img, main script") == 0
    assert "\u202e" not in browser.run("document.body.innerHTML")


def test_64k_ids_scroll_at_60_frames_with_only_the_visible_lines_in_the_page(browser, tmp_path):
    write_metrics(tmp_path / "run", 1)
    write_step(tmp_path / "run", 0, [make_trajectory("g0/0", [make_row(range(65536), num_prompt=100)])])
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path / "page")]) == 0
    browser.open(f"{(tmp_path / 'page/index.html').as_uri()}#rollout/0/0/0/0/0/65000")
    browser.wait("document.querySelector('.cell.selected')?.dataset.n === '65000'")
    assert 50 < count(browser, "[data-n]") < 2000
    # The time that a page needs for its lines, without the wait for the next frame, which a busy machine may delay.
    times = browser.run(
        """(() => { const grid = document.querySelector('.grid'); const times = [];
        for (let top = 0; top < 60000; top += 300) {
          const start = performance.now(); grid.scrollTop = top; grid.dispatchEvent(new Event('scroll'));
          grid.getBoundingClientRect(); times.push(performance.now() - start);
        } return times; })()"""
    )
    assert statistics.median(times) < 1000 / 60
    assert count(browser, "[data-n]") < 2000


def test_what_a_live_run_writes_appears(browser, server, tmp_path):
    browser.open(f"{server.url}#run")
    assert count(browser, 'a[href="#step/0/2"]') == 0
    write_step(tmp_path / "run", 2, [make_trajectory("g9/0", [make_row([1, 2], num_prompt=1)])])
    browser.wait("document.querySelector('a[href=\"#step/0/2\"]') !== null")
    browser.click('a[href="#step/0/2"]')
    browser.wait("document.querySelector('main h1').innerText.startsWith('Step 2')")
    assert "1 of 1 rollout" in read(browser)


def test_nothing_is_wider_than_a_narrow_window(browser, page):
    for place in ("run", "step/0/1", "rollout/0/1/1"):
        browser.open(f"{page}#{place}", width=400, height=700, dark=True)
        assert browser.run("document.documentElement.scrollWidth") <= 400, place


def test_a_place_that_is_not_there_says_so(started, page):
    started.open(f"{page}#step/0/7")
    assert "the export has no run/0/step/7" in read(started)
