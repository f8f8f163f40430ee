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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tinker import types

from unbroken.errors import InvalidInputError
from unbroken.training.model.batch import Batch
from unbroken.training.model.scores import TokenScores
from unbroken.types import TokenIds

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
    settings = dict(loss.settings)
    for key, value in config.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise InvalidInputError(f"loss_fn_config of {name} has the settings {known}, got {key!r}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise InvalidInputError(f"loss_fn_config.{key} must be a finite number >= 0, got {value!r}")
        settings[key] = float(value)
    if LOW in settings and settings[LOW] > settings[HIGH]:
        raise InvalidInputError(f"loss_fn_config.{LOW} must be at most {HIGH}, got {settings[LOW]} > {settings[HIGH]}")
    return loss, settings


def check_datum(datum: Datum, loss: Loss, where: str) -> NDArray[np.int64]:
    """Return the targets of a datum; `InvalidInputError`, which names the datum, unless it has what the loss needs."""
    fields, inputs, name = f"{where}.loss_fn_inputs", datum.inputs, loss.name
    if datum.targets is None:
        raise InvalidInputError(f"{fields}.target_tokens must be given, got none")
    shape = datum.targets.shape
    if len(shape) != 1 and (name != "cross_entropy" or 0 in shape):
        rule = "the shape [T], or [T, K] with cross_entropy"
        raise InvalidInputError(f"{fields}.target_tokens must have {rule}, got {list(shape)} with {name}")
    for key in loss.needs:
        if key == SAMPLED and key not in inputs:
            rule = f"provenance spans with {name}, which trains sampled ids alone"
            raise InvalidInputError(f"{where} must have {rule}: attach them by Datum.with_provenance")
        if key not in inputs:
            raise InvalidInputError(f"{fields}.{key} must be given with {name}, got {', '.join(inputs) or 'none'}")
    for key, values in inputs.items():
        if key not in (*loss.needs, *loss.takes):
            known = ", ".join(("target_tokens", *loss.needs, *loss.takes))
            raise InvalidInputError(f"{fields} of {name} may be {known}, got {key!r}")
        if values.shape != shape:
            rule = f"the shape of target_tokens, {list(shape)}"
            raise InvalidInputError(f"{fields}.{key} must have {rule}, got {list(values.shape)}")
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and inputs["advantages"].any() and not mask.any():
        raise InvalidInputError(f"{fields}.sequence_ratio_mask must mark a position where advantages are not 0")
    if {LOW, HIGH} <= inputs.keys() and (inputs[LOW] > inputs[HIGH]).any():
        raise InvalidInputError(f"{fields}.{LOW} must be at most {HIGH} at every position")
    return datum.targets


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
    if "sequence_ratio_mask" in values:
        values["sequence_log_ratio"] = _mean_log_ratio(logprobs_N, values, batch.num_row_tokens)
    values = {name: of_N[used_N] for name, of_N in values.items()}
    loss_N, clipped_N = _compute_terms(loss.name, logprobs_N[used_N], values, settings)
    total = (loss_N * values["weights"] if "weights" in values else loss_N).sum()
    metrics = {"loss:sum": float(total.detach()), "num_loss_tokens:sum": float(used_N.sum())}
    if clipped_N is not None:
        metrics["num_clipped:sum"] = float(clipped_N.sum())
    return total, metrics


@torch.no_grad()
def _mean_log_ratio(logprobs_N: torch.Tensor, values: Values, num_row_tokens: Sequence[int]) -> torch.Tensor:
    """[N] the mean of log p - log q over the positions in `sequence_ratio_mask` of its row; 0 in a row without any."""
    whole = (logprobs_N - values["logprobs"], values["sequence_ratio_mask"] != 0)
    parts = zip(*(torch.split(of_N, list(num_row_tokens)) for of_N in whole), strict=True)
    return torch.cat([log_ratio[mask].mean().nan_to_num().expand(len(mask)) for log_ratio, mask in parts])
