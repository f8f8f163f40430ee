"""The command `unbroken export SOURCE TARGET`: rollouts as rows, or a checkpoint as a model."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, missing_extra

_EPILOG = """\
unbroken export runs/sums rows.parquet                       rollouts of a run: ids, masks, logprobs, versions, rewards
unbroken export runs/sums rows.jsonl --steps 10:20           of the steps 10 to 19
unbroken export runs/sums samples.eval --kind evaluation     evaluations, as a log of Inspect
unbroken export runs/sessions rows.parquet --form verl       sessions of a gateway; also a postgresql:// URL
unbroken export runs/sums rows --form trl                    a folder for datasets.load_from_disk
unbroken export runs/sums model                              the newest checkpoint as a model"""


def add_export_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    export = commands.add_parser(
        "export",
        help="write rollouts as rows for other tools, or make a model of a checkpoint",
        description="Write rollouts of a run, or sessions of a gateway, as rows for other tools.\nOr make a model for "
        "transformers and vLLM of a checkpoint: config, weights,\ntokenizer, chat template and image processor.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    export.add_argument("source", metavar="SOURCE", help="a run's folder, a gateway's store, or a checkpoint's folder")
    export.add_argument(
        "target",
        type=Path,
        metavar="TARGET",
        help="rows: a new file .parquet, .jsonl or .eval (Inspect), or with --form a new folder; otherwise the model's "
        "folder, which must be new or empty",
    )
    rows = export.add_argument_group("rows")
    rows.add_argument("--form", choices=("rows", "trl", "verl"), help="whose rows (default: ours, with all columns)")
    rows.add_argument("--steps", metavar="A:B", help="of the steps from A up to, without, B (default: all)")
    rows.add_argument(
        "--kind", help="training, evaluation, or the name of an evaluation's set (default: training, if it has any)"
    )
    model = export.add_argument_group("model")
    add = model.add_argument
    add("--model", metavar="SOURCE", help="folder or hub name of the model that was trained, if it has moved")
    add("--merged", action="store_true", help="with LoRA: a whole model, instead of the adapters alone")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="by default that of the model's own files")
    add("--shard-gb", type=float, default=5.0, metavar="GB", help="maximum size of a file in 10^9 bytes (default: 5)")
    add("--push-to-hub", metavar="REPO", help="a repository on the Hugging Face Hub that gets the model")
    add("--private", action="store_true", help="create the repository as a private one")
    export.set_defaults(run=_run_export)


def _run_export(arguments: argparse.Namespace) -> int:
    """Write rows or a model; returns the exit status."""
    if arguments.target.suffix in (".json", ".csv", ".arrow", ".gz", ".zst", ".zip"):
        raise InvalidInputError(f"TARGET must be a file .parquet, .jsonl or .eval, or a folder, got {arguments.target}")
    if arguments.form is not None or arguments.target.suffix in (".parquet", ".jsonl", ".eval"):
        return _export_rows(arguments)
    for name in ("steps", "kind"):
        if getattr(arguments, name) is not None:
            raise InvalidInputError(f"--{name} must be left out for a model: rows need --form or a file .parquet")
    return _export_model(arguments)


def _export_rows(arguments: argparse.Namespace) -> int:
    for name in ("model", "merged", "dtype", "push_to_hub", "private"):
        if getattr(arguments, name):
            raise InvalidInputError(f"--{name.replace('_', '-')} must be left out for rows, got {arguments.target}")
    steps = None
    if arguments.steps is not None:
        if (match := re.fullmatch(r"(\d*):(\d*)", arguments.steps)) is None:
            raise InvalidInputError(f"--steps must be A:B, such as 10:20, got {arguments.steps!r}")
        steps = range(int(match[1] or 0), int(match[2] or 10**12))
    from unbroken.runs.export.rows import RowForm, export_rows

    form = RowForm(arguments.form or "rows")
    counts = export_rows(arguments.source, arguments.target, form=form, steps=steps, kind=arguments.kind)
    rows = f"{counts['rows']} rows of " if "rows" in counts else ""
    noted = f", {counts['noted']} with a note" if counts["noted"] else ""
    print(f"{rows}{counts['rollouts']} rollouts in {arguments.target}{noted}")
    return 0


def _export_model(arguments: argparse.Namespace) -> int:
    """Export, and send the model to the hub if that was asked for."""
    try:
        from unbroken.runs.export.checkpoint import export_checkpoint
        from unbroken.runs.export.files import create_repository, upload
        from unbroken.runs.export.kept import make_form
    except ModuleNotFoundError as error:
        raise missing_extra(error, "export needs the train extra", "train") from error
    form = make_form(merged=arguments.merged, dtype=arguments.dtype, shard_gb=arguments.shard_gb)
    if arguments.push_to_hub is not None:
        create_repository(arguments.push_to_hub, private=arguments.private)
    checkpoint = export_checkpoint(Path(arguments.source), arguments.target, form=form, source=arguments.model)
    print(f"model of {checkpoint} in {arguments.target}")
    if arguments.push_to_hub is not None:
        address = upload(arguments.target, arguments.push_to_hub, message=f"Checkpoint {checkpoint.name}")
        print(f"model at {address}")
    return 0
