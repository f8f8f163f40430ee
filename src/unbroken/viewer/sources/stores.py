"""A gateway's store as a run without numbers: its sessions are rollouts, a hundred of them a step.

Session 1 of a store is rollout 0 of step 0, session 101 is rollout 0 of step 1: a link stays right when sessions come
or are deleted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from unbroken.ledger.records import SessionRecord, StoredSession
from unbroken.ledger.store import is_postgres_url, open_store_reader
from unbroken.ledger.store.reader import ListedSession
from unbroken.viewer.sources.recipe import RECIPE_FILE, read_recipe
from unbroken.viewer.sources.retokenised import TemplateSource
from unbroken.viewer.sources.sessions import (
    describe_broken_session,
    describe_session,
    get_model,
    summarize_broken_session,
    summarize_session,
)
from unbroken.viewer.sources.steps import MAX_TEXT
from unbroken.viewer.sources.tokenizers import Tokenizers

PAGE_SIZE = 100
_MAX_LINES = 2000
"""Sessions whose lines are kept in memory."""


class StoreRun:
    """Reads a gateway's store, live or not; implements `Source`."""

    def __init__(self, location: str, *, name: str, tokenizer: Path | None = None) -> None:
        """Read the store at a location, a folder or a `postgresql://` URL.

        Raises:
            InvalidInputError: there is no store, or `tokenizer` cannot be loaded.
            StoreError: it cannot be read.
        """
        self._reader = open_store_reader(location)
        self.name = name
        run = None if is_postgres_url(location) else _find_run(Path(location))
        self._run_model = None if run is None else read_recipe(run).model
        self._tokenizers = Tokenizers(tokenizer, run=run)
        self._lines: OrderedDict[str, tuple[tuple[int, str], dict[str, Any]]] = OrderedDict()
        """By session: the turns and the status that it had, and its line."""
        self._lock = Lock()

    def describe(self) -> dict[str, Any]:
        """See `Source`."""
        return {
            "kind": "store",
            "name": self.name,
            "recipe": None,
            "model": self._run_model,
            "state": self._reader.find_state().value,
            "revision": self._reader.find_revision(),
        }

    def read_run(self) -> dict[str, Any]:
        """See `Source`."""
        numbers = self._reader.list_numbers()
        return {
            **self.describe(),
            "metrics": {"steps": [], "values": {}},
            "evaluations": [],
            "recorded_steps": _list_pages(numbers),
            "sessions": Counter(status for _, status in numbers),
            "page_size": PAGE_SIZE,
            "problems": [],
        }

    def list_steps(self) -> list[int]:
        """See `Source`."""
        return _list_pages(self._reader.list_numbers())

    def read_step(self, step: int) -> dict[str, Any]:
        """See `Source`."""
        first = step * PAGE_SIZE + 1
        listed = self._reader.list_sessions(first, first + PAGE_SIZE - 1)
        if not listed:
            raise LookupError(f"the store has no sessions from {first} to {first + PAGE_SIZE - 1}")
        lines = self._find_lines(listed)
        return {
            "kind": "store",
            "step": step,
            "heads": [],
            "trajectories": [
                {"index": each.number - first, **lines[each.session_id]} for each in listed if each.session_id in lines
            ],
            "problems": [],
            "max_text": MAX_TEXT,
        }

    def read_trajectory(self, step: int, index: int) -> dict[str, Any]:
        """See `Source`."""
        number = step * PAGE_SIZE + 1 + index
        listed = self._reader.list_sessions(number, number)
        if not listed or not 0 <= index < PAGE_SIZE:
            raise LookupError(f"the store has no session {number}")
        loaded = self._reader.load_each([listed[0].session_id], self._describe, broken=describe_broken_session)
        if not loaded:
            raise LookupError(f"the store has no session {number} any more")
        (shown,) = loaded.values()
        return {"step": step, "index": index, "rank": None, "policy_version": None, **shown}

    def find_template(self, shown: Mapping[str, Any]) -> TemplateSource | None:
        """See `Source`."""
        models = dict.fromkeys(model for model in (shown["model"], self._run_model) if model is not None)
        return self._tokenizers.find_template(list(models), template_options=shown["session"]["template_options"])

    def read_image(self, sha256: str) -> bytes:
        """See `Source`."""
        data = self._reader.load_image(sha256)
        if data is None:
            raise LookupError(f"the store has no image {sha256}")
        return data

    def list_images(self) -> list[str]:
        """See `Source`."""
        return self._reader.list_images()

    def _describe(self, stored: StoredSession) -> dict[str, Any]:
        texts = self._tokenizers.find(self._list_models(stored.record))
        model = get_model(stored.record) or self._run_model
        return {"model": model, "has_texts": texts is not None, **describe_session(stored, texts)}

    def _find_lines(self, listed: Sequence[ListedSession]) -> dict[str, dict[str, Any]]:
        """The lines of sessions, each made again when it has another turn or ended; deleted ones are left out."""
        keys = {each.session_id: (each.num_turns, each.status) for each in listed}
        with self._lock:
            known = {name: self._lines[name] for name in keys if name in self._lines}
        kept = {name: line for name, (key, line) in known.items() if key == keys[name]}
        missing = [name for name in keys if name not in kept]
        made = self._reader.load_each(missing, summarize_session, broken=summarize_broken_session)
        with self._lock:
            for name, line in (kept | made).items():
                self._lines[name] = keys[name], line
                self._lines.move_to_end(name)
            while len(self._lines) > _MAX_LINES:
                self._lines.popitem(last=False)
        return kept | made

    def _list_models(self, record: SessionRecord) -> list[str]:
        return [model for model in (get_model(record), self._run_model) if model is not None]


def _list_pages(numbers: Sequence[tuple[int, str]]) -> list[int]:
    return sorted({(number - 1) // PAGE_SIZE for number, _ in numbers})


def _find_run(folder: Path) -> Path | None:
    """The output folder of the run that a store belongs to: it is in OUTPUT/sessions/NAME."""
    output = folder.resolve().parent.parent
    is_of_run = folder.resolve().parent.name == "sessions" and (output / RECIPE_FILE).is_file()
    return output if is_of_run else None
