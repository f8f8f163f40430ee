"""Rows of real sessions as data of the Tinker SDK: spans tile, and claim what the session's tree has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from support.gateways import CALL, CHAT, USER, ask, result, running_gateway, scripted
from support.recorded_sessions import recording_gateway
from support.servers import encode, listening, scripted_engine
from unbroken import AsyncClient
from unbroken.errors import InvalidInputError
from unbroken.integrations.tinker import make_data, name_sequence, split_sequence_name
from unbroken.tinker.losses import read_data
from unbroken.tinker.options import ProvenancePolicy
from unbroken.tinker.provenance import ProvenanceCheck
from unbroken.tinker.store import TinkerStore
from unbroken.types import NO_VERSION, EncodedImage, ImageSpan, TrainingSample


async def read_session(gateway, created, *, advantage=0.5):
    async with listening(gateway.app) as url, AsyncClient(url) as client:
        session_id = created["session_id"]
        return await client.sessions.samples(session_id, advantage=advantage), await client.sessions.tree(session_id)


def find_prompt(nodes, number: int) -> list[int]:
    """What the engine was given for a sampled node."""
    ids: list[int] = []
    parent = nodes[number]["parent"]
    while parent is not None:
        node = nodes[parent["node"]]
        ids = node["token_ids"][: parent["offset"]].tolist() + ids
        parent = node["parent"]
    return ids


def read_spans(spans, nodes, session_id: str) -> list[int]:
    """The ids that spans claim."""
    ids: list[int] = []
    for span in spans:
        of, number = split_sequence_name(span.sequence_id)
        assert of == session_id
        assert nodes[number]["origin"] == "sampled"
        is_sampled = isinstance(span, tinker.SampledProvenanceSpan)
        source = nodes[number]["token_ids"].tolist() if is_sampled else find_prompt(nodes, number)
        assert span.length >= 1
        assert span.offset + span.length <= len(source)
        ids += source[span.offset : span.offset + span.length]
    return ids


def check_data(data, rows, tree, session_id: str) -> None:
    assert len(data) == len(rows)
    for datum, row in zip(data, rows, strict=True):
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        assert inputs["target_tokens"].tolist() == row.token_ids[1:].tolist()
        assert datum.model_input.length == len(row.token_ids) - 1
        assert read_spans(datum.model_input_spans, tree["nodes"], session_id) == row.token_ids[:-1].tolist()
        assert read_spans(datum.loss_fn_input_spans, tree["nodes"], session_id) == row.token_ids[1:].tolist()
        of_target = np.concatenate(
            [[isinstance(span, tinker.SampledProvenanceSpan)] * span.length for span in datum.loss_fn_input_spans]
        )
        np.testing.assert_array_equal(of_target, row.sampled_mask[1:])
        np.testing.assert_array_equal(inputs["logprobs"][of_target], row.rollout_logprobs[1:][of_target])
        assert not inputs["logprobs"][~of_target].any()
        np.testing.assert_array_equal(inputs["advantages"] != 0, row.loss_mask[1:])
        assert {tensor.dtype for tensor in datum.loss_fn_inputs.values()} == {"int64", "float32"}


async def test_rows_of_tools_forks_and_sub_agents_become_data_with_true_spans(tmp_path):
    async with recording_gateway(tmp_path) as (gateway, created):
        rows, tree = await read_session(gateway, created)
    data = make_data(created["session_id"], rows, tree)
    assert len(rows) >= 3
    assert any(np.diff(row.sampled_mask.astype(int)).tolist().count(1) > 1 for row in rows), "a row of several turns"
    assert any((row.sampled_mask & ~row.loss_mask).any() for row in rows), "an id that another row trains"
    check_data(data, rows, tree, created["session_id"])


async def test_conversations_that_are_alike_are_told_apart_by_their_logprobs(tmp_path):
    async with running_gateway(scripted(f"I look.{CALL}", "It is 17.<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        message = await ask(agent, [USER])
        await ask(agent, [USER, message, result(message)])
        await ask(agent, [USER])
        rows, tree = await read_session(gateway, created, advantage=-1.0)
    check_data(make_data(created["session_id"], rows, tree), rows, tree, created["session_id"])


async def test_a_row_of_another_session_or_distribution_is_refused(tmp_path):
    async with recording_gateway(tmp_path) as (gateway, created):
        other = await gateway.create()
        await gateway.agent(other).post(CHAT, json={"messages": [{"role": "user", "content": "Something else"}]})
        other_tree = await gateway.look(other, "/tree")
        rows, tree = await read_session(gateway, created)
    with pytest.raises(InvalidInputError, match=r"rows\[0\] is not a row of session"):
        make_data(other["session_id"], rows, other_tree)
    changed = replace(rows[0], token_ids=np.append(rows[0].token_ids[:-1], rows[0].token_ids[-1] + 1))
    with pytest.raises(InvalidInputError, match=r"rows\[1\] is not a row of session"):
        make_data(created["session_id"], [rows[0], changed], tree)
    with pytest.raises(InvalidInputError, match=r"rows\[0\] must be sampled at temperature 1, .*, got 0.7"):
        make_data(created["session_id"], [replace(rows[0], temperature=0.7)], tree)


async def test_a_server_proves_the_turns_of_a_gateways_store(tmp_path):
    """Through the SDK's own message; one id that was changed is refused with its position."""
    async with recording_gateway(tmp_path / "sessions") as (gateway, created):
        rows, tree = await read_session(gateway, created)
    data = make_data(created["session_id"], rows, tree)
    store = TinkerStore(tmp_path / "store", sessions=str(tmp_path / "sessions"))

    def check(given):
        body = ForwardBackwardInput(data=given, loss_fn="stable_reinforce")
        request = ForwardBackwardRequest(model_id="a", seq_id=1, forward_backward_input=body)
        claimed = read_data(forward_backward_request_to_proto(request), vocab_size=10**6, context_length=10**6)
        run = SimpleNamespace(owner="key", model_id="a", version=3)
        return ProvenanceCheck(store, ProvenancePolicy.REFUSE, run, loss="stable_reinforce").check(claimed)

    checked, metrics = check(data)
    assert metrics["provenance_other_model:sum"] == sum(int(row.sampled_mask.sum()) for row in rows)
    assert metrics["provenance_proven:sum"] == 0  # the served model is not the run's
    assert metrics["provenance_logprobs_changed:sum"] == metrics["provenance_false_spans:sum"] == 0
    for datum, row in zip(checked, rows, strict=True):
        np.testing.assert_array_equal(datum.inputs["sampled"] != 0, row.sampled_mask[1:])
    targets = data[0].loss_fn_inputs["target_tokens"].to_numpy().copy()
    targets[-1] += 1
    inputs = {**data[0].loss_fn_inputs, "target_tokens": tinker.TensorData.from_numpy(targets)}
    with pytest.raises(InvalidInputError, match=rf"span \d+, position {len(targets) - 1}: the sampled ids of"):
        check([replace(data[0], loss_fn_inputs=inputs)])
    store.close()
    store = TinkerStore(tmp_path / "store")
    with pytest.raises(InvalidInputError, match="this server has sampled no sequence"):
        check(data)
    store.close()


async def test_ids_that_closed_the_reasoning_of_a_turn_are_no_sampled_ids_to_the_api(tmp_path):
    """A session of two turns, the first of which was closed; a span may claim its sampled ids alone."""
    end = encode("\n</think>\n\n")

    def reply(prompt_ids):
        is_closed = prompt_ids[-len(end) :].tolist() == end
        return encode("42<|im_end|>") if is_closed else encode("<think>\nlet me see and so on")

    async with running_gateway(scripted_engine(reply), tmp_path / "sessions") as gateway:
        created, other = await gateway.create(), await gateway.create()
        await ask(gateway.agent(created), [USER], thinking_token_budget=4)
        await ask(gateway.agent(other), [USER], max_tokens=4)
        session_id = created["session_id"]
        (row,), tree = await read_session(gateway, created)
        (plain,), plain_tree = await read_session(gateway, other)
    with pytest.raises(InvalidInputError, match=r"rows\[0\] must have turns that were sampled whole, .* of node 1 of"):
        make_data(session_id, [row], tree)
    with pytest.raises(InvalidInputError, match=r"rows\[0\] is not a row of session"):
        make_data(session_id, [replace(plain, token_ids=plain.token_ids + 1)], tree)
    check_data(make_data(other["session_id"], [plain], plain_tree), [plain], plain_tree, other["session_id"])

    store = TinkerStore(tmp_path / "store", sessions=str(tmp_path / "sessions"))
    first = int(row.sampled_mask.argmax())
    num_ids = len(row.token_ids)
    arrays = {
        "target_tokens": row.token_ids[1:].astype(np.int64),
        "logprobs": np.nan_to_num(row.rollout_logprobs[1:]),
        "advantages": row.loss_mask[1:].astype(np.float32),
    }
    name = name_sequence(session_id, 1)

    def spans(start):
        given = tinker.PromptProvenanceSpan(sequence_id=name, offset=start, length=first - start)
        return [given, tinker.SampledProvenanceSpan(sequence_id=name, offset=0, length=num_ids - first - 1 + start)]

    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.token_ids[:-1].tolist()),
        loss_fn_inputs={key: tinker.TensorData.from_numpy(array) for key, array in arrays.items()},
    ).with_provenance(model_input=spans(0), loss_fn_inputs=spans(1))
    body = ForwardBackwardInput(data=[datum], loss_fn="stable_reinforce")
    request = ForwardBackwardRequest(model_id="a", seq_id=1, forward_backward_input=body)
    claimed = read_data(forward_backward_request_to_proto(request), vocab_size=10**6, context_length=10**6)
    run = SimpleNamespace(owner="key", model_id="a", version=3)
    with pytest.raises(InvalidInputError, match="have an id at 4 that was given, not sampled, to close its reasoning"):
        ProvenanceCheck(store, ProvenancePolicy.REFUSE, run, loss="stable_reinforce").check(claimed)
    (counted,), metrics = ProvenanceCheck(store, ProvenancePolicy.COUNT, run, loss="stable_reinforce").check(claimed)
    assert metrics["provenance_false_spans:sum"] > 0
    assert not counted.inputs["sampled"].any()
    store.close()


async def test_turns_of_a_session_are_proven_if_a_checkpoint_of_the_run_answered(tmp_path):
    name = "tinker://a/sampler_weights/s1"
    async with running_gateway(scripted("It is 17.<|im_end|>"), tmp_path / "sessions", adapters=(name,)) as gateway:
        created = await gateway.create(policy=name)
        await ask(gateway.agent(created), [USER], model="my-habit")
        rows, tree = await read_session(gateway, created)
    store = TinkerStore(tmp_path / "store", sessions=str(tmp_path / "sessions"))
    request = ForwardBackwardRequest(
        model_id="a",
        seq_id=1,
        forward_backward_input=ForwardBackwardInput(
            data=make_data(created["session_id"], rows, tree), loss_fn="importance_sampling"
        ),
    )
    data = read_data(forward_backward_request_to_proto(request), vocab_size=10**6, context_length=10**6)
    found = []
    for model_id in ("a", "b"):
        run = SimpleNamespace(owner="key", model_id=model_id, version=3)
        _, metrics = ProvenanceCheck(store, ProvenancePolicy.REQUIRE, run, loss="importance_sampling").check(data)
        found.append([metrics[f"provenance_{each}"] for each in ("proven:sum", "other_model:sum", "version_lag:max")])
    store.close()
    number = int(rows[0].sampled_mask.sum())
    assert found == [[number, 0, 3], [0, number, 0]]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.1}, {"presence_penalty": 0.5}],
    ids=lambda each: next(iter(each)),
)
async def test_a_row_of_another_distribution_is_refused_also_if_its_cuts_are_not_recorded(tmp_path, sampling):
    async with running_gateway(scripted("It is 17.<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create(sampling=sampling)
        await ask(gateway.agent(created), [USER])
        rows, tree = await read_session(gateway, created)
    assert (rows[0].temperature, rows[0].kept_ids) == (1.0, None)
    ((name, value),) = sampling.items()
    with pytest.raises(InvalidInputError, match=rf"rows\[0\] must be .* turn 0 was sampled with .*{name}.*{value}"):
        make_data(created["session_id"], rows, tree)


def make_sequence(tokens, name="s:sample:0:0", logprobs=(-0.5, -0.25)):
    return SimpleNamespace(tokens=tokens, sequence_id=name, logprobs=None if logprobs is None else list(logprobs))


@pytest.mark.parametrize("prompt", [[1, 2, 3], np.array([1, 2, 3]), tinker.ModelInput.from_ints([1, 2, 3])])
def test_what_the_sdk_sampled_becomes_data_with_true_spans(prompt):
    first, second = make_data(prompt, [make_sequence([4, 5]), make_sequence([6], "t", [-1.0])], [0.5, -0.5])
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in first.loss_fn_inputs.items()}
    assert first.model_input.to_ints() == [1, 2, 3, 4]
    assert inputs == {
        "target_tokens": [2, 3, 4, 5], "logprobs": [0, 0, -0.5, -0.25], "advantages": [0, 0, 0.5, 0.5]
    }  # fmt: skip
    of_prompt, of_sampled = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    name = "s:sample:0:0"
    assert list(first.model_input_spans) == [
        of_prompt(sequence_id=name, length=3), of_sampled(sequence_id=name, length=1)
    ]  # fmt: skip
    assert list(first.loss_fn_input_spans) == [
        of_prompt(sequence_id=name, offset=1, length=2), of_sampled(sequence_id=name, length=2)
    ]  # fmt: skip
    assert second.model_input.to_ints() == [1, 2, 3]
    assert list(second.model_input_spans) == [of_prompt(sequence_id="t", length=3)]


@pytest.mark.parametrize(
    ("prompt", "sequences", "advantages", "problem"),
    [
        ([1], [make_sequence([4, 5])], [], "one advantage for each sequence, got 0 for 1"),
        ([], [make_sequence([4, 5])], [1.0], "prompt must have at least one id"),
        ([1], [make_sequence([4, 5], name=None)], [1.0], r"sequences\[0\] must have a sequence_id, .* got None"),
        ([1], [make_sequence([4, 5], logprobs=None)], [1.0], r"sequences\[0\] must have .* got .*NoneType"),
        ([1], [make_sequence([4, 5]), make_sequence([])], [1.0, 1.0], r"sequences\[1\] must have .* 0 ids"),
    ],
)
def test_sequences_that_the_server_could_not_know_are_refused(prompt, sequences, advantages, problem):
    with pytest.raises(InvalidInputError, match=problem):
        make_data(prompt, sequences, advantages)


def test_a_row_with_images_is_refused():
    span = ImageSpan(offset=0, length=2, image=EncodedImage(b"x"), placeholder_id=9)
    row = TrainingSample(
        token_ids=[9, 9, 5],
        sampled_mask=[False, False, True],
        loss_mask=[False, False, True],
        rollout_logprobs=[np.nan, np.nan, -1],
        policy_versions=[NO_VERSION, NO_VERSION, 0],
        advantages=[0, 0, 1],
        images=(span,),
    )
    with pytest.raises(InvalidInputError, match=r"rows\[0\] must have no images"):
        make_data("a", [row], {"nodes": []})


def test_names_of_sequences_are_read_back():
    assert split_sequence_name(name_sequence("a/b", 12)) == ("a/b", 12)
    for other in ("", "abc", "/3", "abc/", "abc/x", "abc/-1", "abc/٣"):
        assert split_sequence_name(other) is None
