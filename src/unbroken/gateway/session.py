"""A session: what it is created with, and how each request is matched with what is recorded, sampled and stored."""

from __future__ import annotations

import asyncio
import time
from asyncio import wrap_future
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import Field

from unbroken.counters import Event
from unbroken.errors import StoreError, TemplateError
from unbroken.gateway.attempts import Attempt, Attempts, PendingTurn, RecordedAnswer
from unbroken.gateway.config import OnDisconnect
from unbroken.gateway.state import Answered, SessionState, make_settings
from unbroken.ledger.forest import Match, TurnSettings, digest_history
from unbroken.ledger.matching import Tolerance
from unbroken.ledger.records import SessionRecord, SessionStatus, StreamRecord, TurnCommit
from unbroken.ledger.store.sql import SessionWriter
from unbroken.messages import Message, check_conversation
from unbroken.rendering.base import Renderer
from unbroken.rollout.prompts import Prompt, PromptBuilder
from unbroken.rollout.seeds import derive_seed
from unbroken.server.context import ServerContext
from unbroken.server.http.bodies import Biases, Ids, StrictBody, Words
from unbroken.server.http.errors import HttpError
from unbroken.server.images import RequestPrompt
from unbroken.server.questions import PlainTurn, continue_prompt
from unbroken.server.texts import check_conversation as check_length
from unbroken.server.turns import OpenTurn, Question
from unbroken.server.wire.reply import WholeReply
from unbroken.types import SampledSequence, SampleRequest

_MAX_BROKEN = 4
"""Broken streams whose text is kept for each session."""
CONTROLS = ("logit_bias", "allowed_token_ids", "min_tokens", "bad_words_ids")
"""Sampling parameters of sessions that no dialect has."""
_ABORTED_IDS = f"{Event.ABORTED}/sampled_ids"


class _SessionSampling(StrictBody):
    """Sampling parameters that all turns of a session have, also against its agent; null leaves it to the agent.

    A trainer needs one temperature in all turns.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases = Field(default_factory=list)
    allowed_token_ids: Ids = Field(default_factory=list)
    min_tokens: int = 0
    bad_words_ids: Words = Field(default_factory=list)
    seed: int | None = None
    return_kept_ids: bool | None = None
    """Record the ids that each id was sampled from, where top-k, top-p or min-p cut any, for a trainer."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most ids of one turn. The agent may ask for fewer."""

    @property
    def controls(self) -> dict[str, Any]:
        """Those that no dialect has, by the names of `SamplingParams`."""
        return {
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": tuple(self.allowed_token_ids),
            "min_tokens": self.min_tokens,
            "bad_words_ids": tuple(map(tuple, self.bad_words_ids)),
        }


class _SessionLimits(StrictBody):
    """Where a session ends; null for no limit."""

    turns: int | None = Field(default=None, ge=1)
    """Each of the `n` answers to a request is a turn."""
    tokens: int | None = Field(default=None, ge=1)
    """Sampled ids of all turns, those of aborted ones too. A request reserves its `max_tokens` for each of its answers,
    cut to what is left, until it ends."""
    seconds: float | None = Field(default=None, gt=0)
    """Since it was created."""
    in_flight: int | None = Field(default=None, ge=1)
    """Requests at the same time."""


class SessionSettings(StrictBody):
    """What a session is created with."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Kept and returned as it is, such as the task and the number of the attempt."""
    policy: str | None = None
    """What answers its agent, whatever name the agent has for it: the served model, or any policy's name, also with
    @VERSION. A name in a request that is a policy's own is answered by that one."""
    follow: bool = True
    """Answer with the policy's newest version; false for the one of the session's creation, and an error once there are
    other weights."""
    sampling: _SessionSampling = Field(default_factory=_SessionSampling)
    template_options: dict[str, Any] | None = None
    """`chat_template_kwargs` of all its requests; null leaves them to the agent."""
    limits: _SessionLimits = Field(default_factory=_SessionLimits)
    on_disconnect: OnDisconnect | None = Field(default=None, strict=False)
    """What happens to a turn whose reader leaves before its end; null for the gateway's default."""


class StoredSettings(SessionSettings):
    """What is stored of a session's settings."""

    model: str
    """The served model, whose tokenizer made the ids."""
    tokenizer: str | None
    """Folder or hub name of the tokenizer that made the ids; null for a server that was given none by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A question at its place in the session."""

    question: Question
    renderer: Renderer
    settings: TurnSettings
    match: Match
    prompt: Prompt


class Session:
    """A session that this process owns."""

    def __init__(
        self, record: SessionRecord, state: SessionState, *, writer: SessionWriter, max_in_flight: int
    ) -> None:
        self.record = record
        self.settings = StoredSettings.model_validate(record.settings)
        self.state = state
        self._writer = writer
        self._max_in_flight = min(max_in_flight, self.settings.limits.in_flight or max_in_flight)
        self._forced_sampling = self.settings.sampling.model_dump(exclude_none=True, exclude=set(CONTROLS))
        self._opening = asyncio.Lock()
        """One request at a time is matched and gets its prompt."""
        self._recording = asyncio.Lock()
        """One turn at a time gets its numbers and is written."""
        self.is_stale = False
        """Whether the store may hold other turns: it refused one, perhaps as another gateway owns the session."""
        self._num_opened = len(state.turns)
        self._pending: list[PendingTurn] = []
        self._engine_s = 0.0
        self._pending_since_s = 0.0
        self._unrecorded: dict[Attempt, int] = {}
        """How many turns each accepted question may still record: they count before they are sampled, and their ids."""
        self._storing: set[asyncio.Task[None]] = set()
        """Counts of aborted ids that are being written."""
        self._dropped_streams: list[str] = []
        """Answers of which the store has pieces that nobody needs any more."""
        self._forget_streams()
        self._attempts = Attempts()
        self._attempts.add_recorded(state.turns)

    @property
    def num_in_flight(self) -> int:
        """Turns that are being sampled."""
        return len(self._pending)

    @property
    def engine_s(self) -> float:
        """Seconds in which a turn was in the engine or its queue, since this process has the session."""
        return self._engine_s + (time.monotonic() - self._pending_since_s if self._pending else 0.0)

    async def open(
        self, context: ServerContext, question: Question, *, id_prefix: str
    ) -> tuple[OpenTurn, Callable[[bool], None]]:
        """Open the turn that answers a question, or find it again if the question is a retry.

        Also returns what to call when the request ends: with true if it was answered to its end.

        Raises:
            HttpError: the session has ended, a limit is reached, or the question cannot be answered.
            UnbrokenError: messages, tools, images or sampling parameters are invalid.
        """
        self._check_open()
        async with self._opening:
            if (attempt := self._attempts.find(question.retry, n=question.n)) is not None:
                leave = self._enter(attempt)
                try:
                    return await self._answer_again(context, question, attempt), leave
                except BaseException:
                    leave(False)
                    raise
            self._check_limits(question.n)
            question = self._limit_tokens(self._apply_settings(question))
            placed = await wrap_future(context.text_threads.submit(self._place, context, question))
            turn = await continue_prompt(
                context,
                question,
                placed.renderer,
                RequestPrompt(token_ids=placed.prompt.token_ids, images=placed.prompt.images),
                id_prefix=id_prefix,
            )
            self._num_opened += 1
            attempt = Attempt(question.retry, question.n)
            attempt.pending = self._make_pending(context, turn, placed, attempt)
            self._unrecorded[attempt] = attempt.n
            return attempt.pending, self._enter(attempt)

    def recall(self, answer_id: str) -> list[Message] | None:
        """The recorded messages up to the reply of an answer; None for an answer that is not the session's."""
        turns = (turn.record for turn in self.state.turns if turn.record.answer_id == answer_id)
        if (turn := next(turns, None)) is None:
            return None
        return [node.message for node in self.state.forest.get_path(turn.reply_node)]

    async def open_conversation(self, name: str, items: Sequence[Mapping[str, Any]]) -> None:
        """Store a conversation of Responses that begins with these items."""
        self._check_open()
        content = {name: {"items": list(items)}}
        await self._commit(TurnCommit(session_id=self.record.session_id, conversations=content))
        self.state.conversations.update(content)

    async def finish_pending(self) -> None:
        """Wait for the turns that are being sampled."""
        for turn in list(self._pending):
            await turn.finish()
        await asyncio.gather(*self._storing)

    def cancel_pending(self) -> None:
        """End the turns that are being sampled; they are not recorded."""
        for turn in list(self._pending):
            turn.cancel()

    def _check_open(self) -> None:
        if self.record.status is not SessionStatus.OPEN:
            raise ended(self.record)
        if time.time() >= self.record.expires_s:
            raise ended(replace(self.record, status=SessionStatus.EXPIRED))

    def _check_limits(self, num_turns: int) -> None:
        """Check that a question may be answered by so many turns, each with at least one id."""
        limits = self.settings.limits
        live = {attempt: number for attempt, number in self._unrecorded.items() if not _get_pending(attempt).is_over}
        num_used = len(self.state.turns) + sum(live.values())
        age_s = time.time() - self.record.created_s
        reached = (
            ("turns", limits.turns, num_used, num_turns, "turns"),
            ("tokens", limits.tokens, self._count_sampled(), num_turns, "sampled ids"),
            ("seconds", limits.seconds, age_s, 0, "seconds since it was created"),
        )
        for name, limit, used, asked, unit in reached:
            if limit is not None and (used >= limit or used + asked > limit):
                more = f", and {asked} are asked for" if used < limit else ""
                raise HttpError(
                    403,
                    f"the session's limits.{name} is reached: {used:g} of {limit:g} {unit}{more}",
                    param=f"limits.{name}",
                    code="session_limit_reached",
                )
        if (busy := self._find_busy(len(live), num_turns)) is not None:
            raise HttpError(429, busy, code="session_busy", headers={"Retry-After": "1"})

    def _find_busy(self, num_live: int, num_turns: int) -> str | None:
        """Why a question has to wait for those at work; None if it has not."""
        limits = self.settings.limits
        if num_live >= self._max_in_flight:
            return f"the session may have {self._max_in_flight} requests at a time, and has {num_live}"
        if limits.tokens is not None and self._count_tokens_left(limits.tokens) < num_turns:
            return "the requests in flight have reserved all ids that are left of the session's limits.tokens"
        return None

    def _count_sampled(self) -> int:
        """Number of ids that were sampled and not given back: those of aborted turns count too."""
        aborted = sum(pending.num_unrecorded for pending in self._pending if pending.is_over)
        return self.state.num_sampled + self.state.counters[_ABORTED_IDS] + aborted

    def _count_tokens_left(self, limit: int) -> int:
        """Number of ids that are neither sampled nor reserved by a request in flight, which may take its maximum."""
        reserved = sum(
            number * pending.request.params.max_tokens
            for attempt, number in self._unrecorded.items()
            if not (pending := _get_pending(attempt)).is_over
        )
        return limit - self._count_sampled() - reserved

    def _limit_tokens(self, question: Question) -> Question:
        """The question with at most its share of the ids that are left, which is at least one."""
        limit = self.settings.limits.tokens
        if limit is None:
            return question
        share = self._count_tokens_left(limit) // question.n
        if question.max_tokens is not None and question.max_tokens <= share:
            return question
        return replace(question, max_tokens=share, caps_max_tokens=True)

    def _enter(self, attempt: Attempt) -> Callable[[bool], None]:
        """Count a request that an attempt answers; returns what to call when it ends."""
        leave = attempt.enter()

        def end(is_delivered: bool) -> None:
            leave(is_delivered)
            if attempt.pending is not None and not (is_delivered and len(attempt.numbers) == attempt.n):
                self._remember_stream(attempt.pending)
            if attempt.pending not in self._pending:  # it was never sampled, or has ended
                self._unrecorded.pop(attempt, None)
            elif attempt.num_requests == 0 and self.settings.on_disconnect is OnDisconnect.ABORT:
                attempt.pending.abort()

        return end

    def _remember_stream(self, pending: PendingTurn) -> None:
        """Know what a reader had of a turn, if it comes back."""
        if (streamed := pending.streamed) is not None:
            self.state.broken.pop(pending.answer_id, None)
            self.state.broken[pending.answer_id] = streamed
            self._forget_streams()

    def _forget_streams(self) -> None:
        """Forget all broken streams but the last few."""
        while len(self.state.broken) > _MAX_BROKEN:
            answer_id = next(iter(self.state.broken))
            del self.state.broken[answer_id]
            self._dropped_streams.append(answer_id)

    def _apply_settings(self, question: Question) -> Question:
        """The question with the session's sampling parameters instead of the agent's, and its id for affinity."""
        forced = dict(self._forced_sampling)
        if "seed" in forced:  # for each turn another: with one seed, equal prompts would get equal replies
            forced["seed"] = derive_seed(forced["seed"], self._num_opened)
        returns_kept_ids = forced.pop("return_kept_ids", False)
        most = [limit for limit in (forced.pop("max_tokens", None), question.max_tokens) if limit is not None]
        options = self.settings.template_options
        return replace(
            question,
            sampling=question.sampling.model_copy(update=forced) if forced else question.sampling,
            max_tokens=min(most) if most else None,
            template_options=question.template_options if options is None else options,
            session_id=self.record.session_id,
            returns_kept_ids=returns_kept_ids,
            controls=self.settings.sampling.controls,
        )

    def _place(self, context: ServerContext, question: Question) -> _Placed:
        """Check a question, match it with what is recorded, and build its prompt."""
        messages, forest = question.messages, self.state.forest
        check_length(context, messages, question.tools, question.template_options)
        known = forest.recall(messages)
        check_conversation(messages, num_checked=len(known.messages))
        renderer = context.get_renderer(question.template_options, question.image_settings)
        settings = make_settings(self.state.learn_tools(question.tools), _list_options(question))
        match = forest.match(messages, settings, known=known, broken=tuple(self.state.broken.values()))
        try:
            prompt = self._build_prompt(renderer, match, question)
        except TemplateError:
            if Tolerance.FOLDED_CALLS in match.tolerances:  # what lists the calls is followed by no result of one
                forest.take_lists_as_text()
                return self._place(context, question)
            # Replies of other models come back with their reasoning in the text.
            if (unfolded := match.unfold()) == match:
                raise
            prompt = self._build_prompt(renderer, unfolded, question)
        return _Placed(question=question, renderer=renderer, settings=settings, match=match, prompt=prompt)

    def _build_prompt(self, renderer: Renderer, match: Match, question: Question) -> Prompt:
        builder = PromptBuilder(renderer, self.state.tree)
        last = None if match.turn is None else self.state.turns[match.turn]
        if last is None or not match.continues:
            turn = None if last is None else last.turn
            return builder.render(match.messages, tools=question.tools, last=turn, reason=match.fork)
        num_before = self.state.forest.nodes[last.record.reply_node].place.position - 1
        prompt = builder.extend(
            last.turn, match.messages[num_before + 1 :], earlier=match.messages[:num_before], tools=question.tools
        )
        return replace(prompt, fork=prompt.fork or match.fork)

    def _make_pending(self, context: ServerContext, turn: PlainTurn, placed: _Placed, attempt: Attempt) -> PendingTurn:
        history = digest_history(placed.match.history)
        return PendingTurn(
            turn.service,
            turn.request,
            turn.renderer,
            answer_id=turn.answer_id,
            read_reply=lambda index, sequence: context.read_reply(turn, placed.question, sequence, index=index),
            record=partial(self._record, context, turn, placed, attempt),
            on_start=lambda: self._follow(attempt),
            history=history,
            keep_streamed=partial(self._keep_piece, turn.answer_id, history),
            counts=self.settings.limits.tokens is not None,
        )

    async def _keep_piece(self, answer_id: str, history: bytes, content: str, reasoning: str) -> None:
        """Store what is about to be streamed."""
        message = {"content": content, "reasoning_content": reasoning}
        piece = StreamRecord(answer_id=answer_id, piece=self.state.num_pieces, history=history, message=message)
        self.state.num_pieces += 1
        await self._commit(TurnCommit(session_id=self.record.session_id, streamed=(piece,)))

    async def _commit(self, commit: TurnCommit) -> None:
        """Write a commit, which also drops the streams that nobody needs."""
        dropped, self._dropped_streams = self._dropped_streams, []
        try:
            await self._writer.commit(replace(commit, dropped_streams=(*commit.dropped_streams, *dropped)))
        except StoreError:
            self.is_stale = True
            raise

    async def _record(
        self,
        context: ServerContext,
        turn: PlainTurn,
        placed: _Placed,
        attempt: Attempt,
        index: int,
        sequence: SampledSequence,
        reply: WholeReply,
    ) -> None:
        """Write a completion of an attempt as a turn, and apply it."""
        question = placed.question
        answered = Answered(
            match=placed.match,
            prompt=placed.prompt,
            sequence=sequence,
            reply=reply.reader,
            choice=index,
            answer_id=turn.answer_id,
            tools=tuple(question.tools),
            options=_list_options(question),
            settings=placed.settings,
            retry=question.retry,
            policy=(question.policy or context.policies.served).name,
            sampling=turn.request.params.changes,
            conversation=question.conversation,
        )
        async with self._recording:  # also when the session is being finished: its end waits for its turns
            planned = self.state.plan(self.record.session_id, answered, created_s=time.time())
            is_streamed = attempt.pending is not None and attempt.pending.streamed is not None
            ended = (turn.answer_id,) if is_streamed and index == 0 else ()
            await self._commit(replace(planned.commit, dropped_streams=ended))
            self.state.apply(planned)
            if attempt in self._unrecorded:
                self._unrecorded[attempt] -= 1
            attempt.numbers.append(len(self.state.turns) - 1)

    def _follow(self, attempt: Attempt) -> None:
        """Remember a turn whose work begins now."""
        pending = attempt.pending
        assert pending is not None
        if not self._pending:
            self._pending_since_s = time.monotonic()
        self._pending.append(pending)
        self._attempts.add(attempt)

        def end() -> None:
            engine_s = self.engine_s
            self._pending.remove(pending)
            if not self._pending:
                self._engine_s = engine_s
            self._unrecorded.pop(attempt, None)
            self._attempts.end(attempt)
            if 0 in pending.replies and pending.streamed is not None:  # a piece may have been written after the turn
                self._dropped_streams.append(pending.answer_id)
            if pending.num_unrecorded and self.settings.limits.tokens is not None:
                self.state.counters.add(_ABORTED_IDS, pending.num_unrecorded)
                storing = asyncio.create_task(self._store_aborted(pending.num_unrecorded))
                self._storing.add(storing)
                storing.add_done_callback(self._storing.discard)

        pending.add_done_callback(end)

    async def _store_aborted(self, number: int) -> None:
        """Write the number of ids of an aborted turn: they count after a restart too."""
        with suppress(StoreError):  # the session has ended, or finds the next turn refused
            await self._writer.commit(TurnCommit(session_id=self.record.session_id, counters={_ABORTED_IDS: number}))

    async def _answer_again(self, context: ServerContext, question: Question, attempt: Attempt) -> OpenTurn:
        if attempt.pending is not None:
            return attempt.pending
        turns = sorted((self.state.turns[number] for number in attempt.numbers), key=lambda turn: turn.record.choice)
        question = self._apply_settings(question)
        renderer = await wrap_future(
            context.text_threads.submit(context.get_renderer, question.template_options, question.image_settings)
        )
        request = SampleRequest(
            request_id=turns[0].record.answer_id,
            prompt_ids=self.state.tree.token_ids(turns[0].turn.prompt_end),
            images=self.state.tree.images(turns[0].turn.prompt_end),
            n=len(turns),
        )
        return RecordedAnswer(
            answer_id=turns[0].record.answer_id,
            renderer=renderer,
            request=request,
            sequences=tuple(recorded.turn.sequence for recorded in turns),
        )


def _get_pending(attempt: Attempt) -> PendingTurn:
    """The turn of an attempt that is not over."""
    assert attempt.pending is not None
    return attempt.pending


def ended(record: SessionRecord) -> HttpError:
    """The error for a request to a session that takes none any more."""
    return HttpError(
        409,
        f"the session {record.session_id} takes no requests: it is {record.status.value}",
        code=f"session_{record.status.value}",
    )


def _list_options(question: Question) -> dict[str, Any]:
    """What the prompt depends on besides messages and tools."""
    return {"template": dict(question.template_options or {}), "images": question.image_settings}
