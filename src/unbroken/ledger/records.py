"""Records of sessions: what a store keeps, so that a session lives again after its process was killed.

A session is one attempt of one agent at one task. A worked example: a user asks (message 0), the model is given 1 2
and samples 3 4 (message 1), which is turn 0; a tool answers (message 2), the bridge 5 6 is given and 7 is sampled
(message 3), which is turn 1.

    turn   given.token_ids  given.parent  parent   sequence.completion_ids  prompt_node  reply_node
    0      1 2              None          (0, 2)   3 4                      0            1
    1      5 6              (1, 2)        (2, 2)   7                        2            3

Added to a `TokenTree` in this order (`add_given`, then `add_sampled`), they make the tree that they were recorded from:
a turn's nodes get the tree's next numbers. So the given and the sampled ids of a turn must have been added to the tree
one after the other, and the turns in the order of `number` and `choice`. What never was a node (a refused prompt) is no
turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.messages import ToolSchema
from unbroken.types import EncodedImage, ImageSpan, SampledSequence, TokenIds, freeze, token_ids


class SessionStatus(StrEnum):
    """Whether a session takes turns. The names are stored and must not change."""

    OPEN = "open"
    FINISHED = "finished"
    EXPIRED = "expired"
    """Its time was over before it was finished; what it recorded is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session without its turns. Mappings are JSON objects."""

    session_id: str
    key_digest: bytes = field(repr=False)
    """SHA-256 of the session's API key, [32]; the key itself is never stored."""
    created_s: float
    """Unix seconds."""
    expires_s: float
    """Unix seconds."""
    status: SessionStatus = SessionStatus.OPEN
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was created with: metadata, sampling, limits."""
    outcome: Mapping[str, Any] | None = None
    """What it was finished with: reward, metrics, status; None until then, and if it expired."""

    def __post_init__(self) -> None:
        if not self.session_id or not self.session_id.isprintable():
            raise InvariantError(f"session_id must be printable text, got {self.session_id!r}")
        if len(self.key_digest) != 32:
            raise InvariantError(f"key_digest must be a SHA-256, 32 bytes, got {len(self.key_digest)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """One message of a session's forest of conversations."""

    node: int
    """Unique in the session."""
    parent: int | None
    """The node of the message before; None for the first of a conversation."""
    message: Mapping[str, Any]
    """A `Message` of JSON values. An image part is `{"type": "image", "sha256": ...}`: its bytes are stored once."""
    sampled: bool
    """Whether it is a reply of the model."""
    delivered: Mapping[str, Any] | None = None
    """The reply as the agent got it, if that differs: malformed calls are content there, and stop strings are cut."""

    @property
    def image_sha256s(self) -> tuple[str, ...]:
        """The images that its content refers to."""
        return tuple(_iterate_images(self.message.get("content")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecord:
    """An `ImageSpan` without its image, which is stored once."""

    offset: int
    length: int
    placeholder_id: int
    sha256: str
    """64 lower-case hex digits."""
    settings: str = "{}"

    @staticmethod
    def from_span(span: ImageSpan) -> ImageRecord:
        """Make the record of a span."""
        return ImageRecord(
            offset=span.offset,
            length=span.length,
            placeholder_id=span.placeholder_id,
            sha256=span.sha256,
            settings=span.settings,
        )

    def to_span(self, image: EncodedImage) -> ImageSpan:
        """Make the span again. Raises `InvariantError` if it is another image."""
        if image.sha256 != self.sha256:
            raise InvariantError(f"image must be the recorded one, {self.sha256}, got {image.sha256}")
        return ImageSpan(
            offset=self.offset,
            length=self.length,
            image=image,
            placeholder_id=self.placeholder_id,
            settings=self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRecord:
    """The K ids that a turn added to its tree before it sampled: arguments of `TokenTree.add_given`."""

    parent: Position | None
    origin: Origin
    """PROMPT or BRIDGE."""
    token_ids: TokenIds
    """[K]"""
    message_indices: TokenIds
    """[K]"""
    images: tuple[ImageRecord, ...] = ()
    """Offsets count from the first of `token_ids`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_ids(self.token_ids))
        object.__setattr__(self, "message_indices", freeze(np.asarray(self.message_indices, np.int32)))
        if self.origin is Origin.SAMPLED:
            raise InvariantError("origin must be prompt or bridge, got sampled: sampled ids are the turn's sequence")
        if self.message_indices.shape != self.token_ids.shape:
            raise InvariantError(
                f"message_indices has shape {self.message_indices.shape} for {len(self.token_ids)} ids: they must agree"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One answer of the model, exactly as it was sampled, and the request that it answers."""

    number: int
    choice: int = 0
    """Which of the request's n answers; `number` and `choice` are unique in the session."""
    tree: int
    """Which of the session's token trees."""
    prompt_node: int
    """The node of the last message that was given."""
    reply_node: int
    """The node of the reply."""
    tools_key: str
    """Names the conversation's tools among those of the session."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Template options, a JSON object."""
    given: GivenRecord | None
    """None if the prompt's ids were all in the tree already."""
    parent: Position
    """Where the sampled ids were attached."""
    sequence: SampledSequence
    """Without `top_logprobs`: they are not kept."""
    continued: str | None = None
    fork: str | None = None
    refusal: str | None = None
    tolerances: tuple[str, ...] = ()
    """The rules by which the request was matched."""
    request_digest: bytes
    """Of the request's body, to recognise a repetition."""
    idempotency_key: str | None = None
    answer_id: str
    created_s: float
    """Unix seconds."""
    policy: str
    """The name of the policy that answered, whose versions `sequence` has."""
    sampling: Mapping[str, Any]
    """`SamplingParams.changes`, a JSON object."""

    def __post_init__(self) -> None:
        if self.sequence.top_logprobs is not None:
            object.__setattr__(self, "sequence", replace(self.sequence, top_logprobs=None))

    @property
    def image_sha256s(self) -> tuple[str, ...]:
        """The images among its given ids."""
        return () if self.given is None else tuple(image.sha256 for image in self.given.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """The next piece of a reply that is streamed, stored before it is sent: its agent may send it back.

    A turn needs none once it is recorded; a reply that never became one is known by its pieces.
    """

    answer_id: str
    piece: int
    """Unique in the session, and rising."""
    history: bytes
    """Which messages it answers: `digest_history` of their keys."""
    message: Mapping[str, str]
    """`content` and `reasoning_content` that follow those of the piece before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCommit:
    """What one request adds to a session: all of it is stored, or nothing."""

    session_id: str
    messages: tuple[MessageRecord, ...] = ()
    """New ones; a parent before its children."""
    tools: Mapping[str, tuple[ToolSchema, ...]] = field(default_factory=dict)
    """By key. Those of a key that the session has already are ignored."""
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files by their SHA-256: of the images that messages and turns refer to, those that the session has not yet."""
    turns: tuple[TurnRecord, ...] = ()
    """Several for n > 1."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """What it adds to the session's counters (`Counters.as_dict`)."""
    streamed: tuple[StreamRecord, ...] = ()
    dropped_streams: tuple[str, ...] = ()
    """Answers whose streamed pieces nobody needs any more."""
    conversations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Conversations of Responses by their names: `items` that one begins with, or the `answer_id` of its last answer.
    The newest counts.
    """

    @property
    def waits_for_disk(self) -> bool:
        """Whether it must outlive the machine; what is only streamed must outlive this process."""
        return bool(self.messages or self.turns or self.counters or self.conversations)

    @property
    def image_sha256s(self) -> tuple[str, ...]:
        """All images that it refers to or brings, each once."""
        of_messages = [sha256 for message in self.messages for sha256 in message.image_sha256s]
        of_turns = [sha256 for turn in self.turns for sha256 in turn.image_sha256s]
        return tuple(dict.fromkeys([*self.images, *of_messages, *of_turns]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session with everything that it recorded; images are loaded one by one."""

    record: SessionRecord
    messages: tuple[MessageRecord, ...]
    """In the order of their nodes."""
    turns: tuple[TurnRecord, ...]
    """In the order of number and choice."""
    tools: Mapping[str, tuple[ToolSchema, ...]]
    """By key."""
    counters: Mapping[str, int]
    """The sums of all commits."""
    streamed: tuple[StreamRecord, ...] = ()
    """In the order of their numbers."""
    conversations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _iterate_images(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, (list, tuple)) else ():
        if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("sha256"), str):
            yield part["sha256"]
