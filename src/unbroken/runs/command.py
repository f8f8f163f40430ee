"""The commands `unbroken train RECIPE`, or `--env NAME` for the built-in recipe, `sampler`, `numerics` and `doctor`."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.reports import format_json, link_pages
from unbroken.runs.processes import SAMPLER_KEY

COMMON_FIELDS = (
    *("output", "loop.num_steps", "trainer.optimizer.learning_rate", "rollouts.problems_per_step"),
    *("rollouts.group_size", "rollouts.sampling.max_tokens", "rollouts.sampling.temperature"),
    *("rollouts.limits.max_turns", "evaluation.num_problems", "evaluation.every", "model", "data.file", "tools"),
    *("rewards", "environment", "algorithm", "seed", "loop.max_staleness", "trainer.kl_weight"),
    *("trainer.tokens_per_micro_batch", "lora.rank", "engine.kind", "engine.urls", "checkpoints.every"),
)
"""Fields that `unbroken train RECIPE --help` describes, those of a first hour first; `--help-all` describes all."""
_TRAIN_EPILOG = """\
settings of a first hour, each also a line of a TOML file (output = "runs/second"):
  --output FOLDER                       of the run; a run that is there is continued
  --loop.num-steps N                    how long
  --trainer.optimizer.learning-rate X   1e-6 for billions of weights, 5e-4 for the tiny model of `unbroken new`
  --rollouts.problems-per-step N        prompts of a step
  --rollouts.group-size N               rollouts of each, whose rewards are compared
  --rollouts.sampling.max-tokens N      of a reply
  --evaluation.num-problems N           evaluated before the first step and after the last
  --model MODEL                         a folder or a hub's name

unbroken train RECIPE --help            the most common settings, and their values in RECIPE
unbroken train RECIPE --help-all        every setting
unbroken new NAME                       write a recipe to start from"""


def add_train_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    train = commands.add_parser(
        "train",
        help="train with a recipe: a Python file, or a TOML file with values for one; or on an environment",
        description="Train with a recipe, or on an environment.",
        epilog=_TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_preflight(train)
    _add_recipe(train)
    train.set_defaults(run=_run_train, parser=train, advice="; nothing was begun")


def add_sampler_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    sampler = commands.add_parser(
        "sampler",
        help="sample for a trainer on another machine: the same recipe and options as its `unbroken train`",
        description="Sample for a trainer that listens (rollouts.listen), with the recipe and the options that it was "
        "started with; settings that may change when a run continues may differ. Ends with the trainer.",
        allow_abbrev=False,
    )
    sampler.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the trainer listens")
    sampler.add_argument(
        "--key-file", type=Path, help=f"a file with the trainer's key; otherwise it is in the variable {SAMPLER_KEY}"
    )
    sampler.add_argument("--name", help="in logs; by default the host and the process")
    sampler.add_argument("--wait-s", type=float, default=600.0, help="how long to wait for the trainer (600)")
    sampler.add_argument("--exit-with-parent", action="store_true", help="leave signals, and the end, to the parent")
    _add_recipe(sampler)
    sampler.set_defaults(run=_run_sampler, parser=sampler, advice="; the trainer gives its groups to other samplers")


_EVAL_FIELDS = (
    *("output", "seed", "rollouts.sampling.max_tokens", "rollouts.sampling.temperature", "rollouts.limits.max_turns"),
    *("environment", "environment_arguments", "data.file", "engine.kind", "engine.urls"),
)
"""Fields that `unbroken eval TASK --help` describes."""
_EVAL_EPILOG = """\
unbroken eval recipe.toml                                          the recipe's own model, on its evaluation's problems
unbroken eval recipe.toml --model runs/sums --model Qwen/Qwen2.5-0.5B-Instruct --samples 4
unbroken eval recipe.toml --model http://127.0.0.1:8000            a server of this package, or vLLM
unbroken eval --follow runs/sums --engine.kind colocated           each checkpoint of a run, while it trains
unbroken eval tasks.jsonl --reward rewards.py:correct --model MODEL
unbroken eval tasks.jsonl --agent.function agent.py:solve --model MODEL
unbroken eval guess.py:make_env --model MODEL --problems 200"""


def add_eval_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    evaluate = commands.add_parser(
        "eval",
        help="evaluate models on the problems of a recipe, a data set or an environment, without training",
        description="Evaluate models, without training: rewards, pass@k, tokens and time with\nintervals, and all "
        "rollouts in files that `unbroken view` reads.\n`unbroken eval TASK --help` lists the settings of a task.",
        epilog=_EVAL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # its own --help
        allow_abbrev=False,
    )
    _add_eval_options(evaluate)
    add = evaluate.add_argument
    add(
        "task",
        nargs="?",
        metavar="TASK",
        help="a recipe (.py, .toml), a data set's file (.jsonl, .json, .parquet, .csv), or an environment "
        "(file.py:Class, module:Class, verifiers:NAME, harbor:FOLDER); then settings as --FIELD VALUE, "
        "e.g. --rollouts.sampling.temperature 0.6; --output FOLDER gets the rollouts",
    )
    add(
        "--follow",
        nargs=argparse.REMAINDER,
        metavar="RUN",
        help="instead of TASK: the folder of a run, whose checkpoints are evaluated as they appear, on the problems "
        "of its evaluations; then options and settings. The lines are in RUN/evaluation.jsonl",
    )
    evaluate.set_defaults(run=run_eval, parser=evaluate, advice="; what was sampled is kept")


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add an option of commands: it is no setting of a run, of which it changes nothing."""
    parser.add_argument(
        "--preflight",
        type=_read_bool,
        metavar="BOOL",
        help="whether a few rollouts are sampled first, and shown on one screen: tools, calls, ends of turns, rewards, "
        "cost (true); what continues has none",
    )


def _read_bool(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {word!r}")
    return word.lower() == "true"


def take_preflight(options: Sequence[str]) -> tuple[bool, list[str]]:
    """What `--preflight` says among the options of a recipe, by default true, and the others."""
    own = argparse.ArgumentParser(prog="unbroken train RECIPE", add_help=False, allow_abbrev=False)
    _add_preflight(own)
    found, others = own.parse_known_args(options)
    return found.preflight is not False, others


def _add_eval_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_preflight(parser)
    add("-h", "--help", "--help-all", action=_EvalHelp, nargs=0, help="show this; after TASK, its settings")
    add(
        "--model",
        action="append",
        dest="models",
        metavar="MODEL",
        help="a model's folder, a run or its checkpoint, a hub's name, or the URL of a server; can be repeated: the "
        "others are compared with the first (default: the task's own)",
    )
    add("--problems", type=int, metavar="N", help="problems of each set (default: the task's; else all, or 100)")
    add("--samples", type=int, metavar="K", help="rollouts of each problem, for pass@1 to pass@K (default: the task's)")
    add("--reward", action="append", metavar="FILE.py:NAME", help="a reward function; can be repeated, they are added")
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="for servers that do not say where their model is; otherwise the models' own",
    )
    add("--json", action="store_true", help="print the report as JSON; it is in OUTPUT/report.json too")
    add(
        "--retokenised",
        action="store_true",
        help="say too what decoding, parsing, rendering and tokenising again would have changed in the rollouts, with "
        "a scoring pass (docs/drift.md)",
    )
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare each engine's policy with transformers' own pass of the model before it is evaluated (default: "
        "if the engine is in this process, and the model's float32 weights have up to 8 GB or room on a GPU)",
    )


def make_check(model: str, engine_options: Sequence[str]) -> Callable[[Any, Any], Awaitable[str]]:
    """Make the check of a server's engine (`ServeOptions.check`), which loads torch and the model when it is called."""

    async def check(engine: Any, renderer: Any) -> str:
        try:
            from unbroken.runs.policy_check import check_against_folder
        except ModuleNotFoundError as error:
            raise missing_extra(error, "--check needs the train extra", "train") from error
        return await check_against_folder(engine, model, renderer, options=engine_options)

    return check


class _EvalHelp(argparse.Action):
    """Prints the help of the command, and after a TASK the settings of that."""

    def __call__(self, parser: argparse.ArgumentParser, given: Any, _: Any, option: str | None = None) -> None:
        text = parser.format_help() if given.task is None else parser.format_usage()
        if given.task is not None:
            try:
                from unbroken.runs.evaluate import open_task
                from unbroken.runs.settings import format_help
            except ModuleNotFoundError as error:
                raise missing_extra(error, "evaluation needs the train extra", "train") from error
            recipe, _ = open_task(given.task)
            shown = () if option == "--help-all" else _EVAL_FIELDS
            command = f"unbroken eval {given.task}"
            text += f"\n{format_help(recipe.section, recipe.values, command=command, doc='', shown=shown)}"
        _print_text(text)
        parser.exit()


def run_eval(arguments: argparse.Namespace) -> int:
    """Evaluate, and print the report; returns the exit status."""
    if arguments.follow is not None:
        return _run_follow(arguments)
    if arguments.task is None:
        arguments.parser.error("TASK must be given, or --follow RUN")
    options = list(arguments.others)
    if arguments.reward:
        rewards = ", ".join(f"{{function = {json.dumps(each)}}}" for each in arguments.reward)
        options += ["--rewards", f"[{rewards}]"]
    try:
        from rich.console import Console

        from unbroken.runs.evaluate import evaluate_task, make_report

        found = evaluate_task(
            arguments.task,
            options,
            Console(stderr=True, markup=False),
            models=arguments.models or (),
            tokenizer=arguments.tokenizer,
            num_problems=arguments.problems,
            num_samples=arguments.samples,
            checks_policy=arguments.check,
            retokenises=arguments.retokenised,
            preflight=arguments.preflight is not False,
        )
        report = make_report(found)
    except ModuleNotFoundError as error:  # of the user's own modules it is another error
        raise missing_extra(error, "evaluation needs the train extra", "train") from error
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    print(report.to_json() if arguments.json else report.to_text(width), end="")
    return 0


def _run_follow(arguments: argparse.Namespace) -> int:
    """Follow a run: what stands after --follow are its folder, options and settings."""
    own = argparse.ArgumentParser(
        prog="unbroken eval --follow RUN", add_help=False, allow_abbrev=False, conflict_handler="resolve"
    )
    _add_eval_options(own)
    run, *words = arguments.follow or [""]
    if not run or run.startswith("-"):
        arguments.parser.error("--follow must be followed by the folder of a run")
    arguments, options = own.parse_known_args(words, arguments)
    for name in ("models", "tokenizer", "reward", "retokenised"):
        if getattr(arguments, name):
            arguments.parser.error(f"--{name.removesuffix('s')} must be left out with --follow")
    if arguments.preflight:
        arguments.parser.error("--preflight must be left out with --follow, which has none")
    arguments.advice = "; what was evaluated is kept, and the same command continues it"
    try:
        from rich.console import Console

        from unbroken.runs.follow import follow_run

        report = follow_run(
            Path(run),
            [*arguments.others, *options],
            Console(stderr=True, markup=False),
            task=arguments.task,
            num_problems=arguments.problems,
            num_samples=arguments.samples,
            checks_policy=arguments.check,
        )
    except ModuleNotFoundError as error:  # of the user's own modules it is another error
        raise missing_extra(error, "evaluation needs the train extra", "train") from error
    if arguments.json:
        print(format_json(report), end="")
    return 0


def add_numerics_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    numerics = commands.add_parser(
        "numerics",
        help="compare the bits of sampler and trainer for a model on this machine",
        description="Samples rows of random ids with the engine of a run, scores them as its trainer does, compares "
        'logprobs and outputs of modules, with trainer.numerics "fast" and "exact". The status is 0 if all logprobs '
        'are equal with "exact", else 1.',
        epilog="vLLM on a Hopper GPU: unbroken numerics MODEL --precision bfloat16 --engine.kind colocated",
        allow_abbrev=False,
    )
    add = numerics.add_argument
    add("model", metavar="MODEL", help="a folder or a hub's name")
    add("options", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="settings of a run, as of `unbroken train`")
    _add_numerics_options(numerics)
    numerics.set_defaults(run=_run_numerics, parser=numerics)


def _add_numerics_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, default=32, metavar="N", help="conversations that are sampled together (32)")
    add("--max-tokens", type=int, default=64, metavar="N", help="maximum ids of a turn; the mean is half of it (64)")
    add("--json", action="store_true", help="print the report as JSON")


def _run_numerics(arguments: argparse.Namespace) -> int:
    """Compare, and print the report; returns 0 if all logprobs are equal with exact numerics."""
    own = argparse.ArgumentParser(prog="unbroken numerics MODEL", add_help=False, allow_abbrev=False)
    _add_numerics_options(own)
    arguments, options = own.parse_known_args(arguments.options, arguments)
    if {"-h", "--help", "--help-all"} & set(options):
        arguments.parser.print_help()
        return 0
    if min(arguments.rows, arguments.max_tokens) < 1:
        arguments.parser.error("--rows and --max-tokens must be >= 1")
    try:
        from unbroken.runs.config import RunConfig
        from unbroken.runs.numerics import Comparison, make_report
        from unbroken.runs.settings import read_options, section_of
    except ModuleNotFoundError as error:
        raise missing_extra(error, "numerics needs the train extra", "train") from error

    values = read_options(options, section_of(RunConfig))
    sizes = {"num_rows": arguments.rows, "max_tokens": arguments.max_tokens}
    reports = asyncio.run(Comparison(source=arguments.model, values=values, **sizes).measure())
    report = make_report(reports)
    print(report.to_json() if arguments.json else report.to_text(), end="")
    return 0 if all(each.is_exact for each in reports if each.numerics == "exact") else 1


_ENDINGS = {
    "running": "it is running",
    "finished": "it has finished",
    "failed": "it ended with an error",
    "interrupted": "it was interrupted (Ctrl-C); the same command continues from its last checkpoint, if it has one",
    "terminated": "it was terminated (SIGTERM); the same command continues from its last checkpoint, if it has one",
    "died": "its process is gone",
}


def add_doctor_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with a run, an evaluation or a task, and what to do",
        description="Say what is wrong with a run or an evaluation, and what to do: from its metrics, its rollouts and "
        "how it ended. It may run, have ended, or have died. Of a task (.toml, .py): load its model, sample a few "
        "rollouts and say what they show, without training. The status is 0, whatever is found.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run or an evaluation, or a task"
    )
    doctor.add_argument("--json", action="store_true", help="print what is found as JSON: a list for each folder")
    doctor.set_defaults(run=_run_doctor, parser=doctor, advice="; nothing was written")


def _run_doctor(arguments: argparse.Namespace) -> int:
    """Print the diagnosis of each folder, or make the preflight of a task; returns the exit status.

    Raises:
        InvalidInputError: a folder holds neither a run nor an evaluation, or a task is wrong.
        PolicyMismatchError: the engine of a task samples from another policy than its trainer's.
    """
    from unbroken.runs.diagnosis.diary import diagnose_folder, format_finding

    if any(map(_is_task, arguments.runs)):
        if len(arguments.runs) > 1 or arguments.json:
            arguments.parser.error("a task must be given alone, without --json")
        _check_task(arguments.runs[0])
        return 0
    found = {folder: diagnose_folder(folder) for folder in arguments.runs}
    if arguments.json:
        of_all = {str(folder): [asdict(each) for each in findings] for folder, (_, findings) in found.items()}
        print(format_json(of_all), end="")
        return 0
    for folder, (evidence, findings) in found.items():
        silence = link_pages("nothing is found: no rule of docs/troubleshooting.md speaks")
        if evidence.num_steps == 0:
            silence = "no step has ended, so there is nothing to judge"
        said = [format_finding(each, folder) for each in findings] or [silence]
        print(f"{folder}: {_describe_evidence(evidence)}", *said, sep="\n")
    return 0


def add_verify_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    verify = commands.add_parser(
        "verify",
        help="train a finished run again from its files, and compare every bit; or two runs with each other",
        description="Train a finished run again from its rollouts, and compare logprobs, losses, gradient norms and "
        "weights with its files: for trainer.numerics exact. What differs is named. With --against, compare the files "
        "of two runs until the first id or number that differs, whatever their numerics. The status is 0 if all is "
        "verified, or equal, else 1.",
        allow_abbrev=False,
    )
    add = verify.add_argument
    add("folder", type=Path, metavar="RUN", help="output folder of a run")
    add("--against", type=Path, metavar="OTHER", help="output folder of another run")
    add("--model", metavar="SOURCE", help="folder or hub name of the model that the run began with, if it has moved")
    add("--processes", type=int, default=1, metavar="N", help="verify parts between checkpoints at the same time (1)")
    add("--json", action="store_true", help="print the report as JSON")
    verify.set_defaults(run=_run_verify, parser=verify)


def _run_verify(arguments: argparse.Namespace) -> int:
    """Verify a run, or compare two, and print the report; returns the exit status.

    Raises:
        InvalidInputError: the run cannot be verified, with the setting or the file that is the reason.
    """
    folder: Path = arguments.folder
    if arguments.processes < 1:
        arguments.parser.error("--processes must be >= 1")
    found: Any
    if arguments.against is not None:
        if arguments.model is not None or arguments.processes > 1:
            arguments.parser.error("--model and --processes must be left out with --against, which reads files only")
        from unbroken.runs.compare import compare_runs

        found = compare_runs(folder, arguments.against)
        text, is_good = found.describe(folder, arguments.against), found.difference is None
    else:
        try:
            from unbroken.runs.verify import verify_run
        except ModuleNotFoundError as error:
            raise missing_extra(error, "verify needs the train extra", "train") from error
        found = verify_run(folder, model=arguments.model, num_processes=arguments.processes)
        text, is_good = found.describe(folder), found.is_verified
    print(json.dumps(asdict(found), indent=1) if arguments.json else text)
    return 0 if is_good else 1


def _is_task(path: Path) -> bool:
    return path.suffix in (".toml", ".py") and not path.is_dir()


def _describe_evidence(evidence: Any) -> str:
    """What a folder holds, and how it ended, in a few words."""
    number, ending = evidence.num_steps, _ENDINGS.get(evidence.ending.status)
    kind = "an evaluation" if evidence.is_evaluation else f"{number} step{'s' * (number != 1)}"
    return kind if ending is None else f"{kind}; {ending}"


def _check_task(path: Path) -> None:
    """Compare the policies of a task's engine and trainer, and make its preflight; its output folder stays as it is."""
    try:
        from unbroken.runs.run import check_without_training
    except ModuleNotFoundError as error:
        raise missing_extra(error, "a task needs the train extra", "train") from error
    from unbroken.runs.chosen_numerics import choose_numerics
    from unbroken.runs.recipe import load_recipe
    from unbroken.runs.training import run_without_training

    recipe = load_recipe(path)
    config, said = choose_numerics(recipe.configure(()), continues=False)  # as the run that is checked would
    if said:
        print(said, flush=True)
    check = partial(check_without_training, output=config.output)
    # Before the recipe makes its problems: agents' logs in the task's own folder kept `unbroken train` out of it.
    with tempfile.TemporaryDirectory(prefix="unbroken-") as folder:
        run_without_training(recipe, replace(config, output=Path(folder)), check)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="a Python or TOML file")
    parser.add_argument(
        "--env",
        nargs=argparse.REMAINDER,
        metavar="NAME",
        help="instead of a recipe: an environment, file.py:Class, module:Class, verifiers:NAME or harbor:FOLDER, then "
        "options",
    )
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="e.g. --trainer.optimizer.learning-rate 3e-4"
    )


def _read_recipe(arguments: argparse.Namespace) -> list[str]:
    """The options of the recipe."""
    if not (arguments.recipe or arguments.env):
        arguments.parser.error("a RECIPE or --env NAME must be given")
    return ["--environment", *arguments.env] if arguments.env else list(arguments.options)


def _run_train(arguments: argparse.Namespace) -> int:
    """Run the recipe, or print its help; returns the exit status."""
    options = _read_recipe(arguments)
    try:
        from unbroken.runs.recipe import load_recipe
        from unbroken.runs.settings import format_help
        from unbroken.runs.training import run_recipe

        if {"-h", "--help", "--help-all"} & set(options):
            recipe = load_recipe(arguments.recipe)
            command = f"unbroken train {arguments.recipe or '--env NAME'}"
            shown = () if "--help-all" in options else COMMON_FIELDS
            _print_text(format_help(recipe.section, recipe.values, command=command, doc=recipe.doc, shown=shown))
            return 0
        preflight, settings = take_preflight(options)
        preflight &= arguments.preflight is not False  # before RECIPE, it is not among the recipe's options
        words = [str(arguments.recipe), *settings] if arguments.recipe is not None else ["--env", *settings[1:]]
        run_recipe(load_recipe(arguments.recipe), settings, words=words, preflight=preflight)
    except ModuleNotFoundError as error:  # of the user's own modules it is another error
        raise missing_extra(error, "training needs the train extra", "train") from error
    return 0


def _run_sampler(arguments: argparse.Namespace) -> int:
    """Sample for a trainer until it ends; returns the exit status."""
    _, settings = take_preflight(_read_recipe(arguments))  # the trainer's options, and it has made the preflight
    own_key = os.environ.pop(SAMPLER_KEY, None)  # programs that rollouts start do not get it
    if arguments.name and re.fullmatch(r"\d+-\d+", arguments.name) and not arguments.exit_with_parent:
        arguments.parser.error(f"--name must not be that of a sampler on the trainer's machine, got {arguments.name}")
    check_wait(arguments.wait_s)
    if arguments.exit_with_parent:  # before torch is loaded, which takes seconds
        from unbroken.rollout.process.worker import leave_end_to_parent

        leave_end_to_parent()
    try:
        from unbroken.runs.config import parse_address, read_key
        from unbroken.runs.recipe import SamplerRole
        from unbroken.runs.training import run_sampler

        key = read_key(arguments.key_file, field="--key-file") or own_key
        if not key:
            arguments.parser.error(f"--key-file or the variable {SAMPLER_KEY} must be given")
        role = SamplerRole(
            name=arguments.name or f"{socket.gethostname()}-{os.getpid()}",
            address=parse_address(arguments.connect, field="--connect"),
            key=key or "",
            wait_s=arguments.wait_s,
            ends_with_parent=arguments.exit_with_parent,
        )
        run_sampler(arguments.recipe, settings, role)
    except ModuleNotFoundError as error:  # of the user's own modules it is another error
        raise missing_extra(error, "a sampler needs the train extra", "train") from error
    return 0


def check_wait(wait_s: float) -> None:
    """Raise `InvalidInputError` for a --wait-s that is no number of seconds."""
    if not 0 <= wait_s < math.inf:
        raise InvalidInputError(f"--wait-s must be a number of seconds >= 0, got {wait_s}")


def _print_text(text: str) -> None:
    """Print; a reader that closes the pipe early, such as `--help | head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
