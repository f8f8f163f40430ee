"""Data of the Tinker API and their losses: sums over positions, of logprobs of targets and what a datum gives for each.

Position i of a datum's input predicts one target, or K of them; inputs of a loss have the targets' shape:

    input_ids  [5 6 7]    the model sees        targets  [6 7 8]     weights  [0 1 1]
    targets    [[6 9] [7 9] [8 9]]              two for each position, weights [[.5 .5] [.5 .5] [.5 .5]]

With p the trained policy, q the one that sampled, r = p / q, A the advantage, w the weight, sg a stopped gradient:

    cross_entropy          - w log p
    importance_sampling    - r A
    ppo                    - min(r A, clip(r) A)                          clip to [0.8, 1.2]
    cispo                  - sg(clip(r)) A log p                          clip to [0, 4]
    dro                    - A log p + beta / 2 (log r)^2                 beta 0.1
    gspo                   - min(s A, clip(s) A)                          clip to [0.9997, 1.0004]
    stable_reinforce       - sg(min(r, 1)) A log p + kl_coeff / 2 (log r)^2    kl_coeff 0.01, at sampled positions

s has the value of the geometric mean of r over the positions of `sequence_ratio_mask`, and at each position the
gradient of its own r. The formulas are those of the API's pages on losses; the thresholds of gspo are the paper's
(arXiv:2507.18071). Of stable_reinforce the API publishes no formula: ours is REINFORCE with importance weights cut at
1, and a quadratic penalty for leaving the sampling policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from unbroken.engines.checks import check_vocabulary
from unbroken.errors import InvalidInputError
from unbroken.training.model.batch import Batch
from unbroken.training.model.scores import TokenScores
from unbroken.training.objective.losses import sum_by_trajectory
from unbroken.types import TokenIds

PROTOBUF = "application/x-protobuf"
_MAX_CELLS = 2**24
"""Most values of all tensors of a request, which may be sparse."""
_MAX_FIELDS = 2**20
"""Most fields of all messages in a body: an empty message has 2 bytes on the wire, and 50 once it is parsed."""
_VARINT, _DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
"""Wire types of protobuf, and what the values of the fixed ones have."""
_LOWEST = -1e4
"""Lower than a softmax of any model's logits gives; a square of much less overflows in float32."""
_DTYPES = {number: name.removeprefix("DTYPE_").lower() for name, number in messages.DType.items()}
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
SAMPLED = "sampled"
"""1 where a span says that the target was sampled; made by the server, of the spans."""
Values: TypeAlias = Mapping[str, torch.Tensor]
Settings: TypeAlias = Mapping[str, float]


ProvenanceClaim: TypeAlias = types.PromptProvenanceSpan | types.SampledProvenanceSpan
"""A span of a datum: its next `length` positions are those from `offset` of a prompt or of what was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of T ids, what a loss needs of it, and what is claimed of where they are from."""

    input_ids: TokenIds
    """[T] int32."""
    targets: NDArray[np.int64] | None
    """[T] or [T, K] ids of the vocabulary, whose logprobs are asked for; None: missing, which every loss refuses."""
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """By the API's names: `weights`, `logprobs`, `advantages`, ...; finite."""
    input_claims: Sequence[ProvenanceClaim] = ()
    target_claims: Sequence[ProvenanceClaim] = ()


class Output(NamedTuple):
    """Of each datum the logprobs of its targets, in their shape, and metrics, named as the SDK adds up several."""

    logprobs: Sequence[NDArray[np.float32]]
    metrics: Mapping[str, float]


def parse_forward_backward(body: bytes, content_type: str, encoding: str) -> messages.ForwardBackwardRequest:
    """Parse the body of `forward_backward`.

    Raises:
        InvalidInputError: it is no protobuf message, is compressed, or has more than `_MAX_FIELDS` fields.
    """
    if PROTOBUF not in content_type or encoding not in ("", "identity"):
        rule = f"the body must be {PROTOBUF} that is not compressed (client/config)"
        raise InvalidInputError(f"{rule}, got {content_type[:100]!r}, {encoding[:100]!r}: use an SDK >= 0.38")
    message = messages.ForwardBackwardRequest()
    if count_fields(body, message.DESCRIPTOR, most=_MAX_FIELDS) > _MAX_FIELDS:
        raise InvalidInputError(f"the body must have at most {_MAX_FIELDS} fields in all of its messages, got more")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidInputError(f"the body must be a ForwardBackwardRequest in protobuf: {error}") from None
    if not message.model_id:  # as in an empty body, which protobuf takes
        raise InvalidInputError("model_id is required in the body, a ForwardBackwardRequest in protobuf, got none")
    return message


def count_fields(body: bytes, kind: Descriptor, *, most: int) -> int:
    """Count the fields of a protobuf message and of those in it, without parsing them; at most about `most`.

    Numbers of a packed list count one for each byte. What is broken is not counted: the parser refuses it.
    """
    count, waiting = 0, [(0, len(body), kind)]
    while waiting and count <= most:
        start, stop, kind = waiting.pop()
        known = {field.number: field for field in kind.fields}
        for number, place, length in _find_fields(body, start, stop):
            count += 1
            field = known.get(number)
            if length is not None and field is not None:
                if field.message_type is not None:
                    waiting.append((place, min(place + length, stop), field.message_type))
                elif field.type not in (field.TYPE_BYTES, field.TYPE_STRING):
                    count += length
            if count > most:
                break
    return count


def _find_fields(body: bytes, place: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
    """The fields of a message: the number, where the value begins, and its length in bytes; None for a number's."""
    while place < stop:
        tag, place = _read_varint(body, place)
        length: int | None = None
        wire = tag & 7
        if wire == _DELIMITED:
            length, place = _read_varint(body, place)
        yield tag >> 3, place, length
        if wire == _VARINT:
            _, place = _read_varint(body, place)
        place += _FIXED_BYTES.get(wire, length or 0)


def _read_varint(body: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place behind it; 0 at the body's end."""
    if place < len(body) and (number := body[place]) < 128:
        return number, place + 1
    number = 0
    for index, byte in enumerate(body[place : place + 10]):
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, place + index + 1
    return number, place + 10


def read_data(message: messages.ForwardBackwardRequest, vocab_size: int, context_length: int) -> list[Datum]:
    """Read the data of `forward_backward`; `InvalidInputError`, which names the datum, for what is wrong."""
    if not message.data:
        raise InvalidInputError("data must have at least one datum, got none")
    _check_size(message.data, vocab_size)
    found = []
    for index, given in enumerate(message.data):
        try:
            found.append(_read_datum(given, vocab_size, context_length))
        except ValueError as error:  # our own, or the SDK's
            raise InvalidInputError(f"data[{index}]: {error}") from None
    return found


def _check_size(data: Sequence[messages.Datum], vocab_size: int) -> None:
    """Raise for shapes that no loss takes, and for too many values, before any sparse tensor becomes dense."""
    num_cells = 0
    for index, given in enumerate(data):
        for name, tensor in given.loss_fn_inputs.items():
            shape = list(tensor.shape)
            if len(shape) > 2 or min(shape, default=0) < 0 or max(shape[1:], default=1) > vocab_size:
                rule = f"a shape [T], or [T, K] with K at most {vocab_size} (the vocabulary)"
                raise InvalidInputError(f"data[{index}]: loss_fn_inputs[{name!r}] must have {rule}, got {shape[:9]}")
            num_cells += math.prod(shape)
    if num_cells > _MAX_CELLS:
        raise InvalidInputError(f"loss_fn_inputs of all data must have at most {_MAX_CELLS} values, got {num_cells}")


def _read_datum(given: messages.Datum, vocab_size: int, context_length: int) -> Datum:
    input_ids = _read_input_ids(given)
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


def _read_input_ids(given: messages.Datum) -> TokenIds:
    parts = []
    for number, chunk in enumerate(given.model_input):
        name, kind = f"model_input.chunks[{number}]", chunk.WhichOneof("chunk")
        if kind != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise InvalidInputError(f"{name} must be ids (encoded_text) of 4 bytes, got {kind}: training data are text")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    return np.concatenate([np.zeros(0, np.int32), *parts])


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
    return kind(sequence_id=given.sequence_id, offset=given.offset, length=given.length)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a loss takes."""

    name: str
    needs: tuple[str, ...] = ("logprobs", "advantages")
    takes: tuple[str, ...] = ("weights",)
    """What a datum may give besides; `weights` multiply the loss at each position."""
    settings: Settings = field(default_factory=dict)
    """Names in the config, with their defaults."""
    used: str | None = "advantages"
    """The loss depends on the logprobs where this input is not 0; None: everywhere."""


_RL, _CLIPPED = ("logprobs", "advantages"), ("weights", LOW, HIGH)
LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(name="cross_entropy", needs=("weights",), takes=(), used=None),
        Loss(name="importance_sampling"),
        Loss(name="ppo", takes=_CLIPPED, settings={LOW: 0.8, HIGH: 1.2}),
        Loss(name="cispo", takes=_CLIPPED, settings={LOW: 0.0, HIGH: 4.0}),
        Loss(name="dro", settings={"beta": 0.1}, used=None),
        Loss(name="gspo", needs=(*_RL, "sequence_ratio_mask"), takes=_CLIPPED, settings={LOW: 0.9997, HIGH: 1.0004}),
        Loss(name="stable_reinforce", needs=(*_RL, SAMPLED), settings={"kl_coeff": 0.01}, used=SAMPLED),
    )
}


def _compute_terms(
    name: str, logprobs_N: torch.Tensor, values: Values, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss at each position before `weights`, and whether a threshold changed it there."""
    if name == "cross_entropy":
        return -logprobs_N, None
    advantages_N, log_ratio_N = values["advantages"], logprobs_N - values["logprobs"]
    if name == "importance_sampling":
        return -log_ratio_N.exp() * advantages_N, None
    if name == "dro":
        return log_ratio_N.square() * (settings["beta"] / 2) - logprobs_N * advantages_N, None
    if name == "stable_reinforce":
        weight_N = log_ratio_N.detach().clamp(max=0).exp()
        penalty_N = log_ratio_N.square() * (settings["kl_coeff"] / 2)
        return penalty_N - weight_N * advantages_N * logprobs_N, log_ratio_N > 0
    low, high = (torch.as_tensor(values.get(key, settings[key])).to(logprobs_N) for key in (LOW, HIGH))
    if name == "cispo":
        ratio_N = log_ratio_N.detach().exp()
        bounded_N = ratio_N.clamp(low, high)
        return -bounded_N * advantages_N * logprobs_N, bounded_N != ratio_N
    if name == "gspo":
        log_ratio_N = values["sequence_log_ratio"] + logprobs_N - logprobs_N.detach()
    ratio_N = log_ratio_N.exp()
    free_N = ratio_N * advantages_N
    gain_N = torch.minimum(free_N, ratio_N.clamp(low, high) * advantages_N)
    return -gain_N, gain_N != free_N


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, Settings]:
    """A loss by its name, and its settings with the defaults; `InvalidInputError` if it has no such one."""
    if name == "custom":
        rule = "give forward_backward_custom a function: a loss uploaded by create_custom_loss is not supported"
        raise InvalidInputError(f"loss_fn 'custom' is computed by the client: {rule}")
    if name not in LOSSES:
        raise InvalidInputError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r}")
    loss = LOSSES[name]
    settings = {**loss.settings, **{key: _read_setting(loss, key, value) for key, value in config.items()}}
    if LOW in settings and settings[LOW] > settings[HIGH]:
        raise InvalidInputError(f"loss_fn_config.{LOW} must be at most {HIGH}, got {settings[LOW]} > {settings[HIGH]}")
    return loss, settings


def _read_setting(loss: Loss, key: str, value: float | str) -> float:
    if key not in loss.settings:
        known = ", ".join(loss.settings) or "none"
        raise InvalidInputError(f"loss_fn_config of {loss.name} has the settings {known}, got {key!r}")
    if isinstance(value, str) or not math.isfinite(value) or value < 0:
        raise InvalidInputError(f"loss_fn_config.{key} must be a finite number >= 0, got {value!r}")
    return float(value)


def check_datum(datum: Datum, loss: Loss, where: str) -> NDArray[np.int64]:
    """Return the targets of a datum; `InvalidInputError`, which names the datum, unless it has what the loss needs."""
    fields = f"{where}.loss_fn_inputs"
    if datum.targets is None:
        raise InvalidInputError(f"{fields}.target_tokens must be given, got none")
    shape = datum.targets.shape
    if len(shape) != 1 and (loss.name != "cross_entropy" or 0 in shape):
        rule = "the shape [T], or [T, K] with cross_entropy"
        raise InvalidInputError(f"{fields}.target_tokens must have {rule}, got {list(shape)} with {loss.name}")
    _check_given(datum.inputs, loss, where)
    for key, values in datum.inputs.items():
        _check_input(key, values, shape, loss, fields)
    _check_logprobs(datum, loss, fields)
    _check_ratios(datum.inputs, fields)
    return datum.targets


def _check_given(inputs: Mapping[str, NDArray[Any]], loss: Loss, where: str) -> None:
    """Raise unless a datum has all inputs that a loss needs."""
    for key in loss.needs:
        if key in inputs:
            continue
        if key == SAMPLED:
            rule = f"provenance spans with {loss.name}, which trains sampled ids alone"
            raise InvalidInputError(f"{where} must have {rule}: attach them by Datum.with_provenance")
        given = ", ".join(inputs) or "none"
        raise InvalidInputError(f"{where}.loss_fn_inputs.{key} must be given with {loss.name}, got {given}")


def _check_input(key: str, values: NDArray[Any], shape: tuple[int, ...], loss: Loss, fields: str) -> None:
    """Raise unless a loss takes an input of this name, and of this shape."""
    if key not in (*loss.needs, *loss.takes):
        known = ", ".join(("target_tokens", *loss.needs, *loss.takes))
        raise InvalidInputError(f"{fields} of {loss.name} may be {known}, got {key!r}")
    if values.shape != shape:
        rule = f"the shape of target_tokens, {list(shape)}"
        raise InvalidInputError(f"{fields}.{key} must have {rule}, got {list(values.shape)}")


def _check_logprobs(datum: Datum, loss: Loss, fields: str) -> None:
    """Raise unless the logprobs of the sampling are at most 0, and not so low that a ratio to them overflows."""
    given = datum.inputs.get("logprobs")
    if given is None or not len(given):
        return
    is_low = (given < _LOWEST) & find_used(datum, loss)
    if (wrong := (given > 0) | is_low).any():
        place = int(np.flatnonzero(wrong)[0])
        rule = f"lie in [{_LOWEST:g}, 0] where the loss depends on it" if is_low[place] else "be at most 0"
        raise InvalidInputError(f"{fields}.logprobs[{place}] must {rule}, got {given[place]}")


def _check_ratios(inputs: Mapping[str, NDArray[Any]], fields: str) -> None:
    """Raise for a ratio of no positions, and for bounds that exclude each other."""
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and inputs["advantages"].any() and not mask.any():
        raise InvalidInputError(f"{fields}.sequence_ratio_mask must mark a position where advantages are not 0")
    if {LOW, HIGH} <= inputs.keys() and (inputs[LOW] > inputs[HIGH]).any():
        raise InvalidInputError(f"{fields}.{LOW} must be at most {HIGH} at every position")


def find_used(datum: Datum, loss: Loss) -> NDArray[np.bool_]:
    """[T] where the loss of a datum depends on the logprobs; the rest of them is only reported."""
    used_T = np.ones(len(datum.input_ids), dtype=np.bool_)
    for key, values in datum.inputs.items():
        if key in (loss.used, "weights"):
            used_T &= values.reshape(len(used_T), -1).any(-1)
    return used_T


def compute_loss(
    loss: Loss, settings: Settings, scores: TokenScores, batch: Batch
) -> tuple[torch.Tensor, dict[str, float]]:
    """The sum of the loss over the N positions of several rows, and its metrics; also [N, K] for cross_entropy.

    Positions that have no effect are left out before anything is computed of them: their ratio may be anything.
    """
    assert batch.targets is not None, "every row has targets"
    values, logprobs_N, used_N = dict(batch.values), scores.logprobs_N, batch.targets.trained_N
    if "sequence_ratio_mask" in values:  # log s is the mean over the marked positions of a row; 0 without any
        marked_N = (values["sequence_ratio_mask"] != 0).double()
        parts = (marked_N * (logprobs_N.detach() - values["logprobs"]), marked_N)
        sums = (sum_by_trajectory(of_N, batch.num_row_tokens, (), lambda _: 0.0)[0] for of_N in parts)
        values["sequence_log_ratio"] = torch.div(*sums).nan_to_num().to(logprobs_N)
    values = {name: of_N[used_N] for name, of_N in values.items()}
    loss_N, clipped_N = _compute_terms(loss.name, logprobs_N[used_N], values, settings)
    total = (loss_N * values["weights"] if "weights" in values else loss_N).sum()
    metrics = {"loss:sum": float(total.detach()), "num_loss_tokens:sum": float(used_N.sum())}
    if clipped_N is not None:
        metrics["num_clipped:sum"] = float(clipped_N.sum())
    return total, metrics


def add_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several calls or passes together, as the SDK adds up those of chunks; means are left out."""
    names = sorted({name for part in parts for name in part if name.endswith((":sum", ":max"))})
    return {name: (max if ":max" in name else math.fsum)(part.get(name, 0.0) for part in parts) for name in names}
