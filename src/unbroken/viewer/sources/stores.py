"""A gateway's store as a run without numbers: its sessions are rollouts of docs/rollouts.md, a hundred of them a step.

Session 1 of a store is rollout 0 of step 0, session 101 is rollout 0 of step 1: a link stays right when sessions come
or are deleted. What a store does not hold is absent: the trainer's logprobs, advantages, and whether something was
trained. Messages are all that the session has, in the order of their recording; each branch says which of them are its
own.

Worked example: after the user's message 0 the model wrote 1; then the agent sent 0 and 2 instead. The messages 0, 1, 2
and the reply 3 are shown, and the rows have the messages [0, 1] and [0, 2, 3].

A Tinker server's store has training runs, the numbers of their steps, and the sequences that they sampled, shown as
sessions of one turn, a hundred of one run a page. Page 2 of run 3 is step 3,000,002. Run 1 is the base model, and the
others follow in the order of their creation; sequences are numbered from the oldest, and listed from the newest.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from unbroken.errors import StoreError
from unbroken.ledger import nodes
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import GivenRecord, MessageRecord, SessionRecord, SessionStatus, StoredSession, TurnRecord
from unbroken.ledger.store import Cursor, is_postgres_url, open_snapshots, open_store_reader
from unbroken.ledger.store.reader import ListedSession, StoreReader
from unbroken.ledger.tree import Conversations, StoredTree
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.runs.folder import RECIPE_FILE
from unbroken.runs.records.files import MAX_TEXT, summarize
from unbroken.runs.records.paths import describe_branch, describe_session, find_runs
from unbroken.tinker.store import TINKER_TABLES, decode_sampled
from unbroken.untrusted import check_json, read_json
from unbroken.viewer.sources.models import Tokenizers, read_recipe
from unbroken.viewer.sources.retokenised import TemplateSource
from unbroken.viewer.sources.rollouts import BROKEN, check_record, describe_trajectory, make_broken

PAGE_SIZE = 100
_MAX_LINES = 2000
"""Sessions whose lines are kept in memory."""
_MAX_NOTE = 120
"""Characters of a session's metadata that a list has."""
_PAGES = 1_000_000
"""More pages than a training run has."""
_MAX_BYTES = 1 << 20
_NOT_STORED = ("trainer_logprobs", "entropies", "ranks", "is_trained", "clipped", "corrected")


class StoreRun:
    """Reads a gateway's store, live or not."""

    kind = "store"

    def __init__(self, location: str, *, name: str, tokenizer: Path | None = None) -> None:
        """Read the store at a location, a folder or a `postgresql://` URL.

        Raises:
            InvalidInputError: there is no store, or `tokenizer` cannot be loaded.
            StoreError: it cannot be read.
        """
        self.name = name
        run = None if is_postgres_url(location) else _find_run(Path(location))
        self._run_model = None if run is None else read_recipe(run).model
        self._tokenizers = Tokenizers(tokenizer, run=run)
        self._reader = self._open_reader(location)
        self._lines: OrderedDict[str, tuple[tuple[int, str], dict[str, Any]]] = OrderedDict()
        """By session: the turns and the status that it had, and its line."""
        self._lock = Lock()

    def _open_reader(self, location: str) -> StoreReader:
        return open_store_reader(location)

    def describe(self) -> dict[str, Any]:
        """Kind, name, state, and a `revision` that changes when the store does."""
        return {
            "kind": self.kind, "name": self.name, "recipe": None, "model": self._run_model,
            "state": self._reader.find_state().value, "revision": self._reader.find_revision(),
        }  # fmt: skip

    def read_run(self) -> dict[str, Any]:
        """The steps that have sessions, and how many sessions have each status."""
        numbers = self._reader.list_numbers()
        return {
            **self.describe(), "metrics": {"steps": [], "values": {}}, "evaluations": [],
            "recorded_steps": _list_pages(numbers), "sessions": Counter(status for _, status in numbers),
            "page_size": PAGE_SIZE, "problems": [],
        }  # fmt: skip

    def list_steps(self) -> list[int]:
        """The steps that have sessions."""
        return _list_pages(self._reader.list_numbers())

    def read_step(self, step: int) -> dict[str, Any]:
        """The lines of a step's sessions."""
        if not (lines := self._list_lines(step)):
            raise LookupError(f"the store has no sessions from {step * PAGE_SIZE + 1} to {(step + 1) * PAGE_SIZE}")
        return self._make_page(step, lines)

    def _list_lines(self, step: int) -> list[dict[str, Any]]:
        first = step * PAGE_SIZE + 1
        listed = self._reader.list_sessions(first, first + PAGE_SIZE - 1)
        lines = self._find_lines(listed)
        return [{"index": each.number - first, **lines[each.session_id]} for each in listed if each.session_id in lines]

    def _make_page(self, step: int, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rest: dict[str, Any] = {"heads": [], "problems": [], "max_text": MAX_TEXT}
        return {"kind": self.kind, "step": step, "trajectories": lines, **rest}

    def read_trajectory(self, step: int, index: int) -> dict[str, Any]:
        """A session as a rollout, with its ids and their texts."""
        number = step * PAGE_SIZE + 1 + index
        listed = self._reader.list_sessions(number, number)
        if not listed or not 0 <= index < PAGE_SIZE:
            raise LookupError(f"the store has no session {number}")
        loaded = self._reader.load_each([listed[0].session_id], self._describe, broken=_describe_broken_session)
        if not loaded:
            raise LookupError(f"the store has no session {number} any more")
        (shown,) = loaded.values()
        return {"step": step, "index": index, "rank": None, "policy_version": None, **shown}

    def find_template(self, shown: Mapping[str, Any]) -> TemplateSource | None:
        """Where the tokenizer and template of a session's model are; None if they are not on this machine."""
        models = dict.fromkeys(model for model in (shown["model"], self._run_model) if model is not None)
        return self._tokenizers.find_template(list(models), template_options=shown["session"]["template_options"])

    def read_image(self, sha256: str) -> bytes:
        """The file of an image of a session."""
        data = self._reader.load_image(sha256)
        if data is None:
            raise LookupError(f"the store has no image {sha256}")
        return data

    def list_images(self) -> list[str]:
        """The SHA-256 of all images of sessions."""
        return self._reader.list_images()

    def _describe(self, stored: StoredSession) -> dict[str, Any]:
        model = _get_model(stored.record) or self._run_model
        models = (_get_model(stored.record), self._run_model)
        texts = self._tokenizers.find([each for each in models if each is not None])
        return {"model": model, "has_texts": texts is not None, **_describe_session(stored, texts)}

    def _summarize(self, stored: StoredSession) -> dict[str, Any]:
        return _summarize_session(stored)

    def _find_lines(self, listed: Sequence[ListedSession]) -> dict[str, dict[str, Any]]:
        """The lines of sessions, each made again when it has another turn or ended; deleted ones are left out."""
        keys = {each.session_id: (each.num_turns, each.status) for each in listed}
        with self._lock:
            known = {name: self._lines[name] for name in keys if name in self._lines}
        kept = {name: line for name, (key, line) in known.items() if key == keys[name]}
        missing = [name for name in keys if name not in kept]
        made = self._reader.load_each(missing, self._summarize, broken=_summarize_broken_session)
        with self._lock:
            for name, line in (kept | made).items():
                self._lines[name] = keys[name], line
                self._lines.move_to_end(name)
            while len(self._lines) > _MAX_LINES:
                self._lines.popitem(last=False)
        return kept | made


class TinkerRun(StoreRun):
    """Reads a Tinker server's store, live or not."""

    kind = "tinker"
    _reader: _SequenceReader

    def _open_reader(self, location: str) -> StoreReader:
        return _SequenceReader(location, lambda model: self._tokenizers.find([model]))

    def read_run(self) -> dict[str, Any]:
        """The training runs, and the pages of their sequences."""
        return {**super().read_run(), "training_runs": self._reader.list_runs()}

    def read_step(self, step: int) -> dict[str, Any]:
        """A page of a training run, the newest sequences first, with the numbers of its steps."""
        run = next((run for run in self._reader.list_runs() if step in run["pages"]), None)
        if run is None:
            raise LookupError(f"the store has no page {step}")
        lines = self._list_lines(step)[::-1]
        for line in lines:
            versions = "–".join(map(str, sorted(set(line["versions"] or ()))))
            line |= {"note": f"version {versions}", "is_sequence": True}
        metrics = self._reader.read_metrics(run["model_id"])
        return {**self._make_page(step, lines), "training_run": run, "metrics": metrics}

    def read_trajectory(self, step: int, index: int) -> dict[str, Any]:
        """A sequence as a rollout of one turn."""
        return {**super().read_trajectory(step, index), "kind": self.kind}

    def _summarize(self, stored: StoredSession) -> dict[str, Any]:
        """The line of a sequence, whose text begins with what was sampled: a prompt may fill it."""
        return _summarize_session(replace(stored, messages=stored.messages[::-1]))

    def find_template(self, shown: Mapping[str, Any]) -> TemplateSource | None:
        """None: which messages made a prompt is not known."""
        return None


class _SequenceReader(StoreReader):
    """Reads a sequence as a session with one turn, whose messages are the texts of its prompt and of its ids."""

    def __init__(self, location: str, find_texts: Callable[[str], TokenTexts | None]) -> None:
        super().__init__(open_snapshots(location, TINKER_TABLES))
        self._find_texts = find_texts

    def list_runs(self) -> list[dict[str, Any]]:
        """The base model, and the training runs in the order of their creation."""
        try:
            return self._snapshots.read(_list_runs)
        except (LookupError, TypeError, ValueError) as error:
            raise StoreError(f"training runs are not as a server writes them: {error!r}") from error

    def read_metrics(self, model_id: str) -> dict[str, Any]:
        """The numbers of a training run's steps by name."""
        query = "SELECT version, metrics FROM steps WHERE model = ? ORDER BY made"
        rows = self._snapshots.read(lambda cursor: cursor.select(query, model_id))
        lines = [read_json(metrics, max_bytes=_MAX_BYTES) for _, metrics in rows]
        names = sorted({name for line in lines for name in line})
        values = {name: [line.get(name) for line in lines] for name in names}
        return {"steps": [version for version, _ in rows], "values": values}

    def list_numbers(self) -> list[tuple[int, str]]:
        """The number of the first sequence of each page."""
        return [(page * PAGE_SIZE + 1, "sampled") for run in self.list_runs() for page in run["pages"]]

    def list_sessions(self, first: int, last: int) -> list[ListedSession]:
        """The sequences with numbers from `first` to `last`, which are of one run."""
        number, start = divmod(first - 1, _PAGES * PAGE_SIZE)
        run = {n: run["model_id"] for n, run in enumerate(self.list_runs(), start=1)}.get(number)
        query = "SELECT id FROM sequences WHERE model = ? ORDER BY made, LENGTH(id), id LIMIT ? OFFSET ?"
        found = self._snapshots.read(lambda cursor: cursor.select(query, run, last - first + 1, start))
        return [
            ListedSession(number=first + n, session_id=str(name), status="sampled", num_turns=1)
            for n, (name,) in enumerate(found)
        ]

    def _load(self, session_id: str, cursor: Cursor) -> StoredSession | None:
        query = (
            "SELECT s.model, s.sampling, p.ids, s.made, s.ids, s.logprobs, s.versions, s.finish, COALESCE(m.facts, "
            "(SELECT facts FROM models ORDER BY used DESC LIMIT 1)) FROM sequences s JOIN prompts p ON p.id = s.prompt "
            "LEFT JOIN models m ON m.id = s.model WHERE s.id = ?"
        )
        rows = cursor.select(query, session_id)
        return _make_session(session_id, rows[0], self._find_texts) if rows else None

    def list_images(self) -> list[str]:
        """None: sequences are text."""
        return []


def _list_pages(numbers: Sequence[tuple[int, str]]) -> list[int]:
    return sorted({(number - 1) // PAGE_SIZE for number, _ in numbers})


def _find_run(folder: Path) -> Path | None:
    """The output folder of the run that a store belongs to: it is in OUTPUT/sessions/NAME."""
    output = folder.resolve().parent.parent
    is_of_run = folder.resolve().parent.name == "sessions" and (output / RECIPE_FILE).is_file()
    return output if is_of_run else None


def _summarize_session(stored: StoredSession) -> dict[str, Any]:
    """The line of a session in a list, as that of a rollout in a step."""
    grown = StoredTree.grow(stored)
    paths, conversations = [grown.tree.path(leaf) for leaf in grown.tree.leaves()], grown.conversations
    rows = [
        {
            "token_ids": path.token_ids, "policy_versions": find_runs(path.policy_versions, where=path.sampled_mask),
            "messages": conversations.find_messages(conversations.find_turns(path)[-1]),
        }
        for path in paths
    ]  # fmt: skip
    head = describe_session(stored)
    check_json([head, stored.record.settings])
    check_record({**head, "rows": []})
    line = summarize({**head, "rows": rows})
    metadata = stored.record.settings.get("metadata")
    note = json.dumps(metadata, ensure_ascii=False)[:_MAX_NOTE] if metadata else ""
    line["text"] = f"{note}\n{line['text']}" if note else line["text"]
    state, model = stored.record.status.value, _get_model(stored.record)
    return {**line, "note": note, "is_trained": None, "state": state, "model": model}


def _summarize_broken_session(session_id: str, error: Exception) -> dict[str, Any]:
    """The line of a session that cannot be read."""
    line = summarize(make_broken(session_id, error))
    return {**line, "note": "", "is_trained": None, "state": BROKEN, "model": None}


def _describe_broken_session(session_id: str, error: Exception) -> dict[str, Any]:
    """A session that cannot be read."""
    record = make_broken(session_id, error)
    facts = {"session_id": session_id, "status": BROKEN, "created_s": 0, "expires_s": 0, "settings": {}}
    session = {**facts, "template_options": {}, "outcome": None}
    return {
        "model": None, "has_texts": False, "record": record, "session": session, **describe_trajectory(record, None)
    }  # fmt: skip


def _describe_session(stored: StoredSession, texts: TokenTexts | None) -> dict[str, Any]:
    """A session with its ids, their texts, and how its parts belong together.

    Raises:
        InvalidInputError: a message or another part that is stored as JSON has not the form of one.
    """
    grown = StoredTree.grow(stored)
    paths, conversations = map(grown.tree.path, grown.tree.leaves()), grown.conversations
    record = {**describe_session(stored), "rows": [_make_row(grown, path, conversations) for path in paths]}
    check_json([record, stored.record.settings, stored.record.outcome])
    check_record(record)
    turn_of_message = {turn.reply_node: number for number, turn in enumerate(stored.turns)}
    described = describe_trajectory(record, texts, turn_of_node=grown.turn_of_node, turn_of_message=turn_of_message)
    session = {
        **{
            name: getattr(stored.record, name)
            for name in ("session_id", "created_s", "expires_s", "settings", "outcome")
        },
        "status": stored.record.status.value,
        "template_options": stored.turns[-1].options.get("template", {}) if stored.turns else {},
    }
    return {"record": record, "session": session, **described}


def _get_model(record: SessionRecord) -> str | None:
    """The name of the model that a session was served by; None if the store does not say."""
    model = record.settings.get("model")
    return model if isinstance(model, str) else None


def _make_row(grown: StoredTree, path: nodes.Path, conversations: Conversations) -> dict[str, Any]:
    return {
        **describe_branch(path, conversations), **dict.fromkeys(_NOT_STORED),
        "temperature": path.temperatures[0] if len(path.temperatures) == 1 else None,
        "loss": [], "advantages": [], "images": grown.find_images(path),
    }  # fmt: skip


def _make_session(name: str, row: Sequence[Any], find_texts: Callable[[str], TokenTexts | None]) -> StoredSession:
    model_id, sampling, prompt, made, *columns, facts = row
    base = "" if facts is None else str(read_json(facts, max_bytes=_MAX_BYTES)["base_model"])
    texts = find_texts(base)
    prompt_ids, sequence = np.frombuffer(prompt, np.int32), decode_sampled(*columns)
    messages = []
    for node, part in enumerate((prompt_ids.tolist(), sequence.completion_ids.tolist())):
        known = {} if texts is None else texts.get_all(part)
        text = b"".join(known[each].data for each in part if each in known).decode("utf-8", "replace")
        message = {"role": ("prompt", "assistant")[node], "content": text}
        messages.append(MessageRecord(node=node, parent=(None, 0)[node], message=message, sampled=node == 1))
    given = GivenRecord(
        parent=None, origin=Origin.PROMPT, token_ids=prompt_ids, message_indices=np.zeros(len(prompt_ids), np.int32)
    )
    turn = TurnRecord(
        number=0,
        tree=0,
        prompt_node=0,
        reply_node=1,
        tools_key="",
        request_digest=b"",
        answer_id="",
        created_s=made,
        given=given,
        parent=Position(node=0, offset=len(prompt_ids)),
        sequence=sequence,
        policy=model_id or base,
        sampling=read_json(sampling, max_bytes=_MAX_BYTES),
    )
    record = SessionRecord(
        session_id=name,
        key_digest=bytes(32),
        created_s=made,
        expires_s=made,
        status=SessionStatus.FINISHED,
        settings={"model": base, "training_run": model_id or None},
    )
    return StoredSession(record=record, messages=tuple(messages), turns=(turn,), tools={}, counters={})


def _list_runs(cursor: Cursor) -> list[dict[str, Any]]:
    counts, steps = (
        dict(cursor.select(f"SELECT model, COUNT(*) FROM {table} GROUP BY model")) for table in ("sequences", "steps")
    )
    saved = cursor.select("SELECT model, path FROM checkpoints ORDER BY made")
    models = [
        {**read_json(facts, max_bytes=_MAX_BYTES), "used_s": used, "ended": ended}
        for facts, used, ended in cursor.select("SELECT facts, used, ended FROM models")
    ]
    models.sort(key=lambda facts: (facts["used"], facts["model_id"]))  # in the facts, it is when the model was made
    base = {"model_id": "", "base_model": models[-1]["base_model"] if models else "", "used": None}
    return [
        {
            **{name: facts.get(name) for name in ("model_id", "base_model", "lora", "used_s", "ended")},
            "made_s": facts["used"],
            "checkpoints": [path for model_id, path in saved if model_id == facts["model_id"]],
            "num_steps": steps.get(facts["model_id"], 0),
            "num_sequences": (count := counts.get(facts["model_id"], 0)),
            "pages": [number * _PAGES + page for page in range(max(1, math.ceil(count / PAGE_SIZE)))],
        }
        for number, facts in enumerate((base, *models), start=1)
    ]
