"""The command `unbroken view RUN [RUN ...] [--export FOLDER]`."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError

_EPILOG = """\
unbroken view runs/lookup                        prints a URL: open it in a browser on this machine
unbroken view runs/lookup runs/lookup-rloo       two to four runs, their curves in the same charts
unbroken view runs/sessions                      the sessions of a gateway: --store runs/sessions
unbroken view runs/tinker                        a server with the Tinker API: --tinker-store runs/tinker
unbroken view runs/lookup --export page          writes a folder: open page/index.html, or send it

A run on another machine: ssh -L 8700:127.0.0.1:8700 MACHINE unbroken view runs/lookup --port 8700"""


def add_view_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    view = commands.add_parser(
        "view",
        help="look at a run in a browser: its curves, its rollouts, every token",
        description="Look at a run in a browser, while it runs or later: its curves, its rollouts, every token.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    view.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="output folder of a run, or the store of a gateway or Tinker server: folder or postgresql:// URL; up to 4",
    )
    view.add_argument("--export", type=Path, metavar="FOLDER", help="write the pages into a folder, and serve nothing")
    view.add_argument(
        "--max-rollouts",
        type=int,
        default=2000,
        metavar="N",
        help="rollouts of each run that an export has whole, evenly spread over its steps (default: 2000)",
    )
    view.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    view.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="where the ids have their text from (default: the run's model)"
    )
    view.set_defaults(run=_run_view)


def _run_view(arguments: argparse.Namespace) -> int:
    """Serve the pages until an interrupt, or export them; returns the exit status.

    Raises:
        InvalidInputError: a folder holds no run and no store, or a port is in use.
        StoreError: a store cannot be read.
    """
    from unbroken.viewer.resources import open_runs
    from unbroken.viewer.server import ViewerServer, export_page

    resources = open_runs(arguments.runs, tokenizer=arguments.tokenizer)
    if arguments.export is not None:
        if arguments.max_rollouts < 1:
            raise InvalidInputError(f"--max-rollouts must be >= 1, got {arguments.max_rollouts}")
        num_files = export_page(resources, arguments.export, max_rollouts=arguments.max_rollouts)
        print(f"{num_files} files in {arguments.export}: open {arguments.export / 'index.html'}")
        return 0
    with ViewerServer(resources, port=arguments.port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.url}\nends with Ctrl-C", flush=True)
        server.serve_forever()
    return 0
