"""Fail if a module reads a file or parses bytes outside of `unbroken.untrusted` without a word here: `make check`.

What somebody else wrote comes in through `untrusted`. `OWN` has the modules that read something else, how often, and
whose it is; a new read there, or anywhere else, goes through `untrusted`, or is counted here with its reason.
`--list` prints how many reads there are now.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
BOUNDARY = "unbroken.untrusted"
METHODS = {"read_text", "read_bytes", "cat_file", "ParseFromString", "FromString"}
FUNCTIONS = {
    f"{module}.{name}"
    for module, names in {
        "json": ("load", "loads"), "orjson": ("loads",), "tomllib": ("load", "loads"), "pickle": ("load", "loads"),
        "torch": ("load",), "np": ("load",), "gzip": ("open", "GzipFile"), "os": ("open",), "Image": ("open",),
    }.items()
    for name in names
} | {"open", "safe_open", "load_file"}  # fmt: skip
"""As they are called in the package."""


OWN: dict[str, tuple[int, str]] = {
    "unbroken.audit.checks.template": (1, "what the audit rendered itself"),
    "unbroken.audit.command": (1, "the user's command line"),
    "unbroken.cli": (1, "/dev/null"),
    "unbroken.client.calls": (3, "answers that were bounded as they came, and ids that were encoded here"),
    "unbroken.cluster.driver": (2, "logs, metrics and the lock of its own run"),
    "unbroken.cluster.processes": (1, "logs of its own processes"),
    "unbroken.cluster.registry": (4, "its own log and state"),
    "unbroken.demo.model": (1, "a file of the package"),
    "unbroken.demo.run": (2, "metrics of its own run"),
    "unbroken.demo.warm": (2, "files of the package"),
    "unbroken.engines.vllm.causes": (2, "what processes of its own engine wrote"),
    "unbroken.engines.vllm.prompts": (1, "settings that were checked when the request came"),
    "unbroken.images.decoder": (2, "bytes whose size and header are checked first"),
    "unbroken.images.processor": (2, "settings that were checked when the request came"),
    "unbroken.integrations.harbor": (1, "a digest of tasks' files, up to a size"),
    "unbroken.ledger.matching": (2, "arguments of a call in a body that was checked; deep ones are caught"),
    "unbroken.ledger.store.sql": (2, "rows of its own store"),
    "unbroken.ledger.store.sqlite": (3, "the lock and the database of its own store"),
    "unbroken.ledger.store.tables": (9, "rows of its own store; the page checks them"),
    "unbroken.limited_process": (1, "/proc"),
    "unbroken.messages": (1, "arguments of a call in a body that was checked; deep ones are caught"),
    "unbroken.rendering.encoding.safe_encoder": (3, "what the tokenizers library wrote"),
    "unbroken.rendering.encoding.text_codec": (1, "what the tokenizers library wrote"),
    "unbroken.rendering.encoding.tokenizer": (1, "what another process of ours wrote"),
    "unbroken.rendering.loader": (2, "a digest of a tokenizer's files, and its own sealed cache"),
    "unbroken.rendering.message_format": (1, "arguments of a call in a body that was checked"),
    "unbroken.rendering.parsing.syntax.json_calls": (
        1,
        "what the model sampled; deep JSON is caught",
    ),
    "unbroken.rollout.agents.command": (2, "/proc, and a file that is written"),
    "unbroken.rollout.conversations": (1, "arguments of a call in messages that were checked"),
    "unbroken.rollout.process.channel": (3, "behind the proof of a key, as its docstring says"),
    "unbroken.runs.agent": (1, "its own task file"),
    "unbroken.runs.command": (1, "/dev/null"),
    "unbroken.runs.engines": (1, "the log of a server that the run started"),
    "unbroken.runs.evaluate": (1, "a digest of weights"),
    "unbroken.runs.evaluation.evaluator": (3, "its own evaluations"),
    "unbroken.runs.export.rows": (2, "its own temporary rows, and records that were checked"),
    "unbroken.runs.folder": (4, "locks, files that are written, and digests of the user's files"),
    "unbroken.runs.numerics": (1, "outputs of its own process"),
    "unbroken.runs.process_file": (4, "what the kernel counts, and a file that is written"),
    "unbroken.runs.processes": (1, "the store of its own run"),
    "unbroken.runs.prompts.dataset": (2, "cells of a data set, which the datasets library reads"),
    "unbroken.runs.prompts.images": (1, "images of a data set, by the decoder's rules"),
    "unbroken.runs.records.conversations": (1, "what it wrote itself"),
    "unbroken.runs.records.files": (1, "packed lines, opened inside a folder with limits"),
    "unbroken.runs.records.notes": (1, "a file of notes that is written, once it is no link"),
    "unbroken.runs.records.recorded": (1, "what it has written itself, to compare it as JSON"),
    "unbroken.runs.settings": (2, "TOML that was read with limits, and the command line"),
    "unbroken.runs.teachers": (2, "settings of image processors, as this package describes them"),
    "unbroken.server.http.idempotency": (1, "a body that the guard bounded"),
    "unbroken.server.http.known_bodies": (2, "the new part of a body that the guard bounded"),
    "unbroken.server.http.json": (1, "a body that the guard bounded, and whose values are counted"),
    "unbroken.server.images": (1, "settings of its own image processor"),
    "unbroken.server.routes.gemini": (1, "arguments of a call that was parsed"),
    "unbroken.server.routes.messages": (1, "arguments of a call that was parsed"),
    "unbroken.server.routes.responses": (1, "arguments of a call that was parsed"),
    "unbroken.server.wire.images": (2, "settings in a body that was checked"),
    "unbroken.server.wire.responses": (1, "arguments of a call in a body that was checked; deep ones are caught"),
    "unbroken.timeline": (4, "the timeline of its own run"),
    "unbroken.tinker.api": (1, "bodies that the guard bounded, in protobuf once fields are counted"),
    "unbroken.tinker.losses": (1, "protobuf, once its fields are counted"),
    "unbroken.tinker.models": (2, "weights whose digests were compared"),
    "unbroken.tinker.store": (7, "rows of its own store"),
    "unbroken.training.metrics.step_log": (4, "what the kernel counts"),
    "unbroken.training.metrics.trackers": (2, "ids of its own runs"),
    "unbroken.training.metrics.writer": (2, "metrics of its own run"),
    "unbroken.training.model.pretrained": (4, "what transformers and PEFT wrote of a config"),
    "unbroken.training.policies": (1, "weights whose digests were compared"),
    "unbroken.training.state": (2, "what was written in the same call; a pickle that may name types of tensors alone"),
    "unbroken.types.recorded": (1, "an .npy in base64, without pickles"),
    "unbroken.types.sampling": (1, "a schema in a body that was checked; deep ones are caught"),
    "unbroken.viewer.assets": (1, "a file of the package"),
    "unbroken.viewer.reports": (1, "a file of the package"),
    "unbroken.viewer.sources.retokenised": (1, "settings that the page made"),
    "unbroken.weights.files": (3, "digests of files whose sizes were compared, regular safetensors, and its own notes"),
    "unbroken.weights.folders": (1, "a folder that is flushed"),
    "unbroken.weights.memory": (1, "shared memory of a process of ours"),
    "unbroken.weights.store": (7, "files that it has copied with limits, and a folder's lock"),
}
"""How often a module reads at most, and whose it is."""


def main() -> int:
    """Compare the reads of each module with `OWN`; 1 if there are others."""
    found = {}
    for path in sorted((SOURCE / "unbroken").rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if name != BOUNDARY and (number := count_reads(ast.parse(path.read_text()))):
            found[name] = number
    if "--list" in sys.argv[1:]:
        print(*(f"{name} {number}" for name, number in found.items()), sep="\n")
    allowed = {name: number for name, (number, _) in OWN.items()}
    wrong = [
        f"{name}: {found[name]} reads, and {allowed.get(name, 0)} are known"
        for name in sorted(found)
        if found[name] > allowed.get(name, 0)
    ]
    if wrong:
        print(f"Read what others wrote by {BOUNDARY}, or say whose it is in tools/check_readers.py:")
        print(*wrong, sep="\n")
    return bool(wrong)


def count_reads(tree: ast.AST) -> int:
    """The calls that read a file, or parse what was read."""
    return sum(is_read(node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def is_read(call: ast.Call) -> bool:
    """Whether a call reads; `path.open` does if its mode says so, or there is none."""
    called = call.func
    if isinstance(called, ast.Name):
        return called.id in FUNCTIONS
    if not isinstance(called, ast.Attribute):
        return False
    owner = called.value.id if isinstance(called.value, ast.Name) else ""
    if called.attr in METHODS or f"{owner}.{called.attr}" in FUNCTIONS:
        return True
    mode = call.args[0] if call.args else None
    return (
        called.attr == "open"
        and isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and set(mode.value) <= set("rb+at")
        and bool(set(mode.value) & set("r+"))
    )


if __name__ == "__main__":
    sys.exit(main())
