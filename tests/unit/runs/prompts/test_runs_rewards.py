"""Reward functions from files: what they get, how they add up, and what of them is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.fake_renderer import END, encode
from support.rewarded import PROMPT, group_of
from support.rows import build_samples
from support.sequences import sampled
from unbroken.counters import Counters
from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.runs.prompts.rewards import Problem, RewardConfig, Rewards
from unbroken.training.objective.advantages import grpo_advantages
from unbroken.types import token_ids


def rewards_of(
    folder: Path, code: str, *functions: str | RewardConfig, columns: tuple[str, ...] = ("answer",)
) -> Rewards:
    file = folder / "rewards.py"
    file.write_text(code)
    given = [
        each
        if isinstance(each, RewardConfig)
        else RewardConfig(function=Path(f"{file}:{each}"), max_retries=2, retry_wait_s=0.01)
        for each in functions
    ]
    return Rewards(given, columns)


def problem(prompt: Any = "3 + 4?") -> Problem:
    return Problem(place="row 5 of sums", prompt=prompt, num_prompt_messages=2, row={"answer": "7"})


async def test_functions_get_what_they_name_and_add_up_with_their_weights(tmp_path):
    rewards = rewards_of(
        tmp_path,
        "def correct(completions, answer): return [float(a == c) for a, c in zip(answer, completions)]\n"
        "async def short(completions, **others): return [1 / len(c) for c in completions]\n",
        "correct",
        RewardConfig(function=Path(f"{tmp_path}/rewards.py:short"), weight=-0.5),
    )
    scored = await rewards.score(problem(), await group_of("7", "12345"))
    assert scored.rewards == (0.5, pytest.approx(-0.1))
    assert [member.reward_parts for member in scored.trajectories] == [
        {"correct": 1.0, "short": 1.0},
        {"correct": 0.0, "short": 0.2},
    ]


@pytest.mark.parametrize(
    ("signature", "seen", "rewards"),
    [
        ("completions", ["a", "c"], (1.0, 0.0, 1.0, 0.0)),
        ("completions, statuses", list("abcb"), (1.0, -1.0, 1.0, -1.0)),
    ],
)
async def test_a_function_that_names_statuses_scores_time_outs_and_others_leave_them_at_0(
    tmp_path, signature, seen, rewards
):
    scorer = rewards_of(
        tmp_path,
        "seen = []\n"
        f"def look({signature}):\n"
        "    seen.extend(completions)\n"
        "    late = locals().get('statuses', [''] * len(completions))\n"
        "    return [-1.0 if each == 'timeout' else 1.0 for each in late]\n",
        "look",
    )
    group = await group_of(*"abcb")
    members = [
        replace(each, status=TrajectoryStatus.TIMEOUT) if number % 2 else each
        for number, each in enumerate(group.trajectories)
    ]
    scored = await scorer.score(problem(), replace(group, trajectories=tuple(members)))
    assert scorer._functions[0]._function.__globals__["seen"] == seen
    assert scored.rewards == rewards


async def test_every_argument_has_an_entry_for_each_completion(tmp_path):
    rewards = rewards_of(
        tmp_path,
        "seen = {}\n"
        "def look(prompts, completions, messages, completion_ids, answer, other=3):\n"
        "    seen.update(locals())\n"
        "    messages[0][0]['content'] = 'changed'\n"
        "    return [0, 1]\n",
        "look",
    )
    group = await group_of("a", "b")
    await rewards.score(problem(), group)
    seen = rewards._functions[0]._function.__globals__["seen"]
    assert seen["prompts"] == ["3 + 4?"] * 2
    assert seen["completions"] == ["a", "b"]
    assert seen["completion_ids"] == [[*encode("a"), END], [*encode("b"), END]]
    assert seen["answer"] == ["7", "7"]
    assert [len(each) for each in seen["messages"]] == [3, 3]
    assert group.trajectories[0].messages[0]["content"] == "Be brief."


async def test_completions_of_messages_are_messages(tmp_path):
    code = "def last(completions): return [float(c[-1]['content'] == 'b' and len(c) == 1) for c in completions]"
    scored = await rewards_of(tmp_path, code, "last").score(problem(PROMPT), await group_of("a", "b"))
    assert scored.rewards == (0.0, 1.0)


@pytest.mark.parametrize(
    "value", ["numpy.array([1, 0])", "torch.tensor([1.0, 0.0])", "(True, False)", "[1, numpy.float32(0)]"]
)
async def test_numbers_may_come_in_any_form(tmp_path, value):
    code = f"import numpy, torch\ndef one(completions): return {value}"
    scored = await rewards_of(tmp_path, code, "one").score(problem(), await group_of("a", "b"))
    assert scored.rewards == (1.0, 0.0)


async def test_a_member_that_failed_has_no_reward_and_is_not_shown(tmp_path):
    code = "def one(completions): return [1.0 for c in completions if c == 'b']"
    scored = await rewards_of(tmp_path, code, "one").score(problem(), await group_of("", "b"))
    assert scored.rewards == (None, 1.0)


async def test_a_function_that_names_statuses_decides_what_a_time_out_is_worth_and_to_others_it_is_0(tmp_path):
    code = """
def known(completions, statuses): return [-1.0 if status == "timeout" else 1.0 for status in statuses]
def unaware(completions, **others): return [float(len(text)) for text in completions]
"""
    group = await group_of("abc", "late", "abcd")
    first, late, last = group.trajectories
    late = replace(late, status=TrajectoryStatus.TIMEOUT, reward=0.0)
    group = replace(group, trajectories=(first, late, last))
    scored = await rewards_of(tmp_path, code, "known", "unaware").score(problem("x"), group)
    assert scored.rewards == (4.0, -1.0, 5.0)
    assert scored.trajectories[1].reward_parts == {"known": -1.0, "unaware": 0.0}
    everyone = replace(group, trajectories=(late, replace(late, trajectory_id="other")))
    assert (await rewards_of(tmp_path, code, "unaware").score(problem(), everyone)).rewards == (0.0, 0.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", r"it must return a list of 2 numbers, one for each completion, got \[1.0\]"),
        ("return 1.0", r"it must return a list of 2 numbers, one for each completion, got 1.0"),
        ("return None", r"it must return a list of 2 numbers, one for each completion, got None: does it end without"),
        ("return [1.0, float('nan')]", r"completion 1: the reward must be finite in float32, got nan"),
        ("return ['1', 1.0]", r"completion 0: the reward must be one number, got '1'"),
        ("return [1e39, 1.0]", r"completion 0: the reward must be finite in float32, got 1e\+39"),
        ("return {}['x']", r"it failed with KeyError: 'x'"),
        ("raise TimeoutError('the judge')", r"it failed with TimeoutError: the judge, 3 times in all"),
        (
            "raise FileNotFoundError(2, 'no such file', 'answers')",
            r"it failed with FileNotFoundError: .*'answers'\n  File .*line 1, in wrong",
        ),
        ("exit(3)", r"it failed with SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("define", ["def", "async def"])
async def test_what_is_no_reward_stops_with_function_row_and_value(tmp_path, define, body, message):
    rewards = rewards_of(tmp_path, f"{define} wrong(completions): {body}", "wrong")
    with pytest.raises(RewardError, match=r"^reward function rewards.py:wrong, row 5 of sums[:,] " + message):
        await rewards.score(problem(), await group_of("a", "b"))


@pytest.mark.parametrize(
    "failure",
    [
        "raise ConnectionError('reset')",
        "raise TimeoutError()",
        "raise OSError('unreachable')",
        "raise RuntimeError() from ConnectionResetError()",
    ],
)
@pytest.mark.parametrize("define", ["def", "async def"])
async def test_a_connection_that_fails_is_tried_again_and_a_later_answer_counts(tmp_path, caplog, define, failure):
    code = f"calls = []\n{define} judge(completions):\n    calls.append(1)\n    if len(calls) < 3: {failure}\n"
    scored = await rewards_of(tmp_path, code + "    return [1.0, 0.0]", "judge").score(
        problem(), await group_of("a", "b")
    )
    assert scored.rewards == (1.0, 0.0)
    assert caplog.text.count("reward function rewards.py:judge, row 5 of sums: it failed with") == 2


async def test_no_opinion_is_left_out_of_the_sum_and_of_the_comparison(tmp_path):
    code = "def first(completions): return [1, 0, None, None]\ndef second(completions): return [None, 0.5, 2, None]"
    scored = await rewards_of(tmp_path, code, "first", "second").score(problem(), await group_of("a", "b", "c", "d"))
    assert scored.rewards == (1.0, 0.5, 2.0, None)
    assert [member.reward_parts for member in scored.trajectories] == [
        {"first": 1.0},
        {"first": 0.0, "second": 0.5},
        {"second": 2.0},
        {},
    ]
    assert scored.trajectories[3].status is TrajectoryStatus.UNSCORED
    counters = Counters()
    rows = build_samples([scored], partial(grpo_advantages, normalize=False), counters)
    assert [row.advantages[-1] for row in rows] == pytest.approx([-1 / 6, -2 / 3, 5 / 6])
    assert counters.as_dict() == {"dropped_rows/unscored": 1}


@pytest.mark.parametrize(
    "code",
    ["import time\ndef slow(completions): time.sleep(0.3)", "import asyncio\nasync def slow(): await asyncio.sleep(9)"],
)
async def test_a_function_that_hangs_is_given_up(tmp_path, code):
    (tmp_path / "rewards.py").write_text(code)
    rewards = Rewards([RewardConfig(function=tmp_path / "rewards.py:slow", timeout_s=0.05)], ())
    with pytest.raises(RewardError, match=r"rewards.py:slow, row 5 of sums: it did not return within 0.05 s"):
        await rewards.score(problem(), await group_of("a", "b"))


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        (
            "def f(completions, solution): ...",
            "f",
            r"f needs the argument 'solution', which is not a column .*: the arguments are answer, comp",
        ),
        ("def f(completion, /): ...", "f", r"f needs the argument 'completion'"),
        (
            "def correct(): ...",
            "corect",
            r"rewards\[0\].function must name something in .*, got 'corect': the file has correct",
        ),
        ("f = 3", "f", r"rewards\[0\].function must name a function, got 3"),
        ("def f(:", "f", r"rewards.py cannot be loaded: SyntaxError"),
        ("import nowhere", "f", r"rewards.py cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_training(tmp_path, code, function, message):
    with pytest.raises(InvalidInputError, match=message):
        rewards_of(tmp_path, code, function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere.py:f", r"nowhere.py must be a Python file, but it does not exist"),
        ("rewards.py", r"rewards\[0\].function must be written file.py:name, got 'rewards.py'"),
        ("rewards:f", r"rewards\[0\].function must be written file.py:name, got 'rewards:f'"),
    ],
)
def test_a_function_is_named_by_its_file_and_its_name(function, message):
    with pytest.raises(InvalidInputError, match=message):
        Rewards([RewardConfig(function=Path(function))], ())


def test_there_must_be_a_function():
    with pytest.raises(InvalidInputError, match="rewards must hold at least one function"):
        Rewards([], ())


def test_two_functions_of_one_name_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"rewards must be functions with different names.* got \['f', 'f'\]"):
        rewards_of(tmp_path, "def f(): ...", "f", "f")


@pytest.mark.parametrize("options", [{"weight": float("nan")}, {"timeout_s": 0.0}])
def test_weights_and_time_limits_are_checked(options):
    (name,) = options
    with pytest.raises(InvalidInputError, match=f"{name} must be a finite number"):
        RewardConfig(function=Path("a.py:f"), **options)


async def test_rewards_of_spans_and_of_ids_are_summed_and_kept_with_their_places(tmp_path):
    """ "abc" is four ids with its end. The second function has a number, which is for all ids."""
    rewards = rewards_of(
        tmp_path,
        "import numpy\n"
        "def steps(completion_ids): return [[(0, 1, 0.5), (2, 4, -1)], [1, 0, 0, 2], numpy.array([1.0, 0.0]), None]\n"
        "def correct(completions): return [1, 0, None, None]\n",
        RewardConfig(function=Path(f"{tmp_path}/rewards.py:steps"), weight=2.0),
        "correct",
    )
    scored = await rewards.score(problem(), await group_of("abc", "abc", "a", "b"))
    assert [[tuple(span) for span in member.span_rewards] for member in scored.trajectories] == [
        [(0, 1, 1.0), (0, 4, 1.0), (2, 4, -2.0)],
        [(0, 1, 2.0), (1, 2, 0.0), (2, 3, 0.0), (0, 4, 0.0), (3, 4, 4.0)],
        [(0, 1, 2.0), (1, 2, 0.0)],
        [],
    ]
    assert scored.rewards == (0.0, 6.0, 2.0, None)
    assert scored.trajectories[1].reward_parts == {"steps": 3.0, "correct": 0.0}
    assert scored.trajectories[2].reward_weights == {"steps": 2.0, "correct": 1.0}


async def test_an_environments_own_reward_is_for_all_ids_but_for_what_its_turns_earned(tmp_path):
    (tmp_path / "rewards.py").write_text("def steps(completions): return [[(0, 1, 0.5)], 1.0]")
    rewards = Rewards([RewardConfig(function=tmp_path / "rewards.py:steps")], (), add_to_own=True)
    group = await group_of("a", "b")
    members = [replace(each, reward=3.0, turn_rewards=(1.0,)) for each in group.trajectories]
    scored = await rewards.score(problem(), replace(group, trajectories=tuple(members)))
    assert [member.span_rewards for member in scored.trajectories] == [
        ((0, 1, 0.5), (0, 2, 2.0)),
        ((0, 2, 2.0), (0, 2, 1.0)),
    ]
    assert scored.rewards == (3.5, 4.0)
    assert scored.trajectories[0].reward_weights == {"environment": 1.0, "steps": 1.0}


async def test_places_of_spans_may_be_integers_of_numpy(tmp_path):
    rewards = rewards_of(
        tmp_path,
        "import numpy\n"
        "def steps(completions): return [[(k, k + numpy.int32(1), numpy.float32(0.5))] for k in numpy.arange(2)]\n",
        "steps",
    )
    scored = await rewards.score(problem(), await group_of("a", "b"))
    assert [member.span_rewards for member in scored.trajectories] == [((0, 1, 0.5),), ((1, 2, 0.5),)]
    assert {type(place) for member in scored.trajectories for place in member.span_rewards[0][:2]} == {int}


async def test_a_part_of_an_environment_is_not_taken_for_the_function_of_its_name(tmp_path):
    (tmp_path / "rewards.py").write_text("def correct(completions): return [None, 1.0]")
    rewards = Rewards([RewardConfig(function=tmp_path / "rewards.py:correct")], (), add_to_own=True)
    group = await group_of("a", "b")
    members = [replace(each, reward_parts={"correct": 5.0, "tools": 2.0}) for each in group.trajectories]
    scored = await rewards.score(problem(), replace(group, trajectories=tuple(members)))
    assert [member.reward_parts for member in scored.trajectories] == [
        {"tools": 2.0, "environment": 0.0},
        {"tools": 2.0, "environment": 0.0, "correct": 1.0},
    ]


async def test_ids_that_were_given_inside_a_turn_have_no_place(tmp_path):
    """ "abc" is four ids; two of another turn's four were sampled before ids that closed its reasoning."""
    (member, other) = (await group_of("abc", "abc")).trajectories
    (turn,) = member.turns
    first, second = (sampled(*turn.sequence.completion_ids[part].tolist()) for part in (slice(0, 2), slice(2, 4)))
    sequence, tree = first.then(token_ids([8, 9, 7]), second), TokenTree()
    start = tree.add_given([5, 6], Origin.PROMPT, parent=None)
    closed = replace(turn, prompt_end=start, end=tree.add_sampled(sequence, parent=start), sequence=sequence)
    member = replace(member, tree=tree, turns=(closed,))
    rewards = rewards_of(
        tmp_path, "def ids(completion_ids): return [[float(i) for i in k] for k in completion_ids]", "ids"
    )
    scored = await rewards.score(problem(), TrajectoryGroup(group_id="g", trajectories=(member, other)))
    assert scored.trajectories[0].span_rewards == scored.trajectories[1].span_rewards
    assert [span.stop for span in scored.trajectories[0].span_rewards] == [1, 2, 3, 4]


async def test_numbers_alone_leave_no_spans(tmp_path):
    scored = await rewards_of(tmp_path, "def one(completions): return [1, 0]", "one").score(
        problem(), await group_of("a", "b")
    )
    assert [member.span_rewards for member in scored.trajectories] == [(), ()]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[(0, 3, 1.0)]", r"span 0 must lie in its 2 sampled ids .* 0 <= start < stop <= 2, got \(0, 3, 1.0\)"),
        ("[(-1, 1, 1.0)]", r"span 0 must lie in its 2 sampled ids"),
        ("[(1, 1, 1.0)]", r"span 0 must lie in its 2 sampled ids"),
        ("[(0, 2, 1.0), (1, 2, 1.0)]", r"span 1 must begin where span 0 ends, 2, or later, got \(1, 2, 1.0\)"),
        ("[(1, 2, 1.0), (0, 1, 1.0)]", r"span 1 must begin where span 0 ends"),
        ("[(0, 1, float('nan'))]", r"span 0: the reward must be finite in float32, got nan"),
        ("[(0, 1, None)]", r"span 0: the reward must be one number, got None"),
        ("[(0, 1.0, 1.0)]", r"span 0 must be \(start, stop, reward\) with two integers, got \(0, 1.0, 1.0\)"),
        ("[(False, True, 1.0)]", r"span 0 must be \(start, stop, reward\) with two integers"),
        ("[(0, 1)]", r"span 0 must be \(start, stop, reward\)"),
        ("[(0, 1, 1.0), 0.5]", r"span 1 must be \(start, stop, reward\)"),
        ("[1.0]", r"rewards of ids must be one number for each of its 2 sampled ids \(completion_ids\), .*; got 1"),
        ("[]", r"rewards of ids must be one number for each of its 2 sampled ids .*; got 0. None is no opinion"),
        ("[1.0, float('inf')]", r"the reward of id 1 must be finite in float32, got inf"),
        ("[1.0, None]", r"the reward of id 1 must be one number, got None"),
    ],
)
async def test_rewards_of_other_ids_than_were_sampled_are_refused_with_row_rule_and_value(tmp_path, value, message):
    rewards = rewards_of(tmp_path, f"def wrong(completions): return [0.0, {value}]", "wrong")
    with pytest.raises(
        RewardError, match=r"^reward function rewards.py:wrong, row 5 of sums, completion 1: " + message
    ):
        await rewards.score(problem(), await group_of("a", "b"))
