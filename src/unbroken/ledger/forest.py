"""The messages of a session: every conversation that its agent had with us, as a forest of messages.

An agent sends its whole conversation with each request. `Forest.match` finds the recorded path that it repeats, and
what is new:

    recorded            system ─ user ─ reply 0 ─ tool ─ reply 1
                                          └────── tool' ─ reply 2

    request             system ─ user ─ reply 0 ─ tool ─ reply 1 ─ user'      continues turn 1
                        system ─ user ─ reply 0 ─ user'                       continues turn 0; fork: dropped_reply
                        system ─ user ─ REPLY   ─ tool                        fork: edited_reply
                        SYSTEM ─ user'                                        a new conversation

Nodes are messages; the ids of all conversations are in one `TokenTree`, which has a root for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast

from unbroken.ledger.matching import (
    MessageForm,
    Place,
    Tolerance,
    begins_reply,
    compare_listed,
    compare_reply,
    find_defaults,
    follows_beginning,
    identify,
    unfold_reasoning,
)
from unbroken.ledger.nodes import ForkReason
from unbroken.messages import Message, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageNode:
    """One recorded message."""

    number: int
    parent: int | None
    """The node of the message before it; None for the first of a conversation."""
    message: Message
    """As it is rendered. For a reply: what was parsed from the sampled ids."""
    turn: int | None
    """The number of the turn that sampled it; None for a given message."""
    conversation: int
    form: MessageForm
    """For a reply: the form of what was delivered, with malformed calls as content and stop strings cut."""
    place: Place
    """After it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSettings:
    """What the ids of a prompt depend on besides its messages; digests."""

    tools: str
    options: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How a request follows from what is recorded."""

    node: int | None
    """The last recorded message that it repeats; None if it repeats none."""
    num_matched: int
    """How many of its messages are recorded, from the first on."""
    turn: int | None
    """The last sampled turn among them."""
    fork: ForkReason | None
    """Why the request does not simply continue `turn`, or is not simply the first of a conversation."""
    tolerances: frozenset[Tolerance]
    messages: tuple[Message, ...]
    """All its messages: as recorded, then the new ones, which answer calls under their recorded ids."""

    history: tuple[bytes, ...] = ()
    """The keys of the request's messages; for a `BrokenReply` to it."""

    def unfold(self) -> Match:
        """The same with the reasoning of all replies in a separate field, where a text has it.

        Many templates cut a text at `</think>`, and such a text cannot be rendered as it is.
        """
        return replace(self, messages=tuple(map(unfold_reasoning, self.messages)))

    @property
    def continues(self) -> bool:
        """Whether it continues `turn`: the same history, then messages that no assistant wrote."""
        return self.turn is not None and self.fork in (None, ForkReason.DROPPED_REPLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenReply:
    """What was streamed of a reply that is not recorded: it failed, or is still sampled and nobody reads it."""

    history: bytes
    """`digest_history` of the `Match.history` of its request."""
    message: Message
    """Its text and reasoning so far."""

    @property
    def form(self) -> MessageForm:
        """Its form."""
        return identify(self.message, Place())[0]


class Forest:
    """The messages of one session. Nodes are never changed or removed."""

    def __init__(self) -> None:
        self._nodes: list[_MessageNode] = []
        self._children: dict[tuple[int | None, bytes], list[int]] = {}
        self._children_of: dict[int | None, list[int]] = {}
        self._settings: dict[int, TurnSettings] = {}
        self._known_tools: set[str] = set()
        self._defaults: dict[tuple[str, str], set[bytes]] = {}
        self._num_conversations = 0
        self._num_linked = 0
        """How many nodes are found by their parent: another thread may be adding one."""
        self._walks = _Walks()
        self._takes_lists = True
        """Whether a text that lists the calls of a reply is that reply."""

    @property
    def nodes(self) -> Sequence[_MessageNode]:
        """All messages, oldest first."""
        return self._nodes

    @property
    def num_conversations(self) -> int:
        """How often a conversation began afresh."""
        return self._num_conversations

    def take_lists_as_text(self) -> None:
        """Let a text that lists calls be another message from now on: some templates refuse calls without results."""
        self._takes_lists = False
        self._walks = _Walks()

    def learn_tools(self, digest: str, tools: Sequence[ToolSchema]) -> None:
        """Learn the defaults of tools, before messages that call them are matched or added."""
        if digest in self._known_tools:
            return
        self._known_tools.add(digest)
        for name, values in find_defaults(tools).items():
            self._defaults.setdefault(name, set()).update(values)

    def get_path(self, node: int | None) -> list[_MessageNode]:
        """The nodes from the first message of a conversation to `node`."""
        path: list[_MessageNode] = []
        while node is not None:
            path.append(self._nodes[node])
            node = self._nodes[node].parent
        return path[::-1]

    def find_given(self, message: Message, *, parent: int | None) -> int | None:
        """Find a message of the agent after `parent`; None if it is not recorded there."""
        form, _ = identify(message, self._get_place(parent))
        return self._find_given(form, parent)

    def add_given(self, message: Message, *, parent: int | None) -> int:
        """Record a message of the agent after `parent`; returns its node, the old one if it is recorded there."""
        form, place = identify(message, self._get_place(parent))
        if (node := self._find_given(form, parent)) is not None:
            return node
        return self._add(message, parent, form, place, turn=None)

    def add_reply(self, message: Message, delivered: Message, *, parent: int, turn: int, settings: TurnSettings) -> int:
        """Record the reply of a turn, as it is rendered and as it was delivered; returns its node."""
        form, place = identify(delivered, self._get_place(parent))
        self._settings[turn] = settings
        return self._add(message, parent, form, place, turn=turn)

    def recall(self, messages: Sequence[Message]) -> Walk:
        """Find the first messages that an earlier request had too, letter for letter."""
        found = self._walks.find(messages, num_learned=len(self._known_tools))
        return found or Walk(places=(self._get_place(None),), num_learned=len(self._known_tools))

    def match(
        self,
        messages: Sequence[Message],
        settings: TurnSettings,
        *,
        known: Walk | None = None,
        broken: Sequence[BrokenReply] = (),
    ) -> Match:
        """Find the longest recorded path that a conversation repeats. The messages are checked, and are kept.

        Of paths of one length, one whose last turn has the same settings is taken, then the newest. `known` is what
        `recall` has found of the messages. A last message that is the beginning of a recorded or a `broken` reply is
        left out: its agent asks again for what it did not get.
        """
        is_known = known is not None and known.num_learned == len(self._known_tools)
        walk = self._walk(messages, known if known is not None and is_known else self.recall(messages), broken)
        self._walks.keep(walk)
        if len(walk.levels) <= len(messages) and self._is_beginning(walk, broken):
            again = self.match(messages[:-1], settings, broken=broken)
            return replace(again, tolerances=again.tolerances | {Tolerance.DROPPED_TEXT})
        ends = walk.levels[-1]
        end = ends[0] if len(ends) == 1 else max(ends, key=lambda end: self._rank(end, settings))
        path, num_sent = self.get_path(end.node), len(walk.levels) - 1
        return Match(
            node=end.node,
            num_matched=len(path),
            turn=end.turn,
            fork=self._find_fork(end, walk.forms[num_sent:], settings),
            tolerances=end.tolerances | ({Tolerance.SEVERAL_MATCHES} if len(ends) > 1 else frozenset()),
            messages=(*(node.message for node in path), *_restore_call_ids(messages, walk.forms, path, num_sent)),
            history=_list_keys(walk.forms),
        )

    def _walk(self, messages: Sequence[Message], known: Walk, broken: Sequence[BrokenReply]) -> Walk:
        """The way of these messages, of which the first are known."""
        num_nodes = self._num_linked
        new = messages[len(known.messages) :]
        forms, places = list(known.forms), list(known.places)
        for message in new:
            form, place = identify(message, places[-1])
            forms.append(form)
            places.append(place)
        return Walk(
            messages=(*known.messages, *new),
            has_one_spelling=(*known.has_one_spelling, *map(has_one_spelling, new)),
            forms=forms,
            places=places,
            levels=self._find_levels(forms, self._check_levels(known), broken),
            num_nodes=num_nodes,
            num_learned=known.num_learned,
        )

    def _is_beginning(self, walk: Walk, broken: Sequence[BrokenReply]) -> bool:
        """Whether the last message of a request is the beginning of a reply to the messages before it."""
        last = walk.forms[-1]
        if last.role != "assistant":
            return False
        level = walk.levels[-1] if len(walk.levels) == len(walk.forms) else ()
        replies = [node.form for _, node in self._list_replies(level)]
        return any(begins_reply(last, one) for one in (*replies, *_list_broken(walk.forms[:-1], broken)))

    def _add(self, message: Message, parent: int | None, form: MessageForm, place: Place, *, turn: int | None) -> int:
        number = len(self._nodes)
        before = None if parent is None else self._nodes[parent]
        if before is None:
            self._num_conversations += 1
        self._nodes.append(
            _MessageNode(
                number=number,
                parent=parent,
                message=message,
                turn=turn,
                conversation=self._num_conversations - 1 if before is None else before.conversation,
                form=form,
                place=place,
            )
        )
        self._children.setdefault((parent, form.key), []).append(number)
        self._children_of.setdefault(parent, []).append(number)
        self._num_linked += 1
        return number

    def _get_place(self, node: int | None) -> Place:
        return Place(defaults=self._defaults) if node is None else self._nodes[node].place

    def _find_given(self, form: MessageForm, parent: int | None) -> int | None:
        children = (self._nodes[child] for child in self._children.get((parent, form.key), ()))
        return next((node.number for node in children if node.turn is None and _compare(form, node) is not None), None)

    def _check_levels(self, walk: Walk) -> Sequence[Sequence[_RecordedPath]]:
        """The levels of a walk that still hold: those up to the first after which a message was recorded."""
        levels = walk.levels
        num_joined = max((reached.num_joined for reached in levels[-1]), default=0)
        for node in self._nodes[walk.num_nodes :]:
            place = node.place.position - 1
            for depth in range(max(place - num_joined, 0), place + 1):
                if depth + 1 < len(levels) and any(reached.node == node.parent for reached in levels[depth]):
                    levels = levels[: depth + 1]
        return levels

    def _find_levels(
        self, forms: Sequence[MessageForm], known: Sequence[Sequence[_RecordedPath]], broken: Sequence[BrokenReply]
    ) -> Sequence[Sequence[_RecordedPath]]:
        """All paths that repeat the first messages, level by level as far as there are any."""
        levels = list(known)
        for position in range(len(levels) - 1, len(forms)):
            form, level = forms[position], levels[-1]
            deeper = [
                _reach(reached, node, tolerances)
                for reached in level
                for child in self._children.get((reached.node, form.key), ())
                if (tolerances := _compare(form, node := self._nodes[child])) is not None
            ]
            if not deeper and form.role == "assistant":
                deeper = self._find_changed_replies(form, level, _list_broken(forms[:position], broken))
            if not deeper:
                break
            levels.append(deeper)
        return levels

    def _find_changed_replies(
        self, form: MessageForm, level: Sequence[_RecordedPath], broken: Sequence[MessageForm]
    ) -> list[_RecordedPath]:
        """The replies that a message is with another key than they were delivered with: its text is not the same."""
        replies = self._list_replies(level)
        found = [
            _reach(reached, node, tolerances)
            for reached, node in replies
            if (tolerances := compare_reply(form, node.form)) is not None
        ]
        found = found or [
            _reach(reached, node, tolerances)
            for reached, node in replies
            if self._takes_lists and (tolerances := compare_listed(form, node.form, node.message)) is not None
        ]
        streamed = [*broken, *(node.form for _, node in replies)]
        found = found or [
            _reach(reached, node, {Tolerance.DROPPED_TEXT})
            for reached, node in replies
            if follows_beginning(form, node.form, streamed)
        ]
        return found or self._find_joined_replies(form, level)

    def _find_joined_replies(self, form: MessageForm, level: Sequence[_RecordedPath]) -> list[_RecordedPath]:
        """The replies after a given one, with which a message is joined.

        What an agent had of a reply that a killed gateway lost is given text in the request that follows; later it
        comes in one message with the reply to that request.
        """
        given = [
            (reached, self._nodes[child])
            for reached in level
            for child in self._children_of.get(reached.node, ())
            if self._nodes[child].turn is None and self._nodes[child].form.role == "assistant"
        ]
        return [
            _reach(reached, self._nodes[child], {Tolerance.CONTENT_FORM}, num_joined=1)
            for reached, before in given
            for child in self._children_of.get(before.number, ())
            if self._nodes[child].turn is not None and follows_beginning(form, self._nodes[child].form, [before.form])
        ]

    def _list_replies(self, level: Sequence[_RecordedPath]) -> list[tuple[_RecordedPath, _MessageNode]]:
        """The replies after a level."""
        children = [(reached, self._nodes[k]) for reached in level for k in self._children_of.get(reached.node, ())]
        return [(reached, node) for reached, node in children if node.turn is not None]

    def _rank(self, end: _RecordedPath, settings: TurnSettings) -> tuple[bool, int]:
        assert end.node is not None  # there is one empty path
        return end.turn is not None and self._settings[end.turn] == settings, end.node

    def _find_fork(self, end: _RecordedPath, new: Sequence[MessageForm], settings: TurnSettings) -> ForkReason | None:
        is_begun = end.turn is not None or end.has_user
        if not is_begun or not new:
            return None
        recorded = [self._nodes[child] for child in self._children_of.get(end.node, ())]
        has_reply = any(node.turn is not None for node in recorded)
        if any(form.role == "assistant" for form in new):
            return _explain_other_reply(is_first=new[0].role == "assistant", recorded=recorded, has_reply=has_reply)
        if end.turn is None:
            return ForkReason.DROPPED_REPLY if has_reply else ForkReason.REWRITTEN_HISTORY
        used = self._settings[end.turn]
        if used.tools != settings.tools:
            return ForkReason.CHANGED_TOOLS
        if used.options != settings.options:
            return ForkReason.CHANGED_OPTIONS
        return ForkReason.DROPPED_REPLY if recorded else None


def _reach(
    reached: _RecordedPath, node: _MessageNode, tolerances: Set[Tolerance], *, num_joined: int = 0
) -> _RecordedPath:
    """A path with one message more, which is `node`, and `num_joined` nodes before it."""
    return _RecordedPath(
        node=node.number,
        turn=reached.turn if node.turn is None else node.turn,
        has_user=reached.has_user or node.form.role == "user",
        tolerances=reached.tolerances | tolerances,
        num_joined=reached.num_joined + num_joined,
    )


def _list_keys(forms: Sequence[MessageForm]) -> tuple[bytes, ...]:
    return tuple(form.key for form in forms)


def _list_broken(history: Sequence[MessageForm], broken: Sequence[BrokenReply]) -> list[MessageForm]:
    """The broken replies to these messages."""
    digest = digest_history(_list_keys(history)) if broken else b""
    return [one.form for one in broken if one.history == digest]


def digest_history(keys: Sequence[bytes]) -> bytes:
    """SHA-256 of the keys of messages, 32 bytes, which does not depend on the process."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(len(key).to_bytes(4, "little") + key)
    return digest.digest()


def _compare(form: MessageForm, node: _MessageNode) -> frozenset[Tolerance] | None:
    """The tolerances under which a message with the key of a node is that node's; None if it is another message."""
    if node.turn is not None:
        return compare_reply(form, node.form)
    own = node.form
    is_same = form.role != "assistant" or (
        (form.text, form.reasoning, form.exact_key) == (own.text, own.reasoning, own.exact_key)
    )
    return frozenset() if is_same else None


def _restore_call_ids(
    messages: Sequence[Message], forms: Sequence[MessageForm], path: Sequence[_MessageNode], num_sent: int
) -> list[Message]:
    """The messages after the first `num_sent`; a tool message answers a recorded call under the id that is recorded."""
    restored: list[Message] = []
    for number in range(num_sent, len(messages)):
        message, answers = messages[number], forms[number].answers
        if answers is not None and number - answers[0] < num_sent:
            caller = _find_caller(path, forms[:num_sent], number - answers[0])
            call = (caller.message.get("tool_calls") or ())[answers[1]]
            message = cast(Message, {**cast(Mapping[str, object], message), "tool_call_id": call["id"]})
        restored.append(message)
    return restored


def _find_caller(path: Sequence[_MessageNode], forms: Sequence[MessageForm], number: int) -> _MessageNode:
    """The node of a message with calls, which is number `number` of those that were sent."""
    if len(path) == len(forms):
        return path[number]
    # Two nodes came as one message, and the first of them has no calls.
    num_callers = sum(bool(form.call_ids) for form in forms[number:])
    return [node for node in path if node.message.get("tool_calls")][-num_callers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedPath:
    """A recorded path that repeats the first messages of a request."""

    node: int | None = None
    """Its last node; None if it has none."""
    turn: int | None = None
    """Its last sampled turn."""
    has_user: bool = False
    tolerances: frozenset[Tolerance] = frozenset()
    num_joined: int = 0
    """How many nodes it has more than messages: two came as one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One request's way; never changed."""

    messages: Sequence[Message] = ()
    """As they came."""
    has_one_spelling: Sequence[bool] = ()
    """Of each message, whether one that is equal in Python is equal in JSON too."""
    forms: Sequence[MessageForm] = ()
    places: Sequence[Place]
    """Before each message, and after the last."""
    levels: Sequence[Sequence[_RecordedPath]] = ((_RecordedPath(),),)
    """All paths that repeat the first k messages, for each k up to the longest path."""
    num_nodes: int = 0
    """How many nodes of the forest the levels know of."""
    num_learned: int = 0
    """How many sets of tools the forms know of."""

    def count_common(self, messages: Sequence[Message]) -> int:
        """Count the first messages that are those of this walk, letter for letter."""
        number = 0
        for known, has_one_spelling, message in zip(self.messages, self.has_one_spelling, messages, strict=False):
            if known != message or not (has_one_spelling or repr(known) == repr(message)):
                break
            number += 1
        return number

    def cut(self, number: int) -> Walk:
        """The walk of its first `number` messages."""
        return Walk(
            messages=self.messages[:number],
            has_one_spelling=self.has_one_spelling[:number],
            forms=self.forms[:number],
            places=self.places[: number + 1],
            levels=self.levels[: number + 1],
            num_nodes=self.num_nodes,
            num_learned=self.num_learned,
        )


class _Walks:
    """The last walks of a session, one for each conversation, so that a request is matched from where it differs.

    An agent sends its whole conversation with every request, and most of it as it did before:

        before    system ─ user                             forms 2, levels [start] [system] [user]
        now       system ─ user ─ reply 0 ─ tool            2 messages are known: reply 0 and tool are identified,
                                                            and looked for after [user]

    A walk holds nothing that a new match would not find: its forms hold while the known defaults of tools stay the
    same, and a level holds while no message is recorded after one of an earlier level.
    """

    _MAX_KEPT = 8

    def __init__(self) -> None:
        self._kept: list[Walk] = []

    def find(self, messages: Sequence[Message], *, num_learned: int) -> Walk | None:
        """The kept walk that begins with the most of these messages, cut where it differs; None if no walk matches."""
        number, best = 0, None
        for walk in self._kept:
            if walk.num_learned == num_learned and (common := walk.count_common(messages)) > number:
                number, best = common, walk
        return None if best is None else best.cut(number)

    def keep(self, walk: Walk) -> None:
        """Keep a walk, in the place of the one that it continues, or of the oldest."""
        others = [kept for kept in self._kept if not _continues(walk, kept)]
        self._kept = [*others[1 - self._MAX_KEPT :], walk]


def has_one_spelling(message: Message) -> bool:
    """Whether messages that are equal to this one in Python are equal in JSON too.

    Numbers are not (1 == 1.0 == True), nor is the order of arguments that are an object.
    """
    calls: Any = message.get("tool_calls") or ()
    return _is_text(message.values()) and all(isinstance(call["function"].get("arguments"), str) for call in calls)


def _is_text(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, dict):
            if not _is_text(value.values()):
                return False
        elif isinstance(value, list):
            if not _is_text(value):
                return False
        elif not (value is None or isinstance(value, str)):
            return False
    return True


def _continues(walk: Walk, kept: Walk) -> bool:
    """Whether a walk begins with all messages of another, which it was then made from."""
    number = len(kept.messages)
    if number == 0 or number > len(walk.messages):
        return number == 0
    return walk.messages[0] is kept.messages[0] and walk.messages[number - 1] is kept.messages[-1]


def _explain_other_reply(*, is_first: bool, recorded: Sequence[_MessageNode], has_reply: bool) -> ForkReason:
    """Why new messages have a reply that was not delivered; `recorded` are the messages in their place.

    The reply `is_first` of them, or comes after messages that differ before it.
    """
    if not is_first:
        return ForkReason.REWRITTEN_HISTORY if recorded else ForkReason.FOREIGN_REPLY
    return ForkReason.EDITED_REPLY if has_reply else ForkReason.FOREIGN_REPLY
