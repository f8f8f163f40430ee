"""A run of several policies: what it refuses by name, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import InvalidInputError
from unbroken.rollout.policies import PoliciesConfig
from unbroken.runs.algorithms import Algorithm
from unbroken.runs.chosen_numerics import choose_numerics
from unbroken.runs.collector import Problems
from unbroken.runs.config import EngineKind, RunConfig
from unbroken.runs.samplers import SamplerOpener
from unbroken.runs.settings import build, section_of
from unbroken.training.config import LoraUpdates
from unbroken.types import Numerics


def make_config(**changes: Any) -> RunConfig:
    values = {"output": Path("out"), "loop.num_steps": 1, "policies.names": ("solver", "critic"), "lora.rank": 4}
    given = {**values, **{name.replace("__", "."): value for name, value in changes.items()}}
    config: RunConfig = build(
        section_of(RunConfig), {name: value for name, value in given.items() if value is not None}
    )
    return config


def test_engines_get_the_adapters_of_policies_and_never_merged_weights() -> None:
    config = make_config()
    assert config.policies == PoliciesConfig(names=("solver", "critic"))
    assert config.training.lora_updates is LoraUpdates.ADAPTER
    assert config.adapter_rank == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora__rank": None}, "lora must be given with policies"),
        ({"engine__reuse_kv": True}, "engine.reuse_kv must be false"),
        ({"algorithm": Algorithm.ONLINE_DPO, "trainer__kl_weight": 0.1}, "algorithm must be no online_dpo"),
        ({"algorithm": Algorithm.DAPO}, "loop.max_replacements must be 0"),
        ({"loop__max_staleness": 1}, "loop.max_staleness must be 0: .* with copies that the update drops"),
        ({"teacher__models": ("teacher",)}, "teacher must be left out"),
        ({"warm_start__data": "rows.jsonl", "warm_start__steps": 1}, "warm_start must be left out"),
        ({"images": True}, "images must be false"),
        (
            {"trainer__numerics": Numerics.EXACT, "engine__kind": EngineKind.COLOCATED, "precision": "bfloat16"},
            "trainer.numerics must be fast, or auto, with vLLM, whose sum of adapters and weights",
        ),
        ({"trainer__parallel__sequence": 2}, "trainer.parallel must be left out: policies take turns in one process"),
        ({"trainer__compile": True}, "trainer.compile must be false"),
        ({"export__push_to_hub": "me/model"}, "export.push_to_hub must be left out"),
    ],
)
def test_what_policies_cannot_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ({"env": None, "agent": lambda number: None}, "policies must be left out with agents, who name none"),
        ({"env": lambda number: None, "score": lambda number, group: None}, "rewards must be left out with policies"),
    ],
)
def test_problems_whose_rewards_are_of_no_policy_are_refused(problems: dict[str, Any], message: str) -> None:
    """The reward functions' part would count for evaluations, and for what no policy is trained on."""
    plain = Problems(env=lambda number: None)
    for train_on, evaluate_on in ((Problems(**problems), plain), (plain, Problems(**problems))):
        with pytest.raises(InvalidInputError, match=message + r".*\['solver', 'critic'\]"):
            SamplerOpener(config=make_config(), source="model", train_on=train_on, evaluate_on=[evaluate_on], part="0")


def test_numerics_that_a_run_chooses_are_fast() -> None:
    config, why = choose_numerics(make_config(trainer__numerics=Numerics.AUTO), continues=False)
    assert config.trainer.numerics is Numerics.FAST
    assert "exact is slower on a CPU" in why


def test_commands_that_load_one_model_refuse_a_run_of_several_policies() -> None:
    with pytest.raises(
        InvalidInputError, match=r"policies must be left out with `unbroken eval`.*\['solver', 'critic'\]"
    ):
        make_config().check_one_policy("`unbroken eval`")
