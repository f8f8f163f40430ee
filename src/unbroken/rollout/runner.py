"""The rollout loop: environment and policy take turns until one of them or a limit ends the episode.

The conversation turns messages into prompts and completions into messages, and keeps the tokens.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import typing
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from unbroken.counters import Counters, Event, add_effort
from unbroken.engines.base import Engine
from unbroken.errors import ContextOverflowError, EngineError, InvalidInputError, RewardError, ToolsNotShownError
from unbroken.ledger.nodes import ForkReason
from unbroken.ledger.numbers import to_finite_float32
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema, check_messages, copy_containers
from unbroken.rendering.base import LoadsImages, ParsedResponse, ParsedToolCall, Renderer, ThreadedRenderer
from unbroken.rollout.env import Continue, Done, Env, EnvStart, Outcome, Reply, Rewrite
from unbroken.rollout.failures import must_propagate, unwrap_group
from unbroken.rollout.limits import Limit, Limits, TurnBudget
from unbroken.rollout.policies import PoliciesConfig, Speech
from unbroken.rollout.prompts import Prompt, PromptBuilder, attach_given, count_prompt
from unbroken.rollout.seeds import derive_seed
from unbroken.rollout.thinking import ThinkingBound
from unbroken.rollout.tools import cut_tool_result
from unbroken.rollout.trajectory import (
    CallTime,
    CloseFailure,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    TurnTimes,
    sum_queue_s,
)
from unbroken.threads import DaemonThreads, run_in_daemon_thread
from unbroken.types import FinishReason, SampledSequence, SampleRequest, SampleResult, SamplingParams

_T = TypeVar("_T")
CheckTools: TypeAlias = Callable[[Sequence[ToolSchema]], None]
"""Raises `ToolsNotShownError` for tools that the model would not see."""

_NUM_REWARDS = 16
"""Reward functions whose arguments are remembered; a run has one."""

_STATUS_BY_LIMIT = {
    Limit.TURN: TrajectoryStatus.TRUNCATED,
    Limit.TURNS: TrajectoryStatus.MAX_TURNS,
    Limit.TOKENS: TrajectoryStatus.MAX_TOKENS,
    Limit.CONTEXT: TrajectoryStatus.MAX_TOKENS,
    Limit.TIME: TrajectoryStatus.TIMEOUT,
}


async def run_rollout(
    env: Env,
    *,
    engine: Engine,
    renderer: Renderer,
    sampling: SamplingParams,
    limits: Limits,
    trajectory_id: str | None = None,
    check_tools: CheckTools | None = None,
    policies: PoliciesConfig | None = None,
) -> Trajectory:
    """Run one episode and return its record.

    An exception in the environment, the reward, the renderer or the engine ends only this trajectory, so that a bad row
    of a data set does not end a run: its status is FAILED, and `error` has the exception. A first prompt that fills the
    context is such an error; a later one gives the status MAX_TOKENS. Only a cancellation and the user's interrupt are
    raised; the engine then aborts the request. `env.close` is always called once, for at most `limits.close_timeout_s`.

    What the policy may have caused ends with a reward: no turn, id or second is left (`Limits`). An environment that
    uses up its time ends as TIMEOUT, whose reward is 0, and those of its turns, unless `env.reward` takes a `status`.

    `sampling.max_tokens` limits one turn; the renderer's stop ids are added to `sampling.stop_token_ids`; with
    `sampling.seed`, each turn gets a seed derived from it. `trajectory_id` names the requests to the engine and must be
    unique among the running rollouts; by default it is random. `check_tools` gets the environment's tools before
    anything is sampled; its `ToolsNotShownError` is raised (`rendering.effects.check_tools_shown`). With `policies` the
    environment names who speaks (`rollout.policies`).

    Raises:
        InvalidInputError: `limits.thinking_tokens` cannot be kept with this renderer or sampling.
        StopTokenError: no id would end a turn.
        ToolsNotShownError: raised by `check_tools`.
    """
    bound = _make_bound(limits, renderer, sampling)
    table = _Table.of(policies, engine, sampling.seed)
    policy = _Policy.of(engine, renderer, sampling, trajectory_id or uuid.uuid4().hex, bound, table)
    return await _run_episode(lambda: env, policy, limits, check_tools)


async def run_group(
    make_env: Callable[[], Env],
    n: int,
    *,
    engine: Engine,
    renderer: Renderer,
    sampling: SamplingParams,
    limits: Limits,
    group_id: str | None = None,
    check_tools: CheckTools | None = None,
    policies: PoliciesConfig | None = None,
) -> TrajectoryGroup:
    """Run n episodes of one problem concurrently, each with its own environment.

    An exception in `make_env` ends that trajectory as FAILED, like all other errors (`run_rollout`). With
    `sampling.seed`, each sibling gets a seed derived from it. `check_tools` and `policies` are as in `run_rollout`;
    all siblings play against the same frozen copies.

    Raises:
        InvalidInputError: `n` is less than 1, or `limits.thinking_tokens` cannot be kept.
        StopTokenError: no id would end a turn.
        ToolsNotShownError: raised by `check_tools`.
    """
    if n < 1:
        raise InvalidInputError(f"n must be >= 1 trajectories in a group, got {n}")
    name, bound = group_id or uuid.uuid4().hex, _make_bound(limits, renderer, sampling)
    table = _Table.of(policies, engine, sampling.seed)
    first = _Policy.of(engine, renderer, sampling, name, bound, table)
    siblings_of = [replace(first, seed=derive_seed(sampling.seed, k), trajectory_id=f"{name}/{k}") for k in range(n)]
    try:
        async with asyncio.TaskGroup() as tasks:
            siblings = [tasks.create_task(_run_episode(make_env, each, limits, check_tools)) for each in siblings_of]
    except BaseExceptionGroup as failed:
        refused, others = failed.split(ToolsNotShownError)
        if refused is None or others is not None:
            raise
        raise refused.exceptions[0] from None
    return TrajectoryGroup(group_id=name, trajectories=tuple(task.result() for task in siblings))


def _make_bound(limits: Limits, renderer: Renderer, sampling: SamplingParams) -> ThinkingBound | None:
    """The bound of each turn's reasoning; None without `Limits.thinking_tokens`."""
    if (number := limits.thinking_tokens) is None:
        return None
    return ThinkingBound.of(number, renderer, sampling, name="rollouts.limits.thinking_tokens")


async def _run_episode(
    make_env: Callable[[], Env], policy: _Policy, limits: Limits, check_tools: CheckTools | None
) -> Trajectory:
    clock = _Stopwatch()
    counters = Counters()
    speakers = _Speakers(policy, counters, max_result_chars=limits.max_result_chars)
    env, close_error = None, None
    try:
        env = _check_env(make_env())
        episode = _Episode(
            env=env, policy=policy, limits=limits, speakers=speakers, clock=clock, check_tools=check_tools
        )
        ending = await episode.add_reward(await episode.play())
    except BaseException as raised:
        ending = _make_failed_ending(raised)
    finally:
        if env is not None:
            close_error = await _close(env, limits.close_timeout_s, counters)
    return speakers.join(
        Trajectory(
            trajectory_id=policy.trajectory_id,
            tree=speakers.current.tree,
            turns=tuple(speakers.turns),
            messages=tuple(speakers.current.messages),
            tools=speakers.current.tools,
            status=_count_ending(ending.cause, counters),
            reward=ending.reward,
            turn_rewards=_fill_turn_rewards(speakers.current.turn_rewards),
            counters=counters,
            error=ending.error,
            close_error=close_error,
            wall_time_s=clock.read(),
            engine_s=sum(turn.sampled_s - turn.sampling_s for turn in clock.turns),
            queue_s=sum_queue_s(speakers.turns),
            times=tuple(clock.turns),
        ),
        ending.rewards,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    cause: Limit | TrajectoryStatus
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of several policies, by name, those of their turns included."""
    error: BaseException | None = None


class _OutOfTimeError(Exception):
    """The environment has used up its time."""


class _Stopwatch:
    """The times of one rollout, which began when this was made."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.turns: list[TurnTimes] = []

    def read(self) -> float:
        """Seconds since the rollout began."""
        return time.perf_counter() - self.started

    def add_turn(self, *, start_s: float, sampling_s: float, sampled_s: float) -> None:
        """Add a turn that was just sampled."""
        self.turns.append(TurnTimes(start_s=start_s, sampling_s=sampling_s, sampled_s=sampled_s))

    def add_answer(self, calls: Sequence[CallTime]) -> None:
        """Add that the last turn was answered just now; `calls` have times of `time.perf_counter`."""
        own = tuple(
            replace(call, start_s=call.start_s - self.started, stop_s=call.stop_s - self.started) for call in calls
        )
        self.turns[-1] = replace(self.turns[-1], answered_s=self.read(), calls=own)


@dataclass(slots=True, kw_only=True)
class _Episode:
    env: Env
    policy: _Policy
    limits: Limits
    speakers: _Speakers
    clock: _Stopwatch
    check_tools: CheckTools | None
    env_s: float = 0.0
    """How long the environment, its tools and its reward have taken."""

    async def play(self) -> Limit | TrajectoryStatus:
        """Let environment and policy take turns, and return the limit or status that ended the episode."""
        env, turns, name = self.env, self.speakers.turns, type(self.env).__name__
        try:
            started = await self._wait_for_env(env.start())
            first = _check_type(started, EnvStart, f"{name}.start must return")
            if self.check_tools is not None:
                self.check_tools(first.tools)
            outcome: EnvStart | Outcome = first
            while not isinstance(outcome, Done):
                async with self._limit_turn():
                    reply = await self._take_turn(outcome)
                if not isinstance(reply, Reply):
                    return reply
                stepped = await self._wait_for_env(env.step(reply))
                answer: Outcome = _check_type(stepped, Outcome, f"{name}.step must return")
                self.clock.add_answer(answer.calls if isinstance(answer, Continue) else ())
                if answer.reward is not None:
                    earned = to_finite_float32(
                        answer.reward, name=f"the reward of turn {len(turns) - 1}", error=RewardError
                    )
                    self.speakers.current.turn_rewards[-1] = earned
                outcome = answer
            cut_by = turns[-1].cut_by
            return TrajectoryStatus.COMPLETED if cut_by is None else cut_by
        except _OutOfTimeError:
            return Limit.TIME

    async def add_reward(self, cause: Limit | TrajectoryStatus) -> _Ending:
        """The ending of an episode that was played, with the environment's reward and those of its turns."""
        if cause is TrajectoryStatus.ABORTED:
            return _Ending(cause=cause)
        given: Any = None
        if cause is not Limit.TIME:
            try:
                given = await self._wait_for_env(self._ask_reward(cause))
            except _OutOfTimeError:
                cause = Limit.TIME
        if cause is Limit.TIME:
            limit_s = self.limits.close_timeout_s
            late = TimeoutError(f"its reward after a time-out took longer than {limit_s:g} s")
            given = await _wait_for(self._ask_reward(cause), limit_s, late)
        if self.policy.table is not None:
            rewards = self.speakers.add_turn_rewards(given)
            return _Ending(cause=cause, reward=next(iter(rewards.values()), 0.0), rewards=rewards)
        reward = to_finite_float32(given, name="the reward", error=RewardError)
        total = reward + sum(_fill_turn_rewards(self.speakers.current.turn_rewards))
        return _Ending(cause=cause, reward=to_finite_float32(total, name="the reward's sum", error=RewardError))

    async def _take_turn(self, outcome: EnvStart | Continue | Rewrite) -> Reply | Limit | TrajectoryStatus:
        """Let the policy reply to the environment, or return the limit or status that ended the episode."""
        policy, start_s = self.policy, self.clock.read()
        outcome = await _load_images(outcome, policy.loads_images)
        conversation = self.speakers.choose(outcome)
        conversation.add_messages(outcome)
        num_turns, num_sampled = len(self.speakers.turns), self.speakers.num_sampled
        limit = self.limits.find_reached(num_turns=num_turns, num_sampled=num_sampled)
        if limit is not None:
            return limit
        prompt = await conversation.build_next_prompt(outcome)
        budget = policy.compute_budget(prompt, conversation, self.limits, num_sampled=num_sampled)
        if budget.max_tokens < 1:
            return budget.limit
        sampling_s = self.clock.read()
        sequence = await policy.sample(prompt, budget, num_turns, adapter=conversation.adapter)
        sampled_s = self.clock.read()
        if sequence.finish_reason is FinishReason.ABORT:
            return TrajectoryStatus.ABORTED
        reply = await conversation.record(prompt, sequence, budget)
        self.speakers.note(outcome)
        self.clock.add_turn(start_s=start_s, sampling_s=sampling_s, sampled_s=sampled_s)
        return reply

    async def _ask_reward(self, cause: Limit | TrajectoryStatus) -> Any:
        """The environment's reward. After a time-out it is asked only if its `reward` takes the `status`."""
        ask: Callable[..., Awaitable[Any]] = self.env.reward
        messages = tuple(copy_containers(self.speakers.list_messages()))
        if _takes_status(ask):
            return await ask(messages, status=_get_status(cause))
        if cause is Limit.TIME:
            return 0.0 if self.policy.table is None else self.speakers.make_zero_rewards()
        return await ask(messages)

    async def _wait_for_env(self, work: Awaitable[_T]) -> _T:
        """The result of the environment's work; `_OutOfTimeError` once all of it took `limits.timeout_s`."""
        started = self.clock.read()
        try:
            return await _wait_for(work, self.limits.timeout_s - self.env_s, _OutOfTimeError())
        finally:
            self.env_s += self.clock.read() - started

    def _limit_turn(self) -> _TimeLimit:
        limit_s = self.limits.turn_timeout_s
        late = (
            f"a turn (its prompt, the engine's queue, sampling) took longer than {limit_s:g} s (Limits.turn_timeout_s)"
        )
        return _TimeLimit(limit_s, EngineError(late))


def _takes_status(reward: Callable[..., Any]) -> bool:
    """Whether an environment's `reward` names an argument `status`."""
    # Only a class's function is one for all rollouts. Another callable may have no hash, and keep its environment.
    if inspect.ismethod(reward) and inspect.isfunction(reward.__func__):
        return _names_status(reward.__func__)
    return "status" in inspect.signature(reward).parameters


@functools.lru_cache(maxsize=_NUM_REWARDS)
def _names_status(function: Callable[..., Any]) -> bool:
    """Remembered: it takes as long as a short completion's parse."""
    return "status" in inspect.signature(function).parameters


async def _wait_for(work: Awaitable[_T], seconds: float, late: Exception) -> _T:
    """The result of the work; after so many seconds it is cancelled, and `late` is raised."""
    async with _TimeLimit(seconds, late):
        return await work


class _TimeLimit:
    """A block that is cancelled after so many seconds; then `late` is raised. A rollout has five, so no generator."""

    def __init__(self, seconds: float, late: Exception) -> None:
        self._clock = asyncio.timeout(seconds)
        self._late = late

    async def __aenter__(self) -> None:
        await self._clock.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._clock.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            raise self._late from timeout
        # The block may have made a time-out of its own of the cancellation.
        if isinstance(error, TimeoutError) and self._clock.expired():
            raise self._late from error


def _make_failed_ending(raised: BaseException) -> _Ending:
    """Make the ending for an exception, or raise it again if it must propagate."""
    if must_propagate(raised) or isinstance(raised, ToolsNotShownError):
        raise raised
    return _Ending(cause=TrajectoryStatus.FAILED, error=unwrap_group(raised))


async def _close(env: Env, timeout_s: float, counters: Counters) -> BaseException | None:
    """Close the environment; count and return its exception, which does not affect the finished record."""
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            await env.close()
    except BaseException as raised:
        if must_propagate(raised):
            raise
        if isinstance(raised, TimeoutError) and clock.expired():
            counters.count(Event.CLOSE_FAILURE, CloseFailure.TIMEOUT)
            return TimeoutError(f"{type(env).__name__}.close did not return within {timeout_s:g} s")
        counters.count(Event.CLOSE_FAILURE, CloseFailure.ERROR)
        return unwrap_group(raised)
    return None


async def _load_images(
    outcome: EnvStart | Continue | Rewrite, load: Callable[[Sequence[Message]], list[Message]] | None
) -> EnvStart | Continue | Rewrite:
    """Load the images of an outcome once for the whole rollout, in a thread because it is slow."""
    if load is None:
        return outcome
    messages: Sequence[Any] = outcome.messages
    if not any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages):
        return outcome
    return replace(outcome, messages=await run_in_daemon_thread(functools.partial(load, outcome.messages)))


@dataclass(frozen=True, slots=True)
class _Policy:
    engine: Engine
    renderer: Renderer
    sampling: SamplingParams
    """With all ids that end a turn, and the seed of a whole group."""
    seed: int | None
    trajectory_id: str
    bound: ThinkingBound | None
    table: _Table | None
    threads: DaemonThreads | None
    """The renderer's own; None for a new one for each call."""
    loads_images: Callable[[Sequence[Message]], list[Message]] | None
    """How the renderer loads images, if it does."""

    @staticmethod
    def of(
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        trajectory_id: str,
        bound: ThinkingBound | None,
        table: _Table | None,
    ) -> _Policy:
        """Find what the renderer can do, once for a group: Python 3.11 looks at all members of a protocol each time.

        Raises before anything is opened if no id would end a turn.
        """
        stops = (*sampling.stop_token_ids, *renderer.get_stop_token_ids())
        return _Policy(
            engine=engine,
            renderer=renderer,
            sampling=replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops))),
            seed=sampling.seed,
            trajectory_id=trajectory_id,
            bound=bound,
            table=table,
            threads=renderer.renderer_threads if isinstance(renderer, ThreadedRenderer) else None,
            loads_images=renderer.load_images if isinstance(renderer, LoadsImages) else None,
        )

    def get_request_id(self, turn: int) -> str:
        return f"{self.trajectory_id}/{turn}"

    def compute_budget(
        self, prompt: Prompt, conversation: _Conversation, limits: Limits, *, num_sampled: int
    ) -> TurnBudget:
        """The budget of the next turn, after `num_sampled` ids of all turns."""
        num_prompt, context_length = len(prompt.token_ids), self.engine.context_length
        if not conversation.turns and num_prompt >= context_length:
            raise ContextOverflowError(num_prompt_tokens=num_prompt, context_length=context_length)
        return limits.compute_turn_budget(
            turn_max_tokens=self.sampling.max_tokens,
            num_sampled=num_sampled,
            num_context_left=context_length - num_prompt,
        )

    async def sample(
        self, prompt: Prompt, budget: TurnBudget, turn: int, *, adapter: str | None = None
    ) -> SampledSequence:
        request = SampleRequest(
            request_id=self.get_request_id(turn),
            prompt_ids=prompt.token_ids,
            params=replace(self.sampling, max_tokens=budget.max_tokens, seed=derive_seed(self.seed, turn)),
            images=prompt.images,
            adapter=adapter,
        )
        asked = request if self.bound is None else self.bound.limit(request)
        first = _take_sequence(await self.engine.sample(asked), asked)
        if self.bound is None:
            return first
        plan = functools.partial(self.bound.plan_rest, request, first, context_length=self.engine.context_length)
        rest = await _run_in_renderer_thread(self.threads, plan)
        if rest is None:
            return first
        given_ids, asked = rest
        return first.then(given_ids, _take_sequence(await self.engine.sample(asked), asked))


def _take_sequence(result: SampleResult, request: SampleRequest) -> SampledSequence:
    """The only sequence of a result, which must answer the request; its ids are counted as effort."""
    result.check_answers(request)
    add_effort(len(result.sequences[0].completion_ids))
    return result.sequences[0]


def _find_cut(sequence: SampledSequence, budget: TurnBudget) -> Limit | None:
    """The limit that cut a turn. Given ids that close its reasoning take room of the context alone."""
    if sequence.finish_reason is not FinishReason.LENGTH:
        return None
    return budget.limit if sequence.num_sampled >= budget.max_tokens else Limit.CONTEXT


def _count_ending(ending: Limit | TrajectoryStatus, counters: Counters) -> TrajectoryStatus:
    if isinstance(ending, Limit):
        counters.count(Event.LIMIT, ending)
    status = _get_status(ending)
    counters.count(Event.STATUS, status)
    return status


def _get_status(ending: Limit | TrajectoryStatus) -> TrajectoryStatus:
    return _STATUS_BY_LIMIT[ending] if isinstance(ending, Limit) else ending


def _fill_turn_rewards(given: Sequence[float | None]) -> tuple[float, ...]:
    """The rewards, with 0 for turns without one; empty if no turn has one."""
    return tuple(reward or 0.0 for reward in given) if any(reward is not None for reward in given) else ()


def _check_env(value: Any) -> Env:
    """The environment. `isinstance` takes 10 us for a class that does not name `Env` as its base."""
    with suppress(AttributeError):
        if all(callable(method) for method in (value.start, value.step, value.reward, value.close)):
            return value  # type: ignore[no-any-return]
    checked: Env = _check_type(value, Env, "the environment must be")
    return checked


def _check_type(value: Any, expected: Any, rule: str) -> Any:
    if not isinstance(value, expected):
        names = " or ".join(kind.__name__ for kind in typing.get_args(expected) or (expected,))
        raise InvalidInputError(f"{rule} {names}, got {value!r}")
    return value


class _Conversation:
    """Messages, turns and the token tree of one rollout. Turns and tree only grow.

    Every prompt after the first is counted once, as a bridge (all ids so far, and more) or as a fork, together with the
    refusal that led to it, the closing that it begins with, and the template's effect on the history. It is counted
    when its turn was sampled; without a completion (full context, failure, abort), only the limit or the status is.

    The renderer works in threads, on messages and ids that do not change; this object changes in the event loop only.
    """

    def __init__(
        self,
        renderer: Renderer,
        threads: DaemonThreads | None,
        counters: Counters,
        *,
        max_result_chars: int | None = None,
        policy: str | None = None,
        adapter: str | None = None,
        tools: tuple[ToolSchema, ...] = (),
    ) -> None:
        self.policy = policy
        """Who speaks in it, of several policies."""
        self.adapter = adapter
        """What the engine is asked for; None for the model itself, which every policy begins as."""
        self.tree = TokenTree()
        self.turns: list[Turn] = []
        self.turn_rewards: list[float | None] = []
        self.messages: list[Message] = []
        self.tools = tools
        self._renderer = renderer
        self._threads = threads
        self._prompts = PromptBuilder(renderer, self.tree)
        self._counters = counters
        self._max_result_chars = max_result_chars
        self._num_call_ids = 0

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled in all turns."""
        return self.tree.num_sampled

    def add_messages(self, outcome: EnvStart | Continue | Rewrite) -> None:
        """Record the messages of the environment, but no ids yet; `MessagesError` if they are empty or malformed.

        Tool results are cut to `max_result_chars`, except those of the episode's first messages.
        """
        check_messages(outcome.messages)
        messages = copy_containers(list(outcome.messages))
        if not isinstance(outcome, EnvStart):
            num_cut = sum(cut_tool_result(message, self._max_result_chars) for message in messages)
            self._counters.count(Event.CUT, _CutReason.TOOL_RESULT, num_cut)
        if isinstance(outcome, Continue):
            self.messages.extend(messages)
            for status in outcome.tool_errors:
                self._counters.count(Event.TOOL_ERROR, status)
        else:
            self.messages = messages
        if isinstance(outcome, EnvStart):
            self.tools = outcome.tools

    async def build_next_prompt(self, outcome: EnvStart | Continue | Rewrite) -> Prompt:
        """Build the prompt after `outcome`, whose messages were added: the first prompt, a bridge or a fork."""
        return await _run_in_renderer_thread(self._threads, functools.partial(self._build_next_prompt, outcome))

    def _build_next_prompt(self, outcome: EnvStart | Continue | Rewrite) -> Prompt:
        last = self.turns[-1] if self.turns else None
        if last is not None and isinstance(outcome, Continue):
            num_new = len(outcome.messages)
            return self._prompts.extend(
                last, self.messages[-num_new:], earlier=self.messages[: -num_new - 1], tools=self.tools
            )
        reason = None if last is None else ForkReason.REWRITTEN_HISTORY
        return self._prompts.render(self.messages, tools=self.tools, last=last, reason=reason)

    async def record(self, prompt: Prompt, sequence: SampledSequence, budget: TurnBudget) -> Reply:
        """Parse a completion and add it to the tree, the turns and the messages."""
        parse = functools.partial(self._renderer.parse_response, sequence.completion_ids)
        parsed = await _run_in_renderer_thread(
            self._threads, functools.partial(parse, prompt_ids=prompt.token_ids, tools=self.tools)
        )
        prompt_end = attach_given(self.tree, prompt.parent, prompt.given)
        end = self.tree.add_sampled(sequence, parent=prompt_end, policy=self.policy)
        if sequence.routed_experts is not None:  # those of all turns before too; the tree has them once
            sequence = replace(sequence, routed_experts=None)
        message = parsed.to_message(self._new_call_ids(parsed.tool_calls))
        turn = Turn(
            prompt_end=prompt_end,
            end=end,
            sequence=sequence,
            message=message,
            parsed=parsed,
            bridge=prompt.bridge,
            fork=prompt.fork,
            cut_by=_find_cut(sequence, budget),
            policy=self.policy,
        )
        count_prompt(prompt, self._counters)
        self.turns.append(turn)
        self.turn_rewards.append(None)
        self.messages.append(message)
        if turn.cut_by is not None:
            self._counters.count(Event.TRUNCATION, turn.cut_by)
        if sequence.num_given > 0:
            self._counters.count(Event.CLOSING, "thinking")
        for failure in parsed.failures:
            self._counters.count(Event.PARSE_FAILURE, failure.status)
        return Reply(message=copy_containers(message), parsed=_copy_parse(parsed), finish_reason=sequence.finish_reason)

    def _new_call_ids(self, calls: Sequence[ParsedToolCall]) -> list[str]:
        """Choose a unique id for each call: the model's if unused, else nine characters, as some templates demand."""
        taken = {call.get("id") for message in self.messages for call in message.get("tool_calls") or ()}
        own = {call.call_id for call in calls}
        ids: list[str] = []
        for call in calls:
            call_id = call.call_id
            while not call_id or call_id in taken:
                call_id = f"call{self._num_call_ids:05d}"
                self._num_call_ids += 1
                if call_id in own:
                    call_id = ""  # another call of this turn has that id
            taken.add(call_id)
            ids.append(call_id)
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The policies of a group's rollouts, and the frozen copies that are drawn for it."""

    config: PoliciesConfig
    version: int
    drawn: Mapping[str, str]

    @staticmethod
    def of(config: PoliciesConfig | None, engine: Engine, seed: int | None) -> _Table | None:
        """Draw the copies of a group; None in a run of one policy."""
        if config is None:
            return None
        version = engine.policy_version
        return _Table(config=config, version=version, drawn=config.draw_copies(version, seed))


class _Speakers:
    """The conversations of one rollout: one, or of several policies one for each that speaks."""

    def __init__(self, policy: _Policy, counters: Counters, *, max_result_chars: int | None) -> None:
        self._table = policy.table
        own = (policy.renderer, policy.threads, counters)
        self._make = functools.partial(_Conversation, *own, max_result_chars=max_result_chars)
        self._by_name: dict[str, _Conversation] = {}
        self._speeches: list[Speech] = []
        self.current = self._make()
        """That of who speaks, or spoke last."""
        self.turns: list[Turn] = []
        """Of all, in their order."""

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled in all turns."""
        return sum(each.num_sampled for each in self._by_name.values()) or self.current.num_sampled

    @property
    def _names(self) -> list[str]:
        """Of several policies those that spoke; not one that a limit has kept from its first turn."""
        return [name for name, each in self._by_name.items() if each.turns]

    def choose(self, outcome: EnvStart | Continue | Rewrite) -> _Conversation:
        """The conversation of who speaks next; `InvalidInputError` if the environment names nobody, or nobody known."""
        said, table = outcome.policy, self._table
        if table is None:
            if said is not None:
                raise InvalidInputError(f"policies.names must have {said!r}, which an environment lets speak, got none")
            return self.current
        if said is None and isinstance(outcome, EnvStart):
            raise InvalidInputError(f"EnvStart.policy must be one of {list(table.config.names)}, who speaks first")
        if said is not None:
            name = table.config.find_speaker(said, table.version, table.drawn)
            if name not in self._by_name:
                adapter = name if name in table.config.list_adapters(table.version) else None
                self._by_name[name] = self._make(policy=name, adapter=adapter, tools=self.current.tools)
            self.current = self._by_name[name]
        return self.current

    def note(self, outcome: EnvStart | Continue | Rewrite) -> None:
        """Note the turn that was just recorded, and what was said before it."""
        conversation = self.current
        turn = conversation.turns[-1]
        self.turns.append(turn)
        if conversation.policy is not None:
            given = conversation.messages[-1 - len(outcome.messages) : -1]
            replaces = not isinstance(outcome, Continue)
            self._speeches.append(Speech(policy=conversation.policy, given=given, replaces=replaces, turn=turn))

    def list_messages(self) -> list[Message]:
        """The whole conversation; of several, what was said in all of them, in its order."""
        if self._table is None:
            return self.current.messages
        return [message for each in self._speeches for message in (*each.given, each.turn.message)]

    def make_zero_rewards(self) -> dict[str, float]:
        """The reward 0 of each policy that spoke."""
        assert self._table is not None, "asked for only with several policies"
        return {name: 0.0 for name in self._table.config.names if name in self._names}

    def add_turn_rewards(self, given: Any) -> dict[str, float]:
        """The environment's rewards, with those of each policy's turns; raises as `PoliciesConfig.read_rewards`."""
        assert self._table is not None, "asked for only with several policies"
        rewards = self._table.config.read_rewards(given, self._names)
        for name in rewards.keys() & self._names:
            total = rewards[name] + sum(_fill_turn_rewards(self._by_name[name].turn_rewards))
            rewards[name] = to_finite_float32(total, name=f"the reward's sum of {name}", error=RewardError)
        return rewards

    def join(self, record: Trajectory, rewards: Mapping[str, float]) -> Trajectory:
        """The record of a rollout of several policies, with the parts of those that are trained; otherwise itself."""
        if self._table is None or not self._speeches:
            return record
        trees = {name: each.tree for name, each in self._by_name.items()}
        tree, turns, conversations = Speech.join(self._speeches, trees, record.tools)
        earned = {name: iter(_fill_turn_rewards(each.turn_rewards)) for name, each in self._by_name.items()}
        parts = {
            name: self._make_part(record, name, rewards.get(name))
            for name in self._table.config.names
            if name in self._names
        }
        return replace(
            record,
            tree=tree,
            turns=turns,
            messages=tuple(self.list_messages()),
            conversations=conversations,
            turn_rewards=_fill_turn_rewards([next(earned[each.policy], None) for each in self._speeches]),
            reward_parts=dict(rewards),
            parts=parts,
        )

    def _make_part(self, record: Trajectory, name: str, reward: float | None) -> Trajectory:
        """What one policy said, as a trajectory; times and counters are of the rollout as a whole."""
        own = self._by_name[name]
        return replace(
            record,
            trajectory_id=f"{record.trajectory_id}/{name}",
            tree=own.tree,
            turns=tuple(own.turns),
            messages=tuple(own.messages),
            reward=reward,
            turn_rewards=_fill_turn_rewards(own.turn_rewards),
            counters=Counters(),
            times=(),
        )


async def _run_in_renderer_thread(threads: DaemonThreads | None, function: Callable[[], _T]) -> _T:
    """Call `function`, which uses a renderer, in one of the renderer's threads, or a new one if it has none."""
    return await (threads or DaemonThreads(1)).run(function)


def _copy_parse(parsed: ParsedResponse) -> ParsedResponse:
    if not parsed.tool_calls:  # nothing else of it can be changed
        return parsed
    calls = tuple(replace(call, arguments=copy_containers(call.arguments)) for call in parsed.tool_calls)
    return replace(parsed, tool_calls=calls)


class _CutReason(StrEnum):
    """What was cut. The names are metrics and must stay stable."""

    TOOL_RESULT = "tool_result"
    """By `Limits.max_result_chars`."""
