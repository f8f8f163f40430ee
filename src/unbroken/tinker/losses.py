"""The losses of the Tinker API: sums over positions, of logprobs of targets and what a datum gives for each position.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError
from unbroken.tinker.data import Datum

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
SAMPLED = "sampled"
"""1 where a span says that the target was sampled; made by the server, of the spans."""
Values: TypeAlias = Mapping[str, torch.Tensor]
Settings: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss at each position, and whether a threshold changed it."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss: what it takes, and what it computes at the positions that have an effect."""

    compute: Callable[[torch.Tensor, Values, Settings], Terms]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ("weights",)
    """What a datum may give besides; `weights` multiply the loss at each position."""
    settings: Settings = field(default_factory=dict)
    """Names in the config, with their defaults."""
    is_used: Callable[[Mapping[str, NDArray[np.float32]], Settings], NDArray[np.bool_]]
    """Where the loss depends on the logprobs."""


def _cross_entropy(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    return Terms(-logprobs_N)  # times the weights, as every loss


def _importance_sampling(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    return Terms(-(logprobs_N - values["logprobs"]).exp() * values["advantages"])


def _ppo(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    return _clip((logprobs_N - values["logprobs"]).exp(), values, settings)


def _gspo(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    return _clip((values["sequence_log_ratio"] + logprobs_N - logprobs_N.detach()).exp(), values, settings)


def _clip(ratio_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    free_N = ratio_N * values["advantages"]
    gain_N = torch.minimum(free_N, _bound(ratio_N, values, settings) * values["advantages"])
    return Terms(-gain_N, gain_N != free_N)


def _bound(ratio_N: torch.Tensor, values: Values, settings: Settings) -> torch.Tensor:
    low, high = (values.get(name, settings[name]) for name in (LOW, HIGH))
    return ratio_N.clamp(torch.as_tensor(low).to(ratio_N), torch.as_tensor(high).to(ratio_N))


def _cispo(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    ratio_N = (logprobs_N.detach() - values["logprobs"]).exp()
    bounded_N = _bound(ratio_N, values, settings)
    return Terms(-bounded_N * values["advantages"] * logprobs_N, bounded_N != ratio_N)


def _dro(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    penalty_N = (logprobs_N - values["logprobs"]).square() * (settings["beta"] / 2)
    return Terms(penalty_N - logprobs_N * values["advantages"])


def _stable_reinforce(logprobs_N: torch.Tensor, values: Values, settings: Settings) -> Terms:
    log_ratio_N = logprobs_N - values["logprobs"]
    weight_N = log_ratio_N.detach().clamp(max=0).exp()
    penalty_N = log_ratio_N.square() * (settings["kl_coeff"] / 2)
    return Terms(penalty_N - weight_N * values["advantages"] * logprobs_N, log_ratio_N > 0)


def _has_advantage(values: Mapping[str, NDArray[np.float32]], settings: Settings) -> NDArray[np.bool_]:
    return np.not_equal(values["advantages"], 0)


def _is_anywhere(values: Mapping[str, NDArray[np.float32]], settings: Settings) -> NDArray[np.bool_]:
    return np.ones(len(next(iter(values.values()))), dtype=np.bool_)


def _is_sampled(values: Mapping[str, NDArray[np.float32]], settings: Settings) -> NDArray[np.bool_]:
    return np.not_equal(values[SAMPLED], 0)


_RATIO = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(compute=_cross_entropy, needs=("weights",), takes=(), is_used=_is_anywhere),
    "importance_sampling": Loss(compute=_importance_sampling, needs=_RATIO, is_used=_has_advantage),
    "ppo": Loss(
        compute=_ppo, needs=_RATIO, takes=("weights", LOW, HIGH), settings={LOW: 0.8, HIGH: 1.2}, is_used=_has_advantage
    ),
    "cispo": Loss(
        compute=_cispo,
        needs=_RATIO,
        takes=("weights", LOW, HIGH),
        settings={LOW: 0.0, HIGH: 4.0},
        is_used=_has_advantage,
    ),
    "dro": Loss(compute=_dro, needs=_RATIO, settings={"beta": 0.1}, is_used=_is_anywhere),
    "gspo": Loss(
        compute=_gspo,
        needs=(*_RATIO, "sequence_ratio_mask"),
        takes=("weights", LOW, HIGH),
        settings={LOW: 0.9997, HIGH: 1.0004},
        is_used=_has_advantage,
    ),
    "stable_reinforce": Loss(
        compute=_stable_reinforce, needs=(*_RATIO, SAMPLED), settings={"kl_coeff": 0.01}, is_used=_is_sampled
    ),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, Settings]:
    """A loss by its name, and its settings with the defaults of those that are not given.

    Raises:
        InvalidInputError: there is no such loss, or it has no such setting or value.
    """
    if name == "custom":
        raise InvalidInputError(
            "loss_fn 'custom' is computed by the client: forward_backward_custom with a function sends a forward and "
            "then a cross_entropy with weights; a loss uploaded by create_custom_loss is not supported"
        )
    if name not in LOSSES:
        raise InvalidInputError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r}")
    loss = LOSSES[name]
    for key, value in config.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise InvalidInputError(f"loss_fn_config of {name} has the settings {known}, got {key!r}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise InvalidInputError(f"loss_fn_config.{key} must be a finite number >= 0, got {value!r}")
    settings = {**loss.settings, **{key: float(value) for key, value in config.items()}}
    if LOW in settings and settings[LOW] > settings[HIGH]:
        raise InvalidInputError(f"loss_fn_config.{LOW} must be at most {HIGH}, got {settings[LOW]} > {settings[HIGH]}")
    return loss, settings


def check_datum(datum: Datum, loss: Loss, *, name: str, where: str) -> NDArray[np.int64]:
    """Check that a datum has what the loss needs, and return its targets.

    Raises:
        InvalidInputError: names the datum (`where`), the field, the rule and the value.
    """
    fields = f"{where}.loss_fn_inputs"
    if datum.targets is None:
        raise InvalidInputError(f"{fields}.target_tokens must be given, got none")
    shape = datum.targets.shape
    if len(shape) != 1 and not (len(shape) == 2 and name == "cross_entropy" and shape[1] >= 1):
        raise InvalidInputError(
            f"{fields}.target_tokens must have the shape [T], or [T, K] with cross_entropy, got {list(shape)} with "
            f"{name}"
        )
    if not len(datum.input_ids) or shape[0] != len(datum.input_ids):
        raise InvalidInputError(
            f"{fields}.target_tokens must have one entry for each of at least one id of model_input, got {shape[0]} "
            f"for {len(datum.input_ids)}"
        )
    for key in (*loss.needs, *datum.inputs):
        _check_input(datum, key, loss, name=name, where=where)
    mask = datum.inputs.get("sequence_ratio_mask")
    if mask is not None and datum.inputs["advantages"].any() and not mask.any():
        raise InvalidInputError(f"{fields}.sequence_ratio_mask must mark a position where advantages are not 0")
    if {LOW, HIGH} <= datum.inputs.keys() and (datum.inputs[LOW] > datum.inputs[HIGH]).any():
        raise InvalidInputError(f"{fields}.{LOW} must be at most {HIGH} at every position")
    return datum.targets


def _check_input(datum: Datum, key: str, loss: Loss, *, name: str, where: str) -> None:
    """Check one input that the loss needs or the datum has."""
    fields = f"{where}.loss_fn_inputs"
    if key == SAMPLED and key not in datum.inputs:
        raise InvalidInputError(
            f"{where} must have provenance spans with {name}, which trains sampled ids alone: attach them by "
            "Datum.with_provenance"
        )
    if key not in datum.inputs:
        raise InvalidInputError(f"{fields}.{key} must be given with {name}, got {', '.join(datum.inputs) or 'none'}")
    if key not in (*loss.needs, *loss.takes):
        known = ", ".join(("target_tokens", *loss.needs, *loss.takes))
        raise InvalidInputError(f"{fields} of {name} may be {known}, got {key!r}")
    assert datum.targets is not None, "check_datum"
    values, shape = datum.inputs[key], datum.targets.shape
    if values.shape != shape:
        raise InvalidInputError(
            f"{fields}.{key} must have the shape of target_tokens, {list(shape)}, got {list(values.shape)}"
        )
    if not np.isfinite(values).all():
        place = tuple(int(k) for k in np.argwhere(~np.isfinite(values))[0])
        raise InvalidInputError(f"{fields}.{key} must be finite, got {values[place]} at {list(place)}")


def find_used(datum: Datum, loss: Loss, settings: Settings) -> NDArray[np.bool_]:
    """[T] where the loss of a datum depends on the logprobs; the rest of them is only reported."""
    used_T: NDArray[np.bool_] = loss.is_used(datum.inputs, settings)
    if "weights" not in datum.inputs:
        return used_T
    weights = datum.inputs["weights"]
    has_weight: NDArray[np.bool_] = weights != 0
    return np.logical_and(used_T, has_weight.any(-1) if weights.ndim == 2 else has_weight)


def compute_loss(
    loss: Loss,
    settings: Settings,
    logprobs_N: torch.Tensor,
    values: Values,
    used_N: torch.Tensor,
    num_row_tokens: Sequence[int],
) -> tuple[torch.Tensor, dict[str, float]]:
    """The sum of the loss over the N positions of several rows, and its metrics; also [N, K] for cross_entropy.

    Positions that have no effect are left out before anything is computed of them: their ratio may be anything.
    """
    if "sequence_ratio_mask" in values:
        values = {**values, "sequence_log_ratio": _mean_log_ratio(logprobs_N, values, num_row_tokens)}
    used_values = {name: of_N[used_N] for name, of_N in values.items()}
    terms = loss.compute(logprobs_N[used_N], used_values, settings)
    weighed = terms.loss_N * used_values["weights"] if "weights" in used_values else terms.loss_N
    total = weighed.sum()
    metrics = {"loss:sum": float(total.detach()), "num_loss_tokens:sum": float(used_N.sum())}
    if terms.clipped_N is not None:
        metrics["num_clipped:sum"] = float(terms.clipped_N.sum())
    return total, metrics


@torch.no_grad()
def _mean_log_ratio(logprobs_N: torch.Tensor, values: Values, num_row_tokens: Sequence[int]) -> torch.Tensor:
    """[N] the mean of log p - log q over the positions in `sequence_ratio_mask` of its row; 0 in a row without any."""
    whole = (logprobs_N - values["logprobs"], values["sequence_ratio_mask"] != 0)
    parts = zip(*(torch.split(of_N, list(num_row_tokens)) for of_N in whole), strict=True)
    means = [log_ratio[mask].mean().nan_to_num().expand(len(mask)) for log_ratio, mask in parts]
    return torch.cat(means)
