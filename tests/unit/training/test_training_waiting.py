"""What a run waits for is in its log once that takes long."""

from __future__ import annotations

import asyncio

from unbroken.training.waiting import log_waiting


async def test_a_wait_is_logged_once_it_takes_long_and_then_now_and_again(caplog):
    async with log_waiting("the engine", after_s=0.05, every_s=0.05):
        await asyncio.sleep(0.02)
        assert caplog.text == ""
        await asyncio.sleep(0.2)
    assert 2 <= caplog.text.count("waiting for the engine, for 0 s so far") <= 5
    assert len(asyncio.all_tasks()) <= 2
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1
