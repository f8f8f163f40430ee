"""The `unbroken` command."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unbroken import __version__
from unbroken.audit.command import add_audit_parser
from unbroken.cluster.command import add_cluster_parser
from unbroken.demo.command import add_demo_parser, add_new_parser
from unbroken.engines.registry import check_words
from unbroken.errors import UnbrokenError, missing_extra
from unbroken.gateway.options import (
    add_gateway_arguments,
    add_session_arguments,
    read_gateway_options,
    read_session_options,
)
from unbroken.reports import link_pages
from unbroken.runs.agent import add_agent_parser, run_agent
from unbroken.runs.command import (
    add_doctor_parser,
    add_eval_parser,
    add_numerics_parser,
    add_sampler_parser,
    add_train_parser,
    add_verify_parser,
    make_check,
    run_eval,
)
from unbroken.runs.export.command import add_export_parser
from unbroken.runs.signals import INTERRUPTED, TERMINATED, Terminated
from unbroken.server.options import add_arguments as add_serve_arguments
from unbroken.server.options import name_model, read_options
from unbroken.tinker.options import add_tinker_arguments, read_tinker_options
from unbroken.viewer.command import add_view_parser


class _Parser(argparse.ArgumentParser):
    def __init__(self, *arguments: Any, is_short: bool = False, **settings: Any) -> None:
        """With `is_short`, the help shows rare options by their names (`OptionGroup`)."""
        super().__init__(*arguments, **settings)
        self.is_short = is_short
        self.add_argument("--help-all", action="help", help="show it with every option, and exit")

    def format_help(self) -> str:
        """The help, with the addresses of the pages that it names."""
        return link_pages(super().format_help())


_COMPLETIONS = {
    "bash": ".local/share/bash-completion/completions/unbroken",
    "fish": ".config/fish/completions/unbroken.fish",
    "zsh": ".local/share/zsh/site-functions/_unbroken",
}
"""Where each shell looks for completions, below the home folder; zsh if its `fpath` has the folder."""


class _InstallCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, given: Any, shell: Any, option: str | None = None) -> None:
        shell = shell or Path(os.environ.get("SHELL", "")).name
        if shell not in _COMPLETIONS:
            parser.error(f"{option} must be followed by one of {', '.join(_COMPLETIONS)}, got {shell or 'nothing'!r}")
        try:
            import shtab
        except ModuleNotFoundError as error:
            parser.error(str(missing_extra(error, f"{option} needs the completion extra", "completion")))
        with suppress(ModuleNotFoundError, UnbrokenError):  # without the extra train there is nothing to train
            from unbroken.runs.recipe import load_recipe

            for name in load_recipe(None).section.all_fields():
                given.commands["train"].add_argument(f"--{name.replace('_', '-')}")
        target = Path.home() / _COMPLETIONS[shell]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(shtab.complete(parser, shell), "utf-8")
        hint = f"; in ~/.zshrc, before compinit: fpath+={target.parent}" if shell == "zsh" else ""
        print(f"wrote {target}: new shells complete the words of unbroken{hint}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 for success, 1 for an error, 2 for wrong usage; `audit` has more."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():  # in a log, each state of a library's progress bar would be a line
        os.environ.setdefault("TQDM_DISABLE", "1")
    parser = _parser(is_short=not any(word.startswith(("--help-all", "--install-completion")) for word in words))
    if words[:1] == ["serve"]:
        words = name_model(words)
    words, recipe_options = _split_recipe_options(words)
    arguments = argparse.Namespace(advice="")
    """`advice` stands behind "interrupted" or "terminated": what is kept, or continues."""
    try:
        _, others = parser.parse_known_args(words, arguments)
        if others and arguments.run not in (_serve, run_eval, run_agent):
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        arguments.others, arguments.recipe_options = others, recipe_options
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except UnbrokenError as error:
        print(f"unbroken: {link_pages(str(error))}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as ending:
        return _report_ending(ending, arguments.advice)
    except BrokenPipeError:
        return _drop_output()


def _report_ending(ending: KeyboardInterrupt | Terminated, advice: str) -> int:
    """Say how a command was ended, and what is kept: its `advice`, or what a run noted; returns the exit status."""
    how, status = ("terminated", TERMINATED) if isinstance(ending, Terminated) else ("interrupted", INTERRUPTED)
    notes = "".join(f"; {note}" for note in (ending.__notes__ if hasattr(ending, "__notes__") else ()))
    print(f"unbroken: {how}{notes or advice}", file=sys.stderr)
    return status


def _drop_output() -> int:
    """The exit status once the reader of the output went away, as `| head` does; raises the error if it did not."""
    pipe = select.poll()
    with suppress(io.UnsupportedOperation):  # standard output is an object of Python: no pipe
        pipe.register(sys.stdout.fileno(), 0)  # an error is reported without being asked for
    if not pipe.poll(0):
        raise
    # The flush at exit would fail too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _parser(*, is_short: bool = False) -> argparse.ArgumentParser:
    parser = _Parser(prog="unbroken", description="Token-in, token-out rollouts and RL training.")
    parser.add_argument("--version", action="version", version=f"unbroken {__version__}")
    parser.add_argument(
        "--install-completion", action=_InstallCompletion, nargs="?", metavar="SHELL", help="for bash, fish or zsh"
    )
    parser_class: Any = partial(_Parser, is_short=is_short)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=parser_class)
    parser.set_defaults(commands=commands.choices)
    add_demo_parser(commands)
    add_new_parser(commands)
    add_train_parser(commands)
    add_eval_parser(commands)
    add_agent_parser(commands)
    add_sampler_parser(commands)
    add_cluster_parser(commands)
    add_export_parser(commands)
    add_numerics_parser(commands)
    serve = commands.add_parser(
        "serve",
        help="serve a model: raw ids in, exact ids out",
        description="Serve a model over HTTP, in the dialects of our client, vLLM, TRL and OpenAI.",
        allow_abbrev=False,
    )
    add_serve_arguments(serve)
    _add_check_argument(serve)
    add_session_arguments(serve)
    add_tinker_arguments(serve)
    serve.set_defaults(run=_serve)
    gateway = commands.add_parser(
        "gateway",
        help="record agents that know a base URL and a key, over servers that sample",
        description="Give agents a base URL and a key, and record what they do as exact token trees.",
        allow_abbrev=False,
    )
    add_gateway_arguments(gateway)
    gateway.set_defaults(run=_gateway)
    add_audit_parser(commands)
    add_view_parser(commands)
    add_doctor_parser(commands)
    add_verify_parser(commands)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    options = read_options(arguments, arguments.others)
    check_words(options.engine, options.engine_options)
    if arguments.checks_policy:
        options = replace(options, check=make_check(options.model, options.engine_options))
    sessions = read_session_options(arguments)
    tinker = read_tinker_options(arguments)
    try:
        if tinker is not None:
            from unbroken.tinker.server import serve_tinker

            return serve_tinker(options, tinker)
        if find_spec("torch") is None:  # not imported here: vLLM sets its variables before it does
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        from unbroken.gateway.serve import serve_with_sessions
        from unbroken.server.process import serve
    except ModuleNotFoundError as error:
        extra = "serve" if tinker is None else "tinker"
        raise missing_extra(error, f"serving needs the {extra} extra", extra) from error
    return serve(options) if sessions is None else serve_with_sessions(options, sessions)


def _gateway(arguments: argparse.Namespace) -> int:
    options = read_gateway_options(arguments)
    try:
        from unbroken.gateway.serve import serve_gateway
    except ModuleNotFoundError as error:
        raise missing_extra(error, "a gateway needs the gateway extra", "gateway") from error
    return serve_gateway(options)


def _split_recipe_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of `unbroken cluster`: its own, and what follows `--`."""
    at = words.index("--") if words[:1] == ["cluster"] and "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _add_check_argument(serve: argparse.ArgumentParser) -> None:
    """Add `--check` to the options of `unbroken serve`."""
    serve.add_argument(
        "--check",
        action="store_true",
        dest="checks_policy",
        help="before it serves, compare the engine's logprobs with transformers' own pass of the model, in float32 on "
        "a GPU with room or on the CPU: ends with both numbers if they have two policies (I9)",
    )
