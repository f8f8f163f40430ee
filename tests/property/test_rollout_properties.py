"""Random episodes: token soup, cut turns, wrong headers, refusals, rewritten histories, small limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.fake_renderer import CALL, CALL_END, END, NEWLINE, STOP_IDS, VOCAB_SIZE, FakeRenderer, call_ids
from unbroken.counters import Event
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.ledger.nodes import ForkReason
from unbroken.ledger.tree import export_samples
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing, Refusal, RefusalReason
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.tools import ToolStatus
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.types import FinishReason, SamplingParams

EXAMPLES = settings(max_examples=num_cases(50, in_fuzz=1000), derandomize=True)

TEXTS = st.sampled_from(["", "a", "hi", "42", "é", "\n"])
ROLES = st.sampled_from(["user", "tool", "system"])
MESSAGES = st.lists(
    st.builds(lambda role, text: Message(role=role, content=text), ROLES, TEXTS), min_size=1, max_size=3
)
RUNS = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
    st.just(list(b"hi")),
    st.just(call_ids("look", {"row": 1})),
    st.just([CALL, *b"{", CALL_END]),
    st.just([CALL, *b"{}", CALL_END]),
    st.just([CALL, *b'{"name": "look"}', CALL_END]),
    st.just([0xFF, 0xC3, 0x80]),
)
COMPLETIONS = st.builds(
    lambda runs, stop: [*(i for run in runs for i in run), *stop] or [END],
    st.lists(RUNS, max_size=3),
    st.one_of(st.just([END]), st.sampled_from(STOP_IDS).map(lambda i: [i]), st.just([])),
)


@dataclass(frozen=True)
class Move:
    """What the environment does after a reply: append messages, or rewrite the history by dropping its end first."""

    messages: list[Message]
    tool_errors: tuple[ToolStatus, ...]
    num_dropped: int | None


MOVES = st.builds(
    Move,
    MESSAGES,
    st.lists(st.sampled_from([s for s in ToolStatus if s is not ToolStatus.OK]), max_size=2).map(tuple),
    st.one_of(st.none(), st.none(), st.integers(0, 3)),
)


@dataclass(frozen=True)
class Script:
    completions: list[list[int]]
    moves: list[Move]
    refusals: list[RefusalReason | None]
    turn_max_tokens: int
    limits: Limits
    context_length: int


SCRIPTS = (
    st.integers(1, 5)
    .map(lambda k: 6 - k)
    .flatmap(
        lambda num_turns: st.builds(
            Script,
            st.lists(COMPLETIONS, min_size=num_turns, max_size=num_turns),
            st.lists(MOVES, min_size=num_turns - 1, max_size=num_turns - 1),
            st.lists(st.one_of(st.none(), st.none(), st.sampled_from(RefusalReason)), max_size=num_turns),
            st.sampled_from([2, 10, 60, 60]),
            st.builds(
                Limits,
                max_turns=st.sampled_from([9, 9, 9, 9, 2, 1]),
                max_tokens=st.sampled_from([900, 900, 900, 900, 30, 5]),
            ),
            st.sampled_from([10_000, 10_000, 10_000, 80, 40]),
        )
    )
)


class MovingEnv:
    """Plays the moves of a script, and keeps the history it has sent."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = iter(moves)
        self._history: list[Message] = [{"role": "user", "content": "hi"}]
        self.outcomes: list[Outcome] = []

    async def start(self) -> EnvStart:
        return EnvStart(messages=list(self._history))

    async def step(self, reply: Reply) -> Outcome:
        self._history.append(reply.message)
        move = next(self._moves, None)
        if move is None:
            return Done()
        if move.num_dropped is not None:
            self._history = self._history[: len(self._history) - move.num_dropped]
        self._history += move.messages
        outcome: Outcome = Rewrite(messages=list(self._history))
        if move.num_dropped is None:
            outcome = Continue(messages=move.messages, tool_errors=move.tool_errors)
        self.outcomes.append(outcome)
        return outcome

    async def reward(self, messages: Sequence[Message]) -> float:
        assert list(messages) == self._history
        return 1.0

    async def close(self) -> None:
        pass


class NotingRenderer(FakeRenderer):
    """Notes what it answered when asked for a bridge."""

    def __init__(self, refusals: Sequence[RefusalReason | None]) -> None:
        super().__init__(refusals=refusals)
        self.answers: list[BridgeOutcome] = []

    def bridge_to_next_turn(self, *args, **kwargs) -> BridgeOutcome:  # type: ignore[override,no-untyped-def]
        self.answers.append(super().bridge_to_next_turn(*args, **kwargs))
        return self.answers[-1]


@dataclass(frozen=True)
class Played:
    trajectory: Trajectory
    engine: ScriptedEngine
    env: MovingEnv
    renderer: NotingRenderer


def play(script: Script) -> Played:
    engine = ScriptedEngine(
        [
            ScriptedReply(completion_ids=ids, rollout_logprobs=-(np.arange(len(ids), dtype=np.float32) + 1000 * turn))
            for turn, ids in enumerate(script.completions)
        ],
        context_length=script.context_length,
        vocab_size=VOCAB_SIZE,
        allow_forks=True,
    )
    env, renderer = MovingEnv(script.moves), NotingRenderer(script.refusals)
    trajectory = asyncio.run(
        run_rollout(
            env,
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=script.turn_max_tokens),
            limits=script.limits,
        )
    )
    assert trajectory.error is None, trajectory.error
    return Played(trajectory, engine, env, renderer)


@EXAMPLES
@given(SCRIPTS)
def test_i1_every_prompt_begins_with_all_ids_so_far_unless_the_turn_says_that_it_forks(script: Script):
    played = play(script)
    tree, turns = played.trajectory.tree, played.trajectory.turns
    assert len(played.engine.requests) == len(turns)
    for request, turn in zip(played.engine.requests, turns, strict=True):
        assert request.prompt_ids.tolist() == tree.path(turn.prompt_end).token_ids.tolist()
    forked = [k for k in range(1, len(turns)) if not begins_with(played, k)]
    assert forked == [k for k, turn in enumerate(turns) if turn.fork is not None]
    assert len(played.engine.forks) == len(forked)


def begins_with(played: Played, k: int) -> bool:
    """Whether turn k's prompt begins with turn k - 1's prompt and completion, as the engine saw them."""
    before = played.engine.requests[k - 1].prompt_ids.tolist()
    so_far = before + played.trajectory.turns[k - 1].sequence.completion_ids.tolist()
    return played.engine.requests[k].prompt_ids.tolist()[: len(so_far)] == so_far


@EXAMPLES
@given(SCRIPTS)
def test_i2_and_i4_what_was_sampled_is_trained_once_as_it_was_sampled(script: Script):
    trajectory = play(script).trajectory
    trained = [
        (logprob, token_id, version)
        for row in export_samples(trajectory.tree, 0.5)
        for logprob, token_id, version in zip(
            row.rollout_logprobs[row.loss_mask].tolist(),
            row.token_ids[row.loss_mask].tolist(),
            row.policy_versions[row.loss_mask].tolist(),
            strict=True,
        )
    ]
    scripted = [
        (-float(k + 1000 * turn), token_id, 0)
        for turn, record in enumerate(trajectory.turns)
        for k, token_id in enumerate(script.completions[turn][: len(record.sequence.completion_ids)])
    ]
    assert sorted(trained) == sorted(scripted)


@EXAMPLES
@given(SCRIPTS)
def test_i7_whatever_follows_a_turn_follows_its_end(script: Script):
    played = play(script)
    turns = played.trajectory.turns
    for before, turn, request in zip(turns, turns[1:], played.engine.requests[1:], strict=False):
        if turn.fork is not None:
            continue
        num_so_far = len(played.trajectory.tree.path(before.end).token_ids)
        given = request.prompt_ids[num_so_far:].tolist()
        ended = before.sequence.completion_ids[-1] == END
        assert given[: 2 - ended] == ([NEWLINE] if ended else [END, NEWLINE])
        path = played.trajectory.tree.path(turn.end)
        assert not path.sampled_mask[num_so_far : len(request.prompt_ids)].any()


@EXAMPLES
@given(SCRIPTS)
def test_i8_every_event_that_a_turn_followed_is_counted_once_under_its_reason(script: Script):
    played = play(script)
    trajectory = played.trajectory
    turns, counters = trajectory.turns, trajectory.counters
    answers = [turn.bridge for turn in turns if turn.bridge is not None]
    assert answers == played.renderer.answers[: len(answers)]
    assert len(played.renderer.answers) - len(answers) <= (trajectory.status is TrajectoryStatus.MAX_TOKENS)
    heard = [outcome for outcome in played.env.outcomes if isinstance(outcome, Continue)]
    wanted = {
        Event.REFUSAL: Counter(answer.reason for answer in answers if isinstance(answer, Refusal)),
        Event.CLOSING: Counter(closings_of(played)),
        Event.TRUNCATION: Counter(turn.cut_by for turn in turns if turn.cut_by is not None),
        Event.PARSE_FAILURE: Counter(failure.status for turn in turns for failure in turn.parsed.failures),
        Event.TOOL_ERROR: Counter(status for outcome in heard for status in outcome.tool_errors),
        Event.FORK: Counter(turn.fork for turn in turns if turn.fork is not None),
        Event.STATUS: Counter([trajectory.status]),
    }
    for event, reasons in wanted.items():
        assert of(trajectory, event) == {str(reason): n for reason, n in reasons.items() if n}
    num_cut = sum(turn.sequence.finish_reason is FinishReason.LENGTH for turn in turns)
    assert counters.total(Event.TRUNCATION) == num_cut
    bridges = [answer for answer in answers if isinstance(answer, Bridge)]
    assert counters["bridges/derived"] == sum(bridge.num_taken_back == 0 for bridge in bridges)
    assert counters["forks/wrong_header"] == sum(bridge.num_taken_back for bridge in bridges)
    assert counters.total(Event.BRIDGE) + counters.total(Event.FORK) == len(turns) - 1
    assert counters.total(Event.LIMIT) == (trajectory.status is not TrajectoryStatus.COMPLETED)


def closings_of(played: Played) -> list[Closing]:
    """Read off the ids: what stands between a completion and the prompt that continues it begins with a given END."""
    closings = []
    turns, requests = played.trajectory.turns, played.engine.requests
    for before, asked, turn, request in zip(turns, requests, turns[1:], requests[1:], strict=False):
        last = before.sequence.completion_ids[-1]
        num_so_far = len(asked.prompt_ids) + len(before.sequence.completion_ids)
        if turn.fork is ForkReason.WRONG_HEADER:
            closings.append(Closing.FOREIGN_STOP)
        elif turn.fork is None and request.prompt_ids[num_so_far] == END:
            closings.append(Closing.FOREIGN_STOP if last in STOP_IDS else Closing.TRUNCATED)
    return closings


def of(trajectory: Trajectory, event: Event) -> dict[str, int]:
    prefix = f"{event.value}/"
    counts = trajectory.counters.as_dict().items()
    return {key.removeprefix(prefix): n for key, n in counts if key.startswith(prefix)}


@EXAMPLES
@given(SCRIPTS)
def test_no_limit_is_passed_and_the_status_says_which_was_reached(script: Script):
    played = play(script)
    trajectory, limits = played.trajectory, script.limits
    assert 1 <= len(trajectory.turns) <= limits.max_turns
    assert trajectory.num_sampled <= limits.max_tokens
    for request, turn in zip(played.engine.requests, trajectory.turns, strict=True):
        num_ids = len(turn.sequence.completion_ids)
        assert num_ids <= script.turn_max_tokens
        assert len(request.prompt_ids) + num_ids <= script.context_length
    if trajectory.status is TrajectoryStatus.MAX_TURNS:
        assert len(trajectory.turns) == limits.max_turns
    if trajectory.counters["limits/tokens"]:
        assert trajectory.num_sampled == limits.max_tokens
    if trajectory.status in (TrajectoryStatus.COMPLETED, TrajectoryStatus.TRUNCATED):
        assert len(trajectory.turns) == len(script.completions)
