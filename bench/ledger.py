"""Time to find where a prompt continues a tree of many branches, and turns that a store commits in a second.

python bench/ledger.py [LOCATION ...]    # empty stores: folders or postgresql:// URLs; default: a new folder here
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
import uuid

import numpy as np

from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import GivenRecord, MessageRecord, SessionRecord, TurnCommit, TurnRecord
from unbroken.ledger.store import SessionStore, SessionWriter, open_store
from unbroken.ledger.tree import TokenTree
from unbroken.types import FinishReason, SampledSequence, VersionSpan, token_ids

NUM_IDS = 200
SECONDS = 3.0


def sample(rng: np.random.Generator) -> SampledSequence:
    return SampledSequence(
        completion_ids=token_ids(rng.integers(0, 150_000, NUM_IDS)),
        rollout_logprobs=-rng.exponential(0.3, NUM_IDS).astype(np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, stop=NUM_IDS, policy_version=0),),
    )


def time_prefix(num_branches: int) -> float:
    """Milliseconds to find 10,400 ids of one branch: 10,000 that all share, then four nodes of 100 of its own."""
    rng = np.random.default_rng(0)
    tree = TokenTree()
    root = tree.add_given(rng.integers(0, 150_000, 10_000), Origin.PROMPT, parent=None)
    ends = []
    for _ in range(num_branches):
        end = root
        for _ in range(4):
            end = tree.add_given(rng.integers(0, 150_000, 100), Origin.BRIDGE, parent=end)
        ends.append(end)
    prompt = np.append(tree.token_ids(ends[num_branches // 2]), [1, 2, 3])
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < 1:
        assert tree.find_longest_prefix(prompt)[1] == 10_400
        times += 1
    return (time.perf_counter() - began) / times * 1e3


def make_commit(session_id: str, number: int, rng: np.random.Generator) -> TurnCommit:
    """A tool result of 200 ids and a reply of 200."""
    turn = TurnRecord(
        number=number,
        tree=0,
        prompt_node=2 * number,
        reply_node=2 * number + 1,
        tools_key="tools",
        given=GivenRecord(
            parent=None,
            origin=Origin.BRIDGE,
            token_ids=token_ids(rng.integers(0, 150_000, NUM_IDS)),
            message_indices=np.zeros(NUM_IDS, np.int32),
        ),
        parent=Position(node=2 * number, offset=NUM_IDS),
        sequence=sample(rng),
        request_digest=bytes(32),
        answer_id=f"answer-{number}",
        created_s=time.time(),
    )
    messages = tuple(
        MessageRecord(node=2 * number + k, parent=None, message={"role": role, "content": "x" * 800}, sampled=k == 1)
        for k, role in enumerate(("tool", "assistant"))
    )
    counters = {"bridges/derived": 1, "history/kept": 1}
    return TurnCommit(session_id=session_id, messages=messages, turns=(turn,), counters=counters)


async def measure_commits(store: SessionStore, num_sessions: int) -> None:
    """Each session commits its next turn when the last one is stored."""
    names = [uuid.uuid4().hex for _ in range(num_sessions)]
    for name in names:
        store.create(
            SessionRecord(session_id=name, key_digest=uuid.UUID(name).bytes * 2, created_s=time.time(), expires_s=2e9)
        )
    writer = SessionWriter(store)
    times: list[float] = []
    began, began_cpu = time.perf_counter(), get_cpu_s()

    async def commit_turns(name: str) -> None:
        rng = np.random.default_rng(0)
        number = 0
        while time.perf_counter() - began < SECONDS:
            commit = make_commit(name, number, rng)
            start = time.perf_counter()
            await writer.commit(commit)
            times.append(time.perf_counter() - start)
            number += 1

    await asyncio.gather(*map(commit_turns, names))
    cpu_ms = (get_cpu_s() - began_cpu) / len(times) * 1e3
    await writer.close()
    median_ms, p99_ms = np.quantile(times, [0.5, 0.99]) * 1e3
    print(
        f"{num_sessions:5} sessions  {len(times) / SECONDS:7.0f} turns/s   wait p50 {median_ms:6.2f} ms  p99 "
        f"{p99_ms:6.2f} ms   {cpu_ms:.2f} ms of our CPU a turn"
    )


def measure_load(store: SessionStore) -> None:
    session_id = store.list_sessions(limit=1)[0].session_id
    began = time.perf_counter()
    loaded = store.load(session_id)
    assert loaded is not None
    elapsed_ms = (time.perf_counter() - began) * 1e3
    print(f"a session of {len(loaded.turns)} turns is loaded in {elapsed_ms:.0f} ms")


def get_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    for num_branches in (1, 100, 1000):
        print(f"longest prefix among {num_branches:5} branches: {time_prefix(num_branches):8.3f} ms")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for location in sys.argv[1:] or [folder]:
            store = open_store(location)
            for num_sessions in (1, 32, 256):
                asyncio.run(measure_commits(store, num_sessions))
            measure_load(store)
            store.close()


if __name__ == "__main__":
    main()
