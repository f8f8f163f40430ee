"""Promises, training runs and weights of the Tinker API, without a server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import psutil
import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from support.servers import MODEL, asgi_client, make_app, scripted_engine
from support.tinker_loops import add_sequences, record
from unbroken.errors import EngineError, ExportError, InvalidInputError, StoreError
from unbroken.server.config import ServerConfig
from unbroken.server.http.access import Access
from unbroken.server.http.errors import HttpError
from unbroken.server.options import ServeOptions
from unbroken.server.routes import list_access, load_routers
from unbroken.threads import DaemonThreads
from unbroken.tinker import losses, server, sessions
from unbroken.tinker.api import TinkerApi
from unbroken.tinker.losses import PROTOBUF, Datum, ProvenanceClaim, count_fields, parse_forward_backward, read_data
from unbroken.tinker.options import ProvenancePolicy, TinkerOptions
from unbroken.tinker.provenance import ProvenanceCheck
from unbroken.tinker.sampling import SamplerWeights, WeightSwitch, write_base
from unbroken.tinker.sessions import Promises, TrainingRun
from unbroken.tinker.store import CallResult, Checkpoint, ModelFacts, TinkerStore
from unbroken.weights.files import FileSource, read_tensors, write_tensors

FACTS = ModelFacts(model_id="run", base_model="tiny", lora=None)


SEQUENCE = record("s1", [5, 6, 7], [8, 9, 2])


def prompt(length: int, offset: int = 0, name: str = "s1") -> ProvenanceClaim:
    return types.PromptProvenanceSpan(sequence_id=name, offset=offset, length=length)


def sampled(length: int, offset: int = 0, name: str = "s1") -> ProvenanceClaim:
    return types.SampledProvenanceSpan(sequence_id=name, offset=offset, length=length)


def claimed(
    inputs: list[ProvenanceClaim],
    targets: list[ProvenanceClaim],
    ids: tuple[int, ...] = (5, 6, 7, 8, 9, 2),
    **given: Any,
) -> Datum:
    arrays = {name: np.array(values, np.float32) for name, values in given.items()}
    input_ids, target_ids = np.array(ids[:-1], np.int32), np.array(ids[1:], np.int64)
    return Datum(input_ids=input_ids, targets=target_ids, inputs=arrays, input_claims=inputs, target_claims=targets)


INPUTS, TARGETS = [prompt(3), sampled(2)], [prompt(2, 1), sampled(3)]


async def succeed() -> dict[str, Any]:
    return {"done": True}


def open_promises(store: TinkerStore) -> Promises:
    return Promises(store, DaemonThreads(1), "me")


async def make_run(promises: Promises) -> TrainingRun:
    """A run whose model is made."""
    run = TrainingRun(FACTS, owner="me", promises=promises)
    await (await run.submit(0, "create_model", succeed, b"")).wait()
    return run


@pytest.fixture
def store(open_store: Callable[..., TinkerStore]) -> TinkerStore:
    store = open_store()
    add_sequences(store, [SEQUENCE])
    return store


def check(store: TinkerStore, data: list[Datum], policy: str = "refuse", loss: str = "ppo", owner: str = "me") -> Any:
    run: Any = SimpleNamespace(owner=owner, model_id="run", version=5)
    return ProvenanceCheck(store, ProvenancePolicy(policy), run, loss=loss).check(data)


def test_true_spans_are_proven_and_versions_and_logprobs_compared(store):
    data = [claimed(INPUTS, TARGETS, logprobs=[0, 0, -0.1, -0.2, -0.5], advantages=[0, 1, 1, 1, 1])]
    (datum,), metrics = check(store, data)
    assert datum is data[0]
    assert metrics["provenance_proven:sum"] == 3
    assert metrics["provenance_logprobs_changed:sum"] == 1
    assert metrics["provenance_logprobs_difference:max"] == pytest.approx(0.2)
    assert metrics["provenance_unsampled_trained:sum"] == 1
    assert metrics["provenance_version_lag:max"] == 2
    assert metrics["provenance_version_lag:mean"] == pytest.approx(5 / 3)


CHANGED = [{"temperature": 0.5}, {"temperature": 0.0}, {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.1}]
RL = {"logprobs": [0, 0, -0.1, -0.2, -0.3], "advantages": [0, 0, 1, 1, 1]}


@pytest.mark.parametrize("sampling", CHANGED, ids=str)
def test_ids_of_another_distribution_are_not_proven_and_refused_where_a_loss_has_a_ratio(open_store, sampling):
    store = open_store()
    add_sequences(store, [replace(SEQUENCE, sampling=sampling)])
    said = "".join(f"with .*{each}" for each in sampling)
    for loss in ("importance_sampling", "ppo", "stable_reinforce"):
        for policy in ("refuse", "require"):
            with pytest.raises(InvalidInputError, match=rf"span 1: the ids of 's1' were sampled {said}.*{policy}"):
                check(store, [claimed(INPUTS, TARGETS, **RL)], policy, loss)
        _, metrics = check(store, [claimed(INPUTS, TARGETS, **RL)], "count", loss)
        assert (metrics["provenance_proven:sum"], metrics["provenance_other_distribution:sum"]) == (0, 3)
    for datum, loss in (  # without a ratio, without an effect, and without a claim
        (claimed(INPUTS, TARGETS, weights=[0, 0, 1, 1, 1]), "cross_entropy"),
        (claimed(INPUTS, TARGETS, **{**RL, "advantages": [0, 0, 0, 0, 0]}), "importance_sampling"),
        (claimed((), (), **RL), "importance_sampling"),
    ):
        _, metrics = check(store, [datum], loss=loss)
        assert (metrics["provenance_proven:sum"], metrics["provenance_matched:sum"]) == (0, 0)
        assert metrics["provenance_other_distribution:sum"] == 3


def test_ids_of_other_weights_are_not_proven(open_store):
    store = open_store()
    add_sequences(store, [replace(SEQUENCE, model_id="")])
    for datum in (claimed(INPUTS, TARGETS, **RL), claimed((), (), **RL)):
        _, metrics = check(store, [datum])
        assert [metrics[f"provenance_{each}:sum"] for each in ("proven", "matched", "other_model")] == [0, 0, 3]


def test_data_without_spans_are_refused_where_they_are_required(store):
    _, metrics = check(store, [claimed(INPUTS, TARGETS, **RL)], "require")
    assert metrics["provenance_proven:sum"] == 3
    for inputs, targets, problem in (
        ((), (), r"data\[0\] must have spans of model_input and of loss_fn_inputs .* got none"),
        (INPUTS, (), r"data\[0\].loss_fn_inputs: provenance spans must cover the field's 5 positions exactly, got 0"),
        ((), TARGETS, r"data\[0\].model_input: provenance spans must cover the field's 5 positions exactly, got 0"),
    ):
        with pytest.raises(InvalidInputError, match=problem + ".*--tinker-provenance require"):
            check(store, [claimed(inputs, targets, **RL)], "require")
    several = replace(claimed(INPUTS, TARGETS), targets=np.zeros((5, 2), np.int64))
    with pytest.raises(InvalidInputError, match="target_tokens must have one id a position"):
        check(store, [several], "require", "cross_entropy")


def test_targets_that_count_in_a_ratio_of_sequences_are_compared_and_counted(store):
    whole = {**RL, "sequence_ratio_mask": [1, 1, 1, 1, 1]}
    _, metrics = check(store, [claimed(INPUTS, TARGETS, **whole)], loss="gspo")
    assert (metrics["provenance_proven:sum"], metrics["provenance_unsampled_trained:sum"]) == (3, 2)
    _, metrics = check(
        store, [claimed(INPUTS, TARGETS, **{**whole, "sequence_ratio_mask": [0, 0, 1, 1, 1]})], loss="gspo"
    )
    assert (metrics["provenance_proven:sum"], metrics["provenance_unsampled_trained:sum"]) == (3, 0)
    blank = claimed(INPUTS, TARGETS, **whole)
    blank = replace(blank, targets=np.where(np.arange(5) < 2, 0, blank.targets))
    with pytest.raises(
        InvalidInputError, match="position 0: the prompt ids of 's1' have id 6 at 1, and id 0 was given"
    ):
        check(store, [blank], loss="gspo")


def test_targets_of_one_column_are_compared_and_counted_like_those_of_none(store):
    flat = claimed(INPUTS, TARGETS, weights=[0, 1, 1, 1, 1])
    column = replace(flat, targets=flat.targets[:, None], inputs={"weights": flat.inputs["weights"][:, None]})
    _, wanted = check(store, [flat], loss="cross_entropy")
    (datum,), metrics = check(store, [column], loss="cross_entropy")
    assert datum is column
    assert metrics == wanted
    assert (metrics["provenance_proven:sum"], metrics["provenance_unsampled_trained:sum"]) == (3, 1)
    for spans in ((), INPUTS):
        wrong = replace(column, input_claims=spans, target_claims=TARGETS if spans else ())
        wrong = replace(wrong, targets=wrong.targets + (np.arange(5) == 3)[:, None])
        if spans:
            with pytest.raises(InvalidInputError, match="position 3: the sampled ids of 's1' have id"):
                check(store, [wrong], loss="cross_entropy")
        else:
            assert check(store, [wrong], loss="cross_entropy")[1]["provenance_unproven:sum"] > 0


@pytest.mark.parametrize(
    ("inputs", "targets", "problem"),
    [
        ([prompt(3)], TARGETS, r"data\[0\].model_input: .* cover the field's 5 positions exactly, got 3"),
        (INPUTS, [], r"data\[0\].loss_fn_inputs: .* cover the field's 5 positions exactly, got 0"),
        ([prompt(3), sampled(2, 2)], TARGETS, "span 1: the sampled ids of 's1' have 3 positions, .* claims 2 from 2"),
        ([prompt(3), sampled(2, 1)], TARGETS, "span 1, position 3: .* have id 9 at 1, and id 8 was given .2 of"),
        ([prompt(3), sampled(2, name="s2")], TARGETS, "no sequence 's2' for this key, or removed it after 30 days"),
        ([sampled(3), sampled(2)], TARGETS, "span 0, position 0: .* have id 8 at 0, and id 5 was given"),
    ],
)
def test_a_false_span_is_refused_counted_or_not_looked_at(store, inputs, targets, problem):
    with pytest.raises(InvalidInputError, match=problem):
        check(store, [claimed(inputs, targets)])
    metrics = check(store, [claimed(inputs, targets)], "count")[1]
    assert metrics["provenance_false_spans:sum"] == 1
    assert check(store, [claimed(inputs, targets)], "off")[1] == {}
    with pytest.raises(InvalidInputError, match="has sampled no sequence"):
        check(store, [claimed(INPUTS, TARGETS)], owner="other")


OTHERS = (
    record("s2", [5, 6, 7], [4, 8, 1]),  # of the same prompt
    record("s3", [3, 7], [8, 9, 2]),
    record("s4", [5, 6, 7, 8, 9, 2, 1, 1], [3, 4]),  # the turn after s1
)


@pytest.mark.parametrize(
    ("ids", "targets", "inputs", "claims", "problem"),
    [
        pytest.param(
            [5, 6, 7, 8, 9], [6, 7, 4, 8, 1], INPUTS, [prompt(2, 1), sampled(3, name="s2")],
            "span 1, position 3: .* 's2' from 0 came after 3 ids, .* after 3 .*: at position 3 .* id 4, and id 8",
            id="targets of another completion",
        ),
        pytest.param(
            [8, 9], [9, 2], [sampled(2)], [sampled(2, 1)],
            "span 0, position 0: .* of 's1' from 1 came after 4 ids, .* after 1 of .*: at position 0 .* id 5, and id 8",
            id="no prompt",
        ),
        pytest.param(
            [5, 6, 7, 8], [7, 8, 9, 2], [prompt(3), sampled(1)], [prompt(1, 2), sampled(3)],
            "span 1, position 1: .* came after 3 ids, .* after 2 of .*: at position 2 .* id 7, and no id was given",
            id="shifted",
        ),
        pytest.param(
            [5, 6, 7, 2, 9], [6, 7, 2, 9, 8], [prompt(3), sampled(1, 2), sampled(1, 1)],
            [prompt(2, 1), sampled(1, 2), sampled(1, 1), sampled(1)],
            "span 1, position 2: .* from 2 came after 5 ids, .* after 3 of .*: at position 3 .* id 8, and no id was",
            id="reversed",
        ),
        pytest.param(
            [3, 7, 8, 9], [7, 8, 9, 2], [prompt(2, name="s3"), sampled(2)], [prompt(1, 1, name="s3"), sampled(3)],
            "span 1, position 1: .* of 's1' .*: at position 0 the sequence has id 5, and id 3 was given",
            id="another prompt",
        ),
    ],
)  # fmt: skip
def test_sampled_targets_must_come_after_what_they_were_sampled_after(store, ids, targets, inputs, claims, problem):
    add_sequences(store, [OTHERS[0]]), add_sequences(store, [OTHERS[1]])
    data = Datum(
        input_ids=np.array(ids, np.int32),
        targets=np.array(targets, np.int64),
        input_claims=inputs,
        target_claims=claims,
    )
    with pytest.raises(InvalidInputError, match=rf"data\[0\].loss_fn_inputs, {problem}"):
        check(store, [data])
    metrics = check(store, [data], "count")[1]
    num_sampled = sum(isinstance(each, types.SampledProvenanceSpan) for each in claims)
    assert metrics["provenance_false_contexts:sum"] == num_sampled
    assert metrics["provenance_proven:sum"] == metrics["provenance_false_spans:sum"] == 0


def test_turns_whose_prompts_extend_each_other_are_proven_in_one_datum(store):
    add_sequences(store, [OTHERS[2]])
    prompt_2, sampled_2 = prompt(2, 6, name="s4"), sampled(2, name="s4")
    inputs, ids = [*INPUTS[:1], sampled(3), prompt_2, sampled(1, name="s4")], (5, 6, 7, 8, 9, 2, 1, 1, 3, 4)
    data = claimed(inputs, [*TARGETS, prompt_2, sampled_2], ids=ids)
    assert check(store, [data])[1]["provenance_proven:sum"] == 5
    changed = claimed(inputs, [*TARGETS, prompt_2, sampled_2], ids=(5, 6, 7, 8, 9, 2, 1, 2, 3, 4))
    assert check(store, [changed], "count")[1]["provenance_false_contexts:sum"] == 1  # of the second turn
    many = [sampled(1, offset) for offset in range(3)]  # as many spans of one sequence
    assert check(store, [claimed([prompt(3), *many[:2]], [prompt(2, 1), *many])])[1]["provenance_proven:sum"] == 3


def test_targets_of_a_prompt_may_be_blank_where_the_loss_does_not_use_them(store):
    """As cookbook's rl_loop writes them."""
    data = claimed(INPUTS, TARGETS, advantages=[0, 0, 1, 1, 1])
    data.targets[:2] = 0
    assert check(store, [data])[1]["provenance_proven:sum"] == 3
    data.inputs["advantages"][1] = 1
    with pytest.raises(InvalidInputError, match=r"loss_fn_inputs, span 0, position 1: .* have id 7 at 2, and id 0 was"):
        check(store, [data])
    data.inputs["advantages"][1] = 0
    with pytest.raises(InvalidInputError, match=r"span 0, position 0: .* have id 6 at 1, and id 0 was"):
        check(store, [data], loss="dro")  # it trains them all the same
    counted = check(store, [claimed(INPUTS, TARGETS, advantages=[0] * 5)], loss="dro")[1]
    assert counted["provenance_unsampled_trained:sum"] == 2
    data.inputs["weights"] = np.array([0, 0, 1, 1, 1], np.float32)
    assert check(store, [data], loss="dro")[1]["provenance_proven:sum"] == 3
    last = claimed(INPUTS, TARGETS, advantages=[0, 0, 1, 1, 0])
    last.targets[4] = 0
    with pytest.raises(InvalidInputError, match=r"span 1, position 4: the sampled ids .* have id 2 at 2, and id 0 was"):
        check(store, [last])
    plain = claimed([], [])
    plain.targets[:2] = 0
    assert check(store, [plain])[1]["provenance_matched:sum"] == 3


def test_data_without_spans_are_found_by_their_ids_if_only_one_sequence_has_them(store):
    assert check(store, [claimed([], [])])[1]["provenance_matched:sum"] == 3
    assert check(store, [claimed([], [], ids=(5, 6, 7, 8, 9, 3))])[1]["provenance_unproven:sum"] == 5
    assert check(store, [claimed([], [])], owner="other")[1]["provenance_unproven:sum"] == 5
    add_sequences(store, [replace(SEQUENCE, sequence_id="s2")])
    assert check(store, [claimed([], [])])[1]["provenance_unproven:sum"] == 5


def test_stable_reinforce_gets_what_was_sampled(store):
    (datum,), _ = check(store, [claimed(INPUTS, TARGETS)], loss="stable_reinforce")
    assert datum.inputs["sampled"].tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(datum.inputs["logprobs"], np.array([0, 0, -0.1, -0.2, -0.3], np.float32))


def test_sparse_tensors_become_dense_and_broken_ones_are_refused():
    message = messages.ForwardBackwardRequest()
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = messages.DTYPE_INT64
    tensor.shape.extend([2, 3])
    csr = tensor.sparse_csr
    csr.values, csr.col_indices = np.array([7, 8, 9]).tobytes(), np.array([0, 2, 1]).tobytes()
    csr.crow_indices = np.array([0, 2, 3]).tobytes()
    assert read_data(message, 10, 100)[0].targets.tolist() == [[7, 0, 8], [0, 9, 0]]
    for rows, columns in (
        ([0, 2, 4], [0, 2, 1]), ([0, 3], [0, 2, 1]), ([0, 2, 3], [0, 3, 1]), ([0, 2, 1], [0, 1, 2]),
        ([0, 2, 3], [2, 2, 1]),
    ):  # fmt: skip
        csr.crow_indices, csr.col_indices = np.array(rows).tobytes(), np.array(columns).tobytes()
        with pytest.raises(
            InvalidInputError, match=r"data\[0\]: .* sparse tensor \(CSR\) of int64 of shape \[2, 3\]: .*_indices"
        ):
            read_data(message, 10, 100)
    del tensor.shape[:]
    with pytest.raises(InvalidInputError, match=r"of shape \[\]: shape is required for sparse tensors"):
        read_data(message, 10, 100)
    tensor.shape.extend([2, 2**40])
    with pytest.raises(InvalidInputError, match=r"data\[0\]: .* or \[T, K\] with K at most 10"):
        read_data(message, 10, 100)
    tensor.shape.extend([1] * 69)
    with pytest.raises(InvalidInputError, match=r"must have a shape \[T\], or"):
        read_data(message, 10, 100)


def test_a_request_has_one_budget_of_values_before_any_are_dense(monkeypatch):
    message = messages.ForwardBackwardRequest()
    for shape in ([4, 2**21], [4, 2**21], [5, 1]):
        message.data.add().loss_fn_inputs["target_tokens"].shape.extend(shape)
    monkeypatch.setattr("unbroken.tinker.losses._read_datum", lambda *_: pytest.fail("read"))
    with pytest.raises(InvalidInputError, match=r"all data must have at most 16777216 values, got 16777221"):
        read_data(message, 2**22, 100)
    message.data[1].loss_fn_inputs["target_tokens"].shape[0] = -9
    with pytest.raises(InvalidInputError, match=r"data\[1\]: .* got \[-9, 2097152\]"):
        read_data(message, 2**22, 100)


class Call:
    """The work of a call, which ends when `may_end` is set."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.may_end = asyncio.Event()

    async def __call__(self) -> Any:
        await self.may_end.wait()
        return self.answer


async def start(promises: Promises, request_id: str, call: Any, body: bytes = b"") -> Any:
    """A call like a sampler's."""
    promise = await promises.start(request_id, "sample", body)
    if promise.task is None and promise.result is None:
        promise.task = asyncio.create_task(promises.run(promise, call))
    return promise


async def end(promise: Any, call: Call) -> Any:
    call.may_end.set()
    return await promise.wait()


async def test_open_promises_of_a_key_are_bounded_and_results_are_in_the_store(store, monkeypatch):
    promises = open_promises(store)
    monkeypatch.setattr(sessions, "MAX_OPEN", 3)
    calls = [Call({"number": number}) for number in range(3)]
    held = [await start(promises, str(number), call) for number, call in enumerate(calls)]
    with pytest.raises(HttpError, match="3 calls of 0 bytes that are not answered yet"):
        await start(promises, "4", Call())
    assert (await end(held[0], calls[0])).answer == b'{"number":0}'
    assert list(promises._open) == ["1", "2"]
    for at in (promises, open_promises(store)):  # also the next server's
        found = await at.find("0")
        assert (await found.wait()).answer == b'{"number":0}'
    assert await Promises(store, DaemonThreads(1), "other").find("0") is None


async def test_a_number_is_its_call_s_also_after_its_answer_is_forgotten(store, monkeypatch):
    promises = open_promises(store)
    first = await start(promises, "1", succeed, b"body")
    await first.wait()
    monkeypatch.setattr("unbroken.tinker.store.ANSWERS_KEPT_S", -1)
    await (await start(promises, "2", succeed)).wait()
    assert (await (await start(promises, "1", succeed, b"body")).wait()).answer == sessions.FORGOTTEN.answer
    with pytest.raises(HttpError, match="call 1 came again as sample, or with another body"):
        await start(promises, "1", succeed, b"other")


async def test_a_result_that_cannot_be_stored_is_kept_in_memory_and_what_was_sampled_fails(store, monkeypatch):
    promises, lose = open_promises(store), Mock(side_effect=StoreError("the database is gone"))
    monkeypatch.setattr(store, "put_result", lose)
    trained = await start(promises, "1", succeed)

    async def sample() -> CallResult:
        return CallResult(answer=b"ids", is_protobuf=True, sequences=[SEQUENCE])

    async def fail() -> dict[str, Any]:
        return {"answer": object()}  # no JSON

    assert b'"server"' in (await (await start(promises, "0", fail)).wait()).answer
    sampled = await start(promises, "2", sample)
    assert (await trained.wait()).answer == b'{"done":true}'
    assert json.loads((await sampled.wait()).answer) == {"error": "the database is gone", "category": "server"}
    assert await start(promises, "1", succeed) is trained
    assert [name for _, name in await promises.wait_for_samples("", 0, after=0, timeout_s=0)] == ["1", "0", "2"]


async def test_calls_and_limits_of_a_key_are_its_own(store, monkeypatch):
    api = make_api(store, monkeypatch)
    session, model_id = await make_model(api)
    assert json.loads((await api.retrieve_future("me", types.FutureRetrieveRequest(request_id=f"{model_id}:0"))).answer)
    unknown = await api.retrieve_future("other", types.FutureRetrieveRequest(request_id=f"{model_id}:0"))
    assert "is not known" in unknown["error"]
    monkeypatch.setattr(sessions, "MAX_OPEN", 1)
    await start(api._promises_of("me"), "open", Call())
    for owner, own in (("me", session), ("other", (await make_model(api, owner="other"))[0])):
        request = make_sample(await make_sampler(api, own, owner))
        if owner == "me":
            with pytest.raises(HttpError, match="1 calls of 0 bytes that are not answered yet"):
                await api.asample(owner, request)
        else:
            await (await api.asample(owner, request)).wait()


async def test_ended_samples_are_named_once_by_a_cursor_and_to_each_clone_its_own(store):
    promises, calls = open_promises(store), [Call({}) for _ in range(4)]
    names = ["s:sample:0:1", "s:sample:0:2", "s:sample:0:1000000001", "s:sample:1:1"]
    held = [await start(promises, name, call) for name, call in zip(names, calls, strict=True)]

    async def ask(after: int = 0, clone: int = 0, timeout_s: float = 0) -> list[Any]:
        return await promises.wait_for_samples("s:sample:0", clone, after=after, timeout_s=timeout_s)

    assert await ask() == []
    asked = asyncio.create_task(ask(timeout_s=5))
    for number in (3, 2, 1):  # not the ones that are asked for, then one that is
        await asyncio.sleep(0.01)
        assert not asked.done()
        await end(held[number], calls[number])
    ((second, name),) = await asked
    assert name == names[1]
    assert [name for _, name in await ask(clone=1)] == [names[2]]
    await end(held[0], calls[0])
    assert [name for _, name in await ask()] == [names[1], names[0]]
    ((last, name),) = await ask(after=second)
    assert name == names[0]
    assert await ask(after=last) == []


async def test_a_run_keeps_the_order_and_goes_on_after_a_failure(store):
    promises, done = open_promises(store), []
    run = await make_run(promises)

    def work(number: int) -> Any:
        async def act() -> dict[str, Any]:
            await asyncio.sleep(0)
            done.append(number)
            if number == 2:
                raise InvalidInputError("two is wrong")
            return {"number": number}

        return act

    held = [await run.submit(number, "optim_step", work(number), b"") for number in (3, 2, 4, 2, 1, 1)]
    for each in held:
        await each.wait()
    assert done == [1, 2, 3, 4]
    assert json.loads(held[1].result.answer) == {"error": "two is wrong", "category": "user"}
    waiting = await run.submit(6, "optim_step", work(6), b"")
    await run.end("the end")
    assert b"model run is gone: the end" in (await waiting.wait()).answer


async def test_a_number_that_comes_again_with_another_body_is_refused(store):
    run, body = await make_run(open_promises(store)), b'{"learning_rate": 1}'
    first = await run.submit(1, "optim_step", succeed, body)
    assert await run.submit(1, "optim_step", succeed, body) is first
    for _ in range(2):  # also when the result is in the store
        for kind, other in (("optim_step", b'{"learning_rate": 2}'), ("forward", body)):
            with pytest.raises(HttpError, match=f"run:1 came again as {kind}, or with another body") as refused:
                await run.submit(1, kind, succeed, other)
            assert refused.value.status == 400  # the SDK sends a call again for ever that is answered by 409
        await first.wait()
    assert (await (await run.submit(1, "optim_step", succeed, body)).wait()) == first.result


async def test_waiting_bodies_of_a_key_are_bounded_but_the_call_that_others_wait_for_is_taken(store, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_OPEN_BYTES", 100)
    run, act = await make_run(open_promises(store)), Call({})
    await run.submit(2, "forward", act, bytes(60))
    with pytest.raises(HttpError, match="1 calls of 60 bytes that are not answered yet") as refused:
        await run.submit(3, "forward", act, bytes(60))
    assert refused.value.status == 429
    await run.submit(1, "forward", act, bytes(60))
    act.may_end.set()
    await (await run.submit(2, "forward", act, bytes(60))).wait()
    await asyncio.wait_for((await run.submit(3, "forward", act, bytes(60))).wait(), 60)


@pytest.mark.parametrize("location", ["sqlite"], indirect=True)  # no call that waits is in a database
async def test_what_waits_takes_the_memory_that_is_counted(store, monkeypatch):
    """Of two bytes an empty datum becomes 50, and `[]` in JSON 60."""
    api = make_api(store, monkeypatch)
    _, model_id = await make_model(api)
    datum = bytes([messages.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number << 3 | 2, 0])
    process = psutil.Process()
    sizes = []
    for number in range(2, 7):
        head = messages.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="ppo").SerializeToString()
        await api.forward_backward("me", head + datum * 300_000, PROTOBUF, "")
        sizes.append(process.memory_info().rss)
    for number in range(7, 11):
        given = {"model_id": model_id, "seq_id": number, "type": [[] for _ in range(300_000)]}
        await api.submit("me", "optim_step", given, types.OptimStepRequest)
        del given
        sizes.append(process.memory_info().rss)
    counted = api._promises_of("me")._open_bytes
    assert counted < 9_000_000
    assert sizes[-1] - sizes[0] < 40_000_000
    await api.finish_session("me", model_id.partition(":")[0])


@pytest.mark.parametrize("where", ["data", "model_input", "loss_fn_input_spans", "shape"])
def test_a_body_that_grows_when_it_is_parsed_is_refused_before(where, monkeypatch):
    """Every kind of field: messages in messages, and packed numbers."""
    monkeypatch.setattr(losses, "_MAX_FIELDS", 2**16)
    most = 2**16 + 1
    datum = messages.Datum.DESCRIPTOR

    def put(kind: Any, name: str, content: bytes) -> bytes:
        length, number = len(content), kind.fields_by_name[name].number
        size = bytes([length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21])
        return bytes([number << 3 | 2]) + size + content

    if where == "data":
        body = bytes([messages.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number << 3 | 2, 0]) * most
    elif where == "shape":
        tensor = put(messages.Tensor.DESCRIPTOR, "shape", b"\1" * most)
        entry = put(datum.fields_by_name["loss_fn_inputs"].message_type, "value", tensor)
        body = put(messages.ForwardBackwardRequest.DESCRIPTOR, "data", put(datum, "loss_fn_inputs", entry))
    else:
        inner = bytes([datum.fields_by_name[where].number << 3 | 2, 0]) * most
        body = put(messages.ForwardBackwardRequest.DESCRIPTOR, "data", inner)
    with pytest.raises(InvalidInputError, match="the body must have at most 65536 fields"):
        parse_forward_backward(body, PROTOBUF, "")


def test_fields_are_counted_as_they_are_parsed():
    message = messages.ForwardBackwardRequest(model_id="m" * 300, seq_id=2**30, forward_only=True)
    for _ in range(3):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(400)
        datum.loss_fn_inputs["weights"].dense = bytes(400)
        datum.loss_fn_inputs["weights"].dtype = messages.DTYPE_FLOAT32
        datum.loss_fn_inputs["weights"].shape.append(100)
    body = message.SerializeToString()
    # Each datum: itself, a chunk of two messages and a field, an entry with key and tensor of dense, dtype and shape,
    # whose one number in a packed list counts once more.
    assert count_fields(body, message.DESCRIPTOR, most=1000) == 3 + 3 * (1 + 3 + 6 + 1)
    assert parse_forward_backward(body, PROTOBUF, "") == message
    for stop in range(len(body)):
        assert count_fields(body[:stop], message.DESCRIPTOR, most=1000) <= 36


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), ExportError("no space for the model")])
async def test_a_checkpoint_that_the_disk_does_not_take_is_named(store, monkeypatch, failure):
    api = make_api(store, monkeypatch)
    _, model_id = await make_model(api)

    async def save(number: int, name: str) -> str:
        given = {"model_id": model_id, "seq_id": number, "path": name}
        promise = await api.submit("me", "save_weights", given, types.SaveWeightsRequest)
        await promise.wait()
        return promise.result.answer.decode()

    with monkeypatch.context() as full:
        full.setattr(WrittenModels, "save", lambda *_, **__: (_ for _ in ()).throw(failure))
        answer = await save(1, "a")
    assert "weights cannot be written in" in answer
    assert str(failure) in answer
    assert '"category":"server"' in answer
    long = "x" * 200  # the longest name that is allowed
    assert f"weights/{long}" in await save(2, long)
    assert store.folder_of(store.find_checkpoint(f"tinker://{model_id}/weights/{long}", owner="me")).exists()


async def test_calls_after_one_that_never_arrives_fail_and_the_run_goes_on(store, monkeypatch):
    monkeypatch.setattr(sessions, "_MISSING_S", 0.1)
    run, done = await make_run(open_promises(store)), []

    async def act() -> dict[str, Any]:
        done.append(1)
        return await succeed()

    late = [await run.submit(number, "optim_step", act, b"") for number in (2, 3)]
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in late)), 60)
    assert all(b"call 1 of model run never arrived" in each.result.answer for each in late)
    assert all(b'"user"' in each.result.answer for each in late)
    with pytest.raises(HttpError, match=r"must lie in \[4, "):
        await run.submit(1, "optim_step", act, b"")
    await asyncio.wait_for((await run.submit(4, "optim_step", act, b"")).wait(), 60)
    monkeypatch.setattr(sessions, "_MISSING_S", 60.0)
    waiting = await run.submit(6, "optim_step", act, b"")
    await asyncio.sleep(0.01)
    await run.submit(5, "optim_step", act, b"")
    await asyncio.wait_for(waiting.wait(), 60)
    assert done == [1, 1, 1]


async def test_calls_wait_for_the_first_chunk_of_a_batch_while_others_come(store, monkeypatch):
    """The SDK sends it last."""
    monkeypatch.setattr(sessions, "_MISSING_S", 3.0)
    run, held = await make_run(open_promises(store)), []
    for number in (2, 3, 1):
        await asyncio.sleep(1.6 if held else 0.0)
        held.append(await run.submit(number, "forward_backward", succeed, b""))
    await asyncio.gather(*(each.wait() for each in held))
    assert all(each.result.answer == b'{"done":true}' for each in held)


class CountedEngine:
    """An engine that only takes weights."""

    policy_version = 0

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def update_weights(self, source: FileSource, *, policy_version: int, **_: Any) -> None:
        await asyncio.sleep(0.001)
        self.policy_version = policy_version
        self.loaded.append(source.folder.name)


class WrittenModels:
    """A backend whose weights are one tensor."""

    def __init__(self) -> None:
        self.models: set[str] = set()

    def create(self, model_id: str, lora: Any) -> Any:
        self.models.add(model_id)
        return lora

    def delete(self, model_id: str) -> None:
        if model_id not in self.models:
            raise InvalidInputError("there is no model")
        self.models.remove(model_id)

    def optim_step(self, model_id: str, params: Any) -> dict[str, float]:
        return {"grad_norm": 0.0}

    def save(self, model_id: str, folder: Path, optimizer: bool) -> None:
        folder.mkdir()

    def adapter(self, model_id: str) -> Any:
        return iter([("x.lora_A.weight", torch.zeros(2, 2))])


def open_written() -> Any:
    models: Any = WrittenModels()
    return SimpleNamespace(run=lambda work: work(models), models=models.models)


def make_api(store: TinkerStore, monkeypatch: pytest.MonkeyPatch, **options: Any) -> TinkerApi:
    config = SimpleNamespace(model_name="tiny", limits=SimpleNamespace(max_n=8, max_body_bytes=1000), tokenizer="tiny")
    context: Any = SimpleNamespace(config=config)
    switch = WeightSwitch(CountedEngine(), make_base=lambda _: Path("base"))
    return TinkerApi(
        context,
        switch=switch,
        store=store,
        options=TinkerOptions(**options),
        serving=ServeOptions(model="tiny"),
        open_backend=open_written,
    )


async def make_session(api: TinkerApi, owner: str = "me") -> str:
    begun = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
    return (await api.create_session(owner, begun))["session_id"]


async def make_sampler(api: TinkerApi, session: str, owner: str = "me", **weights: str) -> str:
    """A sampler of the base model, or of other weights."""
    given = {"session_id": session, "sampling_session_seq_id": 0, **(weights or {"base_model": "tiny"})}
    return (await api.create_sampling_session(owner, types.CreateSamplingSessionRequest(**given)))[
        "sampling_session_id"
    ]


def make_sample(sampler: str, number: int = 0, num_samples: int = 1, **settings: Any) -> types.SampleRequest:
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(**settings)
    return types.SampleRequest(
        prompt=prompt, sampling_params=params, sampling_session_id=sampler, seq_id=number, num_samples=num_samples
    )


async def make_model(
    api: TinkerApi, number: int = 0, session: str = "", rank: int = 4, owner: str = "me"
) -> tuple[str, str]:
    """A session and a model of it."""
    session = session or await make_session(api, owner)
    body = types.CreateModelRequest(
        session_id=session, model_seq_id=number, base_model="tiny", lora_config=types.LoraConfig(rank=rank)
    )
    made = await api.create_model(owner, body)
    await made.wait()
    return session, made.request_id.rpartition(":")[0]


@pytest.mark.parametrize("full", [False, True])
async def test_a_server_has_adapters_or_whole_weights(store, monkeypatch, full):
    """An engine that has sampled from other whole weights takes no adapters until it starts again."""
    api = make_api(store, monkeypatch, tinker_full=full)
    session, _ = await make_model(api, rank=0 if full else 4)
    with pytest.raises(HttpError, match="--tinker-full for the other kind"):
        await make_model(api, 1, session, rank=4 if full else 0)
    for name, lora in (("whole", None), ("adapter", {"rank": 4})):
        path = f"tinker://run/sampler_weights/{name}"
        store.put_checkpoint(
            Checkpoint(path=path, model_id="run", base_model="tiny", lora=lora, version=0, num_bytes=1), owner="me"
        )
        if full == (lora is None):
            await make_sampler(api, session, model_path=path)
        else:
            with pytest.raises(HttpError, match="--tinker-full for the other kind"):
                await make_sampler(api, session, model_path=path)


@pytest.mark.parametrize("gate", [True, False])
async def test_the_owner_is_the_key_that_lets_the_request_in(gate):
    """Otherwise keys that are made up beside a valid one have limits of their own."""
    app, owners = FastAPI(), set()

    async def look(request: Request) -> None:
        owners.add(server._find(request)[1])

    app.add_api_route("/api/v1/look", look, methods=["GET"])
    app.state.tinker = None
    app.state.context = SimpleNamespace(config=SimpleNamespace(api_key=None if gate else "tml-one"))
    if gate:
        app.add_middleware(server.gate_keys, keys=frozenset([b"tml-one", b"tml-two"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for given in ({}, {"Authorization": "Bearer made-up"}, {"Authorization": "Bearer made-up-2"}):
            answer = await client.get("/api/v1/look", headers={"X-API-Key": "tml-one", **given})
            assert answer.status_code == 200
    assert owners == {hashlib.sha256(b"tml-one").hexdigest()[:32]}


@pytest.mark.parametrize("given", [{}, {"admin_key": "operator"}, {"api_key": "operator"}])
async def test_a_file_of_keys_lets_nobody_else_in_and_no_client_changes_the_engine_for_all(given):
    config = server.close_paths(ServerConfig(model_name=MODEL, **given))
    app = make_app(scripted_engine("ok"), **{name: getattr(config, name) for name in ("api_key", "admin_key")})
    app.add_middleware(server.gate_keys, keys=frozenset([b"tml-one"]))
    admin = [path for path, access in list_access(load_routers()).items() if access is Access.ADMIN]
    assert "/pause" in admin
    sampling, body = "/v1/sample", {"prompts": [[1]], "params": {"max_tokens": 1}}
    async with asgi_client(app) as client:
        for key, status in (("", 401), ("tml-two", 401), ("tml-one", 200)):
            headers = {"X-API-Key": key}
            assert (await client.post(sampling, json=body, headers=headers)).status_code == status
            assert {(await client.post(path, json={}, headers=headers)).status_code for path in admin} == {401}
        assert (await client.get("/health")).status_code == 200
        answer = await client.post("/pause", json={}, headers={"X-API-Key": "operator"})
        assert answer.status_code == (200 if given else 401)


async def test_a_model_or_a_sample_that_comes_again_is_the_same_or_refused(store, monkeypatch):
    api = make_api(store, monkeypatch)
    session, _ = await make_model(api, rank=4)
    await make_model(api, 0, session, rank=4)
    with pytest.raises(HttpError, match="came again as create_model"):
        await make_model(api, 0, session, rank=8)
    sampler = await make_sampler(api, session)
    first = await api.asample("me", make_sample(sampler, seed=1))
    assert (await api.asample("me", make_sample(sampler, seed=1))).request_id == first.request_id
    with pytest.raises(HttpError, match="came again as sample"):
        await api.asample("me", make_sample(sampler, seed=2))
    await first.wait()


async def test_models_are_freed_and_steps_acknowledged_whatever_fails_beside_them(store, monkeypatch):
    """A checkpoint for sampling cannot be loaded; then the database is lost for the rows of a step and of an end."""
    api = make_api(store, monkeypatch)
    path = "tinker://run/sampler_weights/name"
    lora = types.LoraConfig(rank=4).model_dump()
    store.put_checkpoint(
        Checkpoint(path=path, model_id="run", base_model="tiny", lora=lora, version=0, num_bytes=1), owner="me"
    )
    session, model_id = await make_model(api)
    await make_model(api, 1, session)
    given = {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": False}
    failed = await api.submit("me", "load_weights", given, types.LoadWeightsRequest)
    assert b"is for sampling alone" in (await failed.wait()).answer
    assert api._backend.models == {model_id, f"{session}:train:1"}

    def lose(*_: Any, **__: Any) -> None:
        raise StoreError("the database is gone")

    for name in ("add_step", "put_model", "put_result", "end_model"):
        monkeypatch.setattr(store, name, lose)
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    made = await api.submit("me", "optim_step", step, types.OptimStepRequest)
    assert json.loads((await made.wait()).answer) == {"metrics": {"grad_norm": 0.0}}
    create = types.CreateModelRequest(
        session_id=session, model_seq_id=3, base_model="tiny", lora_config=types.LoraConfig(rank=4)
    )
    await api.create_model("me", create)  # it fails while its session ends
    await api.finish_session("me", session)
    assert api._backend.models == set()


async def test_a_run_stays_with_the_process_of_its_model_and_ends_with_it(store, monkeypatch):
    """Calls that were queued when it ended say so, and leave the next process its models."""
    api, opened = make_api(store, monkeypatch), []
    monkeypatch.setattr(api, "_open_backend", lambda: opened.append(open_written()) or opened[-1])
    session, model_id = await make_model(api)
    other, other_id = await make_model(api)
    opened[0].run = Mock(side_effect=EngineError("the process has ended"))
    calls = []
    for each in (model_id, other_id):
        step = {"model_id": each, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        calls.append(await api.submit("me", "optim_step", step, types.OptimStepRequest))
    found = [json.loads((await each.wait()).answer) for each in calls]
    assert found == [{"error": "the engine cannot answer: the process has ended", "category": "server"}] * 2
    await asyncio.gather(*api._ending)
    assert not api._sessions.keys() & {session, other}
    _, next_id = await make_model(api)
    assert [each.models for each in opened] == [{model_id, other_id}, {next_id}]


async def test_a_sampling_call_is_answered_again_also_by_the_next_server(store, monkeypatch):
    """And is not sampled again under the same names."""
    api, calls = make_api(store, monkeypatch), []
    sampler = await make_sampler(api, await make_session(api))

    async def sample(*given: Any) -> CallResult:
        calls.append(given)
        made = [replace(SEQUENCE, sequence_id=name) for name in given[-1]]
        return CallResult(answer=f"answer {len(calls)}".encode(), is_protobuf=True, sequences=made)

    monkeypatch.setattr(api, "_sample", sample)
    first = await (await api.asample("me", make_sample(sampler, 0, 2))).wait()
    assert first.answer == b"answer 1"
    assert store.find_sequence(f"{sampler}:0:1", owner="me") is not None
    after = make_api(store, monkeypatch)
    request = types.FutureRetrieveRequest(request_id=f"{sampler}:0")
    again = await api.asample("me", make_sample(sampler, 0, 2))
    assert again.sequence_ids == [f"{sampler}:0:0", f"{sampler}:0:1"]
    for found in (
        await again.wait(),
        await api.retrieve_future("me", request),
        await after.retrieve_future("me", request),
    ):
        assert (found.answer, found.is_protobuf) == (b"answer 1", True)
    assert len(calls) == 1
    with pytest.raises(HttpError, match="came again as sample, or with another body"):
        await api.asample("me", make_sample(sampler, 0, 3))
    assert "is not known" in (await after.retrieve_future("other", request))["error"]
    unknown = types.FutureRetrieveRequest(request_id=f"{sampler}:2")
    assert "is not known" in (await after.retrieve_future("me", unknown))["error"]


async def test_only_the_last_samplers_without_a_name_have_files(store, monkeypatch):
    api = make_api(store, monkeypatch)
    session, model_id = await make_model(api)
    made = []
    for number, kind in enumerate([*["snapshot"] * (sessions.MAX_SNAPSHOTS + 2), *["inflight"] * 3], start=1):
        body = types.SaveWeightsForSamplerRequest(
            model_id=model_id, seq_id=number, sampling_session_seq_id=number, kind=kind
        )
        promise = await api.submit("me", "save_weights_for_sampler", body.model_dump(), type(body))
        await promise.wait()
        made.append(json.loads(promise.result.answer)["sampling_session_id"])
    folders = {each.name for each in (store.temporary_folder / session).iterdir()}
    assert folders == {str(number) for number in (*range(3, sessions.MAX_SNAPSHOTS + 3), len(made))}
    for name in made[:2]:
        with pytest.raises(HttpError, match="its model has 8 newer ones") as gone:
            api.get_sampler(name, "me")
        assert gone.value.status == 410
    for name in made[2:]:
        async with api._switch.use(api.get_sampler(name, "me")):
            pass
    with pytest.raises(HttpError, match="are gone: its session has ended, or made newer ones"):
        async with api._switch.use(SamplerWeights(folder=store.temporary_folder / session / "1" / "sampler")):
            pass


async def test_requests_for_the_same_weights_go_together(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    engine = CountedEngine()
    switch = WeightSwitch(engine, make_base=lambda _: Path("base"))
    base, one, two = switch.base, *(SamplerWeights(folder=tmp_path / each) for each in ("one", "two"))
    inside: set[SamplerWeights] = set()

    async def use(weights: SamplerWeights) -> None:
        async with switch.use(weights):
            inside.add(weights)
            assert inside == {weights}
            await asyncio.sleep(0.01)
            inside.discard(weights)

    await asyncio.gather(*(use(each) for each in (base, one, two, one, base, two, one)))
    assert engine.loaded == ["one", "two", "base"]  # the second of the base came while others waited
    left = asyncio.create_task(use(two))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    await asyncio.wait_for(use(one), 60)


def test_what_restores_the_base_is_finite(tmp_path):
    adapter = {f"layer.lora_{part}.weight": torch.full((2, 2), value) for part, value in (("A", math.inf), ("B", 1.0))}
    (tmp_path / "loaded").mkdir()
    list(write_tensors(tmp_path / "loaded", adapter.items()))
    zeros = dict(read_tensors(FileSource(write_base(tmp_path / "loaded", tmp_path / "base", tmp_path)).paths()))
    assert zeros.keys() == adapter.keys()
    assert not any(each.any() for each in zeros.values())


async def test_a_checkpoint_that_is_replaced_is_whole_until_the_new_one_is_recorded(store, open_store, monkeypatch):
    api = make_api(store, monkeypatch)
    _, model_id = await make_model(api)
    calls = iter(range(1, 99))

    async def save(call: str = "save_weights", kind: Any = types.SaveWeightsRequest, **fields: Any) -> str:
        given = {"model_id": model_id, "seq_id": next(calls), "path": "a", **fields}
        promise = await api.submit("me", call, given, kind)
        await promise.wait()
        return promise.result.answer.decode()

    def find() -> Path:
        found = store.find_checkpoint(f"tinker://{model_id}/weights/a", owner="me")
        assert (store.folder_of(found) / "sampler" / "00000.safetensors").exists()
        return store.folder_of(found)

    assert "weights/a" in await save()
    first = find()
    assert "is there already: give another name" in await save()
    with monkeypatch.context() as killed:
        killed.setattr(store, "put_checkpoint", lambda *_, **__: 1 / 0)
        await save(overwrite=True)
    assert find() == first
    await save(overwrite=True)
    assert find() != first
    assert not first.exists()

    to_sample = partial(save, "save_weights_for_sampler", types.SaveWeightsForSamplerRequest)
    assert "sampler_weights/a" in await to_sample()
    assert "is there already: give another name" in await to_sample()  # samplers have it
    for ttl in (0, 10**12):
        assert "ttl_seconds must lie in [1, 315360000]" in await save(overwrite=True, ttl_seconds=ttl)
    assert len(await api.list_checkpoints("me")) == 2
    assert len([*first.parent.iterdir()]) == 2  # with what was written and not recorded
    kept = find()
    store.close()
    open_store()
    assert [*first.parent.iterdir()] == [kept]


@pytest.fixture
def tinker_app(store: TinkerStore, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The routes of the Tinker API in an application of ours."""
    app = make_app(scripted_engine("ok"))
    for router in server.make_routes():
        app.include_router(router)
    app.state.tinker = make_api(store, monkeypatch)
    return app


def list_posts() -> list[str]:
    """Every path of the Tinker API that is posted to."""
    routes = [route for router in server.make_routes() for route in router.routes]
    paths = [route.path for route in routes if isinstance(route, APIRoute) and "POST" in route.methods]
    return [path.replace("{session_id}", "none") for path in paths if "{path" not in path]


@pytest.mark.parametrize("body", [None, b"", b"null", b"[]", b"{}", b"5", b"{", b"\xff"])
@pytest.mark.parametrize("kind", ["application/json", PROTOBUF, None])
async def test_a_call_whose_body_is_empty_or_missing_says_what_is_wrong(tinker_app, body, kind):
    headers = {} if kind is None else {"content-type": kind}
    async with asgi_client(tinker_app) as client:
        for path in list_posts():
            answer = await client.post(path, content=body, headers=headers)
            takes_none = path.removeprefix(f"{server.PREFIX}/") in (*server._FIXED, "sessions/none/finish")
            if takes_none:
                assert answer.status_code in (200, 404), path
            else:
                assert answer.status_code in (400, 422), (path, answer.text)
                assert "body" in answer.json()["error"]["message"] or "is required" in answer.json()["error"]["message"]
