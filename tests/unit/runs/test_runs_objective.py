"""Which objective a run has, by the names on its command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.errors import InvalidInputError
from unbroken.rollout.limits import Limits
from unbroken.runs.algorithms import Algorithm, Pairing
from unbroken.runs.config import EngineConfig, EngineKind, RolloutConfig, RunConfig, TeacherConfig
from unbroken.runs.prompts.built_in import Config
from unbroken.runs.prompts.dataset import DataConfig
from unbroken.runs.prompts.rewards import RewardConfig
from unbroken.runs.python_files import FunctionName, ModelName
from unbroken.runs.recipe import load_recipe
from unbroken.runs.settings import describe
from unbroken.training.config import LoopConfig, OldLogprobs, TrainerConfig
from unbroken.training.loss_config import ClipConfig, Correction, CorrectionKind, LossNormalization, OverlongConfig
from unbroken.training.objective.advantages import ADVANTAGES, StepAdvantages, grpo_advantages, rloo_advantages
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.pairs import best_and_worst, outside_in
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.types import SamplingParams, StructuredOutput


def make_config(**options) -> RunConfig:
    return RunConfig(output=Path("runs/test"), loop=LoopConfig(num_steps=1), **options)


def test_each_algorithm_has_its_objective():
    assert make_config().objective == PolicyGradient(grpo_advantages, LOSSES["clipped"])
    assert make_config(algorithm=Algorithm.RLOO).objective == PolicyGradient(rloo_advantages, LOSSES["clipped"])
    assert make_config(algorithm=Algorithm.ONLINE_DPO).objective == OnlineDpo(pairs=outside_in)
    pairs = make_config(algorithm=Algorithm.ONLINE_DPO, pairs=Pairing.BEST_AND_WORST)
    assert pairs.objective == OnlineDpo(pairs=best_and_worst)


def test_a_run_with_staleness_corrects_for_older_weights_unless_its_settings_say_otherwise():
    stale = {"loop": LoopConfig(num_steps=1, max_staleness=1), "output": Path("runs/test")}
    clip = ClipConfig(low=0.2, high=0.28, dual=2.0)
    assert RunConfig(**stale).training == TrainerConfig(old_logprobs=OldLogprobs.SAMPLER, clip=clip)
    tis = TrainerConfig(old_logprobs=OldLogprobs.RECOMPUTE, correction=Correction(kind=CorrectionKind.TIS))
    assert RunConfig(**stale, algorithm=Algorithm.GSPO).training == tis
    clipped = TrainerConfig(old_logprobs=OldLogprobs.SAMPLER)
    assert RunConfig(**stale, trainer=clipped).training == clipped
    assert make_config().training == TrainerConfig()
    assert RunConfig(**stale, algorithm=Algorithm.ONLINE_DPO).training == TrainerConfig()


def test_an_engine_that_sleeps_during_steps_is_refused_with_staleness():
    with pytest.raises(InvalidInputError, match=r"loop\.max_staleness must be 0 with engine.kind colocated.*, got 1"):
        RunConfig(
            output=Path("runs/test"),
            loop=LoopConfig(num_steps=1, max_staleness=1),
            engine=EngineConfig(kind=EngineKind.COLOCATED),
        )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_name_of_the_policy_gradient_is_an_algorithm(name):
    most = 8 if name == "dr_grpo" else None
    overlong = OverlongConfig(max_tokens=8, buffer=2) if name == "dapo" else None
    trainer = TrainerConfig(max_trajectory_tokens=most, overlong=overlong)
    teacher = TeacherConfig(models=(ModelName("a"),)) if name == "distillation" else None
    assert make_config(algorithm=Algorithm(name), trainer=trainer, teacher=teacher).objective == ALGORITHMS[name]
    assert {each.value for each in Algorithm} == {*ALGORITHMS, "online_dpo"}


def test_an_algorithms_parts_may_be_others():
    config = make_config(
        algorithm=Algorithm.GSPO, advantages=FunctionName("rloo"), loss=FunctionName("gspo_token")
    ).objective
    assert config == PolicyGradient(rloo_advantages, LOSSES["gspo_token"], LossNormalization.SEQUENCE)


@pytest.mark.parametrize("field", ["advantages", "loss"])
def test_a_part_that_online_dpo_would_ignore_is_refused(field):
    with pytest.raises(InvalidInputError, match=f"{field} must be left out with algorithm online_dpo, got grpo"):
        make_config(algorithm=Algorithm.ONLINE_DPO, **{field: FunctionName("grpo")})


@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.REINFORCE_PLUS_PLUS_BASELINE, Algorithm.ONLINE_DPO])
def test_one_trajectory_of_a_problem_is_refused_unless_problems_are_compared(algorithm):
    one = RolloutConfig(group_size=1)
    assert make_config(algorithm=Algorithm.REINFORCE_PLUS_PLUS, rollouts=one).rollouts.group_size == 1
    with pytest.raises(InvalidInputError, match=r"rollouts\.group_size must be >= 2, got 1: a trajectory is compared"):
        make_config(algorithm=algorithm, rollouts=one)
    with pytest.raises(InvalidInputError, match="group_size must be >= 1, got 0"):
        RolloutConfig(group_size=0)


def test_dapo_and_dr_grpo_work_by_their_names_alone():
    """What they need of the length of a rollout is that of the limits: of 10 turns of 100 ids, 500."""
    rollouts = RolloutConfig(limits=Limits(max_turns=10, max_tokens=500), sampling=SamplingParams(max_tokens=100))
    dapo = make_config(algorithm=Algorithm.DAPO, rollouts=rollouts)
    assert dapo.training.overlong == OverlongConfig(max_tokens=500, buffer=100)
    assert make_config(algorithm=Algorithm.DR_GRPO, rollouts=rollouts).training.max_trajectory_tokens == 500
    few = replace(rollouts, limits=Limits(max_turns=2))
    assert make_config(algorithm=Algorithm.DR_GRPO, rollouts=few).training.max_trajectory_tokens == 200
    given = TrainerConfig(max_trajectory_tokens=8)
    assert make_config(algorithm=Algorithm.DR_GRPO, trainer=given).training == given
    by_token = TrainerConfig(normalization=LossNormalization.TOKEN)
    assert make_config(algorithm=Algorithm.DR_GRPO, trainer=by_token).training == by_token
    assert make_config(rollouts=rollouts).training == TrainerConfig()


def test_an_answer_without_tools_is_as_long_as_one_turn(tmp_path):
    for name in ("a.jsonl", "a.py"):
        (tmp_path / name).touch()
    options = {
        "model": "m", "loop": LoopConfig(num_steps=1), "data": DataConfig(file=tmp_path / "a.jsonl"),
        "rewards": (RewardConfig(function=tmp_path / "a.py:f"),), "algorithm": Algorithm.DR_GRPO,
    }  # fmt: skip
    assert Config(**options).training.max_trajectory_tokens == 512
    assert Config(**options, tools=(tmp_path / "a.py:t",)).training.max_trajectory_tokens == 8192


def test_dapo_replaces_groups_of_equal_rewards_unless_the_config_says_otherwise():
    overlong = OverlongConfig(max_tokens=8, buffer=2)
    dapo = make_config(algorithm=Algorithm.DAPO, trainer=TrainerConfig(overlong=overlong))
    assert dapo.chosen_loop.max_replacements == 3
    assert dapo.chosen_loop.get_max_replaced(16) == 48
    fewer = replace(dapo, loop=LoopConfig(num_steps=1, max_replacements=0.25))
    assert fewer.chosen_loop.get_max_replaced(6) == 1
    assert not make_config().chosen_loop.replaces_groups
    with_distance = make_config(algorithm=Algorithm.DAPO, trainer=TrainerConfig(overlong=overlong, kl_weight=0.1))
    assert with_distance.chosen_loop.max_replacements == 0


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": Algorithm.REINFORCE_PLUS_PLUS},
        {"algorithm": Algorithm.ONLINE_DPO},
        {"trainer": TrainerConfig(kl_weight=0.1)},
    ],
)
def test_replacements_are_refused_where_groups_of_equal_rewards_are_trained_on(options):
    with pytest.raises(InvalidInputError, match=r"loop\.max_replacements must be 0 where groups.*got 3"):
        replace(make_config(**options), loop=LoopConfig(num_steps=1, max_replacements=3))
    with pytest.raises(InvalidInputError, match="max_replacements must be finite and >= 0, or None, got -1"):
        LoopConfig(num_steps=1, max_replacements=-1)


USERS = """
from unbroken.training.objective.advantages import StepAdvantages, grpo_advantages

def doubled(rewards):
    return 2 * grpo_advantages(rewards)

over_step = StepAdvantages(lambda groups: [doubled(rewards) for rewards in groups])
number = 3
"""


def test_advantages_and_losses_of_the_users_come_from_a_file_or_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    for source in (f"{tmp_path}/my_losses.py", "my_losses"):
        doubled = make_config(advantages=FunctionName(f"{source}:doubled")).objective.advantages
        assert doubled([1, 0]).tolist() == [2, -2]
        over_step = make_config(advantages=FunctionName(f"{source}:over_step")).objective.advantages
        assert isinstance(over_step, StepAdvantages)
    found = make_config(loss=FunctionName("unbroken.training.objective.losses:sapo")).objective
    assert found.loss is LOSSES["sapo"].function


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:doubled", "advantages must name something that can be imported, got 'nowhere:doubled': Modul"),
        ("math:doubled", "advantages must name something that can be imported, got 'math:doubled': AttributeError"),
        ("math:pi", "advantages must name a function, got math:pi, which is 3.14"),
        ("nothere.py:doubled", "nothere.py must be a Python file, but it does not exist"),
        (":doubled", "advantages must name something that can be imported"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(name, message):
    with pytest.raises(InvalidInputError, match=message):
        make_config(advantages=FunctionName(name))


def test_names_come_from_the_command_line_and_from_toml(tmp_path):
    """A file in TOML is relative to it; a name that the package knows stays as it is."""
    (tmp_path / "mine.py").write_text(USERS)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "recipe.toml").write_text(
        'model = "m"\nloop.num_steps = 1\ndata.file = "a.jsonl"\nrewards = [{function = "mine.py:doubled"}]\n'
        'advantages = "mine.py:doubled"\nloss = "cispo"\ntrainer.clip.high = 2.0\n'
    )
    recipe = load_recipe(tmp_path / "recipe.toml")
    config = recipe.configure([])
    assert config.advantages == f"{tmp_path}/mine.py:doubled"
    assert config.objective.loss == LOSSES["cispo"]
    assert describe(config)["loss"] == "cispo"
    options = ["--loss", "sapo", "--advantages=turn_grpo", "--trainer.clip.high", "none"]
    assert recipe.configure(options).objective == PolicyGradient(ADVANTAGES["turn_grpo"], LOSSES["sapo"])
    with pytest.raises(InvalidInputError, match=r"clip\.high must be left out with the loss sapo"):
        recipe.configure(["--loss", "sapo"])


def test_an_unknown_loss_is_refused_with_the_known_ones():
    known = rf"loss must be one of {', '.join(LOSSES)}, or written module:function .* got 'ppo'"
    with pytest.raises(InvalidInputError, match=known):
        make_config(loss=FunctionName("ppo"))


def test_a_setting_that_the_objective_would_ignore_is_refused():
    with pytest.raises(InvalidInputError, match=r"kl_weight must be left out with OnlineDpo, .* got 0\.1"):
        make_config(algorithm=Algorithm.ONLINE_DPO, trainer=TrainerConfig(kl_weight=0.1))


FORM = StructuredOutput(regex="a*")


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"structured_output": FORM}])
def test_cuts_whose_kept_ids_engines_return_are_allowed(cut):
    assert RolloutConfig(sampling=SamplingParams(**cut)).sampling.truncates


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"structured_output": FORM, "temperature": 0.0}, r"structured_output must be left out at .*temperature 0"),
        ({"min_tokens": 9, "max_tokens": 9}, r"sampling\.min_tokens must be < sampling\.max_tokens, 9, got 9"),
    ],
)
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_by_name(sampling, message):
    with pytest.raises(InvalidInputError, match=message):
        RolloutConfig(sampling=SamplingParams(**sampling))


def test_a_format_is_refused_with_the_engine_that_has_none():
    with pytest.raises(InvalidInputError, match=r"structured_output must be left out with engine\.kind embedded"):
        RolloutConfig(sampling=SamplingParams(structured_output=FORM)).check_engine(EngineKind.EMBEDDED)


def test_gdpo_needs_reward_functions_before_anything_is_loaded(tmp_path):
    (tmp_path / "env.py").write_text("class Own: pass\n")
    (tmp_path / "recipe.toml").write_text('model = "m"\nloop.num_steps = 1\nenvironment = "env.py:Own"\n')
    recipe = load_recipe(tmp_path / "recipe.toml")
    recipe.configure([])
    with pytest.raises(InvalidInputError, match="rewards must hold functions with advantages gdpo"):
        recipe.configure(["--advantages=gdpo"])
