"""The Tinker API's messages: bodies to ids and arrays, results to protobuf. The classes of both are the SDK's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from unbroken.engines.checks import check_vocabulary
from unbroken.errors import InvalidInputError
from unbroken.server.http.errors import HttpError
from unbroken.server.images import ImageIntake, RequestPrompt
from unbroken.tinker.losses import Datum, Output, ProvenanceClaim
from unbroken.types import FinishReason, SampledSequence, TopLogprobs

PROTOBUF = "application/x-protobuf"
_MAX_CELLS = 2**24
"""Most values of all tensors of a request, which may be sparse."""
_EMPTY_LOGPROB = -99999.0
_DTYPES = {number: name.removeprefix("DTYPE_").lower() for name, number in messages.DType.items()}


def parse_forward_backward(body: bytes, content_type: str, encoding: str) -> messages.ForwardBackwardRequest:
    """Parse the body of `forward_backward`; `HttpError` if it is no protobuf message, or is compressed."""
    if PROTOBUF not in content_type or encoding not in ("", "identity"):
        rule = f"the body must be {PROTOBUF} that is not compressed (client/config)"
        raise HttpError(400, f"{rule}, got {content_type[:100]!r}, {encoding[:100]!r}: use an SDK >= 0.38")
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HttpError(400, f"the body must be a ForwardBackwardRequest in protobuf: {error}") from None
    return message


def read_data(message: messages.ForwardBackwardRequest, vocab_size: int, context_length: int) -> list[Datum]:
    """Read the data of `forward_backward`; `InvalidInputError`, which names the datum, for what is wrong."""
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


def _check_shapes(message: messages.ForwardBackwardRequest, vocab_size: int) -> None:
    """Check the shapes of all data, before any sparse tensor becomes dense."""
    num_cells = 0
    for index, datum in enumerate(message.data):
        for name, shape in ((name, tuple(tensor.shape)) for name, tensor in datum.loss_fn_inputs.items()):
            if len(shape) > 2 or min(shape, default=0) < 0 or max(shape[1:], default=1) > vocab_size:
                raise InvalidInputError(
                    f"data[{index}]: loss_fn_inputs[{name!r}] must have a shape [T], or [T, K] with K at most "
                    f"{vocab_size} (the vocabulary), got {list(shape[:9])}"
                )
            num_cells += math.prod(shape)
    if num_cells > _MAX_CELLS:
        raise InvalidInputError(f"loss_fn_inputs of all data must have at most {_MAX_CELLS} values, got {num_cells}")


def _read_datum(given: messages.Datum, vocab_size: int, context_length: int) -> Datum:
    parts = []
    for number, chunk in enumerate(given.model_input):
        name, kind = f"model_input.chunks[{number}]", chunk.WhichOneof("chunk")
        if kind != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise InvalidInputError(f"{name} must be ids (encoded_text) of 4 bytes, got {kind}: training data are text")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    input_ids = np.concatenate([np.zeros(0, np.int32), *parts])
    if not 1 <= len(input_ids) <= context_length:
        raise InvalidInputError(f"model_input must have 1 to {context_length} ids (the context), got {len(input_ids)}")
    check_vocabulary(input_ids, vocab_size=vocab_size, name="model_input")
    arrays = {name: _read_tensor(tensor, name) for name, tensor in sorted(given.loss_fn_inputs.items())}
    targets = arrays.pop("target_tokens", None)
    if targets is not None:
        if targets.dtype != np.int64:
            raise InvalidInputError(f"target_tokens must be int64, got {targets.dtype}")
        if len(targets) != len(input_ids):
            rule = f"shape [{len(input_ids)}] or [{len(input_ids)}, K], as model_input has {len(input_ids)} ids"
            raise InvalidInputError(f"target_tokens must have {rule}, got {list(targets.shape)}")
        check_vocabulary(targets, vocab_size=vocab_size, name="target_tokens")
    for name, array in arrays.items():
        arrays[name] = array.astype(np.float32)
        if (arrays[name] != array).any():
            raise InvalidInputError(f"loss_fn_inputs[{name!r}] must be float32, got values that float32 cannot hold")
    return Datum(
        input_ids=input_ids,
        targets=targets,
        inputs=arrays,
        input_claims=tuple(map(_read_claim, given.model_input_spans)),
        target_claims=tuple(map(_read_claim, given.loss_fn_input_spans)),
    )


def _read_tensor(tensor: messages.Tensor, field: str) -> NDArray[Any]:
    """Read a tensor; a sparse one becomes dense, with 0 in cells that are not listed."""
    name, dtype = f"loss_fn_inputs[{field!r}]", _DTYPES.get(tensor.dtype, "another")
    if dtype != "float32" and dtype != "int64":
        raise InvalidInputError(f"{name} must be float32 or int64, got {dtype}")
    csr, shape = tensor.sparse_csr, list(tensor.shape)
    is_sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    try:
        indices = [np.frombuffer(each, np.int64).tolist() for each in (csr.crow_indices, csr.col_indices)]
        values = np.frombuffer(csr.values if is_sparse else tensor.dense, dtype)
        array = types.TensorData(values, dtype, shape or None, *(indices if is_sparse else ())).to_numpy()
    except (AssertionError, ValueError, RuntimeError) as error:  # the first is the SDK's
        kind = "a sparse tensor (CSR)" if is_sparse else "a tensor"
        raise InvalidInputError(f"{name} must be {kind} of {dtype} of shape {shape}: {error}") from None
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        raise InvalidInputError(f"{name}{place} must be finite, got {array[tuple(place)]}")
    return array


def _read_claim(span: messages.ProvenanceSpan) -> ProvenanceClaim:
    is_sampled = span.WhichOneof("span") == "sampled_tokens"
    given = span.sampled_tokens if is_sampled else span.prompt_tokens
    kind = types.SampledProvenanceSpan if is_sampled else types.PromptProvenanceSpan
    try:
        return kind(sequence_id=given.sequence_id, offset=given.offset, length=given.length)
    except ValueError as error:
        raise InvalidInputError(str(error)) from None


def encode_forward_backward(output: Output, metrics: Mapping[str, float]) -> bytes:
    """The result of `forward_backward`: the logprobs of each datum's targets, and metrics."""
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={**output.metrics, **metrics})
    for values in output.logprobs:
        field = answer.loss_fn_outputs.add(num_datums=1).fields["logprobs"]
        data = np.ascontiguousarray(values, np.float32)
        field.data, field.dtype = data.tobytes(), messages.DTYPE_FLOAT32
        field.offsets = np.array([0, data.nbytes], np.int64).tobytes()
        field.trailing_shape.extend(data.shape[1:])
    return bytes(answer.SerializeToString())


async def read_prompt(prompt: types.ModelInput, vocab_size: int, intake: ImageIntake) -> RequestPrompt:
    """The prompt's ids, with those of its images among them; `InvalidInputError` if it cannot be used."""
    parts, images = [np.zeros(0, np.int64)], []
    for number, chunk in enumerate(prompt.chunks):
        if isinstance(chunk, types.EncodedTextChunk):
            parts.append(np.array(chunk.tokens))  # of any size
        elif isinstance(chunk, types.ImageChunk):
            parts.append(np.array([intake.placeholder_id or 0]))
            images.append((f"prompt.chunks[{number}]", chunk))
        else:
            raise InvalidInputError(f"prompt.chunks[{number}] must be ids (encoded_text) or an image, got {chunk.type}")
    ids: NDArray[Any] = np.concatenate(parts)
    check_vocabulary(ids, vocab_size=vocab_size, name="prompt")
    sources, settings = [chunk.data for _, chunk in images], intake.encode_settings(None)
    (placed,) = await intake.place([ids.astype(np.int32)], [sources], settings, names=lambda _: "images of prompt")
    for (name, chunk), span in zip(images, placed.images, strict=True):
        if chunk.expected_tokens not in (None, span.length):
            rule = f"must be {span.length}, the ids that the model's image processor makes of it"
            raise InvalidInputError(f"{name}.expected_tokens {rule}, got {chunk.expected_tokens}")
    return placed


def encode_sample(sequences: Sequence[SampledSequence], answer: messages.SampleResponse | None = None) -> bytes:
    """The result of `asample`; `answer` has the prompt's scores."""
    answer = messages.SampleResponse() if answer is None else answer
    for sequence in sequences:
        each = answer.sequences.add()
        each.tokens = np.asarray(sequence.completion_ids, np.int32).tobytes()
        each.logprobs = np.asarray(sequence.rollout_logprobs, np.float32).tobytes()
        each.stop_reason = (
            messages.STOP_REASON_STOP if sequence.finish_reason is FinishReason.STOP else messages.STOP_REASON_LENGTH
        )
        if sequence.top_logprobs is not None:
            write_tops(each.topk_sampled_logprobs, sequence.top_logprobs)
    return bytes(answer.SerializeToString())


def write_tops(
    message: messages.TopkLogprobs, tops: TopLogprobs, *, number: int | None = None, num_empty: int = 0
) -> None:
    """Write the most likely ids, or a `number` of them, with `num_empty` positions without any before them."""
    start, padding = max(num_empty - 1, 0), ((num_empty, 0), (0, 0))
    ids = np.pad(tops.token_ids[start:, :number], padding)
    logprobs = np.pad(tops.logprobs[start:, :number], padding, constant_values=_EMPTY_LOGPROB)
    message.token_ids = ids.astype(np.int32).tobytes()
    message.logprobs = np.where(np.isfinite(logprobs), logprobs, _EMPTY_LOGPROB).astype(np.float32).tobytes()
    message.length, message.k = ids.shape
