"""A gateway's store in a browser: the list, branches, sub-agents, images, hostile text, and turns as they come."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.browser import CHROMIUM, Browser
from support.image_servers import CAT
from support.recorded import write_run
from support.recorded_sessions import SHOWN, write_image_store, write_store, write_tokenizer
from support.sessions import make_commit, make_session
from support.tinker_loops import add_sequences, record
from unbroken.cli import main
from unbroken.ledger.store import open_store
from unbroken.tinker.store import ModelFacts, TinkerStore
from unbroken.viewer.resources import open_runs
from unbroken.viewer.server import ViewerServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
MARKUP = "<img src=x onerror=hacked()>"
AS_TEXT = SHOWN.replace("\u202e", "\\u202e").replace("\x00", "\\u0000")


@contextmanager
def serving(browser: Browser, *locations: Path, tokenizer: Path | None = None) -> Iterator[str]:
    with ViewerServer(open_runs(locations, tokenizer=tokenizer)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            browser.call("Page.navigate", url="about:blank")  # its page asks the server again and again
            server.shutdown()
            thread.join()


def read(browser: Browser, selector: str = "main") -> str:
    return " ".join(browser.run(f"document.querySelector({selector!r}).innerText").split())


def test_a_store_is_a_list_of_sessions_and_a_session_is_a_tree_with_branches(browser, tmp_path):
    asyncio.run(write_store(tmp_path / "store"))
    with serving(browser, tmp_path / "store", tokenizer=write_tokenizer(tmp_path / "tokenizer")) as url:
        browser.open(url)
        text = read(browser)
        assert "gateway ended · 2 sessions · 1 finished, 1 open" in text
        assert "0.5" in read(browser, ".rollouts .reward")
        assert "model tiny · 4 turns" in text
        assert "2 of 2 sessions" in text
        browser.type(".filters [type=search]", '"task": ')
        assert "1 of 2 sessions" in read(browser)
        browser.type(".filters [type=search]", "")
        assert "fork: edited_reply" in text
        assert "not trained" not in text.replace("not trained (0)", "")
        browser.click(".rollouts a")
        browser.wait("document.querySelector('.grid .cell') !== null")
        assert browser.run("document.title").startswith("store · sessions 1–100 · session 1")
        head = read(browser, ".head")
        assert "reward 0.5 · exact 0.5 · completed · 4 turns · model tiny" in head
        browser.run("document.querySelector('details.session').open = true")
        assert AS_TEXT in read(browser, "details.session").replace("\\\\u", "\\u")
        branches = read(browser, ".branches")
        assert "branch 1 leaves branch 0" in branches
        assert "edited_reply" in branches
        assert "new_conversation" in branches
        assert shown_messages(browser) == [0, 4, 5, 6]  # the branch that went on
        assert "6 messages of other branches are not shown here" in read(browser, ".conversation")
        assert "ids · by tiny, version 0 · stop" in read(browser, ".turns")
        assert "1 tool" in read(browser, ".conversation")
        browser.press("b")
        assert "1 tool" not in read(browser, ".conversation"), "those of the sub-agent, which has none"
        assert shown_messages(browser) == [7, 8, 9]
        assert AS_TEXT in read(browser, ".conversation")
        assert browser.run("document.querySelectorAll('main script, main img').length") == 0
        streams = read(browser, ".streams")
        assert "rollout logprob" in streams
        assert "trainer" not in streams
        assert "loss" not in streams
        browser.press("n")
        browser.wait("document.querySelector('main').innerText.includes('Nothing was sampled')")
        assert "session 2" in browser.run("document.title")
        for place in ("run", "rollout/0/0/0"):
            browser.open(f"{url}#{place}", width=400, height=700, dark=True)
            assert browser.run("document.documentElement.scrollWidth") <= 400, place


def test_training_runs_of_a_tinker_server_have_their_steps_and_sequences(browser, tmp_path):
    """Hostile text is text, and nothing is wider than a telephone."""
    facts = ModelFacts(model_id="s:train:0", base_model=MARKUP, lora={"rank": 4})
    store = TinkerStore(tmp_path / "store")
    store.put_model(facts, owner="me")
    for number in range(101):
        add_sequences(store, [record(f"{MARKUP}:{number}", [5, 6, 7], [5, 6, 7], model_id="s:train:0")])
    for step in (1, 2):
        metrics = {"loss:sum": 1.0 / step, "provenance_proven:sum": 3.0 * step, "provenance_false_spans:sum": 0.0}
        store.add_step("s:train:0", step, {**metrics, f"{MARKUP}:sum": 0.0})
    store.end_model("s:train:0", MARKUP)
    store.close()
    with serving(browser, tmp_path / "store", tokenizer=write_tokenizer(tmp_path / "tokenizer")) as url:
        browser.open(url)
        text = read(browser)
        assert "server ended · 1 training run" in text
        assert f"s:train:0 {MARKUP} · LoRA of rank 4 · made " in text
        assert "2 steps · 101 sequences · 0 checkpoints" in text
        browser.click(".rollouts a")
        browser.wait("document.querySelectorAll('polyline').length === 2")
        text = read(browser)
        assert "Provenance of training data provenance_proven:sum" in text
        assert f"0 in all steps: {MARKUP}:sum, provenance_false_spans:sum" in text
        assert "truncated (0) failed (0) 1 of 1 sequence" in text
        assert "reward" not in text
        browser.click(".steps a:nth-child(2)")
        browser.wait("document.querySelectorAll('.rollouts li').length === 100")
        assert f"{MARKUP}:99 version 3–4 · 3 sampled" in read(browser, ".rollouts li")
        browser.click(".rollouts a")
        browser.wait("document.querySelectorAll('.grid .cell').length === 6")
        assert browser.run("document.title").startswith("store · sequences 1–100 · sequence 100")
        assert f"3 ids sampled · stop · model {MARKUP}" in read(browser, ".head")
        assert not re.search("retokenising|Time", read(browser))
        assert browser.run("document.querySelectorAll('main script, main img').length") == 0
        for place in ("run", "step/0/2000001", "rollout/0/2000000/99"):
            browser.open(f"{url}#{place}", width=400, height=700)
            assert browser.run("document.documentElement.scrollWidth") <= 400, place


def shown_messages(browser: Browser) -> list[int]:
    return browser.run(
        "[...document.querySelectorAll('.message')].filter((node) => !node.hidden)"
        ".map((node) => Number(node.dataset.message))"
    )


def test_turns_of_a_live_store_appear_beside_a_run(browser, tmp_path):
    asyncio.run(write_store(tmp_path / "store"))
    store = open_store(str(tmp_path / "store"))
    run = write_run(tmp_path / "run")
    with serving(browser, tmp_path / "store") as url, serving(browser, run, tmp_path / "store") as both:
        browser.open(f"{url}#run")
        assert "gateway running" in read(browser)
        listed = store.list_sessions()[1].session_id
        assert store.acquire(listed)
        store.commit([make_commit(listed, 0)])
        browser.wait("document.querySelectorAll('.rollouts li')[1].innerText.includes('1 turn')")
        store.create(make_session(MARKUP, model=MARKUP, metadata={MARKUP: MARKUP}))
        store.commit([make_commit(MARKUP, 0, text=MARKUP)])
        browser.wait("document.querySelectorAll('.rollouts li').length === 3")
        assert read(browser, ".rollouts li:nth-child(3)").count(MARKUP) >= 4
        browser.open(f"{url}#rollout/0/0/2")
        browser.wait("document.querySelectorAll('.message').length === 2")
        assert read(browser).count(MARKUP) >= 3
        assert browser.run("document.querySelectorAll('main img, main b b').length") == 0
        browser.open(f"{both}#run")
        assert "Sessions: 1–100" in read(browser)
        assert browser.run("document.querySelectorAll('polyline').length") == 1
        browser.click('a[href="#step/1/0"]')
        browser.wait("document.querySelectorAll('.rollouts li').length === 3")
    store.close()


def test_an_image_is_shown_where_it_stands_or_its_hash_is(started_browser, tmp_path):
    asyncio.run(write_image_store(tmp_path / "store"))
    with serving(started_browser, tmp_path / "store") as url:
        started_browser.open(f"{url}#rollout/0/0/0")
        started_browser.wait("document.querySelector('.message.user img')?.naturalWidth > 0")
        parts = started_browser.run("[...document.querySelector('.message.user').children].map((node) => node.tagName)")
        assert parts == ["HEADER", "DIV", "FIGURE", "DIV"]
    with sqlite3.connect(tmp_path / "store" / "sessions.sqlite3") as connection:
        connection.execute("DELETE FROM session_blobs WHERE kind = 'image'")
    connection.close()
    with serving(started_browser, tmp_path / "store") as url:
        started_browser.open(f"{url}#rollout/0/0/0")
        started_browser.wait("document.querySelector('.message.user img') === null")
        assert f"image {CAT.sha256}, whose file is not there · 4 ids" in read(started_browser, ".message.user")


def test_an_export_of_a_store_opens_without_a_server(browser, tmp_path):
    asyncio.run(write_store(tmp_path / "store"))
    assert main(["view", str(tmp_path / "store"), "--export", str(tmp_path / "page")]) == 0
    shutil.rmtree(tmp_path / "store")
    browser.open(f"{(tmp_path / 'page' / 'index.html').as_uri()}#rollout/0/0/0")
    browser.wait("document.querySelector('.grid .cell') !== null")
