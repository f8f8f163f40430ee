"""`unbroken numerics MODEL`: whether sampler and trainer compute the same bits for a model on this machine.

Both are those of a run with the same settings. The engine samples rows in ways that add causes of other bits, one by
one; the trainer scores them as in a step, several whole rows at once.

    prefill     one id after prompts of many lengths, one prompt after the other
    cached      an id more after each of them, whose beginning is in the prefix cache
    alone       ids one by one, no other row beside
    batches     2, 4, 8, ... rows that begin together
    together    conversations of several turns, which come and go: batches of all sizes, prompts in pieces
    updated     such conversations after a step of the trainer, by the weights that it has published

For one row the outputs of modules are compared too: those that both have with one name and shape.

stderr gets a line for each of these as it is done. In memory are two models, the sampler's and the trainer's, and for
the update a gradient, but no averages of AdamW, which no second update would read: `_FirstUpdate`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError
from unbroken.exactness import BLOCK, ModuleOutputs, fix_rotary
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.progress import advance, begin, show_progress
from unbroken.reports import Report, ReportTable, format_percent
from unbroken.runs.config import EngineKind, Precision, RunConfig
from unbroken.runs.engines import RunEngine, open_engine
from unbroken.runs.models import load_model, prepare_model
from unbroken.runs.processes import Rank
from unbroken.runs.run import join_accelerator
from unbroken.runs.settings import build, section_of
from unbroken.runs.signals import cancelled_by_sigterm
from unbroken.runs.teachers import open_teachers
from unbroken.threads import give_memory_back
from unbroken.training.config import SharedPrefixes
from unbroken.training.metrics.mismatch import Mismatch, mismatch_of_rows
from unbroken.training.model.adapters import causal_lm
from unbroken.training.policies import PolicyTrainers
from unbroken.training.trainer import Trainer
from unbroken.types import Numerics, SampleRequest, SamplingParams, TrainingSample, token_ids

NUM_TURNS = 3
_KINDS = (Numerics.FAST, Numerics.EXACT)
_NUM_ALONE, _NUM_PROMPTS = 4, 8
_LONGEST_PROMPT = 600
"""From some hundred ids on positions show whose frequencies differ in their last bit. All three are halved if fewer
rows than `_NUM_PROMPTS` are asked for."""
_NUM_RECORDED = 4 * BLOCK + 1
"""Ids of the prompt whose modules are compared; with other numbers passes are filled up."""
_SLOTS, _PASS_IDS = 16, 2 * (_LONGEST_PROMPT + 40)
"""Of the embedded engine, so that prompts stay cached, and rows have others beside them; and of a pass of the trainer:
two of the longest rows. With a run's defaults, 256 and 12,288, 135M parameters took 9 GB and twice the time."""
_MEAN_GIVEN = 16
"""Ids of a prompt, or of what comes between two turns; their number is drawn from a geometric distribution."""
_CERTAIN = -1e-4
"""A logprob above is 0 but for rounding, by whatever arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NumericsReport:
    """Sampler against trainer, with one setting of `Numerics`."""

    numerics: Numerics
    subject: str = ""
    """Model, engine and trainer."""
    refused: str | None = None
    """Why this model cannot have it here; then nothing was measured."""
    ways: dict[str, Mismatch]
    modules: str = ""
    """What the comparison of modules has found."""
    proves_nothing: bool = False
    """Whether ids are so certain, or so alike, that any arithmetic would give equal logprobs."""
    sampled_per_s: float = 0.0
    """Ids of the conversations."""
    trained_per_s: float = 0.0
    """Ids of their step, whose update keeps no averages."""

    @property
    def is_exact(self) -> bool:
        """Whether every logprob was equal, and need not have been."""
        return bool(self.ways) and not self.proves_nothing and all(way.equal_share == 1.0 for way in self.ways.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared."""

    source: str
    """The model's folder, or its name on the hub."""
    values: Mapping[str, Any]
    """Fields of `RunConfig` by dotted names."""
    num_rows: int
    max_tokens: int

    def configure(self, numerics: Numerics, output: Path) -> RunConfig:
        """The settings of a run; raises `InvalidInputError` if it cannot have these numerics."""
        own = {"output": output, "loop.num_steps": 1, "trainer.numerics": numerics}
        defaults: dict[str, Any] = {"trainer.optimizer.learning_rate": 1e-4}
        if self.values.get("engine.kind") is not EngineKind.COLOCATED:
            defaults |= {"trainer.tokens_per_micro_batch": _PASS_IDS}
            defaults |= {"trainer.shared_prefixes": SharedPrefixes.NEVER}  # random rows share none
        config: RunConfig = build(section_of(RunConfig), {**defaults, **self.values, **own})
        if (kind := config.engine.kind) not in (EngineKind.EMBEDDED, EngineKind.COLOCATED):
            raise InvalidInputError(f"engine.kind must be embedded or colocated to compare numerics, got {kind}")
        # Logprobs that are not equal are counted here, and end no run.
        trainer = replace(config.trainer, warn_of_inexact=numerics is Numerics.EXACT)
        embedded = replace(config.engine.embedded, max_batch=max(_SLOTS, self.num_rows))
        return replace(config, trainer=trainer, engine=replace(config.engine, embedded=embedded))

    async def measure(self) -> list[_NumericsReport]:
        """Compare with each setting: with vLLM in a separate process, for a process chooses its kernels once.

        Raises:
            Terminated: SIGTERM came.
        """
        spawn, loop, reports = multiprocessing.get_context("spawn"), asyncio.get_running_loop(), []
        with cancelled_by_sigterm():
            for numerics in _KINDS:
                if self.values.get("engine.kind") is EngineKind.COLOCATED:
                    with ProcessPoolExecutor(1, spawn) as pool:  # the GPU is free again when it has ended
                        reports.append(await loop.run_in_executor(pool, _measure_apart, self, numerics))
                else:
                    reports.append(await _measure(self, numerics))
                    give_memory_back()
        return reports


@asynccontextmanager
async def open_pair(config: RunConfig, source: str) -> AsyncIterator[tuple[RunEngine, Trainer]]:
    """Open the engine and the trainer of a run; the engine is closed when the block ends."""
    accelerator = join_accelerator(config, None)
    is_rounded = config.precision is Precision.BFLOAT16
    policy = load_model(source, config.chosen_model_settings, is_bfloat16=is_rounded)
    async with (
        AsyncExitStack() as stack,
        open_engine(
            config.engine,
            model=policy,
            source=source,
            output=config.output,
            device=accelerator.device,
            rank=Rank(),
            adapter_rank=config.adapter_rank,
            numerics=config.trainer.numerics,
        ) as opened,
    ):
        fix_rotary(policy, opened.engine.context_length)
        policy, reference = prepare_model(policy, config)
        teachers = await open_teachers(stack, config, source, context_length=opened.engine.context_length)
        training = opened.adapt(config.training)
        own = {"objective": config.objective, "accelerator": accelerator, "reference": reference}
        if config.policies is not None:
            yield opened, PolicyTrainers(policy, training, policies=config.policies, **own)
        else:
            yield opened, Trainer(policy, training, teachers=teachers, **own)


async def sample_row(
    engine: Engine, params: SamplingParams, seed: Sequence[int], turns: Sequence[tuple[int, int]], pause_s: float = 0
) -> TrainingSample:
    """Sample a conversation of random ids; each turn has a number of given ids, and of sampled ones at most.

    Before each there is a pause, exponential with this mean.
    """
    rng = np.random.default_rng(list(seed))
    tree, end, ids = TokenTree(), None, token_ids([])
    for turn, (num_given, num_sampled) in enumerate(turns):
        await asyncio.sleep(float(rng.exponential(pause_s)))
        given = token_ids(rng.integers(0, engine.vocab_size, num_given))
        ids = token_ids([*ids, *given])
        own = replace(params, seed=int(rng.integers(2**31)), max_tokens=num_sampled)
        name = f"{'-'.join(map(str, seed))}-{turn}"
        (sequence,) = (await engine.sample(SampleRequest(request_id=name, prompt_ids=ids, params=own))).sequences
        origin = Origin.BRIDGE if turn else Origin.PROMPT
        end = tree.add_sampled(sequence, parent=tree.add_given(given, origin, parent=end))
        ids = token_ids([*ids, *sequence.completion_ids])
    (row,) = export_samples(tree, float(rng.normal()))
    advance()
    return row


def make_report(reports: Sequence[_NumericsReport]) -> Report:
    """What the settings of `Numerics` were found to be."""
    exact = next(report for report in reports if report.numerics is Numerics.EXACT)
    verdict = 'exact, with trainer.numerics = "exact"' if exact.is_exact else "not exact here"
    if exact.proves_nothing:
        verdict = "none: these weights are too certain of their ids for rounding to show"
    measured = [report for report in reports if report.ways]
    words = [(f"refused, {report.numerics}", report.refused) for report in reports if report.refused is not None]
    for report in measured:
        speed = f"{report.sampled_per_s:,.0f} ids a second sampled, {report.trained_per_s:,.0f} trained"
        words += [(f"modules, {report.numerics}", report.modules), (f"speed, {report.numerics}", speed)]
    return Report(
        title="unbroken numerics",
        conclusions=[f"verdict: {verdict}", *sorted({report.subject for report in measured})],
        tables=[_tabulate(measured), ReportTable(rows=words)],
        values=[asdict(report) for report in reports],
    )


def _tabulate(reports: Sequence[_NumericsReport]) -> ReportTable:
    rows = [
        (
            f"{report.numerics:6}{way}",
            str(found.num_tokens),
            format_percent(found.equal_share),
            f"{found.max_abs:.2g}",
            f"{found.k3:.1e}",
        )
        for report in reports
        for way, found in report.ways.items()
    ]
    return ReportTable(columns=("sampled", "tokens", "equal", "largest difference", "k3"), rows=rows)


def _measure_apart(comparison: Comparison, numerics: Numerics) -> _NumericsReport:
    os.dup2(2, 1)  # vLLM's log goes to stdout, which is the report's
    return asyncio.run(_measure(comparison, numerics))


async def _measure(comparison: Comparison, numerics: Numerics) -> _NumericsReport:
    with tempfile.TemporaryDirectory(prefix="unbroken-numerics-") as folder:
        try:
            config = comparison.configure(numerics, Path(folder))
            with show_progress():
                begin(f"{numerics}: loading the model, and opening the engine")
                async with open_pair(config, comparison.source) as (opened, trainer):
                    return await _compare(opened, trainer, config, comparison)
        except InvalidInputError as error:
            if numerics is Numerics.FAST:
                raise
            return _NumericsReport(numerics=numerics, refused=str(error), ways={})


async def _compare(opened: RunEngine, trainer: Trainer, config: RunConfig, comparison: Comparison) -> _NumericsReport:
    engine: Any = opened.engine
    progress = _Progress(config.trainer.numerics)
    sample = partial(sample_row, engine, config.rollouts.sampling)
    progress.begin("modules", "sampling")
    sizes = comparison.num_rows, min(comparison.max_tokens, engine.context_length // 2)
    num_given = min(_NUM_RECORDED, engine.context_length // 2 // BLOCK * BLOCK + 1)
    await engine.record_outputs()
    # The embedded engine's first row has its first slot, so it is the first of each pass, whose outputs are kept.
    row = await sample([config.seed, 6], [(num_given, min(8, engine.context_length - num_given))])
    await engine.record_outputs(file := config.output / "outputs.pt")
    progress.say("modules", "sampled")
    give_memory_back()
    rows = await _sample_apart(sample, engine.context_length, config.seed, *sizes, progress)
    progress.begin("together", "sampling", total=sizes[0])
    started = time.perf_counter()
    rows["together"] = await _sample_together(sample, engine.context_length, [config.seed, 4], *sizes)
    sampled_s = time.perf_counter() - started
    progress.say("together", "sampled")
    if opened.before_update is not None:
        await opened.before_update()
    model = causal_lm(trainer.backend.policy.model)
    modules = await _compare_modules(trainer, row, file)
    progress.say("modules", "compared")
    give_memory_back()
    ways = {}
    for way, found in rows.items():
        progress.begin(way, "comparing")
        ways[way] = await _score(trainer, found)
        progress.say_found(way, ways[way])
    give_memory_back()
    trained_s = await _update(opened, trainer, rows["together"])
    progress.say("updated", "trained and published")
    progress.begin("updated", "sampling and comparing", total=sizes[0])
    updated = await _sample_together(sample, engine.context_length, [config.seed, 5], *sizes)
    if opened.before_update is not None:
        await opened.before_update()
    ways["updated"] = await _score(trainer, updated)
    progress.say_found("updated", ways["updated"])
    sampled = np.concatenate([row.rollout_logprobs[row.sampled_mask] for row in rows["together"]])
    return _NumericsReport(
        numerics=config.trainer.numerics,
        subject=f"{type(model).__name__}, {model.num_parameters():,} parameters; {type(engine).__name__}; trainer on "
        f"{model.device} in {config.precision}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        ways=ways,
        modules=modules,
        proves_nothing=bool(np.mean(sampled > _CERTAIN) >= 0.02 or len(np.unique(sampled)) < len(sampled) / 2),
        sampled_per_s=len(sampled) / sampled_s,
        trained_per_s=sum(len(row.token_ids) for row in rows["together"]) / trained_s,
    )


async def _compare_modules(trainer: Trainer, row: TrainingSample, file: Path) -> str:
    """Compare the outputs that the engine has written to a file with the trainer's of the same row."""
    begin("comparing modules")
    outputs = ModuleOutputs(causal_lm(trainer.backend.policy.model).base_model)
    await _score(trainer, [row])
    return _compare_outputs(torch.load(file, mmap=True), outputs.end(), len(row.token_ids) - 1)


async def _update(opened: RunEngine, trainer: Trainer, rows: Sequence[TrainingSample]) -> float:
    """Train on the rows and publish the new weights; the seconds of the step."""
    begin("updating the weights", total=len(rows), unit="rows")
    policy = trainer.backend.policy
    trainer.backend.optimizer = _FirstUpdate(each for each in policy.parameters() if each.requires_grad)
    started = time.perf_counter()
    await asyncio.to_thread(trainer.step, rows)
    seconds = time.perf_counter() - started
    assert opened.publisher is not None, "one process publishes itself"
    await opened.publisher.publish(trainer.named_weights(), policy_version=trainer.policy_version)
    return seconds


class _Progress:
    """Says on stderr what is done, and how long it took."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics
        self._since = time.monotonic()

    def begin(self, way: str, what: str, *, total: int | None = None) -> None:
        """Begin what takes long: of how many rows."""
        begin(f"{self._numerics}: {way}, {what}", total=total, unit="rows")

    def say(self, way: str, what: str) -> None:
        """Print a line, with the seconds since the last one."""
        now = time.monotonic()
        print(f"{self._numerics:8}{way:12}{what} ({now - self._since:.1f} s)", file=sys.stderr, flush=True)
        self._since = now

    def say_found(self, way: str, found: Mismatch) -> None:
        """Print what the comparison of a way has found."""
        self.say(way, f"compared: {100 * found.equal_share:.1f} % of {found.num_tokens} ids equal")


class _FirstUpdate(torch.optim.Optimizer):
    """AdamW's first update: by the learning rate, against the sign of each gradient, but for its epsilon.

    It keeps nothing: AdamW's averages would be twice the weights, for a second update that is never made.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})  # the trainer sets it before each update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights; the gradients are lost."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign_(), alpha=-group["lr"])


async def _sample_apart(
    sample: Any, context_length: int, seed: int, num_rows: int, max_tokens: int, progress: _Progress
) -> dict[str, list[TrainingSample]]:
    """The rows of the ways without conversations."""
    room = max(context_length - max_tokens - 3, 1)
    numbers = (_NUM_ALONE, _NUM_PROMPTS, _LONGEST_PROMPT)
    num_alone, num_prompts, longest = (most if num_rows >= _NUM_PROMPTS else most // 2 for most in numbers)
    longest, turn = min(longest, room), [(min(_MEAN_GIVEN, room), max_tokens)]
    drawn = np.random.default_rng([seed, 0]).geometric(0.25 / _MEAN_GIVEN, num_prompts - 1)
    lengths = list(enumerate([longest, *np.minimum(drawn, longest).tolist()]))
    ways: dict[str, list[TrainingSample]] = {}

    async def keep(way: str, total: int, rows: Iterable[Awaitable[TrainingSample]]) -> None:
        progress.begin(way, "sampling", total=total)
        ways[way] = [await row for row in rows]
        progress.say(way, "sampled")

    await keep("prefill", len(lengths), (sample([seed, 0, number], [(length, 1)]) for number, length in lengths))
    await keep("cached", len(lengths), (sample([seed, 0, number], [(length, 1), (1, 1)]) for number, length in lengths))
    await keep("alone", num_alone, (sample([seed, 2, number], turn) for number in range(num_alone)))
    ways["batches"], sizes = [], [2**k for k in range(1, max(num_rows.bit_length(), 2))]
    progress.begin("batches", "sampling", total=sum(sizes))
    for size in sizes:
        ways["batches"] += await asyncio.gather(*(sample([seed, 3, size, number], turn) for number in range(size)))
    progress.say("batches", "sampled")
    return ways


async def _sample_together(
    sample: Any, context_length: int, seed: Sequence[int], num_rows: int, max_tokens: int
) -> list[TrainingSample]:
    """Conversations of random lengths, in rows [R, turns, given and sampled]."""
    most = max((context_length // NUM_TURNS - 1) // 2, 1)
    means = np.tile([_MEAN_GIVEN, max(max_tokens / 2, 1)], (num_rows, NUM_TURNS, 1))
    lengths = np.minimum(np.random.default_rng(list(seed)).geometric(1 / means), [most, min(max_tokens, most)]).tolist()
    return list(await asyncio.gather(*(sample([*seed, n], turns, 0.01) for n, turns in enumerate(lengths))))


async def _score(trainer: Trainer, rows: Sequence[TrainingSample]) -> Mismatch:
    return mismatch_of_rows(rows, await asyncio.to_thread(trainer.logprobs, rows))


def _compare_outputs(sampled: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], num_ids: int) -> str:
    """Say which module is the first, in the trainer's order, whose outputs differ: [T, ...] by name."""
    names = [name for name, output in trained.items() if len(sampled.get(name, ())) == num_ids <= len(output)]
    names = [name for name in names if sampled[name].shape[1:] == trained[name].shape[1:]]
    for name in names:
        own, other = sampled[name], trained[name][:num_ids]
        if num := int((own != other).flatten(1).any(1).sum()):
            far, kinds = (own.float() - other.float()).abs().max(), f"{own.dtype} and {other.dtype}"
            return (
                f"of {len(names)} modules {name} is the first that differs: {num} of {num_ids} ids, by up to "
                f"{far:.2g} ({kinds.replace('torch.', '')})"
            )
    if not names:
        return "modules were not compared: vLLM shows them with --enforce-eager in --engine.options"
    return f"outputs of {len(names)} modules are equal"
