"""The demo: the run of the lookup recipe, then a report that compares its rollouts with the usual pipeline's."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from accelerate import Accelerator

from unbroken.demo.config import LookupConfig
from unbroken.demo.lookup import JsonStyle, lookup_problems, style_of
from unbroken.demo.report import ComparedRollouts, DemoResult, write_report
from unbroken.demo.warm import write_warm_model
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.rendering.loader import load_tokenizer
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.changes import Cause
from unbroken.retokenising.comparison import Retokenised, TemplateTexts, compare_trajectory, count_changed
from unbroken.retokenising.ratios import score_rollouts
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.chosen_numerics import choose_numerics
from unbroken.runs.diagnosis.evidence import Numbers, read_steps
from unbroken.runs.evaluation.evaluator import read_evaluations
from unbroken.runs.folder import claim_folder, lock_folder
from unbroken.runs.recipe import OpenRecipe, Task, open_recipe
from unbroken.runs.settings import describe
from unbroken.runs.signals import cancelled_by_sigterm
from unbroken.runs.training import TrainedRun, train_model
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.types import TrainingSample
from unbroken.viewer.reports import SideBySide, show_side_by_side

_RECIPE = "unbroken demo"


async def run_demo(config: LookupConfig) -> DemoResult:
    """Train on the CPU, and write `report.html` and `summary.json` beside the run in `config.output`.

    An earlier demo in the folder is removed.

    Raises:
        InvalidInputError: the evaluation has too few problems for both JSON styles, the folder holds other files, or
            another run writes into it.
        Terminated: SIGTERM came.
    """
    num_problems = config.evaluation.num_problems
    if num_problems < len(JsonStyle):
        raise InvalidInputError(f"evaluation.num_problems must be >= {len(JsonStyle)}, got {num_problems}")
    opened = OpenRecipe(name=_RECIPE, words=(), preflight=False)
    with lock_folder(config.output), cancelled_by_sigterm(), ExitStack() as stack:
        stack.callback(open_recipe.reset, open_recipe.set(opened))  # else `train_model` would lock the folder again
        return await _train_and_report(config)


async def _train_and_report(config: LookupConfig) -> DemoResult:
    started = time.perf_counter()
    config, _ = choose_numerics(config, continues=False)  # before it is written down; nobody asked the demo why
    claim_folder(config.output, _RECIPE, describe(config), anew=True)
    model = config.output / "model"
    await asyncio.to_thread(write_warm_model, model, config.warm_up, seed=config.seed)
    task = Task(
        model=model,
        train_on=lookup_problems("train", config.seed),
        evaluate_on=lookup_problems("evaluation", config.seed),
    )
    trained = await train_model(config, task, accelerator=Accelerator(cpu=True))
    tokenizer = load_tokenizer(model)
    texts = TemplateTexts(tokenizer=tokenizer, template_renderer=TemplateRenderer(tokenizer))
    retokenised = [_compare(texts, trajectory) for trajectory in trained.rollouts]
    steps = read_steps(config.output)
    before, after = (line["reward/mean"] for line in read_evaluations(config.output))
    result = DemoResult(
        seed=config.seed,
        num_parameters=sum(p.numel() for p in trained.model.parameters()),
        success_before=before,
        success_after=after,
        step_rewards=tuple(step["reward/mean"] or 0.0 for step in steps),
        rollouts=len(steps) * config.rollouts.problems_per_step * config.rollouts.group_size,
        exact=_compare_exact(trained),
        retokenised=await _compare_by_style(retokenised, trained),
        counters=_sum_counters(steps),
        example=_show_example(texts, trained.rollouts, retokenised),
        seconds=time.perf_counter() - started,
    )
    write_report(result, config.output)
    return result


def _compare(texts: TemplateTexts, trajectory: Trajectory) -> Retokenised:
    """Compare a rollout with what the usual pipeline makes of it. The demo's template refuses no conversation."""
    found = compare_trajectory(texts, trajectory)
    assert found is not None
    return found


def _compare_exact(trained: TrainedRun) -> ComparedRollouts:
    """Compare trainer and sampler on the rollouts as they were sampled."""
    rows = [row for trajectory in trained.rollouts for row in export_samples(trajectory.tree, advantage=0.0)]
    differ = [not _trains_what_was_sampled(*pair) for pair in zip(rows, trained.rollouts, strict=True)]
    return ComparedRollouts(
        num_rollouts=len(differ),
        share_differ=sum(differ) / len(differ),
        mismatch=mismatch_of_rows(rows, trained.trainer.logprobs(rows)),
        causes={},
    )


def _trains_what_was_sampled(row: TrainingSample, trajectory: Trajectory) -> bool:
    """Whether the ids that a row trains on are those that the engine returned, turn by turn."""
    sequences = [turn.sequence for turn in trajectory.turns]
    returned = np.concatenate([each.completion_ids[each.sampled_mask] for each in sequences])
    return np.array_equal(row.token_ids[row.loss_mask], returned)


async def _compare_by_style(rollouts: Sequence[Retokenised], trained: TrainedRun) -> dict[JsonStyle, ComparedRollouts]:
    """Score the retokenised rollouts with the trained weights, for each JSON style."""
    by_style: dict[JsonStyle, list[Retokenised]] = {style: [] for style in JsonStyle}
    for number, rollout in enumerate(rollouts):
        by_style[style_of(number)].append(rollout)
    engine = TransformersEngine(trained.model)
    try:
        return {style: await _compare_retokenised(of_style, engine) for style, of_style in by_style.items()}
    finally:
        await engine.close()


async def _compare_retokenised(rollouts: Sequence[Retokenised], engine: Engine) -> ComparedRollouts:
    ratios = await score_rollouts(rollouts, engine)
    assert ratios.retokenised is not None
    return ComparedRollouts(
        num_rollouts=len(rollouts),
        share_differ=count_changed(rollouts).num_rollouts / len(rollouts),
        mismatch=ratios.retokenised,
        causes={cause: count_changed(rollouts, cause).num_rollouts for cause in Cause},
    )


def _sum_counters(steps: Sequence[Numbers]) -> dict[str, int]:
    """The number of events of the whole training, by `event/reason`."""
    total: Counter[str] = Counter()
    for metrics in steps:
        total.update({name: int(n) for name, n in metrics.items() if name.startswith("counters/") and n})
    by_reason = {name.removeprefix("counters/"): n for name, n in sorted(total.items())}
    return {name: n for name, n in by_reason.items() if "/" in name}


def _show_example(
    texts: TemplateTexts, trajectories: Sequence[Trajectory], rollouts: Sequence[Retokenised]
) -> SideBySide:
    """Show a rollout that is changed by the usual pipeline, if there is one, right, and of many turns."""
    trajectory, rollout = max(
        zip(trajectories, rollouts, strict=True),
        key=lambda pair: (pair[1].differs, pair[0].reward or 0.0, len(pair[0].turns)),
    )
    path = trajectory.tree.path(trajectory.turns[-1].end)
    notes = {
        int(k): f"logprob {path.rollout_logprobs[k]:.4f}, policy version {path.policy_versions[k]}"
        for k in np.flatnonzero(path.sampled_mask)
    }
    return show_side_by_side(rollout, texts.get_text, notes=notes)
