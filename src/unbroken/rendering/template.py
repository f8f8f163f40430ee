"""A renderer for any Hugging Face chat template: it probes what the template does, and checks or refuses each bridge.

renderer = TemplateRenderer(tokenizer)
prompt = renderer.render([{"role": "user", "content": "What is 6 x 7?"}])
parsed = renderer.parse_response(completion_ids, prompt_ids=prompt.token_ids)
bridge = renderer.bridge_to_next_turn(
    prompt.token_ids, completion_ids, [{"role": "user", "content": "And 6 x 8?"}], assistant=parsed.to_message([])
)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from unbroken.errors import InvalidInputError, StopTokenError, TemplateError
from unbroken.images.processor import ImageInputs
from unbroken.messages import Message, ToolSchema, check_messages
from unbroken.rendering.base import (
    BridgeOutcome,
    HistoryPolicy,
    ParsedResponse,
    Refusal,
    RenderedPrompt,
    ResponseReader,
)
from unbroken.rendering.bridge.builder import BridgeBuilder
from unbroken.rendering.bridge.glue import GlueFinder
from unbroken.rendering.chat_template import ChatTemplate, TemplateLimits
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.encoding.tokenizer import TokenizerFacts
from unbroken.rendering.facts import TemplateFacts, probe_template
from unbroken.rendering.images import find_placeholder, load_images, replace_images_by_files
from unbroken.rendering.parsing.call_grammar import CallConstraint
from unbroken.rendering.parsing.detection import ParserChoice, choose_parser
from unbroken.rendering.parsing.id_stream import CompletionTokens
from unbroken.rendering.prompt import PromptRenderer, RecentPrompts
from unbroken.threads import DaemonThreads, RendererLock
from unbroken.types import TokenIds, token_ids

_MAX_LOADING_THREADS = 4
"""A picture may take hundreds of megabytes while it is loaded."""


class TemplateRenderer:
    """Implements `Renderer` for a transformers fast tokenizer with a chat template.

    Any number of threads may use it at a time. Their Python code runs one after the other (`lock`).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
        history: HistoryPolicy | str = HistoryPolicy.EXACT,
        parser: str | None = None,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
        images: ImageInputs | None = None,
        no_images_because: str = "the model takes none",
    ) -> None:
        """Probe the template, which takes about 0.1 s, also for a tokenizer of 130k entries.

        Args:
            tokenizer: a `PreTrainedTokenizerFast`, or `TokenizerFacts`.
            chat_template: a template, or the name of one of the tokenizer's. The default is the tokenizer's own; if it
                has several, the one named `default`, with tools too.
            template_kwargs: variables for the template, such as `enable_thinking`.
            stop_token_ids: ids that end a turn in addition to the template's, such as those of a generation config.
                Those that the template writes inside a turn are left out.
            history: "exact" bridges wherever the bridge is exact; "template" only where the template keeps the history
                as it is; "repeat_system" also where a bridge repeats a system text that the template moves.
            parser: the name of the format that the model writes reasoning and calls in (`parsing.formats`), or
                `response_template` for the tokenizer's own; by default found as described in `parsing.detection`.
            limits: on the template and each rendering.
            now: the time that the template reads; the time of this call by default. It never changes, so that a text
                stays the same during a conversation.
            images: how images are loaded and expanded; None for a text model.
            no_images_because: the reason in the error for an image when `images` is None.

        Raises:
            TemplateError: there is no chat template, it does not compile, or it goes over a limit.
            InvalidInputError: the tokenizer is not a fast one, a stop id is not in its vocabulary, the placeholder of
                images is not one of its control tokens, or the history policy or parser is unknown.
        """
        policy = _parse_history_policy(history)
        tokenizer = TokenizerFacts.of(tokenizer)
        self._lock = RendererLock()
        self._threads = DaemonThreads(1)
        self._encoder = SafeEncoder(tokenizer.backend, self._lock)
        self._images = images
        self._loading = threading.Semaphore(_MAX_LOADING_THREADS)
        self._no_images_because = no_images_because
        find_placeholder(images, self._encoder.control)
        source = _get_template_source(tokenizer.chat_template, chat_template)
        variables = {**tokenizer.special_tokens, **(template_kwargs or {})}
        self._template = ChatTemplate(source, variables, limits=limits, now=now)
        self._facts = probe_template(self._template, tokenizer, self._encoder.control, stop_token_ids)
        self._recent = RecentPrompts()
        self._prompts = PromptRenderer(
            self._template, self._facts.message_format, self._encoder, self._lock, self._recent
        )
        self._bridges = self._make_bridge_builder(policy)
        choice = self._choose_parser(parser, tokenizer.response_template)
        self._parser, self._unread_calls = choice.parser, choice.unread_calls
        self._constraint = self._make_constraint()
        self._num_generation_ids = len(self._encoder.encode_plain(self._facts.generation_prompt))

    def _make_bridge_builder(self, policy: HistoryPolicy) -> BridgeBuilder | Refusal:
        facts, ends = self._facts, self._facts.turn_ends
        if isinstance(ends, Refusal):
            return ends
        glue = GlueFinder(
            self._template,
            facts.message_format,
            ends,
            self._encoder,
            self._lock,
            reasoning_markup=facts.reasoning_markup,
            prompts=self._recent,
            repeats_system=policy is HistoryPolicy.REPEAT_SYSTEM,
        )
        return BridgeBuilder(
            glue,
            self._encoder,
            ends,
            reasoning=facts.reasoning,
            stop_token_ids=frozenset(facts.stop_token_ids),
            renders_calls=facts.message_format.renders_calls,
            policy=policy,
        )

    def _choose_parser(self, name: str | None, response_template: Any) -> ParserChoice:
        facts = self._facts
        return choose_parser(
            name,
            template=self._template,
            message_format=facts.message_format,
            source=facts.source,
            response_template=response_template,
            reasoning=facts.reasoning,
            tokens=CompletionTokens(
                self._encoder.control,
                self._encoder.decode,
                stop_token_ids={*facts.stop_token_ids, *facts.turn_end_ids},
                num_stop_ids=facts.num_stop_ids,
            ),
        )

    def _make_constraint(self) -> CallConstraint:
        facts = self._facts
        return CallConstraint(
            template=self._template,
            message_format=facts.message_format,
            parser=self._parser,
            encoder=self._encoder,
            reasoning=facts.reasoning,
            turn_ends=facts.turn_end_tokens,
            stop_token_ids=facts.stop_token_ids,
        )

    @property
    def renderer_threads(self) -> DaemonThreads:
        """The thread to use this renderer in, for callers with an event loop."""
        return self._threads

    @property
    def facts(self) -> TemplateFacts:
        """The facts that probing found."""
        return self._facts

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Render a whole conversation with the generation prompt; see `Renderer.render`, also for the errors."""
        return self._render(messages, tools, add_generation_prompt=True)

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        """Like `render`, ids only; the generation prompt is optional."""
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt).token_ids

    def render_text(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> str:
        """Render the template's own text, before it is encoded.

        The messages are not checked, and may spell control tokens: encode the result only if you trust them.

        Raises:
            TemplateError: the template refuses the messages, or goes over a limit.
        """
        return self._template.render(
            self._facts.message_format.convert(messages), tools=tools, add_generation_prompt=add_generation_prompt
        )

    def find_variables(self) -> frozenset[str]:
        """Find the names of the variables that the template reads and does not set itself."""
        return self._template.find_variables()

    def mentions(self, name: str) -> bool:
        """Whether the template's source has this word: it reads no key of a message that it does not name."""
        return name in self._template.source

    def writes_roles(self, roles: tuple[str, ...]) -> bool:
        """Whether the template writes the text of every message of a conversation with these roles."""
        texts = [f"Xq{number}Role" for number in range(len(roles))]
        messages: list[Message] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            rendered = self.render_text(messages, add_generation_prompt=True)
        except TemplateError:
            return False
        return all(text in rendered for text in texts)

    def with_image_settings(self, settings: str) -> TemplateRenderer:
        """Copy the renderer with other settings for its images (`ImageSpan.settings`), e.g. those of one request.

        This is cheap: the copies share everything that was facts.

        Raises:
            InvalidInputError: the renderer takes no images.
        """
        if self._images is None:
            raise InvalidInputError(f"image settings cannot be used, got {settings}: {self._no_images_because}")
        other = copy.copy(self)
        other._images = replace(self._images, settings=settings)
        return other

    def load_images(self, messages: Sequence[Message]) -> list[Message]:
        """Replace each image by its file; see `LoadsImages`. At most four threads load at a time; others wait."""
        check_messages(messages)
        with self._loading:
            images = load_images(messages, self._images, no_images_because=self._no_images_because)
            for image in images:
                if self._images is not None:  # The processor caches the result.
                    self._images.processor.expand(image.image, self._images.settings, name=image.place)
        return replace_images_by_files(messages, images)

    @property
    def images(self) -> ImageInputs | None:
        """How images are loaded and expanded, with the processor that a trainer needs too; None for a text model."""
        return self._images

    @property
    def parser_name(self) -> str:
        """The format of completions."""
        return self._parser.name

    @property
    def unread_calls(self) -> str:
        """What is wrong, if the calls that the template renders are not read back; empty otherwise."""
        return self._unread_calls

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Parse a completion; without `prompt_ids` the template's usual generation prompt is assumed."""
        with self._lock:
            reader = self.open_response(prompt_ids=prompt_ids, tools=tools)
            reader.feed(completion_ids)
            return reader.finish()

    def open_response(
        self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> ResponseReader:
        """Open a reader that parses a completion while it is sampled; see `Renderer.open_response`."""
        return self._parser.open_reader(
            reasoning_opened=self._parser.opens_reasoning(self._decode_end(prompt_ids)),
            tools=tools,
            reads_calls=reads_calls,
        )

    def constrain_calls(self, functions: Sequence[ToolSchema], *, prompt_ids: TokenIds, several: bool) -> str:
        """A structural tag of a turn that calls these functions; see `ConstrainsCalls`."""
        return self._constraint.write(functions, prompt_end=self._decode_end(prompt_ids), several=several)

    def get_reasoning_end(self) -> TokenIds:
        """The ids that end reasoning; see `ClosesReasoning`. That the parser reads them so is tried each time."""
        reasoning, nothing = self._facts.reasoning, token_ids([])
        if reasoning is None:
            raise InvalidInputError(
                "the chat template has no reasoning that one control token opens and one closes, such as <think> and "
                "</think>"
            )
        # After a control token, as in a turn: at the start of a text some tokenizers write a space first.
        ids = self._encoder.encode_plain(reasoning.opening + reasoning.close_text)
        is_open = not self.parse_response(ids[:1], prompt_ids=nothing).reasoning_complete
        if not is_open or not self.parse_response(ids, prompt_ids=nothing).reasoning_complete:
            raise InvalidInputError(
                f"the template's reasoning is in {reasoning.opening!r} and {reasoning.close_text!r}, and the call "
                f"format {self.parser_name!r} does not read it so"
            )
        return ids[1:]

    def _decode_end(self, prompt_ids: TokenIds | None) -> str:
        """The end of a prompt, which shows whether reasoning is open: as long as the usual generation prompt."""
        if prompt_ids is None:
            return self._facts.generation_prompt
        tail = prompt_ids[max(len(prompt_ids) - self._num_generation_ids, 0) :]
        return self._encoder.decode([int(token_id) for token_id in tail])

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn: the template's, the tokenizer's end of text, and those given to the constructor.

        None of them stands inside a turn as the template renders it.

        Raises:
            StopTokenError: a turn of some kind would not end.
        """
        if self._facts.without_stop:
            raise StopTokenError(self._facts.without_stop)
        return self._facts.stop_token_ids

    def bridge_to_next_turn(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema] = (),
        earlier: Sequence[Message],
    ) -> BridgeOutcome:
        """The ids between a sampled turn and the next completion; see `Renderer.bridge_to_next_turn`."""
        if isinstance(self._bridges, Refusal):
            return self._bridges
        return self._bridges.build(
            completion_ids,
            new_messages,
            assistant=assistant,
            tools=tools,
            earlier=earlier,
            ends_in_reasoning=lambda: not self.parse_response(completion_ids, prompt_ids=prompt_ids).reasoning_complete,
            images=self._images,
            no_images_because=self._no_images_because,
        )

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool
    ) -> RenderedPrompt:
        return self._prompts.render_prompt(
            messages,
            tools,
            self._images,
            add_generation_prompt=add_generation_prompt,
            no_images_because=self._no_images_because,
        )


def _parse_history_policy(value: HistoryPolicy | str) -> HistoryPolicy:
    """Get a policy by name. Raises `InvalidInputError` for an unknown one."""
    try:
        return HistoryPolicy(value)
    except ValueError:
        names = [policy.value for policy in HistoryPolicy]
        raise InvalidInputError(f"history must be one of {names}, got {value!r}") from None


def _get_template_source(own: str | Mapping[str, str] | None, chat_template: str | None) -> str:
    """Get the text of `chat_template`, a template or the name of one of a tokenizer's `own`; its default for None.

    Raises:
        TemplateError: the tokenizer has no such template.
    """
    named = own if isinstance(own, Mapping) else {}
    if chat_template is not None:
        if chat_template not in named and "{" not in chat_template:
            raise TemplateError(
                f"chat_template must be the text of a template or the name of one of the tokenizer's {sorted(named)}, "
                f"got {chat_template[:80]!r}"
            )
        return named.get(chat_template, chat_template)
    source = named.get("default") if isinstance(own, Mapping) else own
    if source is None:
        known = f"one of {sorted(named)}" if named else "the text of a template"
        why = (
            "Cannot use chat template functions because tokenizer.chat_template is not set and no template argument "
            "was passed"
            if own is None
            else "This model has multiple chat templates with no default specified"
        )
        raise TemplateError(
            f"the tokenizer has no chat template to use: give {known} as chat_template=, or set "
            f"tokenizer.chat_template ({why})"
        )
    return source
