"""Two processes of a run meet: one comes late to the first one, or that one ends meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest

from unbroken.runs import processes


class _Store(dict):
    """Where processes meet, as torch's stores."""

    def set(self, key, value):
        if self.get(_GONE):
            raise RuntimeError("Broken pipe")
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def wait(self, keys, _timeout):
        assert self.check(keys)


_GONE = "gone"


@pytest.fixture
def first_of_two(monkeypatch):
    """The first process of two, in this one, and the store that it has left its address in."""
    monkeypatch.setattr(processes, "_MEET_S", 0.5)
    monkeypatch.setattr(processes, "_HANDSHAKE_S", 0.1)
    monkeypatch.setattr(processes, "exit_in", lambda *_, **__: lambda: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")

    def make():
        first, store = processes._Others(0, 2, asyncio.get_running_loop().create_future()), _Store()
        first._be_first(store, "key")
        return first, store

    return make


async def test_a_process_that_says_its_name_too_late_is_lost_and_not_waited_for(first_of_two):
    first, store = first_of_two()
    _, host, port, _ = json.loads(store["key"])
    with socket.create_connection((host, port)) as connection:
        connection.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b"", "it is taken for a stranger"
        store.set("key/1", processes._CONNECTED)
    assert "rank 1 of 2 has not connected" in await asyncio.wait_for(first._loss, 5)
    first.close("")


async def test_of_a_first_process_that_ends_while_another_one_connects_its_own_error_is_known(first_of_two):
    first, store = first_of_two()
    store[_GONE] = True
    second = processes._Others(1, 2, asyncio.get_running_loop().create_future())
    await second._reach_first(store, "key")
    await asyncio.sleep(0.1)
    first.close("rank 0 failed: KeyError")
    assert await asyncio.wait_for(second._loss, 5) == "rank 0 failed: KeyError"
    second.close("")
