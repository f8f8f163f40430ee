"""The compact form: what goes in comes out, and what is broken is refused."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from unbroken import compact
from unbroken.errors import InvalidInputError

_ARRAYS = st.sampled_from([np.int32, np.float32, np.bool_]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | _ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(left, right) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(_VALUES)
def test_any_value_comes_back_bit_for_bit(value) -> None:
    assert same(value, compact.decode(compact.encode(value)))


def test_an_answer_of_ids_and_logprobs_takes_eight_bytes_a_token() -> None:
    answer = {"ids": np.arange(10_000, dtype=np.int32), "logprobs": np.full(10_000, -1.2345678, dtype=np.float32)}
    assert len(compact.encode(answer)) < 80_200
    assert len(json.dumps({name: array.tolist() for name, array in answer.items()})) > 250_000


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "must begin with"),
        (b"UNBRKN\x00\x02" + bytes(8), "must begin with"),
        (b"UNBRKN\x00\x01", "at least 12 bytes"),
        (b"UNBRKN\x00\x01\xff\x00\x00\x00", "must have 255 bytes"),
        (b"UNBRKN\x00\x01\x01\x00\x00\x00{", "is not JSON"),
    ],
)
def test_a_broken_frame_is_refused(data: bytes, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule):
        compact.decode(data)


@pytest.mark.parametrize(
    "described", [["<i4", [3], 0], ["<f8", [1], 0], ["<i4", [-1], 0], ["<i4", [1], -8], "x", ["<i4", [10**12], 0]]
)
def test_an_array_that_does_not_fit_the_body_is_refused(described) -> None:
    head = json.dumps({"$array": described}).encode()
    data = b"UNBRKN\x00\x01" + len(head).to_bytes(4, "little") + head + bytes(-(12 + len(head)) % 8) + bytes(8)
    with pytest.raises(InvalidInputError, match="array"):
        compact.decode(data)


@pytest.mark.parametrize("value", [{"x": np.zeros(1)}, {"$array": 1}, float("nan"), {"x": object()}])
def test_what_has_no_form_is_refused(value) -> None:
    with pytest.raises(InvalidInputError):
        compact.encode(value)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_never_break_anything(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        compact.decode(data)


@pytest.mark.parametrize(
    "description",
    [
        ["<i4", [0, 2**70], 0],
        ["<i4", [1] * 65, 0],
        ["<i4", [2**70], 0],
        ["<i4", [1], 2**70],
        ["<i4", [1], True],
        ["<i4", [True], 0],
        ["<i4", [1.5], 0],
        [["<i4"], [1], 0],
        ["<i4", 1, 0],
        {"<i4": 1},
    ],
)
def test_a_description_that_fits_no_array_is_an_input_error(description: Any) -> None:
    head = json.dumps({"ids": {"$array": description}}).encode()
    body = compact.encode(np.zeros(4, dtype=np.int32))[:8] + struct.pack("<I", len(head)) + head
    body += b"\x00" * (-len(body) % 8) + b"\x00" * 64
    with pytest.raises(InvalidInputError, match="an array"):
        compact.decode(body)


def test_an_empty_array_at_the_end_of_a_body_is_read() -> None:
    assert compact.decode(compact.encode({"ids": np.zeros((0, 3), dtype=np.int32)}))["ids"].shape == (0, 3)


def test_a_head_that_is_nested_too_deeply_is_an_input_error() -> None:
    head = b"[" * 100_000 + b"]" * 100_000  # Python 3.13 reads thousands
    with pytest.raises(InvalidInputError, match="head of a compact body"):
        compact.decode(b"UNBRKN\x00\x01" + struct.pack("<I", len(head)) + head)
