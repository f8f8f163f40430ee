"""What a run is made of, in the order in which it is opened; `train_model` (`runs.training`) says what is done with it.

processes ── model ── engines ── samplers ── trainer ── output
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console

from unbroken.errors import InvalidInputError
from unbroken.exactness import fix_rotary
from unbroken.images.processor import ImageProcessor
from unbroken.progress import begin
from unbroken.runs.collector import Collector, EvaluationSet, Sampler, make_collector
from unbroken.runs.config import EngineKind, EvaluationConfig, Precision, RunConfig
from unbroken.runs.engines import RunEngine, open_engine
from unbroken.runs.evaluation.background import BackgroundEvaluations
from unbroken.runs.evaluation.evaluator import cut_evaluations
from unbroken.runs.evaluation.schedule import Evaluations, make_evaluators
from unbroken.runs.export.files import create_repository
from unbroken.runs.export.kept import KeptModels
from unbroken.runs.folder import make_folder
from unbroken.runs.models import (
    check_config_changes,
    find_context_length,
    find_revision,
    find_sizes,
    load_config,
    load_model,
    locate,
    needs_engine_memory,
    prepare_model,
    warn_about_memory,
)
from unbroken.runs.observer import RunProgress, TrainingObserver
from unbroken.runs.policy_check import PolicyCheck, choose_max_k3
from unbroken.runs.preflight import Preflight
from unbroken.runs.processes import Rank, join_processes, uses_cpu
from unbroken.runs.profiler import FOLDER as PROFILES
from unbroken.runs.profiler import StepProfiler, parse_steps
from unbroken.runs.prompts.supervised import load_warm_start
from unbroken.runs.python_files import load_function
from unbroken.runs.recipe import Task
from unbroken.runs.records.files import FOLDER
from unbroken.runs.records.recorder import Recorder
from unbroken.runs.samplers import SamplerOpener, SamplerProcesses
from unbroken.runs.settings import describe
from unbroken.runs.teachers import open_teachers
from unbroken.timeline import Timeline, TraceFile
from unbroken.training.checkpoints import Checkpoints, find_checkpoints
from unbroken.training.config import TrainerConfig
from unbroken.training.memory import ModelSizes
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.model.sharding import check_heads, on_device
from unbroken.training.policies import PolicyTrainers
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together
from unbroken.training.warm_start import WarmStart
from unbroken.types import Numerics

_logger = logging.getLogger(__name__)
_MAX_TIMELINE_BYTES = 64 * 10**6
"""Of a process, of which the newest are kept: some 500,000 events, which https://ui.perfetto.dev opens at once."""


async def check_without_training(config: RunConfig, task: Task, *, output: Path) -> None:
    """Open a run, compare its policies, and make its preflight: `unbroken doctor TASK`.

    What engines and agents write is in `config.output`; `output` is shown, where the task would be trained.

    Raises:
        PolicyMismatchError: engine and trainer have two policies.
    """
    accelerator, console = join_accelerator(config, None), Console()
    here = replace(config.rollouts, samplers=0, listen=None, key_file=None)
    own = replace(config, rollouts=here)
    async with open_run(own, task, accelerator=accelerator) as opened:
        max_k3 = choose_max_k3(config, config.engine, opened.model)
        check = PolicyCheck(trainer=opened.trainer, sampler=opened.sampler, max_k3=max_k3)
        console.print(await check.run(), soft_wrap=True, highlight=False)
        await opened.show_preflight(replace(config, output=output), console)


def join_accelerator(config: RunConfig, accelerator: Accelerator | None) -> Accelerator:
    """Join the run's processes, and make the accelerator unless one is given.

    Raises:
        InvalidInputError: the processes were not started in a way that this run supports.
    """
    join_processes()
    accelerator = accelerator or Accelerator(
        cpu=uses_cpu(), mixed_precision="bf16" if config.precision is Precision.BFLOAT16 else None
    )
    config.trainer.parallel.check_processes(accelerator.num_processes)
    _check_device(config.engine.kind, accelerator)
    return accelerator


def _check_device(kind: EngineKind, accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` if a process cannot have an engine of this kind, without a GPU."""
    if kind is not EngineKind.COLOCATED or accelerator.device.type != "cpu":
        return
    if not any("cpu" in f"{name} {version(name)}" for name in packages_distributions().get("vllm", ())):
        raise InvalidInputError(
            "engine.kind colocated needs a GPU, or vLLM's build for CPUs, and there is neither: take embedded"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRun:
    """What a run samples and trains with."""

    source: str
    """Where the model was loaded from: an absolute path, or a name on the hub."""
    rank: Rank
    engine: RunEngine
    sampler: Sampler
    """Samples the problems to train on."""
    trainer: Trainer
    model: Any
    """The trainer's."""
    warm_start: WarmStart | None

    async def show_preflight(self, config: RunConfig, console: Console) -> None:
        """Sample a few rollouts, and show what they say, in the first process, for which the others wait."""
        async with fail_together(self.trainer):
            if self.trainer.is_main_process:
                num_processes = self.rank.num_processes
                what = {"source": self.source, "model": self.model, "num_processes": num_processes}
                if num_processes == 1 and self.engine.before_update is None:
                    what["trainer"] = self.trainer
                await Preflight(config=config, sampler=self.sampler, **what).run(console)


@asynccontextmanager
async def open_run(config: RunConfig, task: Task, *, accelerator: Accelerator) -> AsyncIterator[_OpenRun]:
    """Load the task's model, open its engine, and a gateway if problems have agents; make the sampler and the trainer.

    Engine and gateway are closed when the block ends.
    """
    _check_sets(task.sets, config.evaluation)
    model = find_revision(task.model, config.model_settings.revision)
    _check(config, model, accelerator)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    samplers = SamplerOpener(
        config=config,
        source=model,
        train_on=task.train_on,
        evaluate_on=[each.problems for each in task.sets],
        part=str(rank.index),
    )
    sizes = _find_sizes(config, model, accelerator)
    _warn(config, model, accelerator, sizes)
    async with AsyncExitStack() as stack:
        processes: SamplerProcesses | None = None
        if config.rollouts.has_samplers:
            processes = await SamplerProcesses.start(samplers, rank)
            stack.push_async_callback(processes.close)
        images = samplers.load_images()
        renderer = samplers.load_renderer(images)
        samplers.check_model(renderer, images)
        length = find_context_length(model, config.engine)
        warm_start = load_warm_start(config, source=str(model), renderer=renderer, context_length=length, rank=rank)
        load_whole = partial(load_model, model, config.chosen_model_settings, takes_images=images is not None)
        parallel = config.trainer.parallel
        load = partial(load_whole, parallel=parallel, is_bfloat16=config.precision is Precision.BFLOAT16)
        begin(f"loading the weights of {model}")
        policy = load()
        # The embedded engine copies the model it gets.
        sampled = load_whole() if parallel.is_sharded and config.engine.kind is EngineKind.EMBEDDED else policy
        processor = None if images is None else images.processor
        begin(f"opening the engine ({config.engine.kind})")
        engine = await _open_engine(
            stack, config, sampled, source=model, accelerator=accelerator, rank=rank, processor=processor, sizes=sizes
        )
        if processes is not None:
            stack.push_async_callback(processes.close)  # before its servers
            await processes.open(engine)
        sampler = await samplers.open(
            stack, engine=engine.engine, renderer=renderer, images=images, elsewhere=processes
        )
        begin("preparing the trainer")
        # The engine has its copy by now: adapters are added to the model itself.
        if engine.engine.context_length and policy is not sampled:
            fix_rotary(policy, engine.engine.context_length)
        policy, reference = prepare_model(policy, config, load_again=load if parallel.is_sharded else None)
        length = engine.engine.context_length
        teachers = await open_teachers(stack, config, model, context_length=length, images=images)
        own = {"accelerator": accelerator, "images": processor, "reference": reference, "teachers": teachers}
        trainer = _make_trainer(config, engine, policy, **own)
        yield _OpenRun(
            source=locate(model),
            rank=rank,
            engine=engine,
            sampler=sampler,
            trainer=trainer,
            model=policy,
            warm_start=warm_start,
        )


def _make_trainer(config: RunConfig, engine: RunEngine, policy: Any, **own: Any) -> Trainer:
    """The trainer of the run's policy, or of several."""
    training, objective = _choose_training(config, engine, policy), config.objective
    if config.policies is None:
        return Trainer(policy, training, objective=objective, **own)
    del own["images"], own["teachers"]  # `RunConfig` refuses them
    return PolicyTrainers(policy, training, policies=config.policies, objective=objective, **own)


def _check(config: RunConfig, model: str | Path, accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` for what can be known before the model, or anything of it, is loaded."""
    check_config_changes(model, config)
    if config.policies is not None:
        config.policies.check_processes(accelerator.num_processes)
    if (model_config := load_config(model, config.model_settings)) is not None:
        check_heads(model_config, config.trainer.parallel)
    group_size = config.rollouts.group_size
    config.objective.try_functions(config.training, group_size=group_size, device=accelerator.device)


def _choose_training(config: RunConfig, engine: RunEngine, policy: Any) -> TrainerConfig:
    """The settings of the trainer, with what it has to know of the engine that samples."""
    max_k3: float | None = choose_max_k3(config, config.engine, policy)
    if config.engine.reuse_kv and config.trainer.max_policy_k3 is None:
        # New ids follow keys and values of older weights then, and no bound is that of rounding: a run that was as it
        # should be had a k3 of 0.11. The start is compared all the same, before there are older weights.
        max_k3 = None
    return replace(engine.adapt(config.training), max_policy_k3=max_k3)


def _find_sizes(config: RunConfig, model: str | Path, accelerator: Accelerator) -> ModelSizes | None:
    """What memory on a GPU is estimated by; None on a CPU, of whose memory nothing is estimated."""
    return find_sizes(model, config) if accelerator.device.type == "cuda" else None


def _warn(config: RunConfig, model: str | Path, accelerator: Accelerator, sizes: ModelSizes | None) -> None:
    """Warn, in the first process, of memory that will not do, and of a proof that is none."""
    if not accelerator.is_main_process:
        return
    if config.trainer.numerics is Numerics.EXACT and config.loop.max_staleness > 0:
        _logger.warning(
            "trainer.numerics exact compares ids that were sampled with the weights that the step begins with; with "
            "loop.max_staleness %d most are of older ones, of which nothing is proven (mismatch/proven_share)",
            config.loop.max_staleness,
        )
    if accelerator.device.type == "cuda":
        size, num_processes = _count_bytes(accelerator.device), accelerator.num_processes
        warn_about_memory(model, config, sizes, device_bytes=size, num_processes=num_processes)


def _lends_memory(config: RunConfig, model: str | Path, accelerator: Accelerator, sizes: ModelSizes | None) -> bool:
    """Whether the engine sleeps during updates; the same in all processes, which meet for it."""
    if config.engine.kind is not EngineKind.COLOCATED or accelerator.device.type != "cuda":
        return True
    size, num_processes = _count_bytes(accelerator.device), accelerator.num_processes
    own = needs_engine_memory(model, config, sizes, device_bytes=size, num_processes=num_processes)
    with on_device(accelerator.device):
        return any(gather_object([own]))


def _count_bytes(device: torch.device) -> int:
    """The memory of a GPU."""
    return torch.cuda.mem_get_info(device)[1]


async def _open_engine(
    stack: AsyncExitStack,
    config: RunConfig,
    policy: Any,
    *,
    source: str | Path,
    accelerator: Accelerator,
    rank: Rank,
    processor: ImageProcessor | None,
    sizes: ModelSizes | None,
) -> RunEngine:
    """Open the engine; `policy` gets its rule for rotary factors, which is that of trainer and reference too."""
    engine = await stack.enter_async_context(
        open_engine(
            config.engine,
            model=policy,
            source=source,
            output=config.output,
            device=accelerator.device,
            rank=rank,
            image_processor=processor,
            adapter_rank=config.adapter_rank,
            records_routing=config.trainer.routing_replay,
            numerics=config.trainer.numerics,
            lends_memory=_lends_memory(config, source, accelerator, sizes),
            policies=config.policies,
            versions=None if config.policies is None else _list_versions(config),
        )
    )
    fix_rotary(policy, engine.engine.context_length)
    return engine


def _list_versions(config: RunConfig) -> range:
    """The versions of several policies that the run makes from its checkpoint on, if no server has newer ones."""
    checkpoints = find_checkpoints(config.output / "checkpoints")
    num_made = max(checkpoints, default=0)
    first = PolicyTrainers.read_version(checkpoints[num_made]) if checkpoints else 0
    return range(first, first + max(config.loop.num_steps - num_made, 0) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """What a run needs to train."""

    run: _OpenRun
    collector: Collector
    models: KeptModels
    checkpoints: Checkpoints
    records: _Records
    evaluations: Evaluations
    background: BackgroundEvaluations | None
    """What evaluates during training; None if evaluations are made between two steps."""
    check: PolicyCheck
    observer: TrainingObserver
    continues: bool
    """Whether the run has a checkpoint, from which it continues."""


@asynccontextmanager
async def open_training(config: RunConfig, task: Task, *, accelerator: Accelerator) -> AsyncIterator[_Training]:
    """Open a run, prepare its output, and open what training writes and evaluates with, until the block ends."""
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(open_run(config, task, accelerator=accelerator))
        output, trainer, curriculum = config.output, run.trainer, task.curriculum
        if curriculum is None and config.curriculum is not None:
            curriculum = load_function(config.curriculum, field="curriculum")
        collector = make_collector(run.sampler, curriculum, seed=config.seed, rank=run.rank)
        models = KeptModels(config=config.export, trainer=trainer, source=run.source, output=output)
        last_step = max(find_checkpoints(output / "checkpoints"), default=0)
        _prepare_output(models, last_step=last_step)
        checkpoints = Checkpoints(
            output / "checkpoints",
            every=config.checkpoints.every,
            every_s=config.checkpoints.every_s,
            num_kept=config.checkpoints.num_kept,
            source=run.sampler.problems.source,
        )
        records = _open_records(stack, config, run)
        evaluations = _make_evaluations(config, run, task.sets, models, records)
        background: BackgroundEvaluations | None = None  # without staleness they are made between two steps
        if config.loop.max_staleness > 0:
            loop = config.loop
            background = BackgroundEvaluations(evaluations, trainer, last=loop.num_steps, outages=loop.outages)
            stack.push_async_callback(background.close)
        max_k3 = choose_max_k3(config, config.engine, run.model)
        check = PolicyCheck(trainer=trainer, sampler=run.sampler, max_k3=max_k3)
        yield _Training(
            run=run,
            collector=collector,
            models=models,
            checkpoints=checkpoints,
            records=records,
            evaluations=evaluations,
            background=background,
            check=check,
            observer=_make_observer(config, run, records, check, models, evaluations, background),
            continues=trainer.from_main_process(last_step > 0),
        )


def _make_evaluations(
    config: RunConfig, run: _OpenRun, sets: Sequence[EvaluationSet], models: KeptModels, records: _Records
) -> Evaluations:
    seed, output = config.seed, config.output
    return Evaluations(
        evaluators=make_evaluators(
            sets, config.evaluation, run.sampler, seed=seed, output=output, rank=run.rank, source=run.source
        ),
        config=config.evaluation,
        models=models,
        console=records.progress.console,
        metrics=records.metrics,
        timeline=records.timeline,
    )


def _prepare_output(models: KeptModels, *, last_step: int) -> None:
    """Make the folder, which a script's run does not claim; remove unfinished models, and evaluations of steps that
    were lost after `last_step`; create the repository of the final model. In the first process.
    """
    with models.trainer.fail_together():
        if models.trainer.is_main_process:
            make_folder(models.output)
            models.remove_unfinished()
            cut_evaluations(models.output, last_step)
            config = models.config
            if config.push_to_hub is not None:
                create_repository(config.push_to_hub, private=config.private)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Records:
    """Where a process writes what happens at each step."""

    progress: RunProgress
    metrics: MetricsWriter | None
    """In the first process."""
    timeline: Timeline
    profiler: StepProfiler


def _open_records(stack: ExitStack | AsyncExitStack, config: RunConfig, run: _OpenRun) -> _Records:
    """Open them until the stack is closed."""
    output, is_first = config.output, run.trainer.is_main_process
    metrics = None
    if is_first:
        writer = MetricsWriter(
            output / "metrics",
            trackers=config.trackers,
            settings=describe(config),
            viewer=f"unbroken view {shlex.quote(str(output.resolve()))}",
        )
        metrics = stack.enter_context(writer)
    profiler = StepProfiler(parse_steps(config.profile_steps), output / PROFILES, rank=run.rank.index)
    stack.callback(profiler.close)
    timeline = _open_timeline(config, run.rank)
    stack.callback(timeline.close)
    progress = RunProgress(Console(quiet=not is_first))
    return _Records(progress=progress, metrics=metrics, timeline=timeline, profiler=profiler)


def _open_timeline(config: RunConfig, rank: Rank) -> Timeline:
    """The timeline of this process, which continues that of an earlier start of the run."""
    path = config.output / "timeline" / f"rank-{rank.index}.json"
    file = TraceFile(path, max_bytes=_MAX_TIMELINE_BYTES)
    return Timeline(file, name=f"rank {rank.index}", rank=rank.index)


def _make_observer(
    config: RunConfig,
    run: _OpenRun,
    records: _Records,
    check: PolicyCheck,
    models: KeptModels,
    evaluations: Evaluations,
    background: BackgroundEvaluations | None,
) -> TrainingObserver:
    return TrainingObserver(
        config=config,
        trainer=run.trainer,
        engine=run.engine,
        check=check,
        models=models,
        evaluations=evaluations,
        background=background,
        recorder=Recorder(
            config=config.rollout_log,
            trainer=run.trainer,
            source=run.source,
            folder=config.output / FOLDER,
            rank=run.rank,
            num_steps=config.loop.num_steps,
        ),
        progress=records.progress,
        metrics=records.metrics,
        profiler=records.profiler,
        num_processes=run.rank.num_processes,
    )


def _check_sets(sets: Sequence[EvaluationSet], config: EvaluationConfig) -> None:
    """Raise `InvalidInputError` if two sets have one name, or `config.best_set` is not one of them."""
    names = [each.name for each in sets]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"name must be different for each evaluation set, got {names}")
    if config.best_set is not None and config.best_set not in names:
        raise InvalidInputError(f"evaluation.best_set must be one of {names}, got {config.best_set!r}")
