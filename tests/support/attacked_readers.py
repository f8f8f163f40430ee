"""Every reader of files that others may have written, with a file that is right."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from support.attacks import Reader
from support.recorded import write_run
from support.templates import CHATML
from support.tokenizers import make_tokenizer
from unbroken.audit.subject import read_template
from unbroken.cluster.command import describe_status
from unbroken.engines.directory import FileDirectory
from unbroken.images.decoder import encode_picture
from unbroken.images.loader import ImageLoader
from unbroken.integrations.nemo_gym import Examples
from unbroken.ledger.records import SessionRecord
from unbroken.ledger.store import open_store, open_store_reader
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.rendering.loader import load_stop_token_ids
from unbroken.rendering.template import TemplateRenderer
from unbroken.runs import config, evaluate, folder
from unbroken.runs.export import files as exported
from unbroken.runs.prompts import supervised
from unbroken.runs.records import notes
from unbroken.runs.records.files import read_records
from unbroken.runs.settings import load_toml
from unbroken.server import options
from unbroken.tinker import models
from unbroken.tinker.options import TinkerOptions
from unbroken.tinker.store import ModelFacts, TinkerStore
from unbroken.training import state
from unbroken.viewer.resources import open_runs
from unbroken.viewer.sources.models import read_recipe
from unbroken.weights.files import FileSource, describe_file, read_tensors, write_tensors, write_weights
from unbroken.weights.store import VersionStore

WEIGHTS = {"a": torch.ones(4, 4), "b": torch.zeros(3)}

NOTE = {
    "labels": ["a"], "text": "b", "set": None, "step": 1, "trajectory": "c", "sha256": "0" * 64, "time_s": 1.0,
}  # fmt: skip


def _write(place: Path, value: Any) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(value if isinstance(value, str) else json.dumps(value))
    return place


def _make_version(place: Path) -> Path:
    return write_weights(place, WEIGHTS.items(), policy_version=1).folder


def _load_version(version: Path) -> None:
    store = VersionStore(version.parent)
    files = store.fetch(store.read(version.name))
    files.check_values()
    assert dict(files.tensors()).keys() == WEIGHTS.keys()


def _make_store(place: Path) -> VersionStore:
    store = VersionStore(f"file://{place}/store", made_in=place)
    store.write(WEIGHTS.items(), policy_version=1)
    return store


def _make_in_store(place: Path, pattern: str) -> Path:
    store = _make_store(place)
    store.close()
    return next((place / "store").glob(pattern))


def _load_from_store(root: Path) -> None:
    store = VersionStore(f"file://{root}")
    try:
        if (newest := store.find_newest()) is not None:
            store.fetch(newest)
    finally:
        store.close()


def _make_state(place: Path) -> Path:
    (place / ".metadata").write_bytes(b"x")
    files = [dataclasses.asdict(describe_file(place / ".metadata"))]
    model = {"source": "tiny", "architecture": "A", "dtype": "float32", "adapter": None, "config": {}}
    found = {"format": 1, "policy_version": 1, "num_updates": 1, "processes": [{}], "trained": ["a"], "frozen": ""}
    return _write(place / "state.json", {**found, "model": model, "files": files})


def _make_tinker_state(place: Path) -> Path:
    (file,) = write_tensors(place, WEIGHTS.items(), file_bytes=1 << 20)
    files = [dataclasses.asdict(describe_file(file))]
    return _write(place / "tinker.json", {"format": 1, "base": "tiny", "lora": None, "num_steps": 1, "files": files})


def _make_run(place: Path, pattern: str) -> Path:
    return next(write_run(place / "run").glob(pattern))


def _show_run(place: Path) -> None:
    resources = open_runs([place])
    for name in resources.list_paths():
        json.dumps(resources.get(name), allow_nan=False)


def _read_addresses(place: Path) -> None:
    directory = FileDirectory(place)
    directory.addresses()
    directory.addresses()


def _make_image(place: Path) -> Path:
    (place / "a.png").write_bytes(encode_picture(Image.new("RGB", (8, 8))).data)
    return place / "a.png"


def _make_sessions(place: Path) -> Path:
    store = open_store(str(place))
    now = time.time()
    store.create(
        SessionRecord(
            session_id="s",
            key_digest=b"k" * 32,
            created_s=now,
            expires_s=now + 60,
            settings={"a": 1},
        )
    )
    store.close()
    return place / "sessions.sqlite3"


def _use_sessions(path: Path) -> None:
    store = open_store(str(path.parent))
    try:
        for record in store.list_sessions():
            store.load(record.session_id)
        store.find_by_key(b"k" * 32)
    finally:
        store.close()


def _read_sessions(path: Path) -> None:
    reader = open_store_reader(str(path.parent))
    listed = reader.list_sessions(0, 1000)
    for each in listed:
        reader.load(each.session_id)


def _make_tinker_store(place: Path) -> Path:
    store = TinkerStore(str(place), files=place / "files")
    store.put_model(ModelFacts(model_id="run", base_model="tiny", lora=None), owner="me")
    store.close()
    return place / "tinker.sqlite3"


def _use_tinker_store(path: Path) -> None:
    store = TinkerStore(str(path.parent), files=path.parent / "files")
    try:
        store.find_model("run", owner="me")
        store.list_checkpoints(owner="me")
    finally:
        store.close()


@functools.cache
def _make_chatml() -> TemplateRenderer:
    return TemplateRenderer(make_tokenizer(CHATML))


def _read_supervised(path: Path) -> None:
    assert [*supervised._Rows(str(path), source="tiny", renderer=_make_chatml(), context_length=999)]


CONVERSATION = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}], "tools": None}
IDS = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "tokenizer": "tiny", "images": []}
EXAMPLE = {"responses_create_params": {"input": "x"}}
STATUS = {
    "time_s": 1.0, "versions": {"1": 2}, "nodes": [{"name": "n"}], "gang": {"restarts": 0, "reason": ""}, "parts": [],
}  # fmt: skip
REPORT = {"format": 1, "task": "t", "settings": {"seed": 1}, "models": [], "differences": []}

READERS: dict[str, Reader] = {
    "manifest of a version": Reader(
        make=lambda place: _make_version(place) / "manifest.json", read=lambda path: _load_version(path.parent),
        kind="json", says="version-00000001",
    ),
    "weights of a version": Reader(
        make=lambda place: _make_version(place) / "00000.safetensors", read=lambda path: _load_version(path.parent),
        kind="weights", says="00000.safetensors",
    ),
    "weights of a folder": Reader(
        make=lambda place: next(iter(write_tensors(place, WEIGHTS.items(), file_bytes=1 << 20))),
        read=lambda path: (FileSource(path.parent).read("cpu"), [*read_tensors([path])]),
        kind="weights", says=".safetensors",
    ),
    "newest of a store": Reader(
        make=lambda place: _make_in_store(place, "newest.json"), read=lambda path: _load_from_store(path.parent),
        kind="json", says="store", may_be_missing=True,
    ),
    "manifest in a store": Reader(
        make=lambda place: _make_in_store(place, "version-*/manifest.json"),
        read=lambda path: _load_from_store(path.parent.parent), kind="json", says="store",
    ),
    "weights in a store": Reader(
        make=lambda place: _make_in_store(place, "version-*/*.safetensors"),
        read=lambda path: _load_from_store(path.parent.parent), kind="weights", says="store",
    ),
    "state of a checkpoint": Reader(
        make=_make_state, read=lambda path: state.read_state(path.parent), kind="json", says="place",
    ),
    "state of a Tinker checkpoint": Reader(
        make=_make_tinker_state, read=lambda path: models._read_state(path.parent), kind="json", says="place",
    ),
    "recipe of a run": Reader(
        make=lambda place: _write(
            place / "recipe.json", {"recipe": "r", "settings": {"seed": 1}, "files": {}, "code": ""}
        ),
        read=lambda path: folder.read_recipe(path.parent), kind="json",
    ),
    "recipe of a run, for a page": Reader(
        make=lambda place: _write(place / "recipe.json", {"recipe": "r", "settings": {"model": "m"}}),
        read=lambda path: read_recipe(path.parent), kind="json", is_lenient=True,
    ),
    "notes of rollouts": Reader(
        make=lambda place: _write(place / notes.NOTES_FILE, NOTE),
        read=lambda path: notes.read_notes(path.parent), kind="json", is_lenient=True,
    ),
    "report of an evaluation": Reader(
        make=lambda place: _write(place / "report.json", REPORT),
        read=lambda path: evaluate._begin_report(path.parent, "t", {"seed": 1}), kind="json", says="place",
        may_be_missing=True,  # a folder without a report is a new one
    ),
    "facts of an exported model": Reader(
        make=lambda place: _write(place / exported.INFO, {"step": 1, "source": "m"}),
        read=lambda path: exported.read_info(path.parent), kind="json", is_lenient=True,
    ),
    "state of a cluster": Reader(
        make=lambda place: _write(place / "cluster" / "state.json", STATUS),
        read=lambda path: describe_status(path.parent.parent), kind="json", says="OUTPUT",
    ),
    "stop ids of a model": Reader(
        make=lambda place: _write(place / "generation_config.json", {"eos_token_id": [1, 2]}),
        read=lambda path: load_stop_token_ids(path.parent), kind="json", is_lenient=True,  # a model may have none
    ),
    "tokenizer.json": Reader(
        make=lambda place: _write(place / "tokenizer.json", make_tokenizer("{{ x }}").backend_tokenizer.to_str()),
        read=TokenTexts.load, kind="json",
    ),
    "examples of NeMo Gym": Reader(
        make=lambda place: _write(place / "examples.jsonl", EXAMPLE), read=Examples, kind="lines",
    ),
    "supervised conversations": Reader(
        make=lambda place: _write(place / "sft.jsonl", CONVERSATION), read=_read_supervised, kind="lines",
    ),
    "supervised ids": Reader(
        make=lambda place: _write(place / "rows.jsonl", IDS), read=_read_supervised, kind="lines",
    ),
    "rollouts": Reader(
        make=lambda place: _make_run(place, "rollouts/step-00000001*"), read=lambda path: [*read_records(path)],
        kind="gzip",
    ),
    "metrics, for a page": Reader(
        make=lambda place: _write(write_run(place / "run") / "metrics" / "metrics.jsonl", {"step": 0, "reward": 1.0}),
        read=lambda path: _show_run(path.parent.parent), kind="bytes", is_lenient=True,
    ),
    "template of an audit": Reader(
        make=lambda place: _write(place / "chat.jinja", "{{ messages }}"), read=read_template, kind="text",
    ),
    "key of a server": Reader(
        make=lambda place: _write(place / "key", "secret\n"),
        read=lambda path: options.read_key(None, path, "--api-key"), kind="text", says="--api-key",
    ),
    "key of samplers": Reader(
        make=lambda place: _write(place / "key", "secret\n"), read=lambda path: config.read_key(path, field="key"),
        kind="text",
    ),
    "keys of Tinker's clients": Reader(
        make=lambda place: _write(place / "keys", "tml-a\n"),
        read=lambda path: TinkerOptions(tinker_keys=path).read_keys(), kind="bytes", says="--tinker-keys",
    ),
    "recipe": Reader(make=lambda place: _write(place / "recipe.toml", "a = 1\n"), read=load_toml, kind="toml"),
    "list of servers": Reader(
        make=lambda place: _write(place / "engines.txt", "http://10.0.0.1:8000\n"), read=_read_addresses, kind="text",
        is_lenient=True,
    ),
    "sessions of a gateway": Reader(
        make=_make_sessions, read=_use_sessions, kind="sqlite", says="sessions.sqlite3", may_be_missing=True,
    ),
    "sessions, for a page": Reader(make=_make_sessions, read=_read_sessions, kind="sqlite", says="sessions.sqlite3"),
    "store of Tinker": Reader(
        make=_make_tinker_store, read=_use_tinker_store, kind="sqlite", says="tinker.sqlite3", may_be_missing=True,
    ),
    "image": Reader(make=_make_image, read=ImageLoader().load, kind="image", says="image"),
}  # fmt: skip
"""What an error names is the file, unless `says` has something else; `place` is the folder of the attack."""
