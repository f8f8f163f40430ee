"""The command `unbroken export CHECKPOINT FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unbroken.errors import missing_extra


def add_export_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    export = commands.add_parser(
        "export",
        help="make a model for transformers and vLLM of a checkpoint",
        description="Make a model for transformers and vLLM of a checkpoint: config, weights in safetensors files, "
        "tokenizer, chat template, generation config and the images' processor.",
        allow_abbrev=False,
    )
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a run's: the newest one")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="the model's folder, which must be new or empty")
    export.add_argument(
        "--model", metavar="SOURCE", help="folder or hub name of the model that was trained, if it has moved"
    )
    export.add_argument("--merged", action="store_true", help="with LoRA: a whole model, instead of the adapters alone")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="by default that of the model's own files"
    )
    export.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="maximum size of a file in 10^9 bytes (default: 5)"
    )
    export.add_argument(
        "--push-to-hub", metavar="REPO", help="a repository on the Hugging Face Hub that gets the model"
    )
    export.add_argument("--private", action="store_true", help="create the repository as a private one")
    export.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    """Export, and send the model to the hub if that was asked for; returns the exit status."""
    try:
        from unbroken.runs.export.checkpoint import export_checkpoint
        from unbroken.runs.export.files import create_repository, upload
        from unbroken.runs.export.kept import make_form
    except ModuleNotFoundError as error:
        raise missing_extra(error, "export needs the train extra", "train") from error
    form = make_form(merged=arguments.merged, dtype=arguments.dtype, shard_gb=arguments.shard_gb)
    if arguments.push_to_hub is not None:
        create_repository(arguments.push_to_hub, private=arguments.private)
    checkpoint = export_checkpoint(arguments.checkpoint, arguments.folder, form=form, source=arguments.model)
    print(f"model of {checkpoint} in {arguments.folder}")
    if arguments.push_to_hub is not None:
        address = upload(arguments.folder, arguments.push_to_hub, message=f"Checkpoint {checkpoint.name}")
        print(f"model at {address}")
    return 0
