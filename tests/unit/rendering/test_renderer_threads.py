"""A renderer in several threads: one runs Python at a time, and none waits for a tokenizer that works in Rust."""

import asyncio
import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from support.templates import chatml_with
from support.tokenizers import make_tokenizer
from unbroken.rendering.encoding.tokenizer import encode_text, read_ids, read_offsets
from unbroken.rendering.template import TemplateRenderer
from unbroken.threads import DaemonThreads, RendererLock, keep_loop_responsive

WORDS = "the quick brown fox, and 42 «naïve» dogs\n"


def test_a_long_text_is_encoded_like_a_short_one():
    tokenizer = make_tokenizer(chatml_with()).backend_tokenizer
    for text in ("", "hi", WORDS * 25, WORDS * 2_000):
        expected = tokenizer.encode(text, add_special_tokens=False)
        encoding = encode_text(tokenizer, text, lock=RendererLock())
        assert read_ids(encoding).tolist() == expected.ids
        assert read_offsets(encoding).tolist() == [list(pair) for pair in expected.offsets]
        assert (read_ids(encoding).dtype, read_offsets(encoding).dtype) == (np.int32, np.int64)


def test_prompts_are_the_same_from_many_threads():
    renderer = TemplateRenderer(make_tokenizer(chatml_with()))
    conversations: Any = [[{"role": "user", "content": f"{k} {WORDS * (k * 20 + 1)}"}] for k in range(12)]
    alone = [renderer.render(messages).token_ids.tolist() for messages in conversations]
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(lambda messages: renderer.render(messages).token_ids.tolist(), conversations * 3)
        assert list(together) == alone * 3


def test_the_lock_is_released_while_a_long_text_is_encoded():
    renderer = TemplateRenderer(make_tokenizer(chatml_with()))
    long: Any = [{"role": "user", "content": WORDS * 15_000}]
    finished: list[str] = []

    def render(name: str, messages: Any) -> None:
        renderer.render(messages)
        finished.append(name)

    first = threading.Thread(target=render, args=("long", long))
    first.start()
    time.sleep(0.2)
    render("short", [{"role": "user", "content": "hi"}])
    first.join()
    assert finished == ["short", "long"]


def test_the_lock_is_reentrant_and_is_taken_back_as_deep_as_it_was():
    lock = RendererLock()
    others: list[str] = []

    def take() -> None:
        with lock:
            others.append("in")

    with lock, lock:
        other = threading.Thread(target=take)
        other.start()
        time.sleep(0.05)
        assert others == []
        with lock.released():
            other.join(timeout=60)
            assert others == ["in"]
        again = threading.Thread(target=take)
        again.start()
        time.sleep(0.05)
        assert others == ["in"]
    again.join(timeout=60)
    assert others == ["in", "in"]


async def test_threads_run_at_most_so_many_calls_at_a_time_in_their_order():
    threads, running, started = DaemonThreads(2), [0], []
    most = 0

    def work(number: int) -> int:
        nonlocal most
        started.append(number)
        running[0] += 1
        most = max(most, running[0])
        time.sleep(0.01)
        running[0] -= 1
        return number

    results = await asyncio.gather(*(threads.run(lambda number=k: work(number)) for k in range(10)))
    assert (results, most) == (list(range(10)), 2)
    assert all(abs(number - order) < 2 for order, number in enumerate(started))  # two threads say it in any order


async def test_a_call_that_nobody_waits_for_any_more_is_dropped():
    threads, calls, may_end = DaemonThreads(1), [], threading.Event()
    first = asyncio.create_task(threads.run(may_end.wait))
    second = asyncio.create_task(threads.run(lambda: calls.append("second")))
    await asyncio.sleep(0.05)
    second.cancel()
    may_end.set()
    await first
    assert await threads.run(lambda: "third") == "third"
    assert calls == []


async def test_an_exception_in_a_thread_is_raised_and_the_threads_go_on():
    threads = DaemonThreads(1)
    with pytest.raises(SystemExit):
        await threads.run(lambda: exit(3))
    assert await threads.run(lambda: 7) == 7


def test_within_a_block_for_the_loop_the_garbage_collector_ignores_what_was_there_before():
    interval = sys.getswitchinterval()
    gc.unfreeze()
    try:
        with keep_loop_responsive():
            assert gc.get_freeze_count() > 0
            assert sys.getswitchinterval() < interval
        assert (sys.getswitchinterval(), gc.get_freeze_count()) == (interval, 0)
    finally:
        gc.freeze()  # as `conftest.py` has done


def test_what_the_garbage_collector_ignores_before_a_block_it_ignores_after_it():
    gc.freeze()
    before = gc.get_freeze_count()
    with keep_loop_responsive(), keep_loop_responsive():
        pass  # the inner one as of a server that a run opens in its own process
    assert gc.get_freeze_count() > before / 2  # some objects end meanwhile
