"""Shadow audits in a rollout: what they find, what it leads to, and who waits for whom."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from support.fake_renderer import END, FakeRenderer, encode
from support.rollouts import HELLO, MORE, play
from support.scripted_env import ScriptedEnv
from support.templates import SEEN_BY_NO_PANEL
from support.tokenizers import make_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.ledger.export import export_samples
from unbroken.ledger.nodes import ForkReason
from unbroken.rendering.base import Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.types import SamplingParams

NINE_WORDS: Any = [{"role": "user", "content": "Tell me what you see when you look outside."}]
THANKS = Continue(messages=[{"role": "tool", "content": "thanks"}])


async def play_hidden(audit_every: int, outcomes: Any, renderer: Any = None) -> tuple[Trajectory, ScriptedEngine]:
    """A template whose prompt depends on the history in a way that no panel sees, in a conversation where it shows."""
    tokenizer = make_tokenizer(SEEN_BY_NO_PANEL["the prompt"])
    reply = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine([reply] * (len(outcomes) + 1), allow_forks=True)
    trajectory = await play(
        ScriptedEnv(outcomes, messages=NINE_WORDS),
        engine,
        renderer=renderer or TemplateRenderer(tokenizer),
        audit_every=audit_every,
    )
    assert trajectory.error is None
    return trajectory, engine


def counts(trajectory: Trajectory) -> dict[str, int]:
    """All but what does not differ here: the ending, and what the template does to the history."""
    kept = trajectory.counters.as_dict().items()
    return {key: n for key, n in kept if not key.startswith(("status/", "history/"))}


async def test_i8_a_wrong_bridge_that_passed_the_certificate_is_found_counted_and_forked_from():
    trajectory, engine = await play_hidden(1, [MORE, THANKS, THANKS])
    assert counts(trajectory) == {
        "bridges/derived": 2,
        "forks/failed_audit": 1,
        "shadow_audits/mismatch": 2,
    }
    assert [turn.fork for turn in trajectory.turns] == [None, None, ForkReason.FAILED_AUDIT, None]
    tokenizer = make_tokenizer(SEEN_BY_NO_PANEL["the prompt"])
    texts = [tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert [text.count("<|im_start|>slow\n") for text in texts] == [0, 1, 0, 1]
    assert texts[2].endswith("<|im_end|>\n<|im_start|>fast\n")


async def test_what_was_sampled_behind_a_wrong_bridge_stays_what_was_sampled():
    trajectory, engine = await play_hidden(1, [MORE, MORE])
    first, second = export_samples(trajectory.tree, 1.0)
    asked = engine.requests
    replies = [turn.sequence.completion_ids.tolist() for turn in trajectory.turns]
    assert first.token_ids.tolist() == [*asked[1].prompt_ids.tolist(), *replies[1]]
    assert first.token_ids[first.loss_mask].tolist() == [*replies[0], *replies[1]]
    assert second.token_ids.tolist() == [*asked[2].prompt_ids.tolist(), *replies[2]]
    assert second.token_ids[second.loss_mask].tolist() == replies[2]


async def test_a_revoked_kind_of_bridge_is_refused_in_every_later_rollout():
    renderer = TemplateRenderer(make_tokenizer(SEEN_BY_NO_PANEL["the prompt"]))
    await play_hidden(1, [MORE], renderer)
    trajectory, engine = await play_hidden(0, [MORE, MORE], renderer)
    assert trajectory.counters["refusals/failed_audit"] == 2
    assert "bridges/derived" not in trajectory.counters.as_dict()
    bridge = trajectory.turns[1].bridge
    assert isinstance(bridge, Refusal)
    assert bridge.reason is RefusalReason.FAILED_AUDIT
    assert "id " in bridge.detail
    tokenizer = make_tokenizer(SEEN_BY_NO_PANEL["the prompt"])
    assert not any("slow" in tokenizer.decode(request.prompt_ids) for request in engine.requests)


async def test_without_audits_the_wrong_bridge_is_not_found():
    trajectory, engine = await play_hidden(0, [MORE, MORE])
    assert counts(trajectory) == {"bridges/derived": 2}
    assert engine.forks == []


async def test_a_mismatch_behind_the_last_turn_is_counted_and_forks_nothing():
    trajectory, _ = await play_hidden(1, [MORE])
    assert counts(trajectory) == {
        "bridges/derived": 1,
        "shadow_audits/mismatch": 1,
    }


async def test_a_history_that_is_rewritten_after_a_mismatch_forks_for_that_reason():
    trajectory, _ = await play_hidden(1, [MORE, Rewrite(messages=NINE_WORDS)])
    assert trajectory.turns[2].fork is ForkReason.REWRITTEN_HISTORY
    assert trajectory.counters["shadow_audits/mismatch"] == 1


class OddRenderer(FakeRenderer):
    """Renders the prompts that audits render as `render` says, once the first prompt is rendered."""

    def __init__(self, render: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threads: list[threading.Thread] = []
        self._render = render
        self._num_rendered = 0

    def render(self, messages: Any, *, tools: Any = ()) -> Any:
        self._num_rendered += 1
        if self._num_rendered > 1:
            self.threads.append(threading.current_thread())
            if self._render is not None:
                self._render()
        return super().render(messages, tools=tools)


async def test_bridges_are_audited_and_fresh_renderings_are_not():
    renderer = OddRenderer(refusals=[None, RefusalReason.UNSUPPORTED, None])
    trajectory = await play(
        ScriptedEnv([MORE, MORE, Rewrite(messages=NINE_WORDS), MORE]),
        ScriptedEngine([HELLO] * 5, allow_forks=True),
        renderer=renderer,
        audit_every=1,
    )
    assert trajectory.counters["shadow_audits/match"] == trajectory.counters["bridges/derived"] == 2
    assert len(renderer.threads) == 4
    assert threading.main_thread() not in renderer.threads, "nothing is rendered in the event loop"


async def test_a_conversation_that_the_template_refuses_is_counted_and_goes_on():
    def refuse() -> None:
        raise TemplateError("not like this")

    trajectory = await play(
        ScriptedEnv([MORE, MORE]), ScriptedEngine([HELLO] * 3), renderer=OddRenderer(refuse), audit_every=1
    )
    assert counts(trajectory) == {
        "bridges/derived": 2,
        "shadow_audits/not_comparable": 2,
    }


async def test_a_renderer_that_breaks_in_an_audit_fails_the_trajectory():
    def break_down() -> None:
        raise LookupError("bug")

    trajectory = await play(
        ScriptedEnv([MORE]), ScriptedEngine([HELLO] * 2), renderer=OddRenderer(break_down), audit_every=1
    )
    assert trajectory.status is TrajectoryStatus.FAILED
    assert isinstance(trajectory.error, LookupError)
    assert trajectory.counters["shadow_audits/abandoned"] == 0


# --- who waits for whom -----------------------------------------------------------------------------------


async def test_sampling_does_not_wait_for_the_audit_and_the_turn_after_does():
    gate = threading.Event()
    engine = ScriptedEngine([HELLO] * 3)
    env = ScriptedEnv([MORE, MORE])
    rollout = asyncio.create_task(play(env, engine, renderer=OddRenderer(lambda: gate.wait(10) or None), audit_every=1))
    while len(env.replies) < 2:  # noqa: ASYNC110 (an environment has no event for it)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(engine.requests) == 2  # the second turn was sampled and answered; the third is not asked for
    gate.set()
    trajectory = await rollout
    assert trajectory.counters["shadow_audits/match"] == 2
    assert len(engine.requests) == 3


async def test_the_request_reaches_the_engine_before_the_audit_begins():
    order: list[str] = []

    class Noting(ScriptedEngine):
        async def sample(self, request: Any) -> Any:
            order.append("sample")
            return await super().sample(request)

    await play(
        ScriptedEnv([MORE]), Noting([HELLO] * 2), renderer=OddRenderer(lambda: order.append("audit")), audit_every=1
    )
    assert order == ["sample", "sample", "audit"]


async def test_the_last_audit_is_over_when_the_reward_is_asked_for():
    order: list[str] = []

    class Noting(ScriptedEnv):
        async def reward(self, messages: Any) -> float:
            order.append("reward")
            return 1.0

    renderer = OddRenderer(lambda: threading.Event().wait(0.05) or order.append("audit"))
    await play(Noting([MORE]), ScriptedEngine([HELLO] * 2), renderer=renderer, audit_every=1)
    assert order == ["audit", "reward"]


@pytest.mark.parametrize("how", ["timeout", "timeout while it is waited for", "failure", "cancellation"])
async def test_no_audit_outlives_its_rollout_however_it_ends(how: str):
    engine = ScriptedEngine([HELLO] * 2)
    outcomes: Any = [MORE, OSError("no sandbox")] if how == "failure" else [MORE]

    class Hanging(ScriptedEnv):
        async def step(self, reply: Any) -> Any:
            if how in ("timeout", "cancellation") and self.replies:
                await asyncio.sleep(60)
            return await super().step(reply)

    renderer = OddRenderer(lambda: threading.Event().wait(0.15) or None)
    limits = Limits(timeout_s=0.05) if "timeout" in how else Limits()
    env = Hanging(outcomes)
    rollout = asyncio.create_task(play(env, engine, renderer=renderer, limits=limits, audit_every=1))
    if how == "cancellation":
        await asyncio.sleep(0.05)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    else:
        assert (await rollout).counters["shadow_audits/match"] == 1
    [thread] = renderer.threads
    thread.join(0.01)  # its work is done; it may be about to end
    assert not thread.is_alive()
    assert env.calls[-1] == "close"


async def test_an_audit_that_never_ends_is_given_up_with_the_environment_and_counted():
    gate = threading.Event()
    trajectory = await play(
        ScriptedEnv([MORE]),
        ScriptedEngine([HELLO] * 2),
        renderer=OddRenderer(lambda: gate.wait(10) or None),
        limits=Limits(turn_timeout_s=0.1, close_timeout_s=0.1),
        audit_every=1,
    )
    gate.set()
    assert trajectory.status is TrajectoryStatus.FAILED
    assert trajectory.counters["shadow_audits/abandoned"] == 1


# --- which turns ------------------------------------------------------------------------------------------


async def audited_turns(name: str, every: int) -> list[int]:
    renderer = OddRenderer()
    group = await run_group(
        lambda: ScriptedEnv([MORE] * 9),
        4,
        engine=ScriptedEngine(lambda _: [*encode("ok"), END]),
        renderer=renderer,
        sampling=SamplingParams(max_tokens=5),
        limits=Limits(),
        audit_every=every,
        group_id=name,
    )
    return [trajectory.counters["shadow_audits/match"] for trajectory in group.trajectories]


async def test_the_same_names_are_audited_alike_and_about_one_turn_in_n_is():
    counts = [await audited_turns(f"g{k}", 4) for k in range(25)]
    assert counts == [await audited_turns(f"g{k}", 4) for k in range(25)]
    assert 150 < np.sum(counts) < 300  # of 900 bridges
    assert len({tuple(row) for row in counts}) > 10
    assert await audited_turns("g", 0) == [0] * 4
    assert await audited_turns("g", 1) == [9] * 4


@pytest.mark.parametrize("every", [-1, 1.0, True, None, "2"])
async def test_a_rate_that_is_no_count_is_an_error_of_the_caller(every: Any):
    with pytest.raises(InvalidInputError, match="audit_every must be a whole number >= 0"):
        await play(ScriptedEnv(), ScriptedEngine([HELLO]), audit_every=every)
    with pytest.raises(InvalidInputError, match="audit_every"):
        await audited_turns("g", every)
