"""Keeps the certificates of one template: which were issued, for which tools, and which were revoked."""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from unbroken.messages import Message, ToolSchema, check_tools
from unbroken.rendering.base import Refusal, RefusalReason
from unbroken.rendering.bridge.certificates.certificate import Certificate, CertificateRecord
from unbroken.rendering.bridge.certificates.certifier import Certifier
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY, HistoryClass
from unbroken.rendering.bridge.histories.history_facts import HistoryFacts, HistoryReader
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import BridgeShape
from unbroken.rendering.message_format import PROBE_TOOLS

_MAX_CERTIFICATES = 4096
_MAX_TOOL_SETS = 4096
_MAX_ROUNDS = 8
"""Rounds of examinations; each may find more texts that the bridge depends on."""
_HISTORY_REASONS = frozenset({RefusalReason.HISTORY_DEPENDENT, RefusalReason.DROPS_MESSAGE})
"""Reasons that may apply to some histories only."""
_NO_TOOLS, _ANY_TOOLS = "", "any"

_Key: TypeAlias = tuple[str, BridgeShape, HistoryClass]
_ClassKey: TypeAlias = tuple[tuple[object, ...], frozenset[str]]
_ANY_KEY: _ClassKey = ((), frozenset())
_Name = TypeVar("_Name")
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tools:
    """A set of tools with its name in keys."""

    schemas: Sequence[ToolSchema]
    key: str

    @classmethod
    def of(cls, schemas: Sequence[ToolSchema]) -> _Tools:
        if not schemas:
            return cls(schemas=schemas, key=_NO_TOOLS)
        try:
            # Several times as fast as JSON. Version 2 writes equal values as equal bytes.
            data = marshal.dumps(list[Any](schemas), 2)
        except ValueError:
            data = json.dumps(schemas, default=repr).encode()
        return cls(schemas=schemas, key=hashlib.blake2b(data, digest_size=16).hexdigest())


class CertificateStore:
    """Examines each shape once, and again for tools with which the template writes something else."""

    def __init__(self, certifier: Certifier) -> None:
        self._certifier = certifier
        self._records: dict[_Key, CertificateRecord] = {}
        self._covered: dict[_Key, bool] = {}
        self._known: dict[tuple[str, BridgeShape], dict[_ClassKey, Certificate]] = {}
        """Certificates that were used, by tools and shape."""
        self._sensitive: frozenset[str] = frozenset()
        """Texts that change the bridge of some shape."""
        self.histories = HistoryReader(certifier.find_watched_texts())
        self._revoked: dict[tuple[bool, BridgeShape], Refusal] = {}

    def get(
        self,
        shape: BridgeShape,
        tools: Sequence[ToolSchema],
        earlier: Sequence[Message] | None,
        turn: Message,
    ) -> Certificate:
        """Get the certificate for any history, or else the one for a class that has `earlier` and the turn.

        Raises:
            BridgeRefusedError: the shape cannot be certified, or was revoked.
            ToolDefinitionError: the tools are not a list of schemas.
        """
        named = _Tools.of(tools)
        known = self._known.get((named.key, shape), {})
        if _ANY_KEY in known:
            return known[_ANY_KEY]
        if known and earlier and (class_key := self._find_class_key(earlier, turn)) in known:
            return known[class_key]
        class_key = _ANY_KEY
        try:
            outcome = self._examine(shape, named, ANY_HISTORY)
            if isinstance(outcome, Refusal) and outcome.reason in _HISTORY_REASONS and earlier:
                facts, texts = self.histories.read(earlier), self.histories.find_texts(turn)
                outcome = self._find_narrower(shape, named, facts, texts) or outcome
                class_key = self._find_class_key(earlier, turn)
        finally:
            self._certifier.forget_renderings()
        outcome = self._revoked.get((bool(tools), shape), outcome)
        if isinstance(outcome, Refusal):
            raise BridgeRefusedError(outcome.reason, outcome.detail)
        _make_room(self._known, _MAX_CERTIFICATES)
        self._known[named.key, shape] = {**known, class_key: outcome}
        return outcome

    def _find_class_key(self, earlier: Sequence[Message], turn: Message) -> _ClassKey:
        """Equal for histories and turns that are in the same classes."""
        return self.histories.read(earlier).class_key, self.histories.find_texts(turn)

    def _find_narrower(
        self, shape: BridgeShape, tools: _Tools, facts: HistoryFacts, texts: frozenset[str]
    ) -> Certificate | Refusal | None:
        """The certificate of the widest class that includes the history; `texts` are in the turn.

        Without one, the refusal of the narrowest class, which holds for this history.
        """
        refusal: Refusal | None = None
        for _ in range(_MAX_ROUNDS):
            without = self._sensitive - texts
            for history_class in facts.find_classes(without):
                outcome = self._examine(shape, tools, history_class)
                if not isinstance(outcome, Refusal):
                    return outcome
                refusal = outcome if history_class.counted is None else refusal
            if self._sensitive - texts == without:
                break
        return refusal

    def revoke(self, shape: BridgeShape, tools: Sequence[ToolSchema], detail: str) -> None:
        """Refuse this shape from now on: with any tools, or without tools if there are none."""
        self._known.clear()
        self._revoked[bool(tools), shape] = Refusal(reason=RefusalReason.FAILED_AUDIT, detail=detail)

    def records(self) -> tuple[CertificateRecord, ...]:
        """The examinations that are still kept, oldest first."""
        return tuple(self._records.values())

    def _examine(self, shape: BridgeShape, tools: _Tools, history_class: HistoryClass) -> Certificate | Refusal:
        if not tools.schemas:
            return self._get_outcome(_NO_TOOLS, shape, (), history_class)
        outcome = self._get_outcome(_ANY_TOOLS, shape, PROBE_TOOLS, history_class)
        if self._holds_for(outcome, shape, tools, history_class):
            return outcome
        return self._get_outcome(tools.key, shape, tools.schemas, history_class)

    def _holds_for(
        self, outcome: Certificate | Refusal, shape: BridgeShape, tools: _Tools, history_class: HistoryClass
    ) -> bool:
        """Whether the outcome for any tools holds for these; a refusal does, unless the template refused the tools."""
        key = (tools.key, shape, history_class)
        if key not in self._covered:
            check_tools(tools.schemas)
            _make_room(self._covered, _MAX_TOOL_SETS)
            if isinstance(outcome, Refusal):
                self._covered[key] = outcome.reason is not RefusalReason.TEMPLATE_RAISES
            else:
                self._covered[key] = not outcome.needs_tools and self._certifier.holds_for_tools(
                    shape, tools.schemas, history_class
                )
        return self._covered[key]

    def _get_outcome(
        self, tools_key: str, shape: BridgeShape, tools: Sequence[ToolSchema], history_class: HistoryClass
    ) -> Certificate | Refusal:
        key = (tools_key, shape, history_class)
        if key not in self._records:
            _make_room(self._records, _MAX_CERTIFICATES)
            self._records[key] = self._certifier.examine(
                shape, tools, history_class, for_any_tools=tools_key == _ANY_TOOLS
            )
            self._sensitive |= self._records[key].because_of
        return self._records[key].outcome


def _make_room(entries: dict[_Name, _Entry], maximum: int) -> None:
    if len(entries) >= maximum:
        entries.pop(next(iter(entries)))
