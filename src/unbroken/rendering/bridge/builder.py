r"""Builds bridges (I1): the ids between a sampled turn and the next generation prompt, from a window and a certificate.

ChatML, ids shortened: the engine sampled `[.., call, <|im_end|>]` and one tool reply "42" follows. The window reads

    ..assistant\nWq7Text<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n
                                  `--------------------- the bridge ----------------------´

Had the turn been cut by length, the bridge would begin with the `<|im_end|>` before that (I7).

Only the last sampled id is read; a turn without a stop id is also parsed, to see whether it ended inside its reasoning.
Sampled ids are never searched for ends, because a model may sample or spell control tokens anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unbroken.errors import ImageError, MessagesError
from unbroken.images.inputs import ImageInputs
from unbroken.messages import Message, ToolSchema, check_messages
from unbroken.rendering.base import BridgeOutcome, HistoryEffect, HistoryPolicy, RefusalReason
from unbroken.rendering.bridge.bridge_encoder import BridgeEncoder
from unbroken.rendering.bridge.certificates.certificate import Certificate, CertificateRecord
from unbroken.rendering.bridge.certificates.certifier import Certifier
from unbroken.rendering.bridge.certificates.store import CertificateStore
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shape_reader import ShapeReader
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.bridge.turn_window import TurnWindowRenderer
from unbroken.rendering.bridge.window import WindowRenderer, WindowTurn
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.images import MessageImage, load_images
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.lock import RendererLock
from unbroken.rendering.message_format import MessageFormat
from unbroken.rendering.reasoning import ReasoningDelimiters


class BridgeBuilder:
    """Builds bridges for one template with its options and one tokenizer, and keeps their certificates."""

    def __init__(
        self,
        *,
        template: ChatTemplate,
        message_format: MessageFormat,
        ends: TurnEnds,
        encoder: SafeEncoder,
        reasoning: ReasoningDelimiters | None,
        reasoning_markup: tuple[str, str],
        stop_token_ids: frozenset[int],
        lock: RendererLock,
        policy: HistoryPolicy = HistoryPolicy.EXACT,
        placeholder: str | None = None,
    ) -> None:
        self._lock = lock
        self._policy = policy
        windows = WindowRenderer(template, message_format, ends, placeholder=placeholder)
        self._certificates = CertificateStore(Certifier(template, windows, reasoning_markup))
        self._shapes = ShapeReader(message_format, encoder)
        self._windows = TurnWindowRenderer(windows, encoder)
        self._encoder = BridgeEncoder(encoder, ends, reasoning=reasoning, stop_token_ids=stop_token_ids)
        known = {"role", "content", "tool_calls", "reasoning_content", message_format.reasoning_key}
        self._unusual_keys = [str(key) for key in template.reads().keys - known]

    def build(
        self,
        last_id: int,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema],
        earlier: Sequence[Message] | None,
        ends_in_reasoning: Callable[[], bool],
        images: ImageInputs | None = None,
        no_images_because: str = "",
    ) -> BridgeOutcome:
        """Build the bridge after a turn whose last sampled id is `last_id` (-1 if it has none).

        `ends_in_reasoning` is called only if the turn was cut, and `earlier` is used only if the bridge depends on it.

        Raises:
            MessagesError: the turn is malformed.
            ToolDefinitionError: the tools are not a list of schemas.
        """
        try:
            check_messages([assistant])
            turn = self._shapes.read_turn(assistant)
            shape = self._shapes.read_shape(turn, new_messages)
            loaded = _load_new_images(new_messages, images, no_images_because)
            with self._lock:
                self._check_keys(assistant)
                certificate = self._certificates.get(shape, tools, earlier, assistant)
                self._check_unique_ids(turn, certificate, earlier or ())
                effect = certificate.get_effect(assistant)
                self._check_policy(effect)
                window = self._windows.render(turn, new_messages, certificate, tools)
                if certificate.depends_on_turn:
                    self._windows.check_turn(assistant, window, certificate)
                if certificate.history_class.counted is not None:
                    counts = self._certificates.histories.read(earlier or ()).counts
                    window = self._windows.count_on(window, certificate, counts)
                start = self._encoder.find_start(window, last_id, ends_in_reasoning)
                return self._encoder.encode(window, start, effect, loaded, images)
        except BridgeRefusedError as error:
            return error.refusal

    def certificates(self) -> tuple[CertificateRecord, ...]:
        """The examinations that are still kept, oldest first."""
        with self._lock:
            return self._certificates.records()

    def revoke(
        self, new_messages: Sequence[Message], *, assistant: Message, tools: Sequence[ToolSchema], detail: str
    ) -> None:
        """Refuse bridges of this shape from now on, whatever the tools (if any), because a full rendering differed."""
        shape = self._shapes.read_shape(self._shapes.read_turn(assistant), new_messages)
        with self._lock:
            self._certificates.revoke(shape, tools, detail)

    def _check_keys(self, assistant: Message) -> None:
        """Refuse a turn with something else in it that the template reads: a window does not have it."""
        if keys := sorted(key for key in self._unusual_keys if assistant.get(key) is not None):
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED, f"the template reads {keys} of the turn, which a sampled turn does not have"
            )

    def _check_policy(self, effect: HistoryEffect) -> None:
        if self._policy is HistoryPolicy.TEMPLATE and effect is not HistoryEffect.KEPT:
            raise BridgeRefusedError(
                RefusalReason.REWRITES_HISTORY,
                f"the template's effect on what came before is {effect.value!r}, and history='template'",
            )

    def _check_unique_ids(self, turn: WindowTurn, certificate: Certificate, earlier: Sequence[Message]) -> None:
        """Refuse a turn whose call ids are not unique, if the template looks up calls by id."""
        if not certificate.needs_unique_ids:
            return
        ids = [call_id for _, call_id in turn.calls]
        reused = self._certificates.histories.find_reused_id(earlier, ids) if earlier else None
        if reused is not None or "" in ids or len(set(ids)) < len(ids):
            where = "" if reused is None else f", and an earlier call has {reused!r}"
            raise BridgeRefusedError(
                RefusalReason.BAD_EXTENSION,
                f"the template looks calls up by id, and the turn has the ids {ids}{where}: make them unique",
            )


def _load_new_images(
    new_messages: Sequence[Message], images: ImageInputs | None, no_images_because: str
) -> list[MessageImage]:
    try:
        return load_images(new_messages, images, no_images_because=no_images_because)
    except (MessagesError, ImageError) as error:
        raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
