"""Any data of the Tinker API: outputs have the shapes of targets, and sums and gradients do not depend on chunks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.types import AdamParams, LoraConfig

from support.adapted import untied_qwen3
from support.effort import num_cases
from unbroken.tinker.losses import LOSSES, Datum
from unbroken.tinker.models import Models

VOCAB_SIZE = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    """With the model `a`, which is never moved: each case steps with a learning rate of 0."""
    folder = tmp_path_factory.mktemp("base")
    untied_qwen3().save_pretrained(folder)
    models = Models(folder, accelerator=Accelerator(cpu=True), tokens_per_pass=40)
    models.create("a", LoraConfig(rank=2, seed=0))
    return models


def find_norm(models: Models) -> float:
    return models.optim_step("a", AdamParams(learning_rate=0.0))["grad_norm"]


def make_datum(rng: np.random.Generator, loss: str, length: int, width: int | None) -> Datum:
    shape = (length,) if width is None else (length, width)
    names = [name for name in (*LOSSES[loss].needs, *LOSSES[loss].takes) if not name.startswith("clip")]
    inputs = {name: rng.normal(size=shape).astype(np.float32) * (rng.random(shape) < 0.7) for name in names}
    if "logprobs" in inputs:
        inputs["logprobs"] -= 4
    for name in {"sampled", "sequence_ratio_mask"} & inputs.keys():
        inputs[name] = np.ones(shape, dtype=np.float32)
    return Datum(
        input_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
        targets=rng.integers(0, VOCAB_SIZE, shape),
        inputs={name: values.astype(np.float32) for name, values in inputs.items()},
    )


@settings(max_examples=num_cases(12, in_fuzz=250), derandomize=True)
@given(
    loss=st.sampled_from(sorted(LOSSES)),
    shapes=st.lists(st.tuples(st.integers(1, 30), st.none() | st.integers(1, 4)), max_size=6),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_for_any_shapes_and_chunks_outputs_fit_and_sums_are_the_same(models, loss, shapes, cuts, seed):
    rng = np.random.default_rng(seed)
    data = [make_datum(rng, loss, length, width if loss == "cross_entropy" else None) for length, width in shapes]
    whole = models.forward_backward("a", data, loss, {}, backward=True)
    norm = find_norm(models)
    assert [each.shape for each in whole.logprobs] == [each.targets.shape for each in data]
    assert all((each <= 0).all() for each in whole.logprobs)
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:stop] for start, stop in pairwise(ends)]
    parts = [models.forward_backward("a", chunk, loss, {}, backward=True) for chunk in chunks]
    for one, other in zip(whole.logprobs, [each for part in parts for each in part.logprobs], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    size = 1 + sum(float(np.abs(values).sum()) for each in data for values in each.inputs.values())
    assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(whole.metrics["loss:sum"], abs=1e-4 * size)
    assert find_norm(models) == pytest.approx(norm, rel=1e-3, abs=1e-4 * size)


@settings(max_examples=num_cases(12, in_fuzz=250), derandomize=True)
@given(length=st.integers(1, 20), width=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_for_any_targets_a_sum_over_several_is_that_of_each_alone(models, length, width, seed):
    rng = np.random.default_rng(seed)
    datum = make_datum(rng, "cross_entropy", length, width)
    whole = models.forward_backward("a", [datum], "cross_entropy", {}, backward=False)
    columns = [
        Datum(
            input_ids=datum.input_ids,
            targets=datum.targets[:, k],
            inputs={"weights": np.ascontiguousarray(datum.inputs["weights"][:, k])},
        )
        for k in range(width)
    ]
    each = models.forward_backward("a", columns, "cross_entropy", {}, backward=False)
    np.testing.assert_allclose(np.stack(each.logprobs, axis=1), whole.logprobs[0], atol=1e-5)
    assert each.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], abs=1e-3)
