"""What trainer and worker agree on: where bytes lie, and that what came is what was sent."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.transfer.announcement import Announcement, Staging, Transport
from unbroken.transfer.broadcast import BroadcastReceiver
from unbroken.transfer.group import Step, WeightGroup
from unbroken.transfer.layout import Layout, Piece, TensorSpec
from unbroken.transfer.sender import compute_sums, send

CPU = torch.device("cpu")
SPECS = (TensorSpec(name="norm", dtype="float32", shape=(3,)), TensorSpec(name="embed", dtype="float32", shape=(5, 4)))


def test_tensors_lie_in_one_row_and_buckets_are_its_slices() -> None:
    layout = Layout(specs=SPECS, bucket_bytes=64)
    assert (layout.offsets, layout.num_bytes, layout.buckets()) == ((0, 16), 96, [(0, 64), (64, 96)])
    assert layout.pieces() == [
        [
            Piece(index=0, tensor_start=0, bucket_start=0, num_bytes=12),
            Piece(index=1, tensor_start=0, bucket_start=16, num_bytes=48),
        ],
        [Piece(index=1, tensor_start=48, bucket_start=0, num_bytes=32)],
    ]


def test_a_digest_tells_names_shapes_and_values_apart() -> None:
    layout = Layout(specs=SPECS, bucket_bytes=64)
    tensors = [torch.ones(3), torch.arange(20.0).view(5, 4)]
    digest = layout.digest(compute_sums(layout, tensors, device=CPU))
    assert digest == layout.digest(compute_sums(layout, [tensor.clone() for tensor in tensors], device=CPU))
    assert digest != layout.digest(compute_sums(layout, [tensors[0], tensors[1] + 1], device=CPU))
    renamed = Layout(specs=(TensorSpec(name="other", dtype="float32", shape=(3,)), SPECS[1]), bucket_bytes=64)
    assert digest != renamed.digest(compute_sums(renamed, tensors, device=CPU))


def test_names_that_repeat_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="weight 'norm' came twice"):
        Layout(specs=(SPECS[0], SPECS[0]), bucket_bytes=64)


def test_an_announcement_survives_its_way_as_json() -> None:
    group = WeightGroup.host("127.0.0.1", group_id="a", transport=Transport.GLOO, world_size=2, timeout_s=5.0)
    announcement = announced(group, Layout(specs=SPECS, bucket_bytes=64))
    assert Announcement.from_object(announcement.to_object()) == announcement
    group.close()


def announced(group: WeightGroup, layout: Layout) -> Announcement:
    return Announcement(
        update_id=uuid.uuid4().hex,
        policy_version=1,
        layout=layout,
        meeting=group.meeting,
        staging=Staging.DEVICE,
        timeout_s=5.0,
    )


def transfer(*, off_by: int, tied: tuple[str, str] | None = None) -> tuple[Any, str]:
    """One transfer: the weights or the error of the receiver, and the error that the trainer sees."""
    specs = (*SPECS, TensorSpec(name="head", dtype="float32", shape=(5, 4)))
    layout = Layout(specs=specs, bucket_bytes=64)
    tensors = [torch.ones(3), torch.arange(20.0).view(5, 4), torch.zeros(5, 4)]
    group = WeightGroup.host("127.0.0.1", group_id="a", transport=Transport.GLOO, world_size=2, timeout_s=5.0)
    announcement = announced(group, layout)
    receiver = BroadcastReceiver(CPU)
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(receiver.receive, announcement, tied=tied)
        while group.num_arrived(announcement.update_id, Step.READY) < 1:
            pass
        group.say_go(announcement.update_id, Step.READY)
        sums = send(group, layout, tensors, device=CPU, check=lambda: None)
        group.say_sums(announcement.update_id, [sums[0], sums[1] + off_by, *sums[2:]])
        heard = ""
        try:
            while group.num_arrived(announcement.update_id, Step.TAKEN) < 1:
                pass
            group.say_go(announcement.update_id, Step.TAKEN)
        except WeightsError as error:
            heard = str(error)
        error = outcome.exception()
    receiver.leave()
    group.close()
    return (outcome.result() if error is None else error), heard


def test_what_came_as_it_was_sent_is_kept_when_the_trainer_says_so() -> None:
    received, heard = transfer(off_by=0)
    weights = dict(received.tensors)
    assert (len(received.digest), heard, list(weights)) == (64, "", ["norm", "embed", "head"])
    assert torch.equal(weights["embed"], torch.arange(20.0).view(5, 4))


def test_a_bucket_that_is_not_what_was_sent_is_refused_and_the_trainer_hears_why() -> None:
    error, heard = transfer(off_by=1)
    assert str(error) == "1 of 3 buckets are not what the trainer sent, the first is number 1"
    assert heard == str(error)


def test_tied_weights_that_differ_are_refused_and_the_trainer_hears_why() -> None:
    error, heard = transfer(off_by=0, tied=("head", "embed"))
    assert str(error) == heard == "weights 'head' and 'embed' are tied in the model, but their values differ"


def test_a_worker_whose_trainer_is_gone_does_not_wait_for_it() -> None:
    group = WeightGroup.host("127.0.0.1", group_id="a", transport=Transport.GLOO, world_size=2, timeout_s=5.0)
    announcement = replace(announced(group, Layout(specs=SPECS, bucket_bytes=64)), timeout_s=20.0)
    group.close()
    began = time.monotonic()
    with pytest.raises(WeightsError, match="cannot be reached"):
        BroadcastReceiver(CPU).receive(announcement)
    assert time.monotonic() - began < 5
