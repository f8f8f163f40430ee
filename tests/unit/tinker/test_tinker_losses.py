"""What a loss takes: errors name the datum, the field, the rule and the value."""

from __future__ import annotations

import numpy as np
import pytest

from unbroken.errors import InvalidInputError
from unbroken.tinker.losses import LOSSES, Datum, check_datum, find_loss, find_used


def make_datum(**inputs) -> Datum:
    targets = inputs.pop("targets", [5, 6, 7])
    return Datum(
        input_ids=np.array([4, 5, 6], dtype=np.int32),
        targets=None if targets is None else np.array(targets, dtype=np.int64),
        inputs={name: np.array(values, dtype=np.float32) for name, values in inputs.items()},
    )


RL = {"logprobs": [0, -1, -2], "advantages": [0, 1, -1]}
REFUSALS = {
    "no targets": (
        "cross_entropy", make_datum(targets=None, weights=[1, 1, 1]),
        r"data\[2\].loss_fn_inputs.target_tokens must be given, got none",
    ),
    "no weights": (
        "cross_entropy", make_datum(),
        r"data\[2\].loss_fn_inputs.weights must be given with cross_entropy, got none",
    ),
    "no advantages": (
        "ppo", make_datum(logprobs=[0, 0, 0]),
        r"data\[2\].loss_fn_inputs.advantages must be given with ppo, got logprobs",
    ),
    "unknown input": (
        "ppo", make_datum(**RL, mask=[0, 1, 1]),
        r"data\[2\].loss_fn_inputs of ppo may be target_tokens, logprobs, advantages, weights, clip_low_threshold, "
        "clip_high_threshold, got 'mask'",
    ),
    "thresholds without a use": (
        "importance_sampling", make_datum(**RL, clip_low_threshold=[0.8] * 3),
        "of importance_sampling may be target_tokens, logprobs, advantages, weights, got 'clip_low_threshold'",
    ),
    "shape of an input": (
        "ppo", make_datum(logprobs=[0, 0], advantages=[0, 1, 1]),
        r"data\[2\].loss_fn_inputs.logprobs must have the shape of target_tokens, \[3\], got \[2\]",
    ),
    "shape of weights": (
        "cross_entropy", make_datum(targets=[[1, 2], [3, 4], [5, 6]], weights=[1, 1, 1]),
        r"weights must have the shape of target_tokens, \[3, 2\], got \[3\]",
    ),
    "targets of several": (
        "ppo", make_datum(targets=[[1], [2], [3]], **RL),
        r"target_tokens must have the shape \[T\], or \[T, K\] with cross_entropy, got \[3, 1\] with ppo",
    ),
    "targets of none": (
        "cross_entropy", make_datum(targets=np.zeros((3, 0)), weights=np.zeros((3, 0))),
        r"target_tokens must have the shape \[T\], or \[T, K\] with cross_entropy, got \[3, 0\] with cross_entropy",
    ),
    "thresholds that cross": (
        "ppo", make_datum(**RL, clip_low_threshold=[0.8, 1.3, 0.8], clip_high_threshold=[1.2] * 3),
        "clip_low_threshold must be at most clip_high_threshold at every position",
    ),
    "no logprob of a softmax": (
        "dro", make_datum(advantages=[0, 0, 0], logprobs=[-1, -1e4, -1e30]),
        r"data\[2\].loss_fn_inputs.logprobs\[2\] must lie in \[-10000, 0\] where the loss depends on it, got -1.*e\+30",
    ),
    "no ratio mask": (
        "gspo", make_datum(**RL),
        r"data\[2\].loss_fn_inputs.sequence_ratio_mask must be given with gspo, got logprobs, advantages",
    ),
    "empty ratio mask": (
        "gspo", make_datum(**RL, sequence_ratio_mask=[0, 0, 0]),
        "sequence_ratio_mask must mark a position where advantages are not 0",
    ),
    "no spans": (
        "stable_reinforce", make_datum(**RL),
        r"data\[2\] must have provenance spans with stable_reinforce, which trains sampled ids alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_datum_without_what_the_loss_needs_is_refused(case):
    name, datum, text = REFUSALS[case]
    with pytest.raises(InvalidInputError, match=text):
        check_datum(datum, LOSSES[name], "data[2]")


def test_logprobs_of_any_size_are_taken_where_the_loss_does_not_depend_on_them():
    check_datum(make_datum(advantages=[0, 0, 1], logprobs=[-1e30, -1, -1e4]), LOSSES["ppo"], "data[0]")


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("grpo", {}, "loss_fn must be one of cross_entropy, importance_sampling, ppo, .*, got 'grpo'"),
        ("custom", {"loss_id": "x"}, "loss_fn 'custom' is computed by the client"),
        ("ppo", {"beta": 0.1}, "loss_fn_config of ppo has the settings clip_low_threshold, .*, got 'beta'"),
        ("cross_entropy", {"beta": 0.1}, "loss_fn_config of cross_entropy has the settings none, got 'beta'"),
        ("dro", {"beta": "much"}, "loss_fn_config.beta must be a finite number >= 0, got 'much'"),
        ("dro", {"beta": float("nan")}, "loss_fn_config.beta must be a finite number >= 0, got nan"),
        ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold must be a finite number >= 0, got -0.1"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold must be at most clip_high_threshold, got 1.3 > 1.2"),
    ],
)
def test_an_unknown_loss_or_setting_is_refused(name, config, text):
    with pytest.raises(InvalidInputError, match=text):
        find_loss(name, config)


def test_thresholds_are_those_of_the_api_unless_given():
    assert find_loss("ppo", {})[1] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert find_loss("cispo", {})[1] == {"clip_low_threshold": 0, "clip_high_threshold": 4}
    assert find_loss("ppo", {"clip_high_threshold": 1.5})[1] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("cross_entropy", {"weights": [0, 2, -1]}, [False, True, True]),
        ("ppo", RL, [False, True, True]),
        ("ppo", RL | {"weights": [1, 0, 1]}, [False, False, True]),
        ("dro", RL, [True, True, True]),
        ("dro", RL | {"weights": [0, 1, 1]}, [False, True, True]),
        ("stable_reinforce", RL | {"sampled": [0, 0, 1]}, [False, False, True]),
    ],
)
def test_positions_without_effect_are_known_before_anything_is_computed(name, inputs, expected):
    assert find_used(make_datum(**inputs), LOSSES[name]).tolist() == expected
