"""Which objective a run has, by the names on its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.errors import InvalidInputError
from unbroken.runs.config import Algorithm, EvaluationConfig, Pairing, RolloutConfig, RunConfig
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.training.objective.advantages import grpo_advantages, rloo_advantages
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.preferences import best_and_worst, outside_in
from unbroken.types import SamplingParams, StructuredOutput


def make_config(**options) -> RunConfig:
    return RunConfig(output=Path("runs/test"), loop=LoopConfig(num_steps=1), **options)


def test_each_algorithm_has_its_objective():
    assert make_config().objective == PolicyGradient(grpo_advantages, LOSSES["clipped"])
    assert make_config(algorithm=Algorithm.RLOO).objective == PolicyGradient(rloo_advantages, LOSSES["clipped"])
    assert make_config(algorithm=Algorithm.ONLINE_DPO).objective == OnlineDpo(pairs=outside_in)
    pairs = make_config(algorithm=Algorithm.ONLINE_DPO, pairs=Pairing.BEST_AND_WORST)
    assert pairs.objective == OnlineDpo(pairs=best_and_worst)


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInputError, match="loss must be one of clipped, got 'ppo'"):
        make_config(loss="ppo")


def test_a_setting_that_the_objective_would_ignore_is_refused():
    with pytest.raises(InvalidInputError, match="no kl_weight, correction or normalization with OnlineDpo"):
        make_config(algorithm=Algorithm.ONLINE_DPO, trainer=TrainerConfig(kl_weight=0.1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("structured_output", StructuredOutput(regex="a*")),
    ],
)
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_by_name(name, value):
    with pytest.raises(InvalidInputError, match=rf"sampling\.{name} must be .* the trainer's logprobs would not be"):
        RolloutConfig(sampling=SamplingParams(**{name: value}))
    assert getattr(EvaluationConfig(sampling=SamplingParams(**{name: value})).sampling, name) == value
