"""What outlives the server's process: sampled sequences, models and checkpoints, in one folder.

    FOLDER/tinker.sqlite3                    rows of all that follows, and of each sampled sequence
    FOLDER/weights/RUN/NAME-HEX/             a checkpoint: the model's own files, and in sampler/ what engines take
    FOLDER/sampler_weights/RUN/NAME-HEX/     weights for sampling alone; those without a name end with their session

A file is whole before its row is written, and a row is on the disk before its request is answered.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError, StoreError
from unbroken.integrations.tinker import read_turns, split_sequence_name
from unbroken.ledger.store import open_store_reader
from unbroken.types import Logprobs, SampledSequence, TokenIds

DATABASE = "tinker.sqlite3"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (id TEXT PRIMARY KEY, ids BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sequences (
    id TEXT PRIMARY KEY, prompt TEXT NOT NULL, owner TEXT NOT NULL, model TEXT NOT NULL, ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, versions TEXT NOT NULL, content BLOB NOT NULL, made REAL NOT NULL);
CREATE INDEX IF NOT EXISTS sequences_by_content ON sequences (content);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, facts TEXT NOT NULL, used REAL NOT NULL, ended TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, owner TEXT NOT NULL, facts TEXT NOT NULL, made REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    """One sampled sequence, as it left the engine."""

    sequence_id: str
    owner: str
    model_id: str
    """The training run whose weights sampled it; empty for the base model."""
    prompt_ids: TokenIds
    ids: TokenIds
    """[C] stop id included."""
    logprobs: Logprobs
    """[C]"""
    version_spans: tuple[tuple[int, int, int], ...]
    """(start, stop, version): the version of the weights of each id, which rises with each change of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a training run, whose model may be gone."""

    model_id: str
    base_model: str
    lora: Mapping[str, Any] | None
    """The fields of its `LoraSpec`; None for full fine-tuning."""
    user_metadata: Mapping[str, Any] | None = None
    used: float = field(default_factory=time.time)
    """When its model was made, or freed."""
    ended: str | None = None
    """Why its model is gone; None if it is not."""

    def describe(self, owner: str, saved: Sequence[Checkpoint]) -> dict[str, Any]:
        """A `TrainingRun` of the API, with its checkpoints, the newest first."""

        def find_last(*, training: bool) -> dict[str, Any] | None:
            return next((each.describe() for each in saved if each.is_for_training is training), None)

        return {
            "training_run_id": self.model_id,
            "base_model": self.base_model,
            "model_owner": owner,
            "is_lora": self.lora is not None,
            "lora_rank": None if self.lora is None else self.lora["rank"],
            "last_request_time": _format_time(self.used),
            "last_checkpoint": find_last(training=True),
            "last_sampler_checkpoint": find_last(training=False),
            "user_metadata": self.user_metadata,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was acknowledged."""

    path: str
    """`tinker://RUN/weights/NAME` or `tinker://RUN/sampler_weights/NAME`."""
    model_id: str
    base_model: str
    lora: Mapping[str, Any] | None
    version: int
    """Of the model, when it was saved."""
    num_bytes: int
    folder: str = ""
    """The name of its folder, which no other save has; empty: that of the path."""
    user_metadata: Mapping[str, str] | None = None
    expires: float | None = None
    made: float = field(default_factory=time.time)

    @property
    def checkpoint_id(self) -> str:
        """Its path within the training run."""
        return self.path.removeprefix("tinker://").partition("/")[2]

    @property
    def is_for_training(self) -> bool:
        """Whether training can go on from it."""
        return self.checkpoint_id.startswith("weights/")

    @property
    def is_over(self) -> bool:
        """Whether its time has passed."""
        return self.expires is not None and self.expires < time.time()

    def describe(self) -> dict[str, Any]:
        """A `Checkpoint` of the API."""
        return {
            "checkpoint_id": self.checkpoint_id,
            "checkpoint_type": "training" if self.is_for_training else "sampler",
            "time": _format_time(self.made),
            "tinker_path": self.path,
            "size_bytes": self.num_bytes,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else _format_time(self.expires),
        }


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def hash_content(*parts: TokenIds) -> bytes:
    """A hash of ids, however they are cut into parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(np.ascontiguousarray(part, np.int32).tobytes())
    return digest.digest()


class TinkerStore:
    """The folder of one server. Blocks: the server calls it in a thread of its own."""

    def __init__(self, folder: Path, *, sessions: str | None = None) -> None:
        """Open the folder, which is made if it is missing. `sessions` is where a gateway stores its sessions, whose
        turns are then sequences too, of every owner.

        Raises:
            InvalidInputError: it cannot be written.
            StoreError: another server uses it, or it is damaged.
        """
        self.folder = folder
        self._sessions = sessions
        self._last_session: tuple[str, Mapping[int, tuple[TokenIds, SampledSequence]]] = "", {}
        """The turns of the gateway's session that was read last; turns never change."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("a")
        except OSError as error:
            raise InvalidInputError(
                f"--tinker-store must be a folder that can be written, got {folder}: {error}"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(f"--tinker-store {folder} is in use by another server: give each its own") from None
        self._mutex = threading.Lock()
        try:
            self._database = sqlite3.connect(folder / DATABASE, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise StoreError(f"{folder / DATABASE} cannot be opened: {error}") from error
        shutil.rmtree(self.temporary_folder, ignore_errors=True)
        self._write("UPDATE models SET ended = ? WHERE ended IS NULL", ("the server stopped",))
        kept: set[Path] = set()
        for owner, facts in self._read("SELECT owner, facts FROM checkpoints"):
            if (checkpoint := Checkpoint(**json.loads(facts))).is_over:
                self.delete_checkpoint(checkpoint, owner=owner)
            else:
                kept.add(self.folder_of(checkpoint))
        for kind in ("weights", "sampler_weights") if kept else ():  # without rows the database may be lost
            for path in folder.glob(f"{kind}/*/*-{'[0-9a-f]' * 32}"):
                if path not in kept:  # a killed server left it
                    shutil.rmtree(path, ignore_errors=True)

    @property
    def temporary_folder(self) -> Path:
        """What ends with its session."""
        return self.folder / "temporary"

    def close(self) -> None:
        """Close the database, and free the folder."""
        self._database.close()
        self._lock.close()

    def _write(self, statement: str, *rows: Sequence[Any]) -> None:
        self._write_all((statement, rows))

    def _write_all(self, *steps: tuple[str, Sequence[Sequence[Any]]]) -> None:
        """Write rows by several statements, all or none."""
        with self._mutex:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                for statement, rows in steps:
                    self._database.executemany(statement, rows)
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._mutex:
            return self._database.execute(query, values).fetchall()

    def add_sequences(self, sequences: Sequence[RecordedSequence]) -> None:
        """Record the completions of one prompt."""
        first = sequences[0]
        prompt = np.ascontiguousarray(first.prompt_ids, np.int32).tobytes()
        rows = [
            (
                each.sequence_id, first.sequence_id, each.owner, each.model_id,
                np.ascontiguousarray(each.ids, np.int32).tobytes(),
                np.ascontiguousarray(each.logprobs, np.float32).tobytes(),
                json.dumps(each.version_spans), hash_content(each.prompt_ids, each.ids), time.time(),
            )
            for each in sequences
        ]  # fmt: skip
        self._write_all(
            ("INSERT OR REPLACE INTO prompts VALUES (?, ?)", [(first.sequence_id, prompt)]),
            ("INSERT OR REPLACE INTO sequences VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows),
        )

    def find_sequence(self, sequence_id: str, *, owner: str) -> RecordedSequence | None:
        """A sequence sampled for this owner, or a turn of a gateway's session; `StoreError` if that cannot be read."""
        found = next(iter(self._find_sequences("s.id", sequence_id, owner)), None)
        return found if found is not None or self._sessions is None else self._find_turn(sequence_id, owner)

    def _find_turn(self, sequence_id: str, owner: str) -> RecordedSequence | None:
        """A turn by its name, read from the gateway's store, which is not changed."""
        name = split_sequence_name(sequence_id)
        if name is None or self._sessions is None:
            return None
        session_id, node = name
        if self._last_session[0] != session_id or node not in self._last_session[1]:
            stored = open_store_reader(self._sessions).load(session_id)
            self._last_session = session_id, {} if stored is None else read_turns(stored)
        if node not in self._last_session[1]:
            return None
        prompt_ids, sequence = self._last_session[1][node]
        return RecordedSequence(
            sequence_id=sequence_id,
            owner=owner,
            model_id="",  # the gateway does not know whose weights its engine had
            prompt_ids=prompt_ids,
            ids=sequence.completion_ids,
            logprobs=sequence.rollout_logprobs,
            version_spans=tuple((span.start, span.stop, span.policy_version) for span in sequence.version_spans),
        )

    def find_by_content(self, content: bytes, *, owner: str) -> list[RecordedSequence]:
        """The sequences, two at most, whose prompt and completion together are these ids."""
        return self._find_sequences("s.content", content, owner)

    def _find_sequences(self, column: str, value: Any, owner: str) -> list[RecordedSequence]:
        rows = self._read(
            "SELECT s.id, s.owner, s.model, p.ids, s.ids, s.logprobs, s.versions FROM sequences s JOIN prompts p "
            f"ON p.id = s.prompt WHERE {column} = ? AND s.owner = ? LIMIT 2",
            value,
            owner,
        )
        return [
            RecordedSequence(
                sequence_id=row[0],
                owner=row[1],
                model_id=row[2],
                prompt_ids=np.frombuffer(row[3], np.int32),
                ids=np.frombuffer(row[4], np.int32),
                logprobs=np.frombuffer(row[5], np.float32),
                version_spans=tuple(map(tuple, json.loads(row[6]))),
            )
            for row in rows
        ]

    def put_model(self, facts: ModelFacts, *, owner: str) -> None:
        """Record that a training run begins."""
        text = json.dumps({name: getattr(facts, name) for name in ModelFacts.__slots__})
        self._write(
            "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, NULL)", (facts.model_id, owner, text, facts.used)
        )

    def end_model(self, model_id: str, reason: str) -> None:
        """Record why a training run's model is gone."""
        self._write("UPDATE models SET ended = ?, used = ? WHERE id = ?", (reason, time.time(), model_id))

    def find_model(self, model_id: str, *, owner: str) -> ModelFacts | None:
        """A training run of an owner."""
        return next((run for run in self.list_models(owner=owner) if run.model_id == model_id), None)

    def list_models(self, *, owner: str) -> list[ModelFacts]:
        """The training runs of an owner, the newest first."""
        rows = self._read("SELECT facts, used, ended FROM models WHERE owner = ? ORDER BY used DESC", owner)
        return [ModelFacts(**{**json.loads(facts), "used": used, "ended": ended}) for facts, used, ended in rows]

    def put_checkpoint(self, checkpoint: Checkpoint, *, owner: str) -> None:
        """Record a checkpoint, whose files are whole, and then remove those of the one that it replaces."""
        facts = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        replaced = self._read("SELECT facts FROM checkpoints WHERE path = ?", checkpoint.path)
        self._write(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?)",
            (checkpoint.path, checkpoint.model_id, owner, json.dumps(facts), checkpoint.made),
        )
        for (before,) in replaced:
            shutil.rmtree(self.folder_of(Checkpoint(**json.loads(before))), ignore_errors=True)

    def list_checkpoints(self, *, owner: str, model_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of an owner, or those of one training run, the newest first."""
        rows = self._read("SELECT facts, model FROM checkpoints WHERE owner = ? ORDER BY made DESC", owner)
        return [Checkpoint(**json.loads(facts)) for facts, model in rows if model_id in (None, model)]

    def find_checkpoint(self, path: str, *, owner: str) -> Checkpoint | None:
        """A checkpoint by its path; None if there is none of this owner, or its time is over."""
        rows = self._read("SELECT facts FROM checkpoints WHERE owner = ? AND path = ?", owner, path)
        found = Checkpoint(**json.loads(rows[0][0])) if rows else None
        return None if found is None or found.is_over else found

    def delete_checkpoint(self, checkpoint: Checkpoint, *, owner: str) -> None:
        """Forget a checkpoint, and remove its files."""
        self._write("DELETE FROM checkpoints WHERE owner = ? AND path = ?", (owner, checkpoint.path))
        shutil.rmtree(self.folder_of(checkpoint), ignore_errors=True)

    def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Where the files of a checkpoint lie."""
        run, kind, name = checkpoint.path.removeprefix("tinker://").split("/")
        return self.folder / kind / run.replace(":", "-") / (checkpoint.folder or name)
