"""What outlives the server's process: results of calls, sampled sequences, models and checkpoints.

    FOLDER/tinker.sqlite3                    rows of all of them; or in PostgreSQL
    FOLDER/weights/RUN/NAME-HEX/             a checkpoint: the model's own files, and in sampler/ what engines take
    FOLDER/sampler_weights/RUN/NAME-HEX/     weights for sampling alone
    FOLDER/temporary/                        those without a name, which end with their session

A file is whole before its row is written, and a row is on the disk before its request is answered.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from unbroken.errors import InvalidInputError, StoreError, UnbrokenError
from unbroken.integrations.tinker import ProvableTurn, read_turns, split_sequence_name
from unbroken.ledger.store import Cursor, Tables, is_postgres_url, is_storable, open_database, open_store_reader
from unbroken.server.policies import CHECKPOINT
from unbroken.types import FinishReason, SampledSequence, TokenIds, VersionSpan

T = TypeVar("T")
FactsT = TypeVar("FactsT", "ModelFacts", "Checkpoint")
_FILES = Path("runs/tinker")
ANSWERS_KEPT_S = 3600.0
_VERSION_1 = (
    "CREATE TABLE prompts (id TEXT PRIMARY KEY, ids {blob} NOT NULL)",
    """CREATE TABLE sequences (
    id TEXT PRIMARY KEY, prompt TEXT NOT NULL, owner TEXT NOT NULL, model TEXT NOT NULL, ids {blob} NOT NULL,
    logprobs {blob} NOT NULL, versions TEXT NOT NULL, content {blob} NOT NULL, made {float} NOT NULL,
    finish TEXT NOT NULL, sampling TEXT NOT NULL)""",
    "CREATE INDEX sequences_by_content ON sequences (content)",
    "CREATE INDEX sequences_by_time ON sequences (made)",
    "CREATE INDEX sequences_by_model ON sequences (model, made)",
    """CREATE TABLE models (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, facts TEXT NOT NULL, used {float} NOT NULL, ended TEXT)""",
    """CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, owner TEXT NOT NULL, facts TEXT NOT NULL, made {float} NOT NULL)""",
    """CREATE TABLE steps (
    model TEXT NOT NULL, version {integer} NOT NULL, metrics TEXT NOT NULL, made {float} NOT NULL)""",
    "CREATE INDEX steps_by_model ON steps (model, made)",
    "CREATE TABLE store (name TEXT NOT NULL)",
    "INSERT INTO store VALUES ('')",
    """CREATE TABLE results (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, digest {blob} NOT NULL, answer {blob}, is_protobuf {integer} NOT NULL,
    ended {float} NOT NULL)""",
    "CREATE INDEX results_by_time ON results (ended)",
    "CREATE INDEX answers_by_time ON results (ended) WHERE answer IS NOT NULL",
)
_INSERT_SEQUENCE = (
    "INSERT INTO sequences (id, prompt, owner, model, ids, logprobs, versions, content, made, finish, sampling) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_OLD_ANSWERS = "id IN (SELECT id FROM results WHERE answer IS NOT NULL AND ended < ? ORDER BY ended LIMIT ?)"
_OLD_RESULTS = "id IN (SELECT id FROM results WHERE ended < ? ORDER BY ended LIMIT ?)"
_OLD_SEQUENCES = "id IN (SELECT id FROM sequences WHERE made < ? ORDER BY made LIMIT ?)"
TINKER_TABLES = Tables(
    content="sampled sequences",
    program="Tinker server",
    file="tinker.sqlite3",
    schema="unbroken_tinker",
    locks=0x756E7469,
    is_shared=False,
    migrations=(_VERSION_1,),
    revision="SELECT (SELECT MAX(made) FROM sequences), (SELECT MAX(made) FROM steps), (SELECT COUNT(*) FROM models), "
    "(SELECT MAX(used) FROM models), COUNT(*), MAX(made) FROM checkpoints",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    """One sampled sequence, as it left the engine."""

    sequence_id: str
    model_id: str
    """The training run whose weights sampled it; empty for the base model, and where it is not known."""
    prompt_ids: TokenIds
    sampled: SampledSequence
    """Its versions are those of the model, which rise with each change of the weights."""
    sampling: Mapping[str, Any]
    """`SamplingParams.changes`: by what its distribution is not the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call is answered with, and what it sampled."""

    answer: bytes | None
    """JSON or protobuf; None once it is not kept any more."""
    is_protobuf: bool = False
    sequences: Sequence[RecordedSequence] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a training run, whose model may be gone."""

    model_id: str
    base_model: str
    lora: Mapping[str, Any] | None
    """The fields of its `LoraConfig`; None for full fine-tuning."""
    user_metadata: Mapping[str, Any] | None = None
    used: float = field(default_factory=time.time)
    """When its model was made, or freed."""
    ended: str | None = None
    """Why its model is gone; None if it is not."""

    def describe(self, owner: str, saved: Sequence[Checkpoint]) -> dict[str, Any]:
        """A `TrainingRun` of the API, with the newest of its checkpoints."""
        last = {each.is_for_training: each.describe() for each in reversed(saved) if each.model_id == self.model_id}
        return {
            "training_run_id": self.model_id,
            "base_model": self.base_model,
            "model_owner": owner,
            "is_lora": self.lora is not None,
            "lora_rank": None if self.lora is None else self.lora["rank"],
            "last_request_time": datetime.fromtimestamp(self.used, UTC),
            "last_checkpoint": last.get(True),
            "last_sampler_checkpoint": last.get(False),
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
    def is_for_training(self) -> bool:
        """Whether training can continue from it."""
        return "/weights/" in self.path

    @property
    def is_over(self) -> bool:
        """Whether its time has passed."""
        return self.expires is not None and self.expires < time.time()

    def describe(self) -> dict[str, Any]:
        """A `Checkpoint` of the API."""
        return {
            "checkpoint_id": self.path.split("/", 3)[3],
            "checkpoint_type": "training" if self.is_for_training else "sampler",
            "time": datetime.fromtimestamp(self.made, UTC),
            "tinker_path": self.path,
            "size_bytes": self.num_bytes,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else datetime.fromtimestamp(self.expires, UTC),
        }


@functools.cache
def _get_adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once for a class: it takes 0.8 ms, and a checkpoint is looked for in each call."""
    return TypeAdapter(kind)


def _read_facts(kind: type[FactsT], facts: str, **columns: Any) -> FactsT:
    """What a cell of JSON and further columns say; `StoreError`, which names the cell, if it is damaged."""
    try:
        given = {**json.loads(facts), **columns}
        kind(**given)  # refuses other names, which pydantic would drop
        adapter: TypeAdapter[FactsT] = _get_adapter(kind)  # type: ignore[arg-type]  # mypy asks for the hash of instances
        return adapter.validate_python(given)
    except (ValueError, TypeError, RecursionError) as error:
        cell = "models.facts" if kind is ModelFacts else "checkpoints.facts"
        raise _refuse_cell(cell, facts, error) from error


def _read_sequence(name: str, model: str, sampling: str, prompt: bytes, *columns: Any) -> RecordedSequence:
    try:
        return RecordedSequence(
            sequence_id=name,
            model_id=model,
            prompt_ids=np.frombuffer(prompt, np.int32),
            sampled=decode_sampled(*columns),
            sampling=json.loads(sampling),
        )
    except (ValueError, TypeError, RecursionError, UnbrokenError) as error:
        raise _refuse_cell("sequences", name, error) from error


def _refuse_cell(cell: str, value: object, error: Exception) -> StoreError:
    problem = f"{type(error).__name__}: {error}"
    return StoreError(
        f"{cell} of the Tinker server's store must be as the server wrote it, got {value!r:.100} ({problem[:300]}): "
        "the database was damaged or edited, so restore it from a backup or remove the row"
    )


def hash_content(*parts: NDArray[Any]) -> bytes:
    """A hash of ids, however they are cut into parts."""
    return blake2b(b"".join(_to_bytes(part) for part in parts), digest_size=16).digest()


def _to_bytes(ids: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(ids, np.int32).tobytes()


def decode_sampled(ids: bytes, logprobs: bytes, versions: str, finish: str) -> SampledSequence:
    """What was sampled, of the columns of these names."""
    return SampledSequence(
        completion_ids=np.frombuffer(ids, np.int32),
        rollout_logprobs=np.frombuffer(logprobs, np.float32),
        finish_reason=FinishReason(finish),
        version_spans=tuple(VersionSpan(start=a, stop=b, policy_version=each) for a, b, each in json.loads(versions)),
    )


def _find_model(policy: str) -> str:
    """The run of a checkpoint's name, or of a run's; empty for others."""
    return policy.removeprefix(CHECKPOINT).partition("/")[0] if policy.startswith(CHECKPOINT) else ""


def _begin(cursor: Cursor) -> str:
    """Note that a server has started; returns the name of the database."""
    cursor.execute("UPDATE models SET ended = 'the server stopped' WHERE ended IS NULL")
    cursor.execute("UPDATE store SET name = ? WHERE name = ''", (uuid.uuid4().hex,))
    return str(cursor.find("SELECT name FROM store")[0])


class TinkerStore:
    """The store of one server. Blocks: the server calls it in a separate thread."""

    def __init__(
        self, location: str | Path, *, files: Path | None = None, keep_days: float = 30, sessions: str | None = None
    ) -> None:
        """Open a folder, or a database, whose checkpoints have their files in a folder of its name in `files`. Turns of
        the sessions that a gateway stores at `sessions` are sequences too, of every owner.
        """
        self.keep_days = keep_days
        self._sessions = sessions
        self._turns: dict[str, Mapping[int, ProvableTurn]] = {}
        """The turns of the gateway's session that was read last; turns never change."""
        try:
            self._database = open_database(str(location), TINKER_TABLES)
        except (InvalidInputError, StoreError) as error:
            raise type(error)(f"--tinker-store: {error}") from None
        self._write, self.close = self._database.write, self._database.close
        try:
            name = self._write(_begin)
            self.folder = (files or _FILES) / name if is_postgres_url(str(location)) else Path(location)
            self.temporary_folder = self.folder / "temporary"
            """What ends with its session."""
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_unused()
        except OSError as error:
            self.close()
            raise InvalidInputError(
                f"--tinker-files must be a folder that can be written, got {self.folder}: {error}"
            ) from None
        except BaseException:
            self.close()
            raise

    def _remove_unused(self) -> None:
        """Remove the files that a killed server left, and checkpoints whose time is over."""
        shutil.rmtree(self.temporary_folder, ignore_errors=True)
        kept: set[Path] = set()
        for (facts,) in self._read("SELECT facts FROM checkpoints"):
            if (checkpoint := _read_facts(Checkpoint, facts)).is_over:
                self.delete_checkpoint(checkpoint)
            else:
                kept.add(self.folder_of(checkpoint))
        for kind in ("weights", "sampler_weights") if kept else ():  # without rows the database may be lost
            for path in self.folder.glob(f"{kind}/*/*-{'[0-9a-f]' * 32}"):
                if path not in kept:
                    shutil.rmtree(path, ignore_errors=True)

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        if not all(is_storable(value) for value in values if isinstance(value, str)):
            return []
        return self._database.read(lambda cursor: cursor.select(query, *values))

    def put_result(self, request_id: str, digest: bytes, result: CallResult, *, owner: str) -> None:
        """Record the result of a call, and what it sampled; and remove a few of those that were kept long enough."""
        now = time.time()
        hour_ago, kept_from, few = now - ANSWERS_KEPT_S, now - self.keep_days * 86400, 2 + 2 * len(result.sequences)
        prompts = [(request_id, _to_bytes(each.prompt_ids)) for each in result.sequences[:1]]
        rows = [
            (
                each.sequence_id, request_id, owner, each.model_id, _to_bytes(each.sampled.completion_ids),
                each.sampled.rollout_logprobs.tobytes(), json.dumps(list(map(astuple, each.sampled.version_spans))),
                hash_content(each.prompt_ids, each.sampled.completion_ids), now, each.sampled.finish_reason.value,
                json.dumps(dict(each.sampling)),
            )
            for each in result.sequences
        ]  # fmt: skip

        def put(cursor: Cursor) -> None:
            values = request_id, owner, digest, result.answer, int(result.is_protobuf), now
            cursor.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?)", values)
            cursor.execute_many("INSERT INTO prompts VALUES (?, ?)", prompts)
            cursor.execute_many(_INSERT_SEQUENCE, rows)
            cursor.execute(f"UPDATE results SET answer = NULL WHERE {_OLD_ANSWERS}", (hour_ago, few))
            cursor.execute(f"DELETE FROM results WHERE {_OLD_RESULTS}", (kept_from, few))
            old = cursor.select(f"DELETE FROM sequences WHERE {_OLD_SEQUENCES} RETURNING prompt", kept_from, few)
            cursor.execute_many("DELETE FROM prompts WHERE id = ?", old)

        self._write(put)

    def find_result(self, request_id: str, *, owner: str) -> tuple[bytes, CallResult] | None:
        """The digest and the result of a call that has ended."""
        query = "SELECT digest, answer, is_protobuf FROM results WHERE id = ? AND owner = ?"
        for digest, answer, is_protobuf in self._read(query, request_id, owner):
            return bytes(digest), CallResult(answer=answer, is_protobuf=bool(is_protobuf))
        return None

    def find_sequence(self, sequence_id: str, *, owner: str) -> RecordedSequence | None:
        """A sequence sampled for this owner, or a turn of a gateway's session; `StoreError` if that cannot be read."""
        found = self._find_sequences("s.id", sequence_id, owner)
        return found[0] if found else self._find_turn(sequence_id)

    def _find_turn(self, sequence_id: str) -> RecordedSequence | None:
        """A turn by its name, read from the gateway's store, which is not changed."""
        name = split_sequence_name(sequence_id)
        if name is None or self._sessions is None:
            return None
        session_id, node = name
        if node not in self._turns.get(session_id, {}):
            stored = open_store_reader(self._sessions).load(session_id)
            self._turns = {session_id: {} if stored is None else read_turns(stored)}
        if node not in self._turns[session_id]:
            return None
        turn = self._turns[session_id][node]
        return RecordedSequence(
            sequence_id=sequence_id,
            model_id=_find_model(turn.policy),
            prompt_ids=turn.prompt_ids,
            sampled=turn.sampled,
            sampling=turn.sampling,
        )

    def find_by_content(self, content: bytes, *, owner: str) -> list[RecordedSequence]:
        """The sequences, two at most, whose prompt and completion together are these ids."""
        return self._find_sequences("s.content", content, owner)

    def _find_sequences(self, column: str, value: Any, owner: str) -> list[RecordedSequence]:
        rows = self._read(
            "SELECT s.id, s.model, s.sampling, p.ids, s.ids, s.logprobs, s.versions, s.finish FROM sequences s "
            f"JOIN prompts p ON p.id = s.prompt WHERE {column} = ? AND s.owner = ? LIMIT 2",
            value,
            owner,
        )
        return [_read_sequence(*row) for row in rows]

    def put_model(self, facts: ModelFacts, *, owner: str) -> None:
        """Record that a training run begins; and remove those that ended long enough ago without a checkpoint."""
        values = facts.model_id, owner, json.dumps(asdict(facts)), facts.used
        old = "ended IS NOT NULL AND used < ? AND id NOT IN (SELECT model FROM checkpoints)"

        def put(cursor: Cursor) -> None:
            cursor.execute("INSERT INTO models VALUES (?, ?, ?, ?, NULL)", values)
            gone = cursor.select(f"DELETE FROM models WHERE {old} RETURNING id", time.time() - self.keep_days * 86400)
            cursor.execute_many("DELETE FROM steps WHERE model = ?", gone)

        self._write(put)

    def end_model(self, model_id: str, reason: str) -> None:
        """Record why a training run's model is gone."""
        values = reason, time.time(), model_id
        self._write(lambda cursor: cursor.execute("UPDATE models SET ended = ?, used = ? WHERE id = ?", values))

    def find_model(self, model_id: str, *, owner: str) -> ModelFacts | None:
        """A training run of an owner."""
        return next((run for run in self.list_models(owner=owner) if run.model_id == model_id), None)

    def list_models(self, *, owner: str) -> list[ModelFacts]:
        """The training runs of an owner, the newest first."""
        rows = self._read("SELECT facts, used, ended FROM models WHERE owner = ? ORDER BY used DESC", owner)
        return [_read_facts(ModelFacts, facts, used=used, ended=ended) for facts, used, ended in rows]

    def add_step(self, model_id: str, version: int, metrics: Mapping[str, float]) -> None:
        """Record a step of a model, which then has this version."""
        values = model_id, version, json.dumps(dict(metrics)), time.time()
        self._write(lambda cursor: cursor.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", values))

    def put_checkpoint(self, checkpoint: Checkpoint, *, owner: str) -> None:
        """Record a checkpoint, whose files are whole, and then remove those of the one that it replaces."""
        facts = json.dumps(asdict(checkpoint))
        values = checkpoint.path, checkpoint.model_id, owner, facts, checkpoint.made

        def put(cursor: Cursor) -> list[Any]:
            replaced = cursor.select("DELETE FROM checkpoints WHERE path = ? RETURNING facts", checkpoint.path)
            cursor.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", values)
            return replaced

        for (before,) in self._write(put):
            shutil.rmtree(self.folder_of(_read_facts(Checkpoint, before)), ignore_errors=True)

    def list_checkpoints(self, *, owner: str, model_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of an owner, or those of one training run, the newest first."""
        rows = self._read("SELECT facts, model FROM checkpoints WHERE owner = ? ORDER BY made DESC", owner)
        return [_read_facts(Checkpoint, facts) for facts, model in rows if model_id in (None, model)]

    def find_checkpoint(self, path: str, *, owner: str) -> Checkpoint | None:
        """A checkpoint by its path; None if there is none of this owner, or its time is over."""
        rows = self._read("SELECT facts FROM checkpoints WHERE owner = ? AND path = ?", owner, path)
        found = _read_facts(Checkpoint, rows[0][0]) if rows else None
        return None if found is None or found.is_over else found

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint, and remove its files."""
        self._write(lambda cursor: cursor.execute("DELETE FROM checkpoints WHERE path = ?", (checkpoint.path,)))
        shutil.rmtree(self.folder_of(checkpoint), ignore_errors=True)

    def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Where the files of a checkpoint lie."""
        run, kind, name = checkpoint.path.removeprefix("tinker://").split("/")
        return self.folder / kind / run.replace(":", "-") / (checkpoint.folder or name)
