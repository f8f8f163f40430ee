"""Servers that come and go: which are listed, who is asked, and what becomes of requests of those that went."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from support.servers import listening, make_app, scripted_engine, server_tokenizer
from support.waits import wait_until
from unbroken.engines import directory
from unbroken.engines.directory import FileDirectory
from unbroken.engines.http import HttpEngine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError
from unbroken.types import SampleRequest, SamplingParams
from unbroken.weights.sources import TensorSource


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_POLL_S", 0.05)


class Listed:
    """A directory in memory."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def addresses(self) -> tuple[str, ...]:
        return self.urls


class Mortal(ScriptedEngine):
    """An engine that can die while its requests hang."""

    is_dead = False

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineError("dead")
        await super().check_health()


def fives() -> Mortal:
    return Mortal(lambda prompt_ids: [5], vocab_size=len(server_tokenizer()), context_length=4096, allow_forks=True)


def ask(request_id: str) -> SampleRequest:
    params = SamplingParams(max_tokens=5, seed=7)
    return SampleRequest(request_id=request_id, prompt_ids=np.array([1, 2, 3]), n=2, params=params)


async def sample_from_all(engine: HttpEngine, *inner: Mortal) -> None:
    """Sample for more and more conversations until each server has had some; they forget them."""
    for each in inner:
        each.requests.clear()
    async with asyncio.timeout(60):
        for k in itertools.count():
            if all(each.requests for each in inner):
                break
            await engine.sample(ask(f"{k}/0"))
    for each in inner:
        each.requests.clear()


def test_a_file_lists_an_address_a_line_and_a_change_counts_once_reads_agree_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engines.txt"
    listed = FileDirectory(path)
    now_s = 100.0
    monkeypatch.setattr(directory.time, "monotonic", lambda: now_s)
    assert listed.addresses() == ()
    path.write_text("# two machines\nhttp://a:1/\n\n  http://b:2  # the second\nhttp://a:1\n")
    assert listed.addresses() == ("http://a:1", "http://b:2")
    path.write_text("")  # as while it is written
    assert listed.addresses() == ("http://a:1", "http://b:2")
    assert listed.addresses() == ("http://a:1", "http://b:2")  # of another one who reads it at the same time
    path.write_text("http://b:2\n")
    assert listed.addresses() == ("http://a:1", "http://b:2")
    now_s += 0.3
    assert listed.addresses() == ("http://b:2",)
    path.unlink()
    assert listed.addresses() == ("http://b:2",)
    os.mkfifo(path)  # what writes nothing, or never ends, is no list
    assert listed.addresses() == ("http://b:2",)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert listed.addresses() == ("http://b:2",)


@pytest.mark.parametrize("content", [b"http://10.0.0.1:1\n" * 2_000_000, b"a" * 3_000_000, b"http://a:1\n\xff\n", None])
def test_a_list_that_cannot_be_read_changes_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    file = tmp_path / "engines.txt"
    file.write_text("http://10.0.0.1:8000\n")
    directory = FileDirectory(file)
    assert directory.addresses() == ("http://10.0.0.1:8000",)
    assert not caplog.records
    file.unlink()
    assert directory.addresses() == ("http://10.0.0.1:8000",)  # a moment in which it is replaced
    assert not caplog.records
    os.mkfifo(file) if content is None else file.write_bytes(content)
    for _ in range(3):
        assert directory.addresses() == ("http://10.0.0.1:8000",)
    assert [f"the list of servers {file} cannot be read" in each.message for each in caplog.records] == [True]


async def test_a_list_that_takes_long_to_read_holds_up_nothing_else() -> None:
    loop, reads = asyncio.get_running_loop(), []

    class Slow(Listed):
        def addresses(self) -> tuple[str, ...]:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            reads.append(turned.wait(30))  # it ends when the loop has gone on
            return super().addresses()

    async with listening(make_app(fives())) as one:
        engine = await HttpEngine.connect(Slow(one))
        await wait_until(lambda: len(reads) > 3)
        await engine.close()
    assert all(reads)


async def test_i6_a_server_that_comes_is_sampled_from_once_it_has_the_newest_version() -> None:
    old, new = fives(), fives()
    await old.update_weights(TensorSource([]), policy_version=2)
    async with listening(make_app(old)) as one, listening(make_app(new)) as two:
        listed = Listed(one)
        engine = await HttpEngine.connect(listed)
        listed.urls = (one, two)
        await wait_until(lambda: engine.urls == (one, two))
        for k in range(16):
            await engine.sample(ask(f"{k}/0"))
        assert new.requests == []
        await new.update_weights(TensorSource([]), policy_version=2)
        await sample_from_all(engine, old, new)
        await engine.close()


@pytest.mark.parametrize("end", ["leaves the list", "dies"])
async def test_what_a_server_that_goes_had_not_answered_is_sampled_again_elsewhere_with_the_same_seeds(
    end: str,
) -> None:
    stays, goes = fives(), fives()
    async with listening(make_app(stays)) as one, listening(make_app(goes)) as two:
        listed = Listed(one, two)
        engine = await HttpEngine.connect(listed)
        await sample_from_all(engine, stays, goes)
        await goes.pause()
        running = [asyncio.create_task(engine.sample(ask(f"{k}/0"))) for k in range(16)]
        await wait_until(lambda: len(goes.requests) + len(stays.requests) == 16)
        waiting = list(goes.requests)
        assert 0 < len(waiting) < 16
        if end == "dies":
            goes.is_dead = True  # and its requests hang
        else:
            listed.urls = (one,)
        results = await asyncio.wait_for(asyncio.gather(*running), 60)
        assert all(sequence.completion_ids.tolist() == [5] for result in results for sequence in result.sequences)
        again = stays.requests[-len(waiting) :]
        assert sorted(map(str, (request.params for request in again))) == sorted(str(each.params) for each in waiting)
        await wait_until(lambda: engine.urls == (one,))
        await engine.close()


async def test_a_server_of_another_model_is_named_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    other = scripted_engine(lambda prompt_ids: [5], context_length=99)
    async with listening(make_app(fives())) as one, listening(make_app(other)) as two:
        listed = Listed(one, two, "http://127.0.0.1:9", "no address")
        with pytest.raises(InvalidInputError, match="must be http://HOST:PORT, got 'no address'"):
            await HttpEngine.connect(listed)
        listed.urls = (one,)
        engine = await HttpEngine.connect(listed)
        listed.urls = (one, two, "http://127.0.0.1:9", "no address")
        await wait_until(lambda: len(caplog.messages) == 3)
        assert {message.split(" cannot be used yet")[0] for message in caplog.messages} == {*listed.urls[1:]}
        assert any(message.startswith(two) and "must serve one model" in message for message in caplog.messages)
        await engine.sample(ask("a"))
        await asyncio.sleep(0.3)
        assert (len(caplog.messages), engine.urls) == (3, (one,))  # said once
        await engine.close()


async def test_a_server_that_is_about_to_join_is_gone_after_two_failed_health_checks_and_not_after_one() -> None:
    checks, seen = [False, True, False, False], []

    class Busy(Mortal):
        async def check_health(self) -> None:
            if engine is not None:
                seen.append(engine.urls)
                self.is_dead = len(seen) <= len(checks) and not checks[len(seen) - 1]
            await super().check_health()

    engine, ahead, behind = None, fives(), Busy(lambda _: [5], vocab_size=len(server_tokenizer()), context_length=4096)
    await ahead.update_weights(TensorSource([]), policy_version=2)
    async with listening(make_app(ahead)) as one, listening(make_app(behind)) as two:
        engine = await HttpEngine.connect(Listed(one, two))
        await wait_until(lambda: len(seen) > 4)
        await engine.close()
    assert seen[:5] == [(one, two)] * 4 + [(one,)]


async def test_servers_that_are_all_gone_are_an_error_until_another_comes() -> None:
    listed = Listed()
    with pytest.raises(ServerUnreachableError, match=r"none of the servers in .* answers"):
        await HttpEngine.connect(listed)
    async with listening(make_app(fives())) as two:
        async with listening(make_app(fives())) as one:
            listed.urls = (one,)
            engine = await HttpEngine.connect(listed)
            listed.urls = ()
            await wait_until(lambda: engine.urls == ())
            with pytest.raises(ServerUnreachableError, match="none of the servers that were listed can be reached"):
                await engine.sample(ask("a"))
            with pytest.raises(EngineError, match="none of the servers that were listed is healthy"):
                await engine.check_health()
        listed.urls = (two,)
        await wait_until(lambda: engine.urls == (two,))
        await engine.check_health()
        await engine.sample(ask("b"))
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.sample(ask("c"))


async def test_a_server_that_does_not_answer_for_a_while_is_taken_in_again() -> None:
    listed = Listed()
    stays, restarts = fives(), fives()
    async with listening(make_app(stays)) as one:
        async with listening(make_app(restarts)) as two:
            listed.urls = (one, two)
            engine = await HttpEngine.connect(listed)
        await wait_until(lambda: engine.urls == (one,))
        async with listening(make_app(restarts), port=int(two.rpartition(":")[2])):
            await wait_until(lambda: set(engine.urls) == {one, two})
            await sample_from_all(engine, stays, restarts)
            await engine.close()
