"""What trainer and worker agree on: the group, the chunks, and that what came is what was sent."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.weights.adapters import A, B
from unbroken.weights.sources import TensorSpec, WeightStream, check_stream, make_digest
from unbroken.weights.wire import (
    BufferPacking,
    PackedGroup,
    Rendezvous,
    Transport,
    WireReceiver,
    listen,
    open_fields,
    pickle_unique_id,
    read_unique_id,
    send,
    sum_stream,
)

CPU = torch.device("cpu")
WEIGHTS = [("norm", torch.ones(3)), ("embed", torch.arange(20.0).view(5, 4)), ("head", torch.zeros(5, 4))]
PACKING = {"packed": True, "buffer_bytes": 64}


def digest_of(weights: list[tuple[str, torch.Tensor]]) -> str:
    stream = WeightStream.of(weights)
    return make_digest(stream.specs, sum_stream(stream))


def test_a_digest_tells_names_dtypes_shapes_and_values_apart() -> None:
    digest = digest_of(WEIGHTS)
    assert digest == digest_of([(name, tensor.clone()) for name, tensor in WEIGHTS])
    (first, norm), (second, embed), last = WEIGHTS
    for other in (
        [("other", norm), (second, embed), last],
        [(first, norm), (second, embed + 1), last],
        [(first, norm), (second, embed.view(4, 5)), last],
        [(first, norm.bfloat16()), (second, embed), last],
    ):
        assert digest != digest_of(other)


def test_names_that_repeat_and_updates_without_weights_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="weight 'norm' came twice"):
        check_stream(WeightStream.of([*WEIGHTS, WEIGHTS[0]]))
    with pytest.raises(InvalidInputError, match="weights is empty: nothing to send"):
        check_stream(WeightStream.of([]))


def test_a_stream_that_is_made_while_it_is_read_goes_on_where_it_stopped() -> None:
    stream = WeightStream([TensorSpec.of(*named) for named in WEIGHTS], iter(WEIGHTS))
    assert (stream.is_whole, stream.is_kept) == (True, False)
    assert next(iter(stream))[0] == "norm"
    assert not stream.is_whole
    assert [name for name, _ in stream] == ["embed", "head"]
    kept = WeightStream.of(WEIGHTS)
    assert [name for name, _ in kept] == [name for name, _ in kept.cast("bfloat16")]
    assert kept.is_whole
    assert {spec.dtype for spec in kept.cast("bfloat16").specs} == {"bfloat16"}


def test_values_are_read_in_the_dtype_of_the_cast_but_those_of_an_adapter_and_whole_numbers_as_they_are() -> None:
    weights = [("norm", torch.tensor([1 + 2**-12])), ("places", torch.arange(3))]
    found = dict(WeightStream.of(weights).cast("bfloat16").read_cast())
    assert (found["norm"].dtype, found["norm"].tolist(), found["places"].dtype) == (torch.bfloat16, [1.0], torch.int64)
    adapter = WeightStream.of([(f"q{ending}", torch.full((2, 2), 1 + 2**-12)) for ending in (A, B)]).cast("bfloat16")
    assert {spec.dtype for spec in adapter.specs} == {"float32"}
    assert all((values == 1 + 2**-12).all() for _, values in adapter.read_cast())


@contextmanager
def meeting(num_workers: int) -> Iterator[tuple[PackedGroup, list[WireReceiver]]]:
    """A trainer and the workers of an engine."""
    listener = listen("127.0.0.1")
    rendezvous = Rendezvous(
        host="127.0.0.1",
        port=listener.getsockname()[1],
        first_rank=1,
        world_size=1 + num_workers,
        transport=Transport.GLOO,
        join_timeout_s=10.0,
        timeout_s=10.0,
    )
    receivers = [WireReceiver(CPU, rank=rank) for rank in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as threads:
        joining = [threads.submit(receiver.open, open_fields(rendezvous)) for receiver in receivers]
        group = PackedGroup(rendezvous, rank=0, device=CPU, listener=listener)
        for one in joining:
            one.result()
    yield group, receivers
    for receiver in receivers:
        receiver.close()
    group.close()


def transfer(
    group: PackedGroup, receivers: list[WireReceiver], weights: list[tuple[str, torch.Tensor]], load: Any
) -> tuple[list[int], list[Any]]:
    """Send the weights; returns the trainer's sums, and what each worker returns."""
    stream = WeightStream.of(weights)
    tensors = [spec.to_object() for spec in stream.specs]
    with ThreadPoolExecutor(len(receivers)) as threads:
        taken = [threads.submit(receiver.take, tensors, PACKING, load) for receiver in receivers]
        sums = send(group, stream, BufferPacking(**PACKING), check=lambda: None)  # type: ignore[arg-type]
        return sums, [one.result() for one in taken]


def test_what_came_has_the_sums_of_what_was_sent() -> None:
    loaded: list[tuple[str, torch.Tensor]] = []
    with meeting(2) as (group, receivers):
        sums, taken = transfer(group, receivers, WEIGHTS, loaded.extend)
        assert taken == [sums, sums]
        assert transfer(group, receivers, WEIGHTS, None) == (sums, [[], []])  # dropped, and the group lives
    assert [name for name, _ in loaded].count("head") == 2
    assert all(torch.equal(tensor, dict(WEIGHTS)[name]) for name, tensor in loaded)


@pytest.mark.parametrize("cause", ["weights that are not finite", "a model that cannot load"])
def test_a_sender_does_not_wait_for_a_worker_that_takes_no_more(cause: str) -> None:
    def fail(weights: Any) -> None:
        next(weights)
        raise ZeroDivisionError("no room")

    broken = [WEIGHTS[0], ("embed", torch.full((5, 4), float("inf"))), WEIGHTS[2]]
    finite = cause != "weights that are not finite"
    with (
        meeting(1) as (group, receivers),
        pytest.raises(
            ZeroDivisionError if finite else WeightsError,
            match="no room" if finite else "'embed' has numbers that are not",
        ),
    ):
        transfer(group, receivers, WEIGHTS if finite else broken, fail if finite else list)


def test_weights_that_were_announced_otherwise_are_not_sent() -> None:
    with meeting(1) as (group, _):
        stream = WeightStream(WeightStream.of(WEIGHTS[:1]).specs, [("other", torch.ones(3))])
        with pytest.raises(WeightsError, match=r"'norm' of shape \(3,\) was announced, and 'other' of shape \(3,\)"):
            send(group, stream, BufferPacking(**PACKING), check=lambda: None)  # type: ignore[arg-type]
        stream = WeightStream(WeightStream.of(WEIGHTS).specs, WEIGHTS[:1])
        with pytest.raises(WeightsError, match=r"'embed' of shape .* was announced, and nothing came"):
            send(group, stream, BufferPacking(**PACKING), check=lambda: None)  # type: ignore[arg-type]


def test_a_trainer_gives_up_while_a_worker_does_not_come() -> None:
    def refuse() -> None:
        raise WeightsError("a server has failed")

    with meeting(1) as (group, _):
        with pytest.raises(WeightsError, match="a server has failed"):
            send(group, WeightStream.of(WEIGHTS), BufferPacking(**PACKING), check=refuse)  # type: ignore[arg-type]
        work = group.begin(torch.zeros(2**26, dtype=torch.uint8))  # nobody receives it
        with pytest.raises(WeightsError, match="a server has failed"):
            group.wait(work, check=refuse)


def test_the_id_of_nccl_is_pickled_as_vllms_and_read_without_running_a_pickle() -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    value = bytes(range(100, 228))
    theirs = pickle.loads(pickle_unique_id(value))
    assert isinstance(theirs, ncclUniqueId)
    assert bytes(theirs) == value
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert read_unique_id(pickle.dumps(theirs, protocol=protocol)) == value
    with pytest.raises(WeightsError, match="no id of NCCL"):
        read_unique_id(pickle.dumps("nothing"))
