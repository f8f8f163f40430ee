"""The Tinker API's messages: bodies to ids and arrays, results to protobuf.

The descriptors are those of the SDK (package `tinker`), loaded from its file alone: the package itself imports torch.
"""

from __future__ import annotations

import importlib.util
import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, Field

from unbroken.errors import InvalidInputError, install_command
from unbroken.server.http.errors import HttpError
from unbroken.tinker.data import Datum, Output
from unbroken.types import FinishReason, SampledSequence, TokenIds, TopLogprobs

PROTOBUF = "application/x-protobuf"
_MAX_CELLS = 2**24
"""Most targets of a request with several a position: all positions times the most targets of one."""
_EMPTY_LOGPROB = -99999.0
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int64)}
_DTYPE_NAMES = {0: "no dtype", 1: "float32", 2: "int64", 3: "int32", 4: "bfloat16"}


@cache
def load_messages() -> Any:
    """The SDK's message classes; `InvalidInputError` if it is not installed."""
    package = importlib.util.find_spec("tinker")
    if package is None or package.origin is None:
        raise InvalidInputError(f"--tinker needs the message descriptors of the SDK: {install_command('tinker')}")
    file = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    return SimpleNamespace(**runpy.run_path(str(file)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceClaim:
    """A span of a datum: its next `length` positions are those from `offset` of a prompt or of what was sampled."""

    sampled: bool
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedDatum:
    """A datum as it came: what is trained, and what is claimed of where it is from."""

    datum: Datum
    input_claims: tuple[ProvenanceClaim, ...]
    target_claims: tuple[ProvenanceClaim, ...]


def parse_forward_backward(body: bytes, content_type: str, encoding: str) -> Any:
    """Parse the body of `forward_backward`; `HttpError` if it is no protobuf message, or is compressed."""
    if PROTOBUF not in content_type:
        raise HttpError(400, f"Content-Type must be {PROTOBUF}, got {content_type[:100]!r}: use an SDK >= 0.38")
    if encoding not in ("", "identity"):
        raise HttpError(400, f"Content-Encoding must be left out, as client/config says, got {encoding[:100]!r}")
    message = load_messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HttpError(400, f"the body must be a ForwardBackwardRequest in protobuf: {error}") from None
    return message


def read_loss_config(message: Any) -> dict[str, float | str]:
    """The values of `loss_fn_config`."""
    found: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        found[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return found


def read_data(message: Any, vocab_size: int, context_length: int) -> list[ClaimedDatum]:
    """Read the data of `forward_backward`.

    Raises:
        InvalidInputError: ids outside the vocabulary, a wrong dtype or shape, values that are not finite, or chunks
            that are no ids; the message names the datum.
    """
    if not message.data:
        raise InvalidInputError("data must have at least one datum, got none")
    _check_shapes(message, vocab_size)
    found = []
    for index, given in enumerate(message.data):
        try:
            found.append(_read_datum(given, vocab_size, context_length))
        except InvalidInputError as error:
            raise InvalidInputError(f"data[{index}]: {error}") from None
    return found


def _check_shapes(message: Any, vocab_size: int) -> None:
    """Check the shapes of all data, before any sparse tensor becomes dense and rows are padded to the widest."""
    num_rows, widest = 0, 1
    for index, datum in enumerate(message.data):
        shapes = {name: tuple(tensor.shape) for name, tensor in datum.loss_fn_inputs.items()}
        for name, shape in shapes.items():
            if len(shape) > 2 or min(shape, default=0) < 0 or max(shape[1:], default=1) > vocab_size:
                raise InvalidInputError(
                    f"data[{index}]: loss_fn_inputs[{name!r}] must have a shape [T], or [T, K] with K at most "
                    f"{vocab_size} (the vocabulary), got {list(shape[:9])}"
                )
            widest = max([widest, *shape[1:]])
        num_ids = sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input) // 4
        num_rows += max([num_ids, *(shape[0] for shape in shapes.values() if shape)])
    if widest > 1 and num_rows * widest > _MAX_CELLS:
        raise InvalidInputError(
            f"data with several targets a position must have at most {_MAX_CELLS} of them, {num_rows} positions times "
            f"the most of one, got {widest}"
        )


def _read_datum(given: Any, vocab_size: int, context_length: int) -> ClaimedDatum:
    input_ids = _join_chunks(given.model_input)
    if not 1 <= len(input_ids) <= context_length:
        raise InvalidInputError(f"model_input must have 1 to {context_length} ids (the context), got {len(input_ids)}")
    check_vocabulary(input_ids, vocab_size, name="model_input")
    arrays = {name: _read_tensor(tensor, name) for name, tensor in sorted(given.loss_fn_inputs.items())}
    targets = arrays.pop("target_tokens", None)
    if targets is not None:
        if targets.dtype != np.int64:
            raise InvalidInputError(f"target_tokens must be int64, got {targets.dtype}")
        if targets.ndim not in (1, 2) or len(targets) != len(input_ids):
            raise InvalidInputError(
                f"target_tokens must have shape [{len(input_ids)}] or [{len(input_ids)}, K], as model_input has "
                f"{len(input_ids)} ids, got {list(targets.shape)}"
            )
        check_vocabulary(targets, vocab_size, name="target_tokens")
    return ClaimedDatum(
        datum=Datum(
            input_ids=input_ids, targets=targets, inputs={name: _to_float(arrays[name], name) for name in arrays}
        ),
        input_claims=tuple(_read_claim(span) for span in given.model_input_spans),
        target_claims=tuple(_read_claim(span) for span in given.loss_fn_input_spans),
    )


def _join_chunks(chunks: Sequence[Any]) -> TokenIds:
    parts = []
    for number, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise InvalidInputError(
                f"model_input.chunks[{number}] must be ids (encoded_text), got {kind or 'nothing'}: this server trains "
                "on text"
            )
        parts.append(_from_bytes(chunk.encoded_text.tokens, np.dtype(np.int32), f"model_input.chunks[{number}]"))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _from_bytes(data: bytes, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise InvalidInputError(f"{name} must be whole {dtype} values of {dtype.itemsize} bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype)


def check_vocabulary(ids: NDArray[Any], vocab_size: int, *, name: str) -> None:
    """Raise `InvalidInputError`, which names the position, for an id outside the vocabulary."""
    wrong = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        place = tuple(int(each) for each in wrong[0])
        raise InvalidInputError(
            f"{name}{''.join(f'[{each}]' for each in place)} must be an id in [0, {vocab_size}), got {int(ids[place])}"
        )


def _read_tensor(tensor: Any, name: str) -> NDArray[Any]:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        given = _DTYPE_NAMES.get(tensor.dtype, f"dtype {tensor.dtype}")
        raise InvalidInputError(f"loss_fn_inputs[{name!r}] must be float32 or int64, got {given}")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        array = _expand_csr(tensor.sparse_csr, dtype, shape, name)
    else:
        array = _from_bytes(tensor.dense, dtype, f"loss_fn_inputs[{name!r}]")
        shape = shape or (len(array),)
        if math.prod(shape) != len(array):
            raise InvalidInputError(f"loss_fn_inputs[{name!r}] of shape {list(shape)} has {len(array)} values")
        array = array.reshape(shape)
    if not np.isfinite(array).all():
        place = tuple(int(each) for each in np.argwhere(~np.isfinite(array))[0])
        raise InvalidInputError(f"loss_fn_inputs[{name!r}]{list(place)} must be finite, got {array[place]}")
    return array


def _to_float(array: NDArray[Any], name: str) -> NDArray[np.float32]:
    numbers = array.astype(np.float32)
    if (numbers != array).any():
        raise InvalidInputError(f"loss_fn_inputs[{name!r}] must be float32, got int64 values that float32 cannot hold")
    return numbers


def _expand_csr(csr: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Make a sparse tensor dense: cells that are not listed are 0."""
    what = f"loss_fn_inputs[{name!r}]"
    if len(shape) != 2:
        raise InvalidInputError(f"{what} is sparse, so its shape must be [T, K], got {list(shape)}")
    values = _from_bytes(csr.values, dtype, what)
    rows = _from_bytes(csr.crow_indices, np.dtype(np.int64), f"{what}.crow_indices")
    columns = _from_bytes(csr.col_indices, np.dtype(np.int64), f"{what}.col_indices")
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise InvalidInputError(f"{what}.crow_indices must rise from 0 to {len(values)} in {shape[0] + 1} steps")
    if len(columns) != len(values) or ((columns < 0) | (columns >= shape[1])).any():
        raise InvalidInputError(f"{what}.col_indices must be {len(values)} numbers in [0, {shape[1]})")
    places = np.repeat(np.arange(shape[0]) * shape[1], np.diff(rows)) + columns
    if len(np.unique(places)) < len(places):
        raise InvalidInputError(f"{what}.col_indices must list a column once in a row")
    array = np.zeros(math.prod(shape), dtype)
    array[places] = values
    return array.reshape(shape)


def _read_claim(span: Any) -> ProvenanceClaim:
    arm = span.WhichOneof("span")
    if arm is None:
        raise InvalidInputError("a provenance span must have prompt_tokens or sampled_tokens, got neither")
    given = getattr(span, arm)
    if given.length < 0 or given.offset < 0 or not given.sequence_id:
        raise InvalidInputError(
            f"a provenance span must have a sequence_id, and offset and length >= 0, got {given.sequence_id[:100]!r}, "
            f"{given.offset} and {given.length}"
        )
    return ProvenanceClaim(
        sampled=arm == "sampled_tokens", sequence_id=given.sequence_id, offset=given.offset, length=given.length
    )


def encode_forward_backward(output: Output, metrics: Mapping[str, float]) -> bytes:
    """The result of `forward_backward`: the logprobs of each datum's targets, and metrics."""
    messages = load_messages()
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for values in output.logprobs:
        record = answer.loss_fn_outputs.add(num_datums=1)
        field = record.fields["logprobs"]
        data = np.ascontiguousarray(values, np.float32)
        field.data, field.dtype = data.tobytes(), messages.DTYPE_FLOAT32
        field.offsets = np.array([0, data.nbytes], np.int64).tobytes()
        field.trailing_shape.extend(data.shape[1:])
    for name, number in {**output.metrics, **metrics}.items():
        answer.metrics[name] = float(number)
    return bytes(answer.SerializeToString())


class TextChunk(BaseModel):
    """Ids of a prompt, or what is not ids."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class PromptBody(BaseModel):
    """A prompt in chunks."""

    chunks: list[TextChunk]

    def to_ids(self, vocab_size: int) -> TokenIds:
        """The prompt's ids; `InvalidInputError` for chunks that are not ids, or ids outside the vocabulary."""
        for number, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                raise InvalidInputError(
                    f"prompt.chunks[{number}] must be ids (encoded_text), got {chunk.type[:100]!r}: this server takes "
                    "text"
                )
        ids = np.array([each for chunk in self.chunks for each in chunk.tokens], dtype=np.int64)
        check_vocabulary(ids, vocab_size, name="prompt")
        return ids.astype(np.int32)


class TensorBody(BaseModel):
    """A tensor in JSON."""

    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """What was computed of a prompt of T ids. Position 0 has no logprob."""

    logprobs: NDArray[np.float32] | None = None
    """[T] NaN where none was asked for."""
    tops: TopLogprobs | None = None
    """[T - 1, K]"""
    num_tops: int = 0
    first: int = 1
    """The first position with entries in `tops`."""
    target_logprobs: NDArray[np.float32] | None = None
    """[T - 1, K], 0 where none was asked for."""


def encode_sample(sequences: Sequence[SampledSequence], scores: PromptScores, *, num_tops: int) -> bytes:
    """The result of `asample`."""
    messages = load_messages()
    answer = messages.SampleResponse()
    for sequence in sequences:
        each = answer.sequences.add()
        each.tokens = np.asarray(sequence.completion_ids, np.int32).tobytes()
        each.logprobs = np.asarray(sequence.rollout_logprobs, np.float32).tobytes()
        each.stop_reason = (
            messages.STOP_REASON_STOP if sequence.finish_reason is FinishReason.STOP else messages.STOP_REASON_LENGTH
        )
        if num_tops and sequence.top_logprobs is not None:
            _write_tops(each.topk_sampled_logprobs, sequence.top_logprobs, num_tops, num_empty=0)
    if scores.logprobs is not None:
        answer.prompt_logprobs = scores.logprobs.tobytes()
        if scores.num_tops and scores.tops is not None:
            _write_tops(answer.topk_prompt_logprobs, scores.tops, scores.num_tops, num_empty=scores.first)
    if scores.target_logprobs is not None:
        tensor = answer.target_prompt_logprobs
        tensor.dtype, tensor.dense = messages.DTYPE_FLOAT32, scores.target_logprobs.tobytes()
        tensor.shape.extend(scores.target_logprobs.shape)
    return bytes(answer.SerializeToString())


def _write_tops(message: Any, tops: TopLogprobs, number: int, *, num_empty: int) -> None:
    """Write the most likely ids, with `num_empty` positions without any before them."""
    given = tops.token_ids[max(num_empty - 1, 0) :, :number], tops.logprobs[max(num_empty - 1, 0) :, :number]
    ids = np.concatenate([np.zeros((num_empty, number), np.int32), given[0]])
    logprobs = np.concatenate([np.full((num_empty, number), _EMPTY_LOGPROB, np.float32), given[1]])
    message.token_ids = np.ascontiguousarray(ids, np.int32).tobytes()
    message.logprobs = np.where(np.isfinite(logprobs), logprobs, _EMPTY_LOGPROB).astype(np.float32).tobytes()
    message.k, message.length = number, len(ids)


class LoraBody(BaseModel):
    """The adapter of a model; rank 0 trains all weights."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class OptimizerBody(BaseModel):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class ApiCallBody(BaseModel):
    """The fields of all calls but those of sampling; each call has some of them."""

    session_id: str = ""
    model_id: str = ""
    sampling_session_id: str = ""
    request_id: str = ""
    seq_id: int | None = None
    model_seq_id: int = Field(default=0, ge=0)
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    model_path: str | None = None
    path: str | None = Field(default=None, validation_alias=AliasChoices("path", "tinker_path"))
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None
    optimizer: bool = False
    adam_params: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("adam_params", "optim_params", "optimizer_params")
    )
    kind: Literal["snapshot", "inflight"] = "snapshot"
    overwrite: bool = False
    ttl_seconds: int | None = None
