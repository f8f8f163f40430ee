"""`unbroken eval --follow RUN`: the checkpoints of a run are evaluated as they appear, in another process.

    RUN/recipe.json ── the problems ──────────────────────────────┐
    RUN/checkpoints/step-N ── its weights ── an engine of ours ── sampled ── RUN/evaluation.jsonl, RUN/evaluations/

The engine is opened once, with the run's first model, and gets the weights of one checkpoint after the other, as a
trainer would publish them; so ids carry the checkpoint's policy version. A checkpoint has its name once it is whole,
and is read before it is evaluated: that the run removes it then does no harm. One that was removed before is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from unbroken.engines.base import RequiresVersion
from unbroken.errors import CheckpointError, EngineError, InvalidInputError, OutageError
from unbroken.runs.collector import DEFAULT_SET, EvaluationSet
from unbroken.runs.config import EngineConfig, EngineKind, RunConfig
from unbroken.runs.evaluate import check_numbers, check_policy, choose_size, open_task
from unbroken.runs.evaluation.evaluator import Evaluator, read_evaluations
from unbroken.runs.evaluation.schedule import format_numbers, make_evaluators
from unbroken.runs.folder import FOLLOWER, find_state, lock_folder, may_change, read_recipe
from unbroken.runs.processes import Rank, join_processes
from unbroken.runs.recipe import Recipe, Task, load_recipe
from unbroken.runs.settings import build, read_described, read_options
from unbroken.runs.training import run_without_training
from unbroken.training.checkpoints import find_checkpoints
from unbroken.training.outages import Outages

_POLL_S = 0.5
"""How often the folder is looked at, also while a checkpoint is evaluated."""
_OF_OTHERS = ("loop.max_staleness", "trainer.numerics")
"""Settings that say how the run trains, and could not be combined with each engine of an evaluation."""
_PLACES = ("urls", "urls_file", "weights_dir", "versions_to")
"""Fields of an engine that name where it, or its weights, are."""


def follow_run(
    run: Path,
    options: Sequence[str],
    console: Console,
    *,
    task: str | None = None,
    num_problems: int | None = None,
    num_samples: int | None = None,
    checks_policy: bool | None = None,
) -> dict[str, Any]:
    """Evaluate the checkpoints of a run until it has ended; returns which ones, with their numbers.

    `task` is the recipe, if the folder does not say where it is. `checks_policy` is as in `evaluate_task`.

    Raises:
        InvalidInputError: the folder is no run's, another process follows it, or an option is wrong.
        PolicyMismatchError: the engine samples from another policy than its model's.
        EngineError, RolloutError: the engine does not start or went away, or all rollouts failed.
        CheckpointError: a checkpoint is damaged.
        Terminated: SIGTERM came.
    """
    check_numbers(num_problems, num_samples)
    recipe, config, training = _open_recipe(run, options, task)
    _check_engine(config.engine, training)
    found: list[dict[str, Any]] = []

    async def evaluate(config: RunConfig, made: Task) -> None:
        if join_processes().num_processes > 1:
            raise InvalidInputError("`unbroken eval` must be started as one process, without a launcher")
        sized = [choose_size(each, config, num_problems, num_samples) for each in made.sets]
        async with _open(run, config, made.model, sized, console, checks_policy) as follower:
            found.append(await follower.follow())

    with lock_folder(config.output):
        run_without_training(recipe, config, evaluate)
    return found[0]


def _open_recipe(run: Path, options: Sequence[str], task: str | None) -> tuple[Recipe, RunConfig, Mapping[str, Any]]:
    """The recipe of a run, its config with another engine, and the run's settings of its engine.

    What may differ when a run continues is not taken from it, such as its engine and gateway: only the evaluation.
    """
    stored = read_recipe(run)
    if task is not None:
        recipe, words = open_task(task)
    else:
        if stored.code and not Path(stored.code).is_file():
            raise InvalidInputError(
                f"TASK must be given where the run's recipe has moved, and {stored.code} is not there: `unbroken eval "
                f"RECIPE --follow {run}`"
            )
        recipe, words = load_recipe(Path(stored.code) if stored.code else None), []
    given = read_options([*words, *options], recipe.section)
    if "output" in given:
        raise InvalidInputError(f"output must be left out with --follow, whose results are in {run}")
    taken = {
        name: value
        for name, value in stored.settings.items()
        if name not in given and (not may_change(name) or name.startswith("evaluation.") or name == "loop.num_steps")
        if name not in _OF_OTHERS
    }
    values = {**recipe.values, **read_described(taken, recipe.section), **given, "output": run / FOLLOWER}
    config: RunConfig = build(recipe.section, values)
    config.check_one_policy("`unbroken eval --follow`")
    engine = {name.removeprefix("engine."): value for name, value in stored.settings.items()}
    return recipe, replace(config, trainer=replace(config.trainer, routing_replay=False)), engine


def _check_engine(engine: EngineConfig, training: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` if the engine would take the weights, or the place of weights, from the training's."""
    for name in _PLACES:
        own, other = getattr(engine, name), training.get(name)
        shared = sorted(set(own) & set(other or ())) if isinstance(own, tuple) else own and str(own) == other
        if shared:
            raise InvalidInputError(
                f"engine.{name} must be other than the run's, got {shared if name == 'urls' else own} for both: the "
                "engine of the training would get weights from here. Give servers of their own, or another engine.kind"
            )


@asynccontextmanager
async def _open(
    run: Path,
    config: RunConfig,
    model: str | Path,
    sets: Sequence[EvaluationSet],
    console: Console,
    checks_policy: bool | None,
) -> AsyncIterator[_Follower]:
    """Open the engine with the run's first model, and make what follows the run."""
    from unbroken.runs.engines import open_engine
    from unbroken.runs.models import find_revision, load_model, locate
    from unbroken.runs.samplers import SamplerOpener

    source = find_revision(model, config.model_settings.revision)
    first, *others = (each.problems for each in sets)
    opener = SamplerOpener(config=config, source=source, train_on=first, evaluate_on=others, part="0")
    images = opener.load_images()
    renderer = opener.load_renderer(images)
    opener.check_model(renderer, images)
    loaded = None
    if config.engine.kind is EngineKind.EMBEDDED:
        loaded = load_model(source, config.chosen_model_settings, takes_images=images is not None)
    shared: dict[str, Any] = {"seed": config.seed, "output": run, "rank": Rank(), "source": locate(source)}
    opening = open_engine(
        config.engine,
        model=loaded,
        source=source,
        output=config.output,
        device=join_processes().device,
        rank=Rank(),
        image_processor=None if images is None else images.processor,
        numerics=config.trainer.numerics,
        is_trained=False,
    )
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(opening)
        if opened.engine.policy_version == 0:  # servers may have weights of an earlier call
            said = await check_policy(
                config, opened.engine, source if loaded is None else loaded, renderer, is_asked=checks_policy
            )
            console.print(said, soft_wrap=True, end="\n" if said else "")
        sampler = await opener.open(stack, engine=opened.engine, renderer=renderer, images=images)
        evaluators = make_evaluators(sets, config.evaluation, sampler, **shared)
        _check_sizes(run, evaluators)
        is_server = config.engine.kind is EngineKind.SERVER
        outages = Outages(None, None, config.loop, engine=opened.engine if is_server else None)
        yield _Follower(
            run=run, evaluators=evaluators, engine=opened, outages=outages, source=locate(source), console=console
        )


def _check_sizes(run: Path, evaluators: Sequence[Evaluator]) -> None:
    """Raise `InvalidInputError` if the run has evaluations of other sizes, with which no curve could be made."""
    by_name = {each.name: each for each in evaluators}
    for line in read_evaluations(run):
        own = by_name.get(line["set"])
        if own is None:
            continue
        for option, name in (("--problems", "num_problems"), ("--samples", "num_samples")):
            there, size = line[name], getattr(own, name)
            if there != size:
                raise InvalidInputError(
                    f"{option} must be {there} as in the evaluations of {own.name} in {run}, got {size}: their numbers "
                    "are on one curve"
                )


@dataclass(slots=True, kw_only=True)
class _Follower:
    """Evaluates the checkpoints of one run, in the order of their steps."""

    run: Path
    evaluators: Sequence[Evaluator]
    engine: Any
    outages: Outages
    source: str
    """The model that the run began with."""
    console: Console
    seen: set[int] = field(default_factory=set)
    """Steps whose checkpoint was there at some time."""
    waiting: set[int] = field(default_factory=lambda: {0})
    """Those of them that were not looked into yet, and the model before the first step."""
    evaluated: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    """Those that the run removed first."""

    async def follow(self) -> dict[str, Any]:
        """Evaluate what is there and what comes, until the run has ended; raises as `follow_run`."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                state = find_state(self.run)  # before the folder: its last checkpoint is there when it has ended
                self._look()
                if self.waiting:
                    step = min(self.waiting)
                    self.waiting.discard(step)
                    await self._follow_step(step)
                elif state == "running":
                    await asyncio.sleep(_POLL_S)
                else:
                    break
                if watching.done():
                    watching.result()
        finally:
            watching.cancel()
        return self._report(state)

    async def _watch(self) -> None:
        """Take note of checkpoints while others are evaluated: some may come and go before those are done."""
        while True:
            self._look()
            await asyncio.sleep(_POLL_S)

    def _look(self) -> None:
        new = find_checkpoints(self.run / "checkpoints").keys() - self.seen
        self.seen |= new
        self.waiting |= new

    async def _follow_step(self, step: int) -> None:
        """Evaluate after a step, unless the run itself has, or its weights are not there."""
        missing = [each for each in self.evaluators if each.find(step) is None]
        if not missing:
            return
        weights: tuple[Any, int] | None = None
        if step == 0 and self.engine.engine.policy_version > 0:
            self.console.print("step 0 is not evaluated: the engine's servers have newer weights", soft_wrap=True)
            return
        if step > 0 and (weights := await asyncio.to_thread(self._load, step)) is None:
            self.removed.append(step)
            self.console.print(
                f"step {step} is not evaluated: the run removed its checkpoint first ({len(self.removed)} so far; "
                "checkpoints.num_kept keeps more of them)",
                soft_wrap=True,
            )
            return

        async def evaluate() -> None:
            if weights is not None:
                await self._publish(*weights)
            for evaluator in missing:
                evaluation = await evaluator.evaluate(step, num_lost=len(self.removed))
                assert evaluation is not None, "it has problems, and the engine the weights"
                name = "" if evaluator.name == DEFAULT_SET else f"{evaluator.name}: "
                when = f"after {step} steps" if step else "before"
                self.console.print(f"{name}reward {when} {format_numbers(evaluation.numbers)}", soft_wrap=True)

        await self.outages.repeat(evaluate)
        self.evaluated.append(step)

    def _load(self, step: int) -> tuple[Any, int] | None:
        """The model of a checkpoint and its policy version; None if the checkpoint is gone."""
        from unbroken.runs.export.checkpoint import load_checkpoint

        folder = self.run / "checkpoints" / f"step-{step:08}"
        try:
            model, state, _ = load_checkpoint(folder, source=self.source)
        except (CheckpointError, OSError):
            if folder.exists():
                raise
            return None
        return model, state.policy_version

    async def _publish(self, model: Any, policy_version: int) -> None:
        """Give the engine the weights; again, if it was restarted. Raises `OutageError` if it is gone."""
        from unbroken.training.model.weights import gather_weights

        engine = self.engine.engine
        try:
            await self.engine.publisher.publish(gather_weights(model), policy_version=policy_version)
        except EngineError as error:
            raise OutageError(f"the engine did not take policy version {policy_version}: {error}") from error
        if isinstance(engine, RequiresVersion):
            engine.require_version(policy_version)

    def _report(self, state: str) -> dict[str, Any]:
        number, last = len(self.evaluated), max(self.seen, default=0)
        what = f"{number} evaluation{'s' if number != 1 else ''} made here"
        if self.removed:
            what += f", {len(self.removed)} left out, as the run removed its checkpoint first"
        advice = "" if state == "ended" else ": the same command follows it once it is started again"
        self.console.print(f"the run in {self.run} {state} after {last} steps, {what}{advice}", soft_wrap=True)
        lines = [line for line in read_evaluations(self.run) if line["step"] in self.evaluated]
        return {"run": str(self.run), "state": state, "evaluations": lines, "removed_steps": self.removed}
