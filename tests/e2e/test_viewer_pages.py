"""The viewer's pages in a browser: each view, filters, links, keys, hostile text; without Chromium they are skipped."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs

import pytest
from PIL import Image

from support.browser import CHROMIUM, Browser
from support.recorded import make_rich, make_row, make_trajectory, write_metrics, write_run, write_step
from unbroken.cli import main
from unbroken.viewer.resources import open_runs
from unbroken.viewer.server import ViewerServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
HOSTILE = "<script>hacked()</script></script><img src=x onerror=hacked()> \\u202eright to left \\u0000"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The URL of an export."""
    folder = tmp_path_factory.mktemp("view")
    run, other = write_run(folder / "run"), write_run(folder / "other")
    write_step(other, 2, [make_rich()])
    (other / "rollouts" / "images").mkdir()
    (other / "rollouts" / "images" / ("0" * 64)).write_bytes(make_picture())
    assert main(["view", str(run), str(other), "--export", str(folder / "page")]) == 0
    return (folder / "page" / "index.html").as_uri()


def make_picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 3), "red").save(file, "PNG")
    return file.getvalue()


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
    browser.wait("document.querySelector('.cell.selected') !== null")  # the cells are drawn with the next frame
    return browser.run("document.querySelector('.cell.selected').dataset.n")


def test_the_run_view_has_curves_of_each_run_evaluations_and_steps(browser, page):
    browser.open(f"{page}#run")
    assert count(browser, "polyline") == 2
    assert "evaluation: reward/mean" in read(browser)
    assert count(browser, 'a[href="#step/1/2"]') == 1  # the last one that has rollouts
    browser.run("document.getElementById('scrubber-1').focus()")
    browser.press("ArrowLeft")
    browser.wait("document.querySelector('a[href=\"#step/1/1\"]') !== null")
    browser.press("Enter")
    browser.wait("document.querySelector('main h1').innerText.startsWith('Step 1')")
    browser.wait("document.activeElement.id === 'scrubber-1'")
    browser.press("ArrowRight")
    browser.wait("document.querySelector('main h1').innerText.startsWith('Step 2')")


def test_the_numbers_at_the_axis_of_tiny_values_are_not_cut(browser, page):
    browser.open(f"{page}#run")
    labels = browser.run(
        "(() => { const axes = makeAxes({ x0: 0, x1: 49, y0: 0, y1: 5e-14, unit: 2.5e-14 });"
        "document.querySelector('svg[role=img]').append(axes);"
        "return [...axes.querySelectorAll('text')].map((each) => [each.textContent, each.getBBox().x]); })()"
    )
    assert [text for text, _ in labels] == ["0", "2.5e-14", "5e-14", "0", "49"]
    assert min(x for _, x in labels) >= 0


@pytest.fixture(scope="module")
def curves(tmp_path_factory) -> str:
    """The URL of an export of a run of 8 steps: one number grows by 10 each step, some move, and some never do."""
    folder = tmp_path_factory.mktemp("curves")
    (folder / "run" / "metrics").mkdir(parents=True)
    lines = [
        {
            "step": step,
            "reward/mean": [0.25, 0.75][step % 2],
            "counters/forks": 0,
            "train/learning_rate": 1e-5,
            "train/loss": step - 3,
            "train/grad_norm": 10.0 ** (step - 3),
            "mismatch/kl": 10.0**-step if step else 0,
            "others/same": 7,
            "others/other": step,
        }
        for step in range(8)
    ]
    (folder / "run/metrics/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["view", str(folder / "run"), "--export", str(folder / "page")]) == 0
    return (folder / "page" / "index.html").as_uri()


STILL = "[...document.querySelectorAll('.stills .still')].map((node) => node.innerText.replace(/\\s+/g, ' '))"


def test_a_number_that_never_moves_is_a_line_of_text(browser, curves):
    browser.open(f"{curves}#run")
    assert browser.run(STILL) == ["forks counters/forks 0", "learning rate train/learning_rate 1e-5"]
    assert count(browser, ".chart") == 4
    browser.run("document.querySelector('.metrics').open = true")
    browser.wait("document.querySelector('.metrics .chart') !== null")
    assert browser.run(STILL)[-1] == "others/same 7"
    browser.run("globalThis.still = (...runs) => isStill(runs.map((points) => ({ points })))")
    assert browser.run("still([[0, 1], [1, 1]], [[0, 2], [1, null]])") is True
    assert browser.run("still([[0, 1], [1, 1]], [[0, 1], [1, 2]])") is False
    assert browser.run("still([[0, 1]])") is False  # one step: nobody knows yet


def read_chart(browser: Browser, name: str) -> str:
    charts = "[...document.querySelectorAll('.chart')]"
    return browser.run(f"{charts}.find((each) => each.innerText.includes('{name}')).innerText").replace("\n", " ")


def test_curves_are_smoothed_and_logarithmic_as_the_url_says(browser, curves):
    browser.open(f"{curves}#run?smooth=2&log=1")
    assert "last 0.75 mean 0.5" in read_chart(browser, "reward/mean")
    assert count(browser, ".chart .raw") == 4
    assert "linear: it has values below 0" in read_chart(browser, "train/loss")
    assert "linear: its values are within a factor of 10" in read_chart(browser, "reward/mean")
    assert "1 of 8 values are 0, and not shown" in read_chart(browser, "mismatch/kl")
    assert "0.001 0.1 10 1000 100000" in read_chart(browser, "train/grad_norm")
    browser.run("document.getElementById('look-log').focus(); document.getElementById('look-log').click()")
    browser.wait("!document.querySelector('.chart .note')")
    assert browser.run("location.hash") == "#run?smooth=2"
    assert browser.run("document.activeElement.id") == "look-log"
    select = "document.getElementById('look-smooth')"
    browser.run(f"{select}.selectedIndex = 0; {select}.dispatchEvent(new Event('change'))")
    browser.wait("!document.querySelector('.chart .raw')")
    assert browser.run("location.hash") == "#run"
    browser.run(f"{select}.selectedIndex = 1; {select}.dispatchEvent(new Event('change'))")
    browser.wait("document.querySelector('.chart .raw') !== null")
    assert browser.run("location.hash") == "#run?smooth=3"
    assert browser.run("document.querySelector('#top a').hash") == "#run?smooth=3"  # whoever comes back finds it


def test_an_axis_of_powers_has_marks_around_its_values(browser, curves):
    browser.open(f"{curves}#run")
    for low, high, ticks in ((1, 100, [1, 2, 5, 10, 20, 50, 100]), (0.03, 0.4, [0.02, 0.05, 0.1, 0.2, 0.5])):
        assert browser.run(f"findDecades([{low}, {high}]).ticks") == ticks
    assert browser.run("findDecades([1e-8, 1e4]).ticks") == [1e-8, 1e-5, 1e-2, 1e1, 1e4]


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
    fork = "document.querySelector('[aria-label=\"fork reason\"]')"
    for reason, number in (("rewritten_history", 1), ("", 3)):
        browser.run(f"{fork}.value = '{reason}'; {fork}.dispatchEvent(new Event('change'))")
        assert f"{number} of 3 rollouts" in read(browser, "#count")
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


@pytest.fixture
def table(tmp_path) -> Iterator[ViewerServer]:
    """Three steps of four rollouts whose first lines have summaries, and an evaluation of a set with a strange name."""
    for step in range(3):
        members = [
            make_trajectory(
                f"{step}-{k // 2}/{k % 2}",
                [make_row(range(3 + k), num_prompt=2) | {"is_trained": k < 2}],
                reward=step + k / 4,
                reward_parts={"exact": float(k % 2), "format": 1.0},
                data={"index": k, "columns": {"question": HOSTILE, "answer": f"{step}{k}", "level": [k]}},
                messages=[
                    {"role": "user", "content": f"Question {k}"},
                    {"role": "assistant", "content": f"{HOSTILE} is {step}{k}"},
                ],
            )
            for k in range(4)
        ]
        write_step(tmp_path / "run", step, members, num_groups=5, num_rollouts=10, rewards=[10, 0.625, 0.5])
    write_step(tmp_path / "run", 2, members[:2], folder="evaluations/more & math", set="more & math")
    write_metrics(tmp_path / "run", 3)
    with ViewerServer(open_runs([tmp_path / "run"])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def wait_for_rows(browser: Browser, text: str) -> None:
    browser.wait(f"document.querySelector('#count')?.innerText.startsWith({text!r})")


STEPS = "[...document.querySelectorAll('.rows tbody tr')].map(({cells: [a, b]}) => `${a.innerText} ${b.innerText}`)"


def test_one_table_has_all_rollouts_of_a_run_by_what_is_asked_for_and_its_url_says_what(browser, table):
    browser.open(f"{table.url}#table/0?")
    wait_for_rows(browser, "14 of 14 rollouts")
    assert "prompt expected given" in read(browser, ".rows thead")
    assert browser.run("document.querySelector('.rows [data-name=prompt]').innerText") == "Question 0"
    assert "onerror=hacked()> \\u202eright to left \\u0000 is 01" in read(browser, ".rows")
    browser.type("#filter-text", "IS 11")
    wait_for_rows(browser, "1 of 14 rollouts · reward 1.25")
    assert browser.run("location.hash") == "#table/0?q=IS+11"
    hashes = {
        "step=1..2&set=training&sort=-reward": ["2 2.75", "2 2.5", "2 2.25", "2 2", "1 1.75", "1 1.5", "1 1.25", "1 1"],
        "part=exact&value=1..&reward=..1.5&sort=reward": ["0 0.25", "0 0.75", "1 1.25"],
        "set=more+%26+math&variance=1": ["2 more & math 2", "2 more & math 2.25"],
        "ids=4..4&is=untrained": ["0 0.75", "1 1.75", "2 2.75"],
    }
    for query, rows in hashes.items():
        browser.open(f"{table.url}#table/0?{query}")
        browser.wait(f"JSON.stringify({STEPS}) === JSON.stringify({rows})")
        assert parse_qs(browser.run("writeChoice()")) == parse_qs(query)
    browser.run("document.querySelectorAll('.rows th button')[1].click()")
    assert browser.run("location.hash").endswith("sort=-reward")


def test_the_table_is_used_by_keys_and_its_order_is_that_of_the_rollouts(browser, table):
    """Keys that come while a page is made are not lost."""
    browser.open(f"{table.url}#table/0?sort=-reward&set=training")
    wait_for_rows(browser, "12 of 14")
    browser.press("/")
    assert browser.run("document.activeElement.id") == "filter-text"
    browser.run("document.activeElement.blur()")
    for key in "jj":
        browser.press(key)
    assert browser.run("document.activeElement.closest('tr').cells[1].innerText") == "2.5"
    browser.run("document.activeElement.click()")
    browser.wait("document.querySelector('main h1').innerText.startsWith('2-1/0')")
    for key in "nnpnn":
        browser.press(key)
    browser.wait("document.querySelector('main h1').innerText.startsWith('1-1/1')")
    assert "5 of 12" in read(browser, ".head nav")
    browser.press("Escape")
    wait_for_rows(browser, "12 of 14")
    browser.wait("document.activeElement.closest('tr')?.cells[1].innerText === '1.75'")


def test_the_next_rollout_is_found_beyond_the_lines_that_are_shown(browser, table):
    browser.open(f"{table.url}#table/0?sort=-reward&set=training")
    browser.run("shownTable.size = 2, refreshTable()")
    browser.wait("document.querySelectorAll('.rows tbody tr').length === 2")
    browser.run("document.querySelectorAll('.rows tbody td:first-child a')[1].click()")
    browser.wait("document.querySelector('main h1').innerText.startsWith('2-1/0')")
    browser.press("n")
    browser.wait("document.querySelector('main h1').innerText.startsWith('2-0/1')")
    assert "3 of 12" in read(browser, ".head nav")
    browser.press("Escape")
    browser.wait("document.querySelectorAll('.rows tbody tr').length === 12")
    browser.run("shownTable.size = 2, refreshTable()")
    browser.wait("document.querySelector('.results > button')?.innerText === 'show 10 more of 12'")
    browser.click(".results > button")
    browser.wait("document.querySelectorAll('.rows tbody tr').length === 12")


def write_two_models(folder) -> list[str]:
    """Two runs of the same two problems, whose second learns the first problem; and an evaluation of it."""
    for name, rewards in (("one", [0.0, 0.0, 0.0]), ("two", [0.0, 0.5, 1.0])):
        for step, reward in enumerate(rewards):
            members = [
                make_trajectory(
                    f"{step}-{problem}/{k}",
                    [make_row(range(4), num_prompt=2)],
                    reward=reward if problem == 0 else 0.25,
                    data={"columns": {"question": f"Question {problem}", "answer": "7"}},
                    messages=[
                        {"role": "user", "content": f"Question {problem}"},
                        {"role": "assistant", "content": f"{name} says {HOSTILE} at {step}"},
                    ],
                )
                for problem in range(2)
                for k in range(2)
            ]
            write_step(folder / name, step, members, num_rollouts=4)
        write_step(folder / name, 2, members[:1], folder="evaluations/math", set="math")
        write_metrics(folder / name, 3)
    return [str(folder / "one"), str(folder / "two")]


def read_problem(browser: Browser) -> None:
    assert read(browser, "h1") == "Problem 14 rollouts of one, two"
    assert read(browser, ".question") == "Question 0"
    titles = "[...document.querySelectorAll('figcaption')].map((node) => node.innerText)"
    assert browser.run(titles) == ["reward in training", "reward in evaluations (math)"]
    rows = "[...document.querySelectorAll('.by-step tbody tr')].map((row) => row.innerText.split(/\\s+/).join(' '))"
    assert browser.run(rows)[4:] == [
        *("step 0 0 ± 0 0 0", "step 1 0.5 ± 0 0.5 0.5", "step 2 1 ± 0 1 1"),
        "evaluation math after 2 steps 1 1",
    ]
    assert "hacked" in browser.run("document.querySelector('.by-step .chip').title")
    browser.run("document.querySelectorAll('.by-step')[1].querySelectorAll('.chip')[2].click()")
    browser.wait("document.querySelector('main h1').innerText.startsWith('1-0/0')")


@pytest.fixture
def two_models(tmp_path) -> Iterator[ViewerServer]:
    with ViewerServer(open_runs(write_two_models(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_problem_has_its_rollouts_of_all_steps_evaluations_and_runs(browser, two_models):
    browser.open(f"{two_models.url}#table/1?set=training&sort=step")
    wait_for_rows(browser, "12 of 13")
    browser.click(".rows [data-name=prompt] a")
    browser.wait("document.querySelector('.by-step') !== null")
    read_problem(browser)
    browser.run("[...document.querySelectorAll('.head a')].find((a) => a.innerText.includes('at all steps')).click()")
    browser.wait("document.querySelector('.by-step') !== null")
    browser.open(f"{two_models.url}#step/1/1")
    assert read(browser, ".group a.quiet") == "Question 0"
    browser.open(f"{two_models.url}#problem/nowhere")
    assert "no rollout of this problem was kept" in read(browser)


def test_an_export_has_the_problems_of_two_runs(browser, tmp_path):
    assert main(["view", *write_two_models(tmp_path), "--export", str(tmp_path / "page")]) == 0
    browser.open(f"{(tmp_path / 'page/index.html').as_uri()}#table/0?")
    wait_for_rows(browser, "13 of 13")
    browser.click(".rows [data-name=prompt] a")
    browser.wait("document.querySelector('.by-step') !== null")
    read_problem(browser)


def read_pair(browser: Browser) -> list[str]:
    """What stands on each side, below its choice: run, facts, and messages."""
    browser.wait("document.querySelectorAll('.pair .columns > section').length === 2")
    side = "[...section.children].filter((node) => node.tagName !== 'SELECT').map((node) => node.innerText).join(' ')"
    return browser.run(
        f"[...document.querySelectorAll('.columns > section')].map((section) => ({side}).replace(/\\s+/g, ' '))"
    )


def test_two_rollouts_of_a_problem_stand_side_by_side_with_what_both_have_above(browser, two_models):
    browser.open(f"{two_models.url}#rollout/0/1/0")
    browser.run("[...document.querySelectorAll('.head a')].find((a) => a.innerText === 'beside another').click()")
    first, second = read_pair(browser)
    assert first.startswith("one reward 0 · exact 1 · completed · 1 turn · 2 sampled")
    assert second.startswith("two reward 0.5 · ")  # at the same step
    assert read(browser, ".pair > .message") == "user Question 0"
    assert f"one says {HOSTILE} at 1" in first
    assert f"two says {HOSTILE} at 1" in second
    choose = "document.getElementById('pair-1')"
    options = browser.run(f"[...{choose}.options].map((each) => each.innerText)")
    assert len(options) == 14
    assert "two: step 0, 0-0/0, reward 0" in options
    browser.run(f"{choose}.selectedIndex = 1; {choose}.dispatchEvent(new Event('change'))")
    browser.wait("location.hash === '#pair/0/1/0/0/0/1'")
    browser.wait("document.querySelectorAll('.columns > section')[1].innerText.includes('at 0')")
    assert read_pair(browser)[1].startswith("one reward 0 · ")
    browser.run("[...document.querySelectorAll('.pair a')].find((a) => a.innerText === 'its ids').click()")
    browser.wait("document.querySelector('main h1').innerText.startsWith('1-0/0')")
    browser.open(f"{two_models.url}#pair/0/1/9")
    assert "step 1 of run 0 has no rollout 9" in read(browser)


def test_an_export_has_pairs_and_says_which_of_them_it_has_not(browser, tmp_path):
    """An export has the lines of all rollouts, and some of them whole: at --max-rollouts 4 one of each step."""
    page = tmp_path / "page"
    assert main(["view", *write_two_models(tmp_path), "--max-rollouts", "4", "--export", str(page)]) == 0
    browser.open(f"{(page / 'index.html').as_uri()}#pair/0/0/0/1/0/1")
    first, second = read_pair(browser)
    assert f"one says {HOSTILE} at 0" in first
    assert "two reward 0 · " in second
    assert "the export has no run/1/step/0/rollout/1" in second
    browser.errors.clear()  # that file


def test_a_note_with_labels_is_saved_found_again_and_shown_as_text(browser, table):
    browser.open(f"{table.url}#rollout/0/1/3")
    assert read(browser, ".noted summary") == "Note and labels"
    browser.run("document.querySelector('.noted').open = true")
    browser.type("#note-labels", "wrong tool, <b>odd</b>, wrong tool")
    browser.type("#note-text", f"{HOSTILE}\n")
    browser.click(".noted [type=submit]")
    browser.wait("document.querySelector('.noted').innerText.includes('saved')")
    assert read(browser, ".noted summary") == f"wrong tool <b>odd</b> {HOSTILE}"
    browser.open(f"{table.url}#table/0?")
    wait_for_rows(browser, "14 of 14")
    select = "document.getElementById('filter-label')"
    browser.wait(f"{select} !== null")
    browser.run(f"{select}.selectedIndex = 1; {select}.dispatchEvent(new Event('change'))")
    wait_for_rows(browser, "1 of 14")
    assert browser.run("location.hash") == "#table/0?label=%3Cb%3Eodd%3C%2Fb%3E"
    marks = browser.run("[...document.querySelectorAll('.rows .mark')].map((node) => node.innerText)")
    assert marks[-3:] == ["label: wrong tool", "label: <b>odd</b>", "note"]
    browser.open(f"{table.url}#step/0/1?label=wrong+tool")
    assert "1 of 4 rollouts" in read(browser, "#count")
    browser.open(f"{table.url}#rollout/0/1/3")
    browser.run("document.querySelector('.noted').open = true")
    browser.type("#note-labels", "x" * 61)
    browser.click(".noted [type=submit]")
    browser.wait("document.querySelector('.noted').innerText.includes('a note must have labels and a text')")
    browser.errors.clear()  # that answer


def test_an_export_shows_notes_and_says_where_they_are_made(browser, tmp_path):
    run = write_run(tmp_path / "run")
    resources = open_runs([run])
    sha256 = resources.get("run/0/step/1/rollout/1")["sha256"]
    note = {"labels": ["odd"], "text": "two\nlines", "sha256": sha256, "shown_time_s": None}
    resources.write_note("run/0/step/1/rollout/1/note", json.dumps(note).encode())
    assert main(["view", str(run), "--export", str(tmp_path / "page")]) == 0
    browser.open(f"{(tmp_path / 'page/index.html').as_uri()}#rollout/0/1/1")
    browser.run("document.querySelector('.noted').open = true")
    assert read(browser, ".noted") == "odd two lines two lines Notes are made where unbroken view RUN serves this page."
    assert count(browser, ".noted form") == 0
    browser.open(f"{(tmp_path / 'page/index.html').as_uri()}#table/0?label=odd")
    wait_for_rows(browser, "1 of 4")


def test_filters_are_saved_under_a_name_in_the_browser(browser, table):
    browser.open(f"{table.url}#table/0?is=untrained")
    wait_for_rows(browser, "6 of 14")
    browser.run("document.querySelector('.saved input').value = '<b>mine'")
    browser.run("document.querySelector('.saved input + button').click()")
    browser.open(f"{table.url}#table/0?")
    wait_for_rows(browser, "14 of 14")
    browser.run("[...document.querySelectorAll('.saved a')].find((a) => a.innerText === '<b>mine').click()")
    wait_for_rows(browser, "6 of 14")
    browser.run("document.querySelector('[title=\"remove <b>mine\"]').click()")
    assert "mine" not in read(browser, ".saved")


def test_a_rollout_shows_the_expected_answer_its_row_and_whether_it_was_trained(browser, table):
    browser.open(f"{table.url}#rollout/0/1/3")
    assert f"Expected 13 Given {HOSTILE} is 13 Row 3 of the data set" in read(browser, ".answers")
    browser.run("document.querySelector('.answers details').open = true")
    assert f"question {HOSTILE}" in read(browser, ".answers table")
    assert "sampled by policy version 3 · not trained" in read(browser, ".head")
    browser.open(f"{table.url}#rollout/0/1/0")
    assert "sampled by policy version 3 · trained from policy version 1" in read(browser, ".head")
    browser.open(f"{table.url}#rollout/0/2@more%20%26%20math/0")
    assert "2-0/0 of evaluation more & math after 2 steps" in read(browser, "main h1")


def test_the_head_of_a_step_is_the_step_and_not_what_was_kept_of_it(browser, table):
    browser.open(f"{table.url}#step/0/2")
    head = read(browser, ".head")
    assert "10 rollouts in 5 groups · 4 rollouts in 1 group kept · reward 0.2 ± 0.5" in head  # the mean is the curve's
    browser.open(f"{table.url}#run")
    assert "step 2 of 2 · reward 0.2" in read(browser, ".scrubber")


def test_runs_are_compared_by_the_settings_in_which_they_differ(browser, tmp_path):
    for name, rate in (("a", 1e-3), ("b", 1e-4)):
        write_metrics(tmp_path / name, 2)
        settings = {"output": name, "algorithm": "grpo", "learning_rate": rate, "<i>": rate}
        (tmp_path / name / "recipe.json").write_text(json.dumps({"recipe": "r", "settings": settings}))
    assert main(["view", str(tmp_path / "a"), str(tmp_path / "b"), "--export", str(tmp_path / "page")]) == 0
    browser.open((tmp_path / "page/index.html").as_uri())
    assert "setting a b <i> 0.001 0.0001 learning_rate 0.001 0.0001" in read(browser, ".settings")


def test_an_export_has_the_table_and_searches_it(browser, page):
    browser.open(f"{page}#table/0?q=ANSWER+IS")
    wait_for_rows(browser, "3 of 4 rollouts")
    assert browser.run("document.querySelectorAll('.rows tbody tr').length") == 3


def test_a_link_to_an_id_shows_its_branch_and_what_is_known_of_it(browser, page):
    browser.open(f"{page}#rollout/0/1/1/1/1/2")
    assert selected(browser) == "2"
    assert "leaves branch 0 at 1: rewritten_history; there #1 #2 #3 #4 (id 2) here #1 #9 #6 (id 9)" in read(
        browser, ".branches"
    )
    assert browser.run("[...document.querySelectorAll('.fork mark')].map((node) => node.innerText)") == ["#2", "#9"]
    known = read(browser, ".inspector")
    assert "position 2 id 6" in known
    assert "turn 1 sampler logprob 0 trainer logprob -0.125 difference -0.125 ratio 0.8825" in known
    assert read(browser, ".message.on pre") == "b"
    assert read(browser, ".others") == ""
    browser.press("b")
    assert "The history was rewritten after this branch." in read(browser, ".others")


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
    assert read(browser, ".branches .on") == "branch 1"  # the one that went on
    browser.press("b")
    assert read(browser, ".branches .on") == "branch 0"
    assert read(browser, ".streams .on") == "rollout logprob"
    browser.press("p")
    browser.wait("document.querySelector('main h1').innerText.startsWith('g0/0')")


def test_each_stream_shows_its_own_of_an_id(browser, page):
    browser.open(f"{page}#rollout/1/2/0")
    assert read(browser, ".legend") == "prompt sampled bridge tool text closing image"
    names = ["origin", "rollout logprob", "trainer − sampler", "entropy", "rank", "advantage", "policy version"]
    names.append("loss, clip, mask")
    browser.wait("document.querySelector('.grid .cell') !== null")  # cells are drawn once the grid has its size
    colors = "[...document.querySelectorAll('.grid .cell')].map((node) => node.style.backgroundColor)"
    shown = []
    for key, name in enumerate(names, start=1):
        browser.press(str(key))
        assert read(browser, ".streams .on") == name
        shown.append(tuple(browser.run(colors)))
    assert len(set(shown)) == len(names)
    assert read(browser, ".legend") == "in the loss clipped by the loss masked or truncated by the correction"
    assert shown[-1][2] != shown[-1][3] != shown[-1][8]
    assert [color == "" for color in shown[3]] == [True, True, False, False, True, True, True, False, False]


def test_pointing_at_an_id_says_all_that_is_known_of_it(browser, page):
    browser.open(f"{page}#rollout/1/2/0/0/0/3")
    browser.wait("document.querySelector('.cell.selected') !== null")
    known = read(browser, ".inspector")
    for part in ("sampler logprob -0.25", "trainer logprob -0.375", "ratio 0.8825", "rank 3", "entropy 0.25 nats"):
        assert part in known
    assert "policy version 3 loss clipped" in known
    over = "document.querySelector('.grid [data-n=\"%d\"]').dispatchEvent(new Event('pointerover', {bubbles: true}))"
    for n, part in ((1, "origin image"), (4, "origin closing node 2 turn prompt of 1"), (6, "origin tool text")):
        browser.run(over % n)
        assert part in read(browser, ".inspector")
    browser.run(over % 1)
    assert "image 00000000, id 1 of 1" in read(browser, ".inspector")


def test_a_link_to_a_turn_shows_its_first_id(browser, page):
    browser.open(f"{page}#rollout/1/2/0/0/1")
    assert selected(browser) == "7"


def test_the_time_line_has_turns_and_calls_and_leads_to_their_ids(browser, page):
    browser.open(f"{page}#rollout/1/2/0")
    assert read(browser, ".axis") == "0 s 1.75 s 3.5 s"
    lanes = "[...document.querySelectorAll('.lane')].map((lane) => lane.querySelectorAll('.time').length)"
    assert browser.run(lanes) == [4, 1, 1, 1]
    title = browser.run("document.querySelectorAll('.lane')[2].querySelector('.time').title")
    assert title.startswith("turn 0: <script>hacked()")
    assert title.endswith("0.5 s from 1 s")
    browser.run("document.querySelectorAll('.lane')[0].querySelectorAll('.time')[3].click()")
    assert selected(browser) == "7"


def test_what_retokenising_would_make_is_shown_or_why_it_is_not_known(browser, page):
    browser.open(f"{page}#rollout/0/1/0")
    browser.wait("document.querySelector('.retokenised') !== null")
    browser.run("document.querySelector('.retokenised').open = true")
    browser.wait("document.querySelector('.retokenised p')?.innerText.includes('no-such-model are not on')")
    found = """{token_ids: [1, 2, 7, 5], num_ids: 5, num_sampled: 3, num_changed: 2,
        changes: [{before: [2, 4], after: [2, 3], causes: ['bpe_split', '<img src=x onerror=hacked()>']}],
        cause_words: {bpe_split: 'the same text in other ids'}, texts: {7: '<img src=x onerror=hacked()>\u202e'}}"""
    browser.run(f"showRetokenised(shownRollout, document.querySelector('.retokenised div'), {found}, 0)")
    shown = read(browser, ".retokenised")
    assert "2 of 3 sampled ids would not be trained on: 1 stretch, 4 ids in all instead of 5" in shown
    causes = "the same text in other ids, <img src=x onerror=hacked()>"
    assert f"#3|#4 → <img src=x onerror=hacked()>\\u202e {causes}" in shown
    browser.click(".changes button")
    assert selected(browser) == "2"


def test_pictures_stand_where_they_are_with_their_size_or_their_place_if_they_are_lost(browser, page):
    browser.open(f"{page}#rollout/1/2/0")
    captions = "[...document.querySelectorAll('figcaption')].map((node) => node.innerText)"
    browser.wait("document.querySelector('figcaption').innerText.includes('×')")
    assert browser.run(captions) == ["2 × 3 · 1 id", "image, whose file was not recorded"]
    browser.wait("document.querySelector('.grid [data-n=\"1\"] img')?.naturalWidth === 2")
    browser.run("document.querySelector('.conversation').prepend(makeImage(shownRollout, 'f'.repeat(64)))")
    browser.wait("document.querySelector('figcaption').innerText.includes('whose file is not there')")
    assert browser.run("document.querySelector('figcaption').innerText") == f"image {'f' * 64}, whose file is not there"
    browser.errors.clear()  # that file


def test_ids_are_copied_as_json(browser, page):
    browser.open(f"{page}#rollout/1/2/0/0/1/8")
    browser.wait("document.querySelector('.cell.selected') !== null")
    browser.run("globalThis.copied = []; copyText = (text) => copied.push(text)")
    for label in ("copy ids", "copy turn"):
        browser.run(f"[...document.querySelectorAll('button')].find((b) => b.innerText === '{label}').click()")
    assert browser.run("copied") == ["[1,9,2,3,4,5,6,7,8]", "[7,8]"]


@pytest.mark.parametrize("place", ["step/0/1", "rollout/0/1/1", "rollout/0/1/2", "step/1/2", "rollout/1/2/0"])
def test_hostile_text_is_shown_as_text(browser, page, place):
    browser.open(f"{page}#{place}")
    assert HOSTILE in read(browser)
    assert count(browser, 'main img:not([src^="images/run/"]), main script') == 0
    assert "\u202e" not in browser.run("document.body.innerHTML")


def test_64k_ids_scroll_at_60_frames_with_only_the_visible_lines_in_the_page(browser, tmp_path):
    write_metrics(tmp_path / "run", 1)
    write_step(tmp_path / "run", 0, [make_trajectory("g0/0", [make_row(range(65536), num_prompt=100)])])
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path / "page")]) == 0
    browser.open(f"{(tmp_path / 'page/index.html').as_uri()}#rollout/0/0/0/0/0/65000")
    browser.wait("document.querySelector('.cell.selected')?.dataset.n === '65000'")
    assert 50 < count(browser, "[data-n]") < 2000
    browser.run("Object.assign(document.querySelector('.grid').style, {flex: 'none', height: '60px'})")
    browser.wait("document.querySelector('.grid').clientHeight < 70")
    edges = "(node) => { const { top, bottom } = node.getBoundingClientRect(); return [top, bottom]; }"
    browser.wait(
        f"""(() => {{ const [[a, b], [c, d]] = ['.grid', '.cell.selected']
            .map((each) => document.querySelector(each)).map({edges}); return a <= c && d <= b; }})()""",
        limit_s=5,
    )
    browser.run("document.querySelector('.grid').removeAttribute('style')")
    spent = browser.measure(
        """for (let top = 0; top < 60000; top += 300) {
          const grid = document.querySelector('.grid');
          grid.scrollTop = top; grid.dispatchEvent(new Event('scroll')); grid.getBoundingClientRect();
        }"""
    )
    assert 0 < spent / 200 < 1 / 60
    assert count(browser, "[data-n]") < 2000


def test_what_a_live_run_writes_appears(browser, server, tmp_path):
    browser.open(f"{server.url}#run")
    assert count(browser, 'a[href="#step/0/2"]') == 0
    write_step(tmp_path / "run", 2, [make_trajectory("g9/0", [make_row([1, 2], num_prompt=1)])])
    browser.wait("document.querySelector('a[href=\"#step/0/2\"]') !== null")
    browser.click('a[href="#step/0/2"]')
    browser.wait("document.querySelector('main h1').innerText.startsWith('Step 2')")
    assert "1 of 1 rollout" in read(browser)


def test_a_table_of_a_live_run_grows_and_keeps_the_line_that_has_the_focus(browser, server, tmp_path):
    browser.open(f"{server.url}#table/0?sort=-reward")
    wait_for_rows(browser, "4 of 4 rollouts")
    browser.press("j")
    before = browser.run("document.activeElement.href")
    write_step(tmp_path / "run", 2, [make_trajectory("g9/0", [make_row([1, 2], num_prompt=1)], reward=2.0)])
    wait_for_rows(browser, "5 of 5 rollouts")
    assert browser.run("document.activeElement.href") == before
    assert browser.run("document.querySelector('.rows tbody tr').cells[1].innerText") == "2"
    browser.run("document.getElementById('sort-reward').focus()")
    browser.run("document.getElementById('sort-reward').click()")
    assert browser.run("document.activeElement.id") == "sort-reward"


def test_nothing_is_wider_than_a_narrow_window(browser, page):
    for place in ("run", "table/0?", "step/0/1", "rollout/0/1/1", "step/1/2", "rollout/1/2/0"):
        browser.open(f"{page}#{place}", width=400, height=700, dark=True)
        assert browser.run("document.documentElement.scrollWidth") <= 400, place


def test_a_diagnosis_stands_on_the_run_in_whole_sentences_with_commands_as_code(browser, page):
    browser.open(f"{page}#run")
    advice = "set --a.b-c, or see `unbroken x`"
    finding = {"sentence": f"all rewards are 0 `as it says` {HOSTILE}", "advice": advice, "link": "d.md#e"}
    run = json.dumps({"name": "run", "diagnosis": [finding]})
    browser.run(f"document.querySelector('main').prepend(makeDiagnoses([{run}]))")
    assert read(browser, ".diagnosis .finding") == f"All rewards are 0 `as it says` {HOSTILE}."
    assert read(browser, ".diagnosis p + p") == "Set --a.b-c, or see unbroken x. More: d.md#e"
    codes = "[...document.querySelectorAll('.diagnosis code')].map((node) => node.innerText)"
    assert browser.run(codes) == ["--a.b-c", "unbroken x", "d.md#e"]


TOPS = "['.conversation', '.tokens'].map((each) => document.querySelector(each).getBoundingClientRect().top)"


def test_on_a_narrow_page_the_conversation_comes_before_the_ids_and_leads_to_them(browser, page):
    browser.open(f"{page}#rollout/0/1/0", width=420, height=300)
    browser.wait("document.querySelector('.grid .cell') !== null")
    first, second = browser.run(TOPS)
    assert 0 < first < second
    browser.run("document.querySelector('.message.assistant button').click()")
    browser.wait(f"{TOPS}[1] >= 0 && {TOPS}[1] < 200")
    assert selected(browser) == "2"
    browser.open(f"{page}#rollout/0/1/0", width=1400, height=800)
    first, second = browser.run(TOPS)
    assert abs(first - second) < 40


def test_a_place_that_is_not_there_says_so(started_browser, page):
    started_browser.open(f"{page}#step/0/7")
    assert "the export has no run/0/step/7" in read(started_browser)
