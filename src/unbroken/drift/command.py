"""The command line of `unbroken drift`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.audit.command import read_option
from unbroken.audit.config import AuditTarget
from unbroken.drift.config import (
    DEFAULT_CONVERSATIONS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_TURNS,
    DEMO_TASKS,
    EMBEDDED,
    DriftConfig,
    EngineChoice,
)
from unbroken.errors import missing_extra
from unbroken.runs.signals import run_command, run_until_terminated

if TYPE_CHECKING:
    from unbroken.drift.conversations import MakeEnv
    from unbroken.drift.report import DriftReport

_DESCRIPTION = """\
Samples multi-turn tool conversations from a model, and says what retokenising
would have changed in them: the usual pipeline decodes what was sampled, parses
it into messages, renders the chat template and tokenises again. Without --model,
the model is the demo's tiny one, which is made the first time."""
_EPILOG = """\
examples:
  unbroken drift --html drift.html
  unbroken drift --model Qwen/Qwen3-0.6B --prompts conversations.jsonl --json
  unbroken drift --model Qwen/Qwen3-8B --engine http://127.0.0.1:8000

a line of --prompts (docs/drift.md):
  {"prompt": "When is it open?", "results": {"monday": "9 to 17"}, "follow_ups": ["And on Sundays?"]}"""


def add_drift_parser(commands: Any) -> None:
    """Add the command to the subparsers of `unbroken`."""
    parser = commands.add_parser(
        "drift",
        help="measure what retokenising would change in a model's own conversations",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="MODEL_OR_PATH", help="a folder or a hub's name (default: the demo's model)")
    add("--engine", action="append", default=[], metavar="URL", help=f"{EMBEDDED} (the default), or the URL of a "
        "server of the model, ours or stock vLLM (may be repeated)")  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE", help="the key of the servers")
    add("--prompts", metavar="FILE", help="conversations to begin with, one JSON object in each line; demo: the tasks "
        "of `unbroken demo` as they are, for its models (default: these tasks, with an explanation)")  # fmt: skip
    add("--conversations", type=int, default=DEFAULT_CONVERSATIONS, metavar="N", help="conversations to sample "
        f"(default: {DEFAULT_CONVERSATIONS})")  # fmt: skip
    add("--max-turns", type=int, default=DEFAULT_MAX_TURNS, metavar="N", help=f"default: {DEFAULT_MAX_TURNS}")
    add("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="ids of one turn (default: "
        f"{DEFAULT_MAX_TOKENS})")  # fmt: skip
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1")
    add("--seed", type=int, default=0, metavar="S", help="seed of tasks and sampling (default: 0)")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="a variable for the template; the value is "
        "JSON or else text (may be repeated)")  # fmt: skip
    add("--parser", metavar="NAME", help="the format of completions (default: found from the template)")
    add("--no-score", action="store_true", help="leave out the scoring pass, and with it the ratios")
    add("--demo-model", type=Path, default=Path("runs/drift/model"), metavar="DIR", help="where the demo's model is "
        "made the first time (default: runs/drift/model)")  # fmt: skip
    add("--json", action="store_true", help="print the report as JSON; docs/drift.md describes it")
    add("--row", action="store_true", help="print a row for the table of docs/drift.md")
    add("--html", type=Path, metavar="FILE", help="write the report as a page that opens without a network")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    urls = tuple(url for url in arguments.engine if url != EMBEDDED)
    if urls and (len(urls) < len(arguments.engine) or arguments.model is None):
        parser.error("--engine URL needs --model, for its tokenizer, and does not go with --engine embedded")
    if any(not url.startswith(("http://", "https://")) for url in urls):
        parser.error(f"--engine must be {EMBEDDED} or a URL, got {' '.join(urls)}")
    if arguments.json and arguments.row:
        parser.error("--json and --row are two forms of one report: give one of them")
    options = dict(read_option(parser, text) for text in arguments.option)
    try:
        import unbroken.drift.run
    except ModuleNotFoundError as error:
        raise missing_extra(error, "drift needs the train extra", "train") from error
    config = DriftConfig(
        seed=arguments.seed,
        num_conversations=arguments.conversations,
        max_turns=arguments.max_turns,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        scores=not arguments.no_score,
    )
    choice = EngineChoice(urls=urls, api_key_file=arguments.api_key_file)

    def work() -> None:
        make_env, prompts = _choose_tasks(arguments)
        model = arguments.model
        if model is None:
            with contextlib.redirect_stdout(sys.stderr):  # its progress is not part of the report
                model = str(unbroken.drift.run.ensure_demo_model(arguments.demo_model))
        target = AuditTarget(model=model, options=options, parser=arguments.parser)
        report = run_until_terminated(_make_report(target, choice, config, make_env, prompts))
        _show_report(report, arguments)

    return run_command(work, advice="the same command begins anew")


def _choose_tasks(arguments: argparse.Namespace) -> tuple[MakeEnv, str]:
    """The conversations, and what they are called in the report."""
    from unbroken.drift.conversations import load_prompts, make_demo_tasks, make_lookup_tasks

    if arguments.prompts == DEMO_TASKS or (arguments.prompts is None and arguments.model is None):
        return make_demo_tasks(arguments.seed), DEMO_TASKS
    if arguments.prompts is None:
        return make_lookup_tasks(arguments.seed), "lookup"
    file = Path(arguments.prompts)
    return load_prompts(file), file.name


async def _make_report(
    target: AuditTarget, choice: EngineChoice, config: DriftConfig, make_env: MakeEnv, prompts: str
) -> DriftReport:
    from unbroken.audit.subject import load_subject
    from unbroken.drift.run import open_engine, run_drift

    subject = load_subject(target)
    async with open_engine(choice, subject.name, vocab_size=len(subject.tokenizer)) as engine:
        return await run_drift(subject, engine, make_env, config, prompts=prompts, engine_name=choice.name)


def _show_report(report: DriftReport, arguments: argparse.Namespace) -> None:
    from unbroken.drift.report import to_html, to_row, to_text
    from unbroken.viewer.reports import write_file

    if arguments.json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    elif arguments.row:
        print(to_row(report), end="")
    else:
        print(to_text(report), end="")
    if arguments.html is not None:  # last: a page that cannot be written takes no result away
        write_file(arguments.html, to_html(report))
        if not (arguments.json or arguments.row):
            print(f"page: {arguments.html}")
