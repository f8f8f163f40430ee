"""Bounded thinking: reasoning that is open after N sampled ids is closed by given ids, and the turn goes on."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from support.fake_renderer import FakeRenderer
from support.rollouts import play
from support.scripted_env import ScriptedEnv
from support.templates import CHATML, QWEN_THINKING
from support.tokenizers import make_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError, InvalidInputError
from unbroken.ledger.nodes import BridgeKind
from unbroken.ledger.tree import export_samples
from unbroken.rendering.base import HistoryEffect
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.env import Continue
from unbroken.rollout.limits import Limit, Limits
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.types import FinishReason, SampledSequence, SamplingParams
from unbroken.weights.sources import TensorSource

CLOSE = "\n</think>\n\n"


def make_renderer(**kwargs):
    return TemplateRenderer(make_tokenizer(QWEN_THINKING, eos_token="<|im_end|>"), **kwargs)


def encode(renderer, text):
    return renderer._encoder.encode_plain(text).tolist()


class Scripted:
    """An engine that says the next ids of each turn's script, wherever a request begins in it."""

    def __init__(self, renderer, *replies, **options):
        self.renderer = renderer
        self.engine = ScriptedEngine(
            [[*encode(renderer, reply)] for reply in replies],
            vocab_size=5000,
            **{"context_length": 2000, **options},
        )

    def play(self, n, *outcomes, max_tokens=50, **params):
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        return asyncio.run(
            play(
                ScriptedEnv(outcomes),
                self.engine,
                renderer=self.renderer,
                sampling=sampling,
                limits=Limits(thinking_tokens=n),
            )
        )


def test_open_reasoning_is_closed_by_given_ids_and_the_turn_goes_on():
    renderer = make_renderer()
    thought, answer = "<think>\nlet me see, the page", "42<|im_end|>"
    n = len(encode(renderer, thought))
    scripted = Scripted(renderer, thought + " and so on and so on", answer)

    trajectory = scripted.play(n, seed=7)

    assert trajectory.error is None
    (turn,) = trajectory.turns
    given, sampled = encode(renderer, CLOSE), encode(renderer, answer)
    assert turn.sequence.completion_ids.tolist() == [*encode(renderer, thought), *given, *sampled]
    mask = [True] * n + [False] * len(given) + [True] * len(sampled)
    assert turn.sequence.sampled_mask.tolist() == mask
    assert np.isfinite(turn.sequence.rollout_logprobs).tolist() == mask
    assert (turn.parsed.reasoning.strip(), turn.parsed.content) == ("let me see, the page", "42")
    assert turn.sequence.finish_reason is FinishReason.STOP
    assert trajectory.num_sampled == n + len(sampled)
    assert trajectory.counters["closings/thinking"] == 1
    first, second = scripted.engine.requests
    assert second.prompt_ids.tolist() == [*first.prompt_ids.tolist(), *encode(renderer, thought), *given]
    assert (first.params.max_tokens, second.params.max_tokens) == (n, 50 - n)
    assert first.params.seed != second.params.seed
    (row,) = export_samples(trajectory.tree, 1.0)
    assert row.loss_mask[-len(mask) :].tolist() == row.sampled_mask[-len(mask) :].tolist() == mask
    assert row.advantages[-len(mask) :].tolist() == [float(each) for each in mask]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("<think>\nyes\n</think>", "\n\n42<|im_end|>"),
        ("an answer without any thinking", " that goes on<|im_end|>"),
    ],
    ids=["it ended in the last id", "it never began"],
)
def test_a_turn_that_is_not_in_its_reasoning_is_continued_as_it_is(first, second):
    renderer = make_renderer()
    scripted = Scripted(renderer, first, second)

    trajectory = scripted.play(len(encode(renderer, first)))

    (turn,) = trajectory.turns
    assert turn.sequence.completion_ids.tolist() == encode(renderer, first) + encode(renderer, second)
    assert turn.sequence.sampled_mask.all()
    assert trajectory.counters["closings/thinking"] == 0


@pytest.mark.parametrize("cut", ["<", "</", "</th", "</think"])
def test_a_cut_in_the_letters_of_the_end_gets_the_whole_end(cut):
    renderer = make_renderer()
    thought = f"<think>\nhm{cut}"
    trajectory = Scripted(renderer, thought, "42<|im_end|>").play(len(encode(renderer, thought)))

    (turn,) = trajectory.turns
    assert turn.parsed.content == "42"
    assert turn.parsed.reasoning == f"hm{cut}"


def test_reasoning_that_the_prompt_opened_is_closed_too():
    renderer = make_renderer(template_kwargs={"open_thinking": True})
    trajectory = Scripted(renderer, "let me see", "42<|im_end|>").play(len(encode(renderer, "let me see")))

    (turn,) = trajectory.turns
    assert (turn.parsed.reasoning, turn.parsed.content) == ("let me see", "42")
    assert trajectory.counters["closings/thinking"] == 1


def test_the_next_turn_continues_all_ids_and_is_bounded_again():
    renderer = make_renderer()
    thought, again = "<think>\nlet me see", "<think>\nonce more"
    n = len(encode(renderer, thought))
    scripted = Scripted(renderer, thought, "42<|im_end|>", (again + " and so on")[: len(again) + 30], "43<|im_end|>")

    trajectory = scripted.play(n, Continue(messages=({"role": "user", "content": "sure?"},)))

    first, second = trajectory.turns
    assert trajectory.counters[f"bridges/{BridgeKind.DERIVED}"] == 1
    assert trajectory.counters[f"history/{HistoryEffect.DROPS_REASONING}"] == 1
    so_far = trajectory.tree.token_ids(first.end)
    assert trajectory.tree.token_ids(second.prompt_end)[: len(so_far)].tolist() == so_far.tolist()
    (row,) = export_samples(trajectory.tree, 1.0)
    assert row.loss_mask.sum() == trajectory.num_sampled == sum(turn.sequence.num_sampled for turn in trajectory.turns)


def test_weights_that_change_between_the_parts_are_in_the_versions():
    renderer = make_renderer()
    thought = "<think>\nlet me see"
    n, given = len(encode(renderer, thought)), len(encode(renderer, CLOSE))
    scripted = Scripted(renderer, thought, "42<|im_end|>")

    class Updated(ScriptedEngine):
        async def sample(self, request):
            result = await super().sample(request)
            await self.update_weights(TensorSource([]), policy_version=self.policy_version + 1)
            return result

    scripted.engine.__class__ = Updated
    trajectory = scripted.play(n)

    (turn,) = trajectory.turns
    spans = [(span.start, span.stop, span.policy_version) for span in turn.sequence.version_spans]
    assert spans == [(0, n, 0), (n + given, len(turn.sequence.completion_ids), 1)]
    assert trajectory.tree.sampled_versions == (0, 1)


@pytest.mark.parametrize("what", ["fails", "is aborted"])
def test_a_turn_whose_second_part_fails_or_is_aborted_is_no_turn(what):
    renderer = make_renderer()
    thought = "<think>\nlet me see"
    scripted = Scripted(renderer, thought, "42<|im_end|>")

    class Broken(ScriptedEngine):
        async def sample(self, request):
            result = await super().sample(request)
            if len(self.requests) == 1:
                return result
            if what == "fails":
                raise EngineError("no engine")
            return replace(result, sequences=(SampledSequence.aborted(request.params),))

    scripted.engine.__class__ = Broken
    trajectory = scripted.play(len(encode(renderer, thought)))

    expected = TrajectoryStatus.FAILED if what == "fails" else TrajectoryStatus.ABORTED
    assert (trajectory.status, trajectory.turns, trajectory.num_sampled) == (expected, (), 0)


def test_a_budget_of_one_id_closes_reasoning_as_soon_as_it_begins():
    renderer = make_renderer()
    (turn,) = Scripted(renderer, "<think>", "42<|im_end|>").play(1).turns
    assert (turn.parsed.reasoning or "", turn.parsed.content) == ("", "42")
    assert turn.sequence.sampled_mask[:2].tolist() == [True, False]


def test_a_turn_may_be_cut_within_a_letter_of_its_reasoning():
    renderer = make_renderer()
    ids = encode(renderer, "<think>\nhm 漢")
    scripted = Scripted(renderer, "", "42<|im_end|>")
    scripted.engine = ScriptedEngine([ids, encode(renderer, "42<|im_end|>")], vocab_size=5000, context_length=2000)

    (turn,) = scripted.play(len(ids) - 1).turns

    assert turn.sequence.completion_ids[: len(ids) - 1].tolist() == ids[:-1]
    assert (turn.parsed.content, turn.parsed.reasoning) == ("42", "hm \N{REPLACEMENT CHARACTER}")


def test_a_turn_that_may_not_be_longer_is_cut_in_its_reasoning_as_without_a_bound():
    renderer = make_renderer()
    thought = "<think>\nlet me see"
    n = len(encode(renderer, thought))
    scripted = Scripted(renderer, thought, "42<|im_end|>")

    (turn,) = scripted.play(n, max_tokens=n).turns

    assert turn.sequence.sampled_mask.all()
    assert turn.cut_by is Limit.TURN
    assert not turn.parsed.reasoning_complete


def test_a_context_without_room_for_the_end_and_an_answer_cuts_the_turn():
    renderer = make_renderer()
    thought = "<think>\nlet me see"
    n = len(encode(renderer, thought))
    length = len(renderer.render(ScriptedEnv()._messages).token_ids)
    scripted = Scripted(renderer, thought, "42<|im_end|>", context_length=length + n + len(encode(renderer, CLOSE)))

    (turn,) = scripted.play(n).turns

    assert turn.sequence.sampled_mask.all()
    assert turn.cut_by is Limit.CONTEXT


@pytest.mark.parametrize(
    ("renderer", "params", "why"),
    [
        (lambda: TemplateRenderer(make_tokenizer(CHATML)), {}, "got 5: the chat template has no reasoning"),
        (FakeRenderer, {}, "FakeRenderer cannot close reasoning"),
        (make_renderer, {"stop_strings": ("x",)}, r"cannot be combined with sampling.stop_strings, got \('x',\)"),
        (make_renderer, {"presence_penalty": 1.0}, "cannot be combined with sampling.presence_penalty, got 1.0"),
        (make_renderer, {"min_tokens": 2}, "cannot be combined with sampling.min_tokens, got 2"),
        (make_renderer, {"bad_words_ids": ((4,),)}, r"cannot be combined with sampling.bad_words_ids, got \(\(4,\),\)"),
    ],
)
def test_what_cannot_be_bounded_exactly_is_refused_by_name(renderer, params, why):
    engine = ScriptedEngine([], vocab_size=5000)
    limits, sampling = Limits(thinking_tokens=5), SamplingParams(**params)
    with pytest.raises(InvalidInputError, match=rf"rollouts.limits.thinking_tokens .*{why}"):
        asyncio.run(play(ScriptedEnv(), engine, renderer=renderer(), sampling=sampling, limits=limits))


def test_an_agent_says_itself_how_much_it_thinks():
    with pytest.raises(
        InvalidInputError, match=r"rollouts\.limits\.thinking_tokens must be left out with an agent, got 5"
    ):
        asyncio.run(
            run_agent_group(None, 1, gateway=None, task={}, sampling=SamplingParams(), limits=Limits(thinking_tokens=5))
        )
