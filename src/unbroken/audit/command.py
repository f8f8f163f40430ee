"""The command line of `unbroken audit`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.audit.config import DEFAULT_CONVERSATIONS, AuditConfig, AuditTarget
from unbroken.limited_process import DEFAULT_TIMEOUT_S, ProcessLimits

if TYPE_CHECKING:
    from unbroken.audit.report import AuditReport

_DESCRIPTION = """\
Audits a chat template for multi-turn, tool-calling training: what it does to the
history, how turns end, what is lost or rewritten when text is tokenised again,
and whether our bridges are exact, over random conversations. Only the tokenizer
of the model is loaded; no code in its folder is executed. It runs in a process
of its own, with limits of time and memory."""
_EPILOG = """\
exit status:
  0  fit: every turn is bridged exactly
  3  partly fit: some turns or all fork, or something is not carried; the
     verdict says what, and what to do
  4  not usable: no turn end can be found, a bridge was wrong, sampling would
     stop inside a turn, or the template accepts no conversation
  5  undecided: give the model's tokenizer, as the control tokens of the
     template alone are not recognised, or guessed wrong
  1  an error: in the model's files, in the template, or a limit of time or memory
  2  wrong usage

examples:
  unbroken audit Qwen/Qwen3-8B
  unbroken audit path/to/model --option enable_thinking=false --html audit.html
  unbroken audit --template chat_template.jinja --json"""


def add_audit_parser(commands: Any) -> None:
    """Add the command to the subparsers of `unbroken`."""
    parser = commands.add_parser(
        "audit",
        help="check whether a model's chat template can carry multi-turn, tool-calling training",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_OR_PATH", help="a folder with a tokenizer, or a model's name on the hub")
    add(
        "--template",
        metavar="FILE_OR_NAME",
        help="audit this template instead of the model's; without a model: with "
        "a stand-in tokenizer that has its control tokens",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable for the template; the value is JSON or else text (may be repeated)",
    )
    add("--parser", metavar="NAME", help="the format of completions (default: found from the template)")
    add(
        "--conversations",
        type=int,
        default=DEFAULT_CONVERSATIONS,
        metavar="N",
        help=f"random conversations to bridge (default: {DEFAULT_CONVERSATIONS})",
    )
    add("--seed", type=int, default=0, metavar="S", help="seed of everything random (default: 0)")
    add(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"stop the audit of a template after this many seconds (default: {DEFAULT_TIMEOUT_S})",
    )
    add("--json", action="store_true", help="print the report as JSON; docs/audit.md describes it")
    add("--html", type=Path, metavar="FILE", help="write the report as a page that opens without a network")
    add("--table", nargs="+", type=Path, metavar="DIR_OR_FILE", help="audit all *.jinja files there, and write a table")
    add("--output", type=Path, metavar="FILE", help="write the table of --table here (default: print it)")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.conversations < 1:
        parser.error(f"--conversations must be 1 or more, got {arguments.conversations}")
    if not 0 < arguments.timeout < math.inf:
        parser.error(f"--timeout must be a number of seconds, more than 0, got {arguments.timeout:g}")
    if arguments.table is not None:
        others = (
            arguments.model,
            arguments.template,
            arguments.json,
            arguments.html,
            arguments.option,
            arguments.parser,
        )
        if any(others):
            parser.error(
                "--table goes with --output, --conversations, --seed and --timeout only: its templates have no "
                "options and no parser in common"
            )
        return _write_table(arguments)
    if arguments.output is not None:
        parser.error("--output goes with --table; a page is written with --html")
    if arguments.model is None and arguments.template is None:
        parser.error("give MODEL_OR_PATH, or --template FILE, or both")
    from unbroken.audit.process import run_in_process

    target = AuditTarget(
        model=arguments.model,
        template=arguments.template,
        options=dict(_read_option(parser, text) for text in arguments.option),
        parser=arguments.parser,
    )
    report = run_in_process(target, _get_config(arguments), _get_limits(arguments))
    _show_report(report, arguments)
    return report.exit_code


def _show_report(report: AuditReport, arguments: argparse.Namespace) -> None:
    from unbroken.audit.output import make_report, to_html
    from unbroken.reports import make_printable, write_file

    for name in report.about.unread_options:
        print(f"unbroken: warning: the template never reads the option {make_printable(name)!r}", file=sys.stderr)
    if arguments.html is not None:
        write_file(arguments.html, to_html(report))
    if arguments.json:
        print(make_report(report).to_json(), end="")
        return
    print(make_report(report).to_text(), end="")
    if arguments.html is not None:
        print(f"page: {arguments.html}")


def _write_table(arguments: argparse.Namespace) -> int:
    from unbroken.audit.table import find_templates, make_table
    from unbroken.reports import write_file

    files = find_templates(arguments.table)
    table = make_table(
        files, _get_config(arguments), _get_limits(arguments), progress=lambda line: print(line, file=sys.stderr)
    )
    if arguments.output is None:
        print(table, end="")
    else:
        write_file(arguments.output, table)
        print(f"{len(files)} templates: {arguments.output}")
    return 0


def _get_config(arguments: argparse.Namespace) -> AuditConfig:
    return AuditConfig(seed=arguments.seed, num_conversations=arguments.conversations)


def _get_limits(arguments: argparse.Namespace) -> ProcessLimits:
    return ProcessLimits(timeout_s=arguments.timeout)


def _read_option(parser: argparse.ArgumentParser, text: str) -> tuple[str, Any]:
    """Read a variable of the template; the value is JSON or else text."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        parser.error(f"--option must be KEY=VALUE, where KEY is the name of a variable, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
