"""The store of a Tinker server: its training runs, the numbers of their steps, and the sequences that they sampled.

It is shown as a gateway's store whose sessions have one turn, a hundred of one training run a page: page 2 of run 3 is
step 3,000,002. Run 1 is the base model, and the others follow in the order of their creation; sequences are numbered
from the oldest, and listed from the newest. So a link stays right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unbroken.errors import StoreError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import GivenRecord, MessageRecord, SessionRecord, SessionStatus, StoredSession, TurnRecord
from unbroken.ledger.store import Cursor, open_snapshots
from unbroken.ledger.store.reader import ListedSession, StoreReader
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.tinker.store import TINKER_TABLES, decode_sampled
from unbroken.untrusted import read_json
from unbroken.viewer.sources.retokenised import TemplateSource
from unbroken.viewer.sources.stores import PAGE_SIZE, StoreRun

_PAGES = 1_000_000
"""More pages than a run has."""
_MAX_BYTES = 1 << 20


class TinkerRun(StoreRun):
    """Reads a Tinker server's store, live or not; implements `Source`."""

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
            line["note"] = f"version {'–'.join(map(str, sorted(set(line['versions'] or ()))))}"
        return {
            **self._make_page(step, lines),
            "training_run": run,
            "metrics": self._reader.read_metrics(run["model_id"]),
        }

    def read_trajectory(self, step: int, index: int) -> dict[str, Any]:
        """A sequence as a rollout of one turn."""
        return {**super().read_trajectory(step, index), "kind": self.kind}

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
        rows = self._snapshots.read(lambda cursor: _select(cursor, query, model_id))
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
        query = "SELECT id FROM sequences WHERE model = ? ORDER BY made, id LIMIT ? OFFSET ?"
        found = self._snapshots.read(lambda cursor: _select(cursor, query, run, last - first + 1, start))
        return [
            ListedSession(number=first + n, session_id=str(name), status="sampled", num_turns=1)
            for n, (name,) in enumerate(found)
        ]

    def _load(self, session_id: str, cursor: Cursor) -> StoredSession | None:
        query = (
            "SELECT s.model, p.ids, s.made, s.ids, s.logprobs, s.versions, s.finish, COALESCE(m.facts, (SELECT facts "
            "FROM models ORDER BY used DESC LIMIT 1)) FROM sequences s JOIN prompts p ON p.id = s.prompt "
            "LEFT JOIN models m ON m.id = s.model WHERE s.id = ?"
        )
        rows = _select(cursor, query, session_id)
        return _make_session(session_id, rows[0], self._find_texts) if rows else None

    def list_images(self) -> list[str]:
        """None: sequences are text."""
        return []


def _make_session(name: str, row: Sequence[Any], find_texts: Callable[[str], TokenTexts | None]) -> StoredSession:
    model_id, prompt, made, *columns, facts = row
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
        number=0, tree=0, prompt_node=0, reply_node=1, tools_key="", request_digest=b"", answer_id="", created_s=made,
        given=given, parent=Position(node=0, offset=len(prompt_ids)), sequence=sequence,
    )  # fmt: skip
    record = SessionRecord(
        session_id=name, key_digest=bytes(32), created_s=made, expires_s=made, status=SessionStatus.FINISHED,
        settings={"model": base, "training_run": model_id or None},
    )  # fmt: skip
    return StoredSession(record=record, messages=tuple(messages), turns=(turn,), tools={}, counters={})


def _list_runs(cursor: Cursor) -> list[dict[str, Any]]:
    counts, steps = (
        dict(_select(cursor, f"SELECT model, COUNT(*) FROM {table} GROUP BY model")) for table in ("sequences", "steps")
    )
    saved = _select(cursor, "SELECT model, path FROM checkpoints ORDER BY made")
    models = [
        {**read_json(facts, max_bytes=_MAX_BYTES), "used_s": used, "ended": ended}
        for facts, used, ended in _select(cursor, "SELECT facts, used, ended FROM models")
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


def _select(cursor: Cursor, query: str, *values: Any) -> list[tuple[Any, ...]]:
    cursor.execute(query, values)
    return cursor.fetch_all()
