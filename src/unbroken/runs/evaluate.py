"""`unbroken eval`: models on the problems of a recipe, without training.

the recipe's train_model ── for each model: engine ── sampler ── evaluation, as in training ── numbers ── a report
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from unbroken.errors import InvalidInputError, UnbrokenError, missing_extra
from unbroken.model_source import check_model_source
from unbroken.progress import begin
from unbroken.rendering.base import Renderer
from unbroken.reports import Report, ReportTable, format_json, write_file
from unbroken.retokenising.comparison import TemplateTexts
from unbroken.retokenising.records import summarize_retokenised
from unbroken.runs.collector import EvaluationSet
from unbroken.runs.config import EngineKind, RunConfig, read_key
from unbroken.runs.evaluation.evaluator import FOLDER, Evaluation, Evaluator, read_samples
from unbroken.runs.evaluation.numbers import INTERVALS, Measure, Sample, compare, measure
from unbroken.runs.evaluation.schedule import make_evaluators
from unbroken.runs.folder import (
    COMPRESSED,
    DATA_FILES,
    LOCK_FILE,
    RECIPE_FILE,
    RECIPE_PART,
    TASK_FILE,
    TRACEBACK,
    claim_folder,
    digest_files,
    find_differences,
    lock_folder,
    may_change,
)
from unbroken.runs.process_file import PROCESS_FILE, record_process
from unbroken.runs.processes import Rank, join_processes
from unbroken.runs.recipe import Recipe, Task, load_recipe
from unbroken.runs.records.files import MAX_LINES, find_records, read_records
from unbroken.runs.settings import build, describe, read_options
from unbroken.runs.training import run_without_training
from unbroken.training.outages import Outages
from unbroken.types import Numerics
from unbroken.untrusted import MAX_ROWS_BYTES, read_json_file

REPORT = "report.json"
NUM_PROBLEMS = 100
"""Of an environment that has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluatedModel:
    """A model to evaluate."""

    name: str
    """As it was given: also the URL of a server, or a name on the hub."""
    folder: Path | None = None
    """Of a model, or of a checkpoint (`is_checkpoint`)."""
    is_checkpoint: bool = False
    source: str
    """Folder or hub name whose tokenizer makes the ids."""

    @property
    def is_server(self) -> bool:
        """Whether it is served already."""
        return "://" in self.name


def evaluate_task(
    task: str,
    options: Sequence[str],
    console: Console,
    *,
    models: Sequence[str] = (),
    tokenizer: str | None = None,
    num_problems: int | None = None,
    num_samples: int | None = None,
    checks_policy: bool | None = None,
    retokenises: bool = False,
    preflight: bool = True,
) -> dict[str, Any]:
    """Evaluate models, by default the task's own, and return the report, which is also in the output folder.

    With `retokenises` it says too what retokenising would have changed in the rollouts.

    With `checks_policy`, each engine is compared with transformers' own pass of its model first (I9); None: if the
    engine is in this process and the model is small enough (`can_check_cheaply`). With `preflight`, an evaluation that
    begins samples a few rollouts first, and shows what they say.

    Raises:
        InvalidInputError: the task, a model or an option is wrong.
        PolicyMismatchError: an engine samples from another policy than its model's.
        EngineError, RolloutError: an engine does not start or went away, or all rollouts failed.
        Terminated: SIGTERM came.
    """
    check_numbers(num_problems, num_samples)
    if len(set(models)) < len(models):
        raise InvalidInputError(f"--model must be different models, got {list(models)}")
    recipe, words = open_task(task)
    given = read_options([*words, *options], recipe.section)
    key = read_key({**recipe.values, **given}.get("engine.api_key_file"), field="engine.api_key_file")
    found = [_find_model(name, tokenizer, api_key=key) for name in models]
    config = _configure(recipe, given, found, name=re.sub(r"\W+", "-", Path(task.partition(":")[2] or task).stem))
    own: dict[str, Any] = {
        "--model": list(models),
        "--tokenizer": tokenizer,
        "--problems": num_problems,
        "--samples": num_samples,
    }
    own["--retokenised"] = retokenises or None
    settings = {"TASK": task, **own, **describe(config)}
    weights = {f"the weights of {each.name}": _digest_weights(each.folder) for each in found if each.folder}
    files = digest_files(settings, code=recipe.code)
    report = _begin_report(config.output, task, settings | files | weights)

    async def evaluate(config: RunConfig, made: Task) -> None:
        sized = [choose_size(each, config, num_problems, num_samples) for each in made.sets]
        evaluation = _Evaluation(
            recipe=recipe,
            config=config,
            sets=sized,
            console=console,
            report=report,
            checks_policy=checks_policy,
            retokenises=retokenises,
            preflight=preflight,
        )
        await evaluation.run(found or [_find_model(str(made.model), tokenizer)])

    with lock_folder(config.output), record_process(config.output):
        run_without_training(recipe, config, evaluate)
    console.print(f"look at it: unbroken view {shlex.quote(str(config.output))}", soft_wrap=True, highlight=False)
    return report


def check_numbers(num_problems: int | None, num_samples: int | None) -> None:
    """Raise `InvalidInputError` for a number of problems or samples below 1."""
    for name, value in (("--problems", num_problems), ("--samples", num_samples)):
        if value is not None and value < 1:
            raise InvalidInputError(f"{name} must be >= 1, got {value}")


def open_task(task: str) -> tuple[Recipe, list[str]]:
    """The recipe of a task, and options that make it this task's."""
    if task.removesuffix(COMPRESSED).endswith(DATA_FILES) or Path(task).is_dir():
        return load_recipe(None), ["--data.file", task]
    if ":" in task:
        return load_recipe(None), ["--environment", task]
    if Path(task).suffix not in (".py", ".toml"):
        raise InvalidInputError(
            f"TASK must be a recipe (.py, .toml), a data set's file ({', '.join(DATA_FILES)}), or folder, or an "
            f"environment (file.py:Class, module:Class, verifiers:NAME, harbor:FOLDER), got {task!r}"
        )
    return load_recipe(Path(task)), []


def _digest_weights(folder: Path) -> str:
    """The digest of up to 64 places in each file of weights: to read all of them could take minutes."""
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.iterdir() if each.suffix in (".safetensors", ".bin", ".distcp")):
        with path.open("rb") as file:
            for place in range(64):
                file.seek(path.stat().st_size * place // 64)
                digest.update(file.read(65_536))
    return digest.hexdigest()


def _begin_report(output: Path, task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The report of an evaluation, new or with the models that are done; raises if the folder holds something else."""
    report: dict[str, Any] = {"format": 1, "task": task, "intervals": INTERVALS, "settings": settings}
    begun = (LOCK_FILE, RECIPE_FILE, RECIPE_PART, f".{REPORT}.part", TRACEBACK, TASK_FILE, PROCESS_FILE)
    if all((each.is_dir() and each.name != REPORT) or each.name in begun for each in output.rglob("*")):
        return {**report, "models": [], "differences": []}
    try:
        found = read_json_file(output / REPORT, max_bytes=MAX_ROWS_BYTES)
        before = dict(found["settings"])
        report |= {"models": found["models"], "differences": found["differences"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidInputError(
            f"output must be a new or empty folder, or that of the same evaluation, and {output} holds other files"
        ) from None
    for name in sorted(before.keys() | settings.keys()):
        old, new = before.get(name), settings.get(name)
        if old != new and not (may_change(name) and not name.startswith("evaluation.")):
            part, was, now = next(find_differences(name, old, new))
            raise InvalidInputError(
                f"{part} must be {'left out' if was == 'None' else was} as in the evaluation in {output}, which "
                f"goes on with what it began with, got {now}: give that, or another --output"
            )
    return report


def _configure(recipe: Recipe, given: Mapping[str, Any], models: Sequence[_EvaluatedModel], *, name: str) -> RunConfig:
    """The config of the recipe, whose `output` is that of training, with the options that are given."""
    output = Path("runs") / f"eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    values: dict[str, Any] = {"loop.num_steps": 0, **recipe.values, "output": output}
    if models and "model" in recipe.section.all_fields():
        values |= read_options(["--model", models[0].source], recipe.section)
    config: RunConfig = build(recipe.section, {**values, **given})
    for field, value in (("samplers", config.rollouts.samplers), ("listen", config.rollouts.listen)):
        if value:
            raise InvalidInputError(f"rollouts.{field} must be left out with `unbroken eval`, got {value}")
    config.check_one_policy("`unbroken eval`")
    return replace(config, trainer=replace(config.trainer, routing_replay=False))


def choose_size(
    each: EvaluationSet, config: RunConfig, num_problems: int | None, num_samples: int | None
) -> EvaluationSet:
    """The set with its numbers of problems and samples.

    Raises:
        InvalidInputError: there are fewer problems, or more rollouts than a file can have.
    """
    there = each.problems.num_problems
    chosen = num_problems or each.num_problems or config.evaluation.num_problems or there or NUM_PROBLEMS
    if there is not None and chosen > there:
        raise InvalidInputError(f"--problems must be at most {there}, which {each.name} has, got {chosen}")
    samples = num_samples or each.num_samples or config.evaluation.num_samples
    if chosen * samples >= MAX_LINES:
        raise InvalidInputError(
            f"--problems times --samples must be less than {MAX_LINES}, what a file of rollouts has, got "
            f"{chosen} x {samples}"
        )
    return replace(each, num_problems=chosen, num_samples=samples)


def _find_model(name: str, tokenizer: str | None = None, *, api_key: str | None = None) -> _EvaluatedModel:
    """Find out what a model is: a server, the folder of a model, a run or a checkpoint, or a hub name.

    Raises:
        InvalidInputError: it is none of them, or no tokenizer is found.
    """
    from unbroken.runs.export.checkpoint import find_checkpoint
    from unbroken.training.state import read_state

    folder = Path(name).expanduser()
    if "://" in name:
        return _EvaluatedModel(name=name, source=_find_tokenizer(name, tokenizer, api_key))
    for each in (folder / "final", folder):
        if (each / "config.json").is_file():
            return _EvaluatedModel(name=name, folder=each, source=tokenizer or str(each.absolute()))
    try:
        if (folder / "adapter_config.json").is_file() and not (folder / "state.json").is_file():
            raise InvalidInputError("it has adapters alone; give the run's folder, or `unbroken export --merged`")
        if folder.is_dir():
            checkpoint = find_checkpoint(folder)
            origin = read_state(checkpoint).state.model
            source = tokenizer or origin.source
            return _EvaluatedModel(name=name, folder=checkpoint, is_checkpoint=True, source=source)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            "--model must be the folder of a whole model (config.json), of a run, or of a checkpoint, a hub's name, or "
            f"a server's URL, got {name!r}: {str(error).partition(chr(10))[0]}"
        ) from None
    check_model_source(name, name="--model")
    return _EvaluatedModel(name=name, source=tokenizer or name)


def _find_tokenizer(url: str, given: str | None, api_key: str | None) -> str:
    """Ask a server for its model, whose tokenizer it is unless one is given; raises if it does not answer."""
    try:
        from unbroken.client import Client
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"{url} needs the client extra", "client") from error
    from unbroken.rendering.loader import load_tokenizer

    with Client(url, api_key=api_key, max_retries=1) as client:
        (served, *_) = client.models()
    name = given or str(served.get("root") or served.get("id"))
    try:
        load_tokenizer(name)
    except (UnbrokenError, OSError, ValueError):
        raise InvalidInputError(
            f"--tokenizer must be the folder or hub name of the model at {url}, which calls it {served.get('id')!r}, "
            f"got {given or 'none'}: {name!r} has no tokenizer on this machine or on the hub"
        ) from None
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """The evaluation of all models of a command."""

    recipe: Recipe
    config: RunConfig
    sets: Sequence[EvaluationSet]
    console: Console
    report: dict[str, Any]
    checks_policy: bool | None
    retokenises: bool
    preflight: bool

    async def run(self, models: Sequence[_EvaluatedModel]) -> None:
        """Evaluate each model that is not in the report, and write the report after each."""
        if join_processes().num_processes > 1:
            raise InvalidInputError("`unbroken eval` must be started as one process, without a launcher")
        output, labels = self.config.output, make_labels([model.name for model in models])
        baseline: dict[str, dict[str, Measure]] = {}
        for model, label in zip(models, labels, strict=True):
            folder = output if len(models) == 1 else output / label
            is_done = any(each["model"] == label for each in self.report["models"])
            if is_done and (baseline or len(models) == 1):
                continue
            settings = describe(replace(self.config, output=folder))
            own = {"model": model.source} if "model" in settings else {}  # the viewer says which it was
            if not (folder / FOLDER).is_dir():
                claim_folder(folder, self.recipe.name, {**settings, **own})
                write_file(output / REPORT, format_json(self.report))
            found = self._read(folder) if is_done else await self._evaluate(model, label, folder)
            self.report["differences"] += [
                {"set": name, "model": label, "baseline": labels[0], "measures": compare(of_set, found[name])}
                for name, of_set in baseline.items()
            ]
            baseline = baseline or found
            await asyncio.to_thread(write_file, output / REPORT, format_json(self.report))

    def _read(self, folder: Path) -> dict[str, dict[str, Measure]]:
        """The numbers of a model that is done."""
        pass_reward = self.config.evaluation.pass_reward
        folders = {each.name: folder / FOLDER / each.name for each in self.sets}
        paths = {name: find_records(each).get((0, 0), each) for name, each in folders.items()}  # reading names it
        return {name: measure(read_samples(path), pass_reward=pass_reward) for name, path in paths.items()}

    async def _evaluate(self, model: _EvaluatedModel, label: str, folder: Path) -> dict[str, dict[str, Measure]]:
        found: dict[str, dict[str, Measure]] = {}
        sets: dict[str, Any] = {}
        async with self._open(model, folder) as (evaluators, loaded):
            await self._look_before(evaluators[0], model.source, loaded)
            for each in evaluators:
                problems = f"{label}: {each.name}, {each.num_problems} problems x {each.num_samples}"
                num_kept, begun_s = len(each.read_kept()), time.perf_counter()
                self.console.print(f"{problems}{f': {num_kept} problems are kept in {folder}' if num_kept else ''}")
                evaluation, samples = await self._sample(each, is_server=model.is_server)
                found[each.name] = measure(samples, pass_reward=each.pass_reward)
                sets[each.name] = {
                    **{name: evaluation.numbers[name] for name in ("num_problems", "num_samples", "num_rollouts")},
                    "seconds": None if num_kept else round(time.perf_counter() - begun_s, 3),
                    "statuses": Counter(sample.status.value for of_problem in samples for sample in of_problem),
                    "measures": {name: each.to_json() for name, each in found[each.name].items()},
                }
                if self.retokenises:
                    sets[each.name]["retokenised"] = await self._retokenise(model, each)
        entry = {"model": label, "name": model.name, "tokenizer": model.source, "folder": str(folder), "sets": sets}
        self.report["models"].append(entry)
        return found

    async def _look_before(self, evaluator: Evaluator, source: str, model: Any) -> None:
        """Make the preflight on the first set, unless that has begun, or has hardly more rollouts than a preflight."""
        from unbroken.runs.preflight import NUM_ROLLOUTS, Preflight

        is_small = evaluator.num_problems * evaluator.num_samples < 4 * NUM_ROLLOUTS
        if self.preflight and not is_small and not evaluator.read_kept():
            preflight = Preflight(
                config=self.config, source=source, model=model, sampler=evaluator.sampler, trains=False
            )
            await preflight.run(self.console)

    async def _retokenise(self, model: _EvaluatedModel, evaluator: Evaluator) -> dict[str, Any]:
        """What retokenising would have changed in the rollouts that are kept."""
        from unbroken.rendering.loader import load_renderer, load_tokenizer

        settings, sampler = self.config.renderer, evaluator.sampler
        renderer = load_renderer(model.source, template_kwargs=settings.template_kwargs, parser=settings.parser)
        texts = TemplateTexts(tokenizer=load_tokenizer(model.source), template_renderer=renderer)
        path = find_records(evaluator.output / FOLDER / evaluator.name)[0, 0]
        begin("retokenising", total=evaluator.num_problems * evaluator.num_samples, unit="rollouts")
        return await summarize_retokenised(
            itertools.islice(read_records(path), 1, None),
            texts,
            sampler.engine,
            temperature=(sampler.sampling or sampler.config.sampling).temperature,
        )

    async def _sample(self, evaluator: Evaluator, *, is_server: bool) -> tuple[Evaluation, list[list[Sample]]]:
        """Sample what is not kept; as in training, a server that is away is waited for. Every end says what is kept."""
        found: list[tuple[Evaluation, list[list[Sample]]]] = []

        async def evaluate() -> None:
            found.append(await evaluator.evaluate_kept())

        engine = evaluator.sampler.engine if is_server else None
        try:
            await Outages(None, None, self.config.loop, engine=engine).repeat(evaluate)
        except BaseException:
            number, output = len(evaluator.read_kept()), self.config.output
            self.console.print(
                f"{number} of {evaluator.num_problems} problems of {evaluator.name} are answered, and kept in "
                f"{evaluator.output}: the same command with --output {output} continues",
                soft_wrap=True,
            )
            raise
        return found[0]

    @asynccontextmanager
    async def _open(self, model: _EvaluatedModel, folder: Path) -> AsyncIterator[tuple[list[Evaluator], Any]]:
        """Open the engine of a model, and make its evaluators; also yields the model, or None if it is elsewhere."""
        from unbroken.runs.samplers import SamplerOpener

        config, (first, *others) = replace(self.config, output=folder), [each.problems for each in self.sets]
        opener = SamplerOpener(config=config, source=model.source, train_on=first, evaluate_on=others, part="0")
        images = opener.load_images()
        renderer = opener.load_renderer(images)
        if not model.is_server:
            opener.check_model(renderer, images)
        shared: dict[str, Any] = {"seed": config.seed, "output": folder, "rank": Rank(), "source": model.source}
        async with AsyncExitStack() as stack:
            engine, loaded = await _open_engine(stack, model, config, None if images is None else images.processor)
            if not model.is_server or self.checks_policy:
                own = model.source if loaded is None else loaded
                begin("comparing the policies of the engine and the model")
                said = await check_policy(config, engine, own, renderer, is_asked=self.checks_policy)
                self.console.print(said, soft_wrap=True, end="\n" if said else "")
            opened = await opener.open(stack, engine=engine, renderer=renderer, images=images)
            evaluators = make_evaluators(self.sets, config.evaluation, opened, **shared)
            yield evaluators, None if isinstance(loaded, str) else loaded


async def check_policy(
    config: RunConfig, engine: Any, folder: Any, renderer: Renderer, *, is_asked: bool | None
) -> str:
    """Compare an engine with transformers' own pass of its model, in a folder or loaded; "" if that is left out.

    Unless it `is_asked` for: where the engine is in this process, its numerics are fast, and the model small enough.
    """
    from unbroken.runs.policy_check import can_check_cheaply, check_against_folder

    is_here = config.engine.kind in (EngineKind.EMBEDDED, EngineKind.COLOCATED)
    is_cheap = is_here and config.trainer.numerics is not Numerics.EXACT and can_check_cheaply(folder)
    if not (is_cheap if is_asked is None else is_asked):
        return ""
    return await check_against_folder(engine, folder, renderer, options=config.engine.options)


async def _open_engine(
    stack: AsyncExitStack, model: _EvaluatedModel, config: RunConfig, processor: Any
) -> tuple[Any, Any]:
    """Open the engine of a model; also returns the model itself if it is in this process, or the folder it is from."""
    from unbroken.rendering.encoding.text_codec import TextCodec
    from unbroken.rendering.loader import load_tokenizer
    from unbroken.runs.engines import connect_servers, open_engine
    from unbroken.runs.export.checkpoint import export_checkpoint
    from unbroken.runs.export.kept import make_form
    from unbroken.runs.models import load_model
    from unbroken.training.state import read_state

    if model.is_server:
        vocab_size = TextCodec(load_tokenizer(model.source)).vocab_size
        return await connect_servers(stack, config.engine, [model.name], vocab_size=vocab_size), None
    if config.engine.kind is EngineKind.SERVER:
        raise InvalidInputError(
            f"engine.kind must be embedded, started or colocated to evaluate {model.name}, got server: or serve it, "
            "and give its URL as --model"
        )
    source = model.name if model.folder is None else str(model.folder)
    if model.is_checkpoint and model.folder is not None:
        source = stack.enter_context(tempfile.TemporaryDirectory(prefix=".model-", dir=config.output))
        origin = read_state(model.folder).state.model
        form = make_form(merged=origin.adapter is not None, dtype=None)
        export_checkpoint(model.folder, Path(source), form=form, source=model.source or None)
    loaded = None
    begin(f"loading {model.name}, and opening its engine ({config.engine.kind})")
    if config.engine.kind is EngineKind.EMBEDDED:
        loaded = load_model(source, config.chosen_model_settings, takes_images=processor is not None)
    opening = open_engine(
        config.engine,
        model=loaded,
        source=source,
        output=config.output,
        device=join_processes().device,
        rank=Rank(),
        image_processor=processor,
        numerics=config.trainer.numerics,
        is_trained=False,
    )
    engine = (await stack.enter_async_context(opening)).engine
    return engine, source if loaded is None else loaded


def make_labels(names: Sequence[str]) -> list[str]:
    """Names of folders: the last two parts of each name, with its number where two are the same."""
    short = ["-".join(re.findall(r"[\w.-]+", name.partition("://")[2] or name)[-2:]).strip(".-") for name in names]
    labels: list[str] = []
    for number, label in enumerate(short, start=1):
        numbered = (f"{label or 'model'}-{n}" for n in itertools.count(number))
        is_alone = label and short.count(label) == 1
        labels.append(label if is_alone else next(each for each in numbered if each not in (*short, *labels)))
    return labels


def make_report(found: Mapping[str, Any]) -> Report:
    """The report of what `evaluate_task` returns: a table for each set of problems."""
    return Report(
        title=f"unbroken eval {found['task']}",
        conclusions=[
            f"Intervals of {found['intervals']}.",
            "A rollout passes, for pass@k, if its reward, the weighted sum of all functions, is at least "
            "evaluation.pass_reward (1).",
        ],
        tables=[_tabulate(found, name) for name in found["models"][0]["sets"]],
        values=found,
    )


def _tabulate(found: Mapping[str, Any], name: str) -> ReportTable:
    """The table of a set of problems: a column for each model, and one for each difference from the first."""
    letters = {each["model"]: chr(ord("A") + k) if k < 26 else str(k) for k, each in enumerate(found["models"])}
    columns = [(f"{letters[each['model']]} {each['model']}", each["sets"][name]) for each in found["models"]]
    changes = [each for each in found["differences"] if each["set"] == name]
    columns += [(f"{letters[each['model']]} − {letters[each['baseline']]}", each) for each in changes]
    cells = [_describe_column(each) for _, each in columns]
    rows = [(row, *(of_column.get(row, "") for of_column in cells)) for row in _merge_names(cells)]
    first = found["models"][0]["sets"][name]
    title = f"{name}: {first['num_problems']} problems x {first['num_samples']}"
    return ReportTable(title=title, columns=("", *(column for column, _ in columns)), rows=rows)


def _describe_column(found: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a model on a set, or of a difference, by the names of their rows."""
    texts = {name: _format(each, name) for name, each in found["measures"].items()}
    if "retokenised" in found:
        texts |= _describe_retokenised(found["retokenised"])
    if found.get("seconds"):
        texts["seconds in all"] = f"{found['seconds']:.1f}"
    return texts


def _merge_names(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """The rows that any of the columns has; the time, which is no measure, comes last."""
    names = dict.fromkeys(name for texts in columns for name in texts)
    return sorted(names, key="seconds in all".__eq__)


def _describe_retokenised(found: Mapping[str, Any]) -> dict[str, str]:
    """What the table says of a set's rollouts once they are retokenised (docs/drift.md)."""
    rows = {
        f"retokenised: other {unit}": _format_share(found["changed"], found, unit)
        for unit in ("rollouts", "turns", "ids")
    }
    for cause, counts in found["causes"].items():
        if counts["num_rollouts"]:
            rows[f"rollouts: {cause}"] = _format_share(counts, found, "rollouts")
    exact, other = found["exact"], found["retokenised"]
    if exact is not None and other is not None:
        rows["k3"] = f"{other['k3']:.1e} (as sampled {exact['k3']:.1e})"
        shares = (other["share_off_20pct"], exact["share_off_20pct"])
        rows["ratios off by > 20 %"] = "{:.1%} (as sampled {:.1%})".format(*shares)
    if found["left_out"]:
        rows["not compared"] = "; ".join(f"{number}: {why}" for why, number in found["left_out"].items())
    if found["num_unscored"]:
        rows["without ratios"] = f"{found['num_unscored']}: {found['why_unscored'] or 'too long for the context'}"
    return rows


def _format_share(counts: Mapping[str, Any], found: Mapping[str, Any], unit: str) -> str:
    return f"{counts[f'share_of_{unit}']:.1%} of {found['compared'][f'num_{unit}']}"


def _format(measure: Mapping[str, Any], name: str) -> str:
    numbers = [measure[key] for key in ("value", "low", "high") if measure[key] is not None]
    value, *interval = [f"{number:.{1 if name.startswith('completion') else 3}f}" for number in numbers] or [""]
    return f"{value} [{', '.join(interval)}]" if interval else value
