"""TRL's own GRPOTrainer on the demo's tiny model, with rollouts through our engine."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.scripted_env import ScriptedEnv
from support.trl_runs import GROUP_SIZE, IGNORED_WARNINGS, Seen, trl_run, warmed_up
from unbroken.integrations.trl import env_reward, on_trained_rows
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.comparison import TemplateTexts, compare_trajectory
from unbroken.rollout.env import Rewrite

pytest.importorskip("trl", reason="needs TRL", exc_type=ModuleNotFoundError)
pytestmark = [pytest.mark.filterwarnings(warning) for warning in IGNORED_WARNINGS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Seen]:
    """Three steps of training."""
    with trl_run(tmp_path_factory.mktemp("trl"), max_steps=3) as (trainer, seen):
        trainer.train()
    return trainer, seen


def sampled_ids(trajectory) -> list[int]:
    return [int(i) for turn in trajectory.turns for i in turn.sequence.completion_ids]


def test_i4_the_ids_that_trl_trains_on_are_those_that_were_sampled(run):
    _, seen = run
    trained = sorted([i for i, m in zip(ids, mask, strict=True) if m] for _, ids, mask, _, _ in seen.rows())
    sampled = sorted(sampled_ids(trajectory) for generation in seen.trajectories for trajectory in generation)
    assert trained == sampled
    assert len(sampled) == 3 * 2 * GROUP_SIZE


def test_tool_replies_and_bridges_are_in_the_context_and_not_in_the_loss(run):
    _, seen = run
    whole = {tuple(prompt + ids): mask for prompt, ids, mask, _, _ in seen.rows()}
    multi_turn = [t for generation in seen.trajectories for t in generation if len(t.turns) > 1]
    assert len(multi_turn) > 5
    for trajectory in multi_turn:
        path = trajectory.tree.path(trajectory.turns[-1].end)
        mask = whole[tuple(path.token_ids.tolist())]
        assert mask == path.sampled_mask[-len(mask) :].astype(int).tolist()
        assert 0 in mask
    _, tokenizer = warmed_up()
    unseen = [i for _, ids, mask, _, _ in seen.rows() for i, m in zip(ids, mask, strict=True) if not m]
    assert "<tool_response>" in tokenizer.decode(unseen)


def test_trls_logprobs_before_the_first_update_are_the_samplers(run):
    _, seen = run
    first = list(seen.rows())[: 2 * GROUP_SIZE]
    gaps = [
        abs(own - sampled)
        for _, _, mask, sampler, trl in first
        for m, sampled, own in zip(mask, sampler, trl, strict=True)
        if m
    ]
    assert len(gaps) > 100
    assert max(gaps) < 1e-5
    given = [value for _, _, mask, sampler, _ in first for m, value in zip(mask, sampler, strict=True) if not m]
    assert given
    assert np.isnan(given).all()


def test_i6_each_generation_is_sampled_with_the_weights_of_the_step_before(run):
    _, seen = run
    versions = [
        {span.policy_version for t in generation for turn in t.turns for span in turn.sequence.version_spans}
        for generation in seen.trajectories
    ]
    assert versions == [{1}, {2}, {3}]
    for k, (_, _, mask, sampler, trl) in enumerate(seen.rows()):
        gaps = [abs(own - sampled) for m, sampled, own in zip(mask, sampler, trl, strict=True) if m]
        assert max(gaps) < 1e-5, k


def test_i4_what_decoding_and_rendering_again_would_make_of_these_rollouts_are_other_ids(run):
    """Else the tests above would pass with a trainer that goes through text."""
    _, seen = run
    _, tokenizer = warmed_up()
    texts = TemplateTexts(tokenizer=tokenizer, template_renderer=TemplateRenderer(tokenizer))
    rollouts = [compare_trajectory(texts, trajectory) for generation in seen.trajectories for trajectory in generation]
    assert sum(rollout is not None and rollout.differs for rollout in rollouts) > len(rollouts) / 2
    again = [
        tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids for _, ids, _, _, _ in seen.rows()
    ]
    assert any(again)


def test_siblings_are_compared_with_each_other_and_rewarded_by_their_environments(run):
    _, seen = run
    advantages = sorted(value for inputs in seen.inputs for value in inputs["advantages"].tolist())
    expected = []
    for generation in seen.trajectories:
        for first in range(0, 2 * GROUP_SIZE, GROUP_SIZE):
            rewards = np.array([trajectory.reward for trajectory in generation[first : first + GROUP_SIZE]])
            assert len(set(rewards.tolist())) > 1
            expected += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).tolist()
    np.testing.assert_allclose(advantages, sorted(expected), rtol=1e-4, atol=1e-5)


def test_i8_what_happened_in_the_rollouts_is_in_trls_log(run):
    trainer, seen = run
    logged = [line for line in trainer.state.log_history if "counters/bridges" in line]
    bridges = [sum(t.counters["bridges/derived"] for t in generation) for generation in seen.trajectories]
    assert [line["counters/bridges"] for line in logged] == bridges
    assert min(bridges) > 0
    assert all(line["counters/dropped_rows"] == 0 for line in logged)
    assert [line["reward"] for line in logged] == pytest.approx(
        [np.mean([t.reward for t in generation]) for generation in seen.trajectories], rel=1e-5
    )


def test_rows_that_are_not_trained_on_change_neither_the_gradient_nor_a_baseline(tmp_path: Path):
    """A failed rollout and a forked one, with siblings that are trained on."""
    made = 0

    def make_env(prompt):
        nonlocal made
        made += 1
        outcomes = {2: [ValueError("boom")], 5: [Rewrite(messages=[{"role": "user", "content": "Again."}])]}
        return ScriptedEnv(outcomes.get(made, ()), messages=prompt, reward=float(made))

    @on_trained_rows
    def twice(*, trajectory, completions, **_):
        return [2.0 * (t.reward or 0.0) for t in trajectory]

    with trl_run(tmp_path, make_env=make_env, rewards=[env_reward, twice]) as (trainer, seen):
        trainer.train()
    (inputs,) = seen.inputs
    by_ids = {tuple(ids): k for k, (_, ids, _, _, _) in enumerate(seen.rows())}
    (generation,) = seen.trajectories
    expected = np.zeros(2 * GROUP_SIZE)
    for members in ([0, 2, 3], [5, 6, 7]):
        rewards = 3 * np.array([members]) + 3
        expected[members] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    for k, trajectory in enumerate(generation):
        if k in (1, 4):
            continue
        row = by_ids[tuple(sampled_ids(trajectory))]
        assert inputs["advantages"][row].item() == pytest.approx(expected[k], rel=1e-4)
        assert inputs["tool_mask"][row].all()
    fillers = [k for k, (_, ids, _, _, _) in enumerate(seen.rows()) if ids == [trainer.processing_class.pad_token_id]]
    assert len(fillers) == 2
    assert not inputs["advantages"][fillers].any()
    assert not (inputs["tool_mask"] * inputs["completion_mask"])[fillers].any()
    (logged,) = [line for line in trainer.state.log_history if "counters/dropped_rows" in line]
    assert logged["counters/dropped_rows/failed"] == logged["counters/dropped_rows/forked"] == 1
    assert np.isfinite(logged["loss"])
    assert logged["num_tokens"] > 0


def test_an_evaluation_is_sampled_with_the_weights_that_it_evaluates(tmp_path: Path):
    with trl_run(tmp_path, per_device_eval_batch_size=2 * GROUP_SIZE) as (trainer, seen):
        trainer.train()
        metrics = trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert len(seen.trajectories) == 1 + 1
    assert all(t.turns[0].sequence.policy_versions[0] == 2 for generation in seen.trajectories[1:] for t in generation)
    rewards = [np.mean([t.reward for t in generation]) for generation in seen.trajectories[1:]]
    assert metrics["eval_reward"] == pytest.approx(np.mean(rewards), rel=1e-5)


def test_i6_adapters_reach_the_engine_merged(tmp_path: Path):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with trl_run(tmp_path, trainer_options={"peft_config": lora}, max_steps=2) as (trainer, seen):
        trainer.train()
    gaps = [
        abs(own - sampled)
        for _, _, mask, sampler, trl in seen.rows()
        for m, sampled, own in zip(mask, sampler, trl, strict=True)
        if m
    ]
    assert len(gaps) > 200
    assert max(gaps) < 1e-5


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_the_recipe_trains(tmp_path: Path):
    path = Path(__file__).parents[2] / "recipes" / "lookup_in_trl.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    recipe = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():  # of what TRL imports
        warnings.simplefilter("ignore")
        spec.loader.exec_module(recipe)
    model, tokenizer = warmed_up()
    small = ["--num-steps", "1", "--tasks-per-step", "2", "--group-size", "2", "--output", str(tmp_path)]
    recipe.train(copy.deepcopy(model), tokenizer, recipe.parse_arguments(small))
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert first["step"] == 1
    assert first["counters/status"] == 4
