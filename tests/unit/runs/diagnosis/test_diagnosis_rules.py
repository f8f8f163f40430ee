"""Each rule of the diagnosis speaks of its cause, and stays quiet beside it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.runs.diagnosis.evidence import Ending, Evidence, RolloutNote, choose_evenly
from unbroken.runs.diagnosis.rules import RULES, diagnose

ROOT = Path(__file__).parents[4]
HEALTHY: dict[str, Any] = {
    "reward/mean": 0.4, "reward/std": 0.5, "reward/min": 0.0, "reward/max": 1.0,
    "rollout/num_trajectories": 64, "rollout/num_trainable": 64, "rollout/num_tool_calls": 64,
    "rollout/turns_mean": 2.0, "rollout/completion_tokens_max": 100,
    "groups/num": 8, "groups/num_compared": 8, "groups/num_zero_variance": 3,
    "counters/status/completed": 60, "counters/status/truncated": 4, "counters/tool_errors": 4,
    "counters/tool_errors/error": 1, "counters/tool_errors/invalid_arguments": 3, "counters/parse_failures": 2,
    "counters/forks": 0,
    "train/num_rows": 40, "train/entropy": 1.0, "train/learning_rate": 1e-5, "train/grad_norm": 0.5,
    "train/clip_fraction": 0.01, "train/k3": 0.001, "train/corrected_fraction": 0.0,
    "mismatch/k3": 1e-6, "mismatch/k3_lag_0": 1e-6, "staleness/max": 0, "staleness/mean": 0.0,
    "seconds/wall": 60.0, "seconds/collect": 35.0, "seconds/train": 20.0, "seconds/other": 1.0,
    "seconds/rollout_mean": 20.0, "seconds/rollout_max": 34.0, "seconds/engine_mean": 18.0, "seconds/queue_mean": 2.0,
    "memory/available_share": 0.5, "memory/peak_bytes": 2**32,
}  # fmt: skip
EMPTY = {"train/entropy": None, "train/grad_norm": None, "train/learning_rate": None, "train/num_rows": 0}
EQUAL = {"groups/num_zero_variance": 8, "reward/std": 0.0, **EMPTY}


def note(number: int, **others: Any) -> RolloutNote:
    usual: dict[str, Any] = {"given": f"The answer is {number}.", "expected": "27", "reward": 0.0, "error": None}
    usual |= {"replies": others.get("given", usual["given"]), "tool_answer": None}
    return RolloutNote(group=f"g{number // 2}", **{**usual, **others})


def rewards(value: float) -> dict[str, Any]:
    return {**EQUAL, "reward/mean": value, "reward/min": value, "reward/max": value}


def observe(
    *steps: dict[str, Any], ending: str = "running", notes: Any = None, temperature: float = 1.0, **of_ending: Any
) -> Evidence:
    """The evidence of steps that differ from healthy ones in this."""
    evidence = Evidence(ending=Ending(status=ending, **of_ending), temperature=temperature)
    for step in steps:
        evidence = evidence.add_step({**HEALTHY, **step})
    return replace(evidence, notes=tuple(note(k) for k in range(16)) if notes is None else tuple(notes))


def find(evidence: Evidence) -> dict[str, str]:
    return {each.name: each.sentence for each in diagnose(evidence)}


SOLVED_IN_20 = (
    *(0.531, 0.484, 0.609, 0.648, 0.742, 0.664, 0.75, 0.742, 0.812, 0.805),
    *(0.836, 0.797, 0.789, 0.766, 0.93, 0.945, 0.914, 0.891, 0.875, 0.875),
)
"""The mean rewards of a run of `unbroken new`, as it is."""
FLAT_IN_20 = (
    *(0.453, 0.406, 0.492, 0.484, 0.469, 0.414, 0.453, 0.516, 0.539, 0.516),
    *(0.5, 0.508, 0.531, 0.43, 0.477, 0.539, 0.516, 0.438, 0.469, 0.5),
)
"""The same, with an answer that depends on what a lookup returned, which that model does not learn."""
SUM_OF_TWO = (
    *(0.576, 0.524, 0.648, 0.684, 0.768, 0.698, 0.773, 0.767, 0.824, 0.829),
    *(0.858, 0.813, 0.803, 0.777, 0.937, 0.935, 0.857, 0.906, 0.876, 0.852),
)
ONE_LOOKUP = (
    *(0.445, 0.398, 0.383, 0.352, 0.258, 0.336, 0.227, 0.25, 0.195, 0.164),
    *(0.141, 0.164, 0.141, 0.195, 0.07, 0.055, 0.133, 0.078, 0.086, 0.086),
)
"""The first, with a tenth for one lookup, where the right answer takes two: the sum and its second part."""


def record(means: Sequence[float], parts: Mapping[str, Sequence[float]] | None = None) -> list[dict[str, Any]]:
    """The steps of a run that was recorded: mean rewards, and those of parts by name."""
    return [
        {"reward/mean": mean, **{f"reward/{name}_mean": part[k] for name, part in (parts or {}).items()}}
        for k, mean in enumerate(means)
    ]


TWO_PARTS = [note(k, weights={"correct": 1.0, "one_lookup": 0.1}) for k in range(16)]
CORRECT = [whole - 0.1 * part for whole, part in zip(SUM_OF_TWO, ONE_LOOKUP, strict=True)]
NEVER_CORRECT = [replace(each, parts={"correct": 0.0, "one_lookup": k % 2}) for k, each in enumerate(TWO_PARTS)]
PARTS = {"correct": CORRECT, "one_lookup": ONE_LOOKUP}
SAME = [note(k, given="Yes.") for k in range(16)]
FAILED_CALL = [
    note(k, call='lookup({"key": "raka"})', tool_answer="Error: lookup failed with RuntimeError: database is down")
    for k in range(4)
]
PAIRS = [note(k, given=f"It is {k // 2}.") for k in range(16)]
CAUSES: dict[str, tuple[Evidence, str]] = {
    "failures": (
        observe({"counters/status/failed": 8}, notes=[note(0), note(1, error="KeyError: 'solution'")]),
        "8 of 64 rollouts of the last step failed, one with KeyError: 'solution'",
    ),
    "tool-errors": (
        observe(*[{"counters/tool_errors/error": 62}] * 2, notes=FAILED_CALL),
        "124 of 124 tool calls of the last 2 steps failed in the tool itself; for example, of "
        r'lookup\(\{"key": "raka"\}\) the policy gets .Error: lookup failed',
    ),
    "collapse": (
        observe({}, *[rewards(0.0)] * 3),
        "all 192 rewards .* are 0, and the mean of the steps before was 0.4; one",
    ),
    "cut": (observe(*[{"counters/status/truncated": 61}] * 3), "183 of 192 .* the longest has 100 tokens"),
    "low-temperature": (
        observe(*[{"groups/num_zero_variance": 8}] * 3, notes=PAIRS, temperature=0.01),
        r"all rollouts of a group are identical \(16 of 16 .* of 8 groups\), and the temperature is 0.01",
    ),
    "equal-rewards": (observe(*[rewards(0.0)] * 3), "every reward so far is 0 .*'27' was expected and 'The answer is"),
    "solved": (observe({}, *[rewards(1.0)] * 3), "have the reward 1, the highest that was seen in this run"),
    "same-completions": (observe(*[rewards(0.0)] * 3, notes=SAME), r"says 'Yes.' to all problems \(16 of 16"),
    "entropy-fall": (observe({}, {}, *[{"train/entropy": 0.01}] * 3), "fell from .* to 0.01 nats"),
    "no-variance": (observe(*[{"groups/num_zero_variance": 8}] * 3), "in 24 of 24 groups .* from 0 to 1 between"),
    "turns": (observe(*[{"counters/status/max_turns": 60}] * 3), "180 of 192 rollouts .* used up their turns"),
    "parse-failures": (
        observe(
            *[{"counters/parse_failures": 40, "counters/parse_failures/bad_json": 40}] * 3,
            notes=[note(0), note(1, unread_call='<tool_call>{"name": lookup')],
        ),
        r"""120 of 192 tool calls .* could not be read \(bad_json\); one is '<tool_call>{"name": lookup'$""",
    ),
    "wrong-calls": (
        observe(*[{"counters/tool_errors/unknown_tool": 58}] * 5),
        "305 of 310 tool calls .* name no tool or do not fit",
    ),
    "unused-tools": (
        observe(*[{"rollout/num_tool_calls": 0}] * 3, notes=[note(0, has_tools=True)]),
        "none of 192 rollouts .* has called a tool",
    ),
    "timeouts": (observe(*[{"counters/status/timeout": 16}] * 2), "32 of 128 rollouts .* ran out of time"),
    "unscored": (observe(*[{"counters/dropped_rows/unscored": 40}] * 2), "80 of 128 rollouts .* have no reward"),
    "lonely-groups": (observe(*[{"groups/num_compared": 2}] * 2), "12 of 16 groups .* fewer than two"),
    "forks": (
        observe(*[{"counters/forks": 50, "counters/forks/rewritten_history": 50}] * 3),
        r"150 of 192 later turns .* begin a new row \(rewritten_history\)",
    ),
    "no-learning-rate": (observe(*[{"train/learning_rate": 0.0}] * 3), "the learning rate is 0 in the last 3 updates"),
    "small-updates": (observe(*[{"train/learning_rate": 1e-10}] * 20), "1e-10, and the reward has not risen in 20"),
    "no-gradient": (observe(*[{"train/grad_norm": 0.0}] * 2), "the gradient is 0 .* though 80 rows"),
    "constant-part": (
        observe(*record(SOLVED_IN_20, {"correct": [0.0] * 20, "one_lookup": SOLVED_IN_20}), notes=NEVER_CORRECT),
        "^correct is 0 in all 1280 rollouts so far: it teaches nothing, unless that is the best .* '27' was expected",
    ),
    "part-falls": (
        observe(*record(SUM_OF_TWO, PARTS), notes=TWO_PARTS),
        r"rises from 0.64 to 0.885, and its part one_lookup goes from 0.367 to 0.0876 \(weight 0.1\)",
    ),
    "no-rise": (
        observe(*record(FLAT_IN_20), ending="finished"),
        "has not risen by more than chance: 0.461 in the first 5 steps and 0.492 in the last 5, with an error of 0.022",
    ),
    "reward-range": (observe({"reward/max": 1e6}), "rewards are from 0 to 1e\\+06"),
    "not-finite": (
        observe({}, ending="failed", error="TrainingError: the gradient's norm is nan at update 1"),
        "ended at a number that is not finite: TrainingError: the gradient's norm is nan at update 1",
    ),
    "large-gradients": (observe({}, {}, {}, {"train/grad_norm": 1e4}), "norm is 1e\\+04, and 0.5 in the steps before"),
    "large-updates": (observe(*[{"train/k3": 0.5}] * 3), "more than 0.1 nats a token"),
    "clipping": (observe(*[{"train/clip_fraction": 0.5}] * 3), "50% of the tokens .* were clipped"),
    "mismatch": (observe({"mismatch/k3_lag_0": 0.2}), "two policies at the same weights"),
    "stale": (
        observe(*[{"mismatch/k3": 0.2, "staleness/max": 4, "staleness/mean": 3.5}] * 3),
        "3.5 versions old on average",
    ),
    "other-work": (observe(*[{"seconds/checkpoint": 30.0}] * 3), "50% of the time .* seconds/checkpoint: checkpoints"),
    "slow-environment": (observe(*[{"seconds/engine_mean": 5.0}] * 3), "75% of a rollout's time"),
    "slow-queue": (observe(*[{"seconds/queue_mean": 12.0}] * 3), "67% of the engine's time"),
    "little-memory": (observe({"memory/available_share": 0.01}), "1.0% of the .* memory .* up to 4.0 GiB"),
    "out-of-memory": (
        observe({}, ending="died", num_memory_kills=1),
        "gone without a word after 1 step, likely for want of memory",
    ),
    "died": (observe({}, {}, ending="died"), "gone without a word after 2 steps"),
    "error": (observe(ending="failed", error="RewardError: it failed"), "before its first step had ended: RewardError"),
}
"""What shows the cause of each rule, and a part of its sentence."""


@pytest.mark.parametrize("name", CAUSES)
def test_a_rule_finds_its_cause(name):
    evidence, words = CAUSES[name]
    assert re.search(words, find(evidence)[name]), find(evidence)[name]


def test_every_rule_has_a_cause_here():
    assert [rule.name for rule in RULES] == list(CAUSES)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 20, 40])
def test_nothing_is_said_of_steps_as_they_should_be(number):
    steps = [{"reward/mean": min(0.4 + 0.02 * k, 0.9)} for k in range(number)]
    for ending in ("running", "finished", "interrupted"):
        assert find(observe(*steps, ending=ending)) == {}


def test_nothing_is_said_of_recorded_runs_that_learned_at_any_step():
    parts = {"correct": SOLVED_IN_20, "one_lookup": [0.45 + 0.5 * mean for mean in SOLVED_IN_20]}
    for steps in (record(SOLVED_IN_20), record(SOLVED_IN_20, parts), record([mean / 2 for mean in SOLVED_IN_20])):
        for number in range(1, 21):
            for ending in ("running", "finished"):
                assert find(observe(*steps[:number], ending=ending, notes=TWO_PARTS)) == {}, (number, ending)


def test_a_reward_that_has_risen_at_once_and_stays_there_is_no_flat_one():
    at_once = [0.1, 0.35, *[0.6 + 0.02 * (-1) ** k for k in range(18)]]
    assert find(observe(*record(at_once), ending="finished")) == {}


def test_a_flat_reward_is_said_of_a_run_that_is_over_or_long_and_where_no_cause_is_known():
    assert find(observe(*record(FLAT_IN_20))) == {}, "it runs"
    assert set(find(observe(*record(FLAT_IN_20 * 5)))) == {"no-rise"}, "100 steps"
    assert find(observe(*record(FLAT_IN_20[:9]), ending="finished")) == {}
    cut = [{**step, "counters/status/truncated": 61} for step in record(FLAT_IN_20)]
    assert set(find(observe(*cut, ending="finished"))) == {"cut"}
    fallen = observe(*record(SOLVED_IN_20[::-1]), ending="finished")
    assert "the reward has fallen: 0.9 in the first 5 steps and 0.603 in the last 5" in find(fallen)["no-rise"]
    flat = observe(*record(FLAT_IN_20), ending="finished")
    assert find(replace(flat, gets_harder=True)) == {}, "its problems get harder"
    assert find(observe(*record([0.95 + 0.01 * (k % 3) for k in range(20)]), ending="finished")) == {}, "near its best"


@pytest.mark.parametrize(
    ("weight", "value", "is_found"),
    [(1.0, 0.0, True), (0.5, -1.0, True), (-1.0, 0.3, True), (1.0, 1.0, False), (-1.0, -0.3, False), (0.0, 0.0, False)],
)
def test_a_part_that_is_the_same_in_all_rollouts_is_found_unless_it_is_at_its_best(weight, value, is_found):
    def look(means: Sequence[float], values: Sequence[float], **others: Any) -> set[str]:
        weights = {"correct": weight, "one_lookup": 1.0}
        notes = [note(k, weights=weights, parts={"correct": each}) for k, each in enumerate(values)]
        steps = record([0.2 + 0.1 * k for k in range(len(means))], {"correct": means})
        return set(find(replace(observe(*steps, notes=notes), **others)))

    for number in (3, 8):
        found = look([value] * number, [value] * 16)
        assert found == ({"constant-part"} if is_found else set()), "the sum rises, and yet"
    assert look([value] * 2, [value] * 16) == set(), "after three steps"
    assert look([value], [value] * 8, is_preflight=True) == ({"constant-part"} if is_found else set())
    assert look([value, value, value + 0.1], [value] * 16) == set(), "it was otherwise in one step"
    assert look([value] * 3, [value - 1, value + 1] * 8) == set(), "the means are alike, the rollouts are not"


def test_a_part_falls_only_if_it_counts_for_the_reward_and_goes_against_its_weight():
    def look(weights: Mapping[str, float], number: int = 20) -> dict[str, str]:
        steps = record(SUM_OF_TWO, PARTS)[:number]
        return find(observe(*steps, notes=[note(k, weights=weights) for k in range(16)]))

    assert set(look({"correct": 1.0, "one_lookup": 0.1}, 10)) == {"part-falls"}
    assert look({"correct": 1.0, "one_lookup": 0.1}, 9) == {}
    assert look({"correct": 1.0, "one_lookup": -0.1}) == {}, "a punishment that is avoided"
    assert look({"correct": 1.0}) == {}, "a number that an environment notes"
    assert look({"correct": 1.0, "one_lookup": 0.0}) == {}
    flat = record(FLAT_IN_20, {"correct": FLAT_IN_20, "one_lookup": ONE_LOOKUP})
    assert "part-falls" not in find(observe(*flat, notes=TWO_PARTS)), "the sum does not rise"


def test_what_was_said_and_is_found_no_more_is_repeated_with_its_step():
    said = {
        "cut": "after 5 steps: 64 of 64 were cut",
        "no-rise": "after 20 steps: it was flat",
        "of-another-version": "?",
    }
    found = find(replace(observe(*record(FLAT_IN_20), ending="finished"), said=said))
    assert list(found) == ["no-rise", "cut"], "what is found now comes first, and once"
    assert found["cut"] == "earlier, after 5 steps: 64 of 64 were cut"
    assert "has not risen" in found["no-rise"]


def test_a_slow_environment_on_busy_cores_says_so():
    slow = {"seconds/engine_mean": 5.0}
    assert "load" not in find(observe(*[{**slow, "idle/machine_load": 1.0}] * 3))["slow-environment"]
    busy = find(observe(*[{**slow, "idle/machine_load": 4.0}] * 3))["slow-environment"]
    assert busy.endswith("; the machine's load is 4.0 for each core, so all of it is slower")


def test_a_rule_waits_for_its_steps_while_a_run_runs_and_not_when_it_is_over():
    for number in (1, 2):
        assert find(observe(*[rewards(0.0)] * number)) == {}
        assert set(find(observe(*[rewards(0.0)] * number, ending="finished"))) == {"equal-rewards"}
    few = {**rewards(0.0), "rollout/num_trainable": 2}
    assert find(observe(few, few, few)) == {}


def test_a_share_of_a_few_calls_or_rollouts_says_nothing():
    few = {"rollout/num_tool_calls": 3, "counters/parse_failures": 0, "counters/tool_errors/error": 3}
    assert find(observe(few, few)) == {}
    assert find(observe({"rollout/num_trajectories": 4, "counters/status/failed": 1})) == {}


RISING = [{"reward/mean": 0.1 + 0.1 * k} for k in range(6)]


@pytest.mark.parametrize(
    "name", ["cut", "turns", "parse-failures", "wrong-calls", "unused-tools", "entropy-fall", "same-completions"]
)
def test_a_rule_about_learning_is_silent_while_the_reward_rises(name):
    evidence, _ = CAUSES[name]
    symptom = {key: value for key, value in evidence.last[-1].items() if not key.startswith("reward/")}
    flat = observe(*[{"train/entropy": 1.0}] * 2, *[symptom] * 6, notes=evidence.notes)
    assert name in find(flat)
    symptom["train/num_rows"] = 40
    first = {**symptom, "train/entropy": 1.0}
    rising = observe(*[{**first, **RISING[0]}] * 2, *[{**symptom, **each} for each in RISING], notes=evidence.notes)
    assert name not in find(rising)


def test_a_reward_that_rises_by_its_noise_alone_does_not_count_as_learning():
    noise = [{"counters/status/truncated": 61, "reward/mean": 0.4 + 0.01 * k} for k in range(6)]
    assert "cut" in find(observe(*noise))


SUPERVISED = {"supervised/loss": 1.0, "supervised/learning_rate": 1e-3, "memory/available_share": 0.02}


def observe_after_warm_start(*steps: dict[str, Any]) -> Evidence:
    """The evidence of steps that follow supervised ones, which have nothing of rollouts."""
    evidence = Evidence(ending=Ending(status="running"), temperature=1.0)
    for step in [*[SUPERVISED] * 5, *[{**HEALTHY, **step} for step in steps]]:
        evidence = evidence.add_step(step)
    return replace(evidence, notes=tuple(note(k) for k in range(16)))


def test_steps_of_a_warm_start_are_not_steps_of_reward_0_from_which_the_reward_has_risen():
    assert "cut" in find(observe_after_warm_start(*[{"counters/status/truncated": 61}] * 6))


def test_the_first_rollouts_after_a_warm_start_are_as_few_as_those_of_any_run():
    solved = {"reward/mean": 0.7, "reward/std": 0.1, "reward/min": 0.5, "groups/num_zero_variance": 8}
    assert not find(observe_after_warm_start(solved))
    assert "no-variance" in find(observe_after_warm_start(*[solved] * 3))


def test_the_memory_of_a_supervised_step_is_looked_at():
    assert set(find(observe_after_warm_start())) == {"little-memory"}


def test_solved_is_said_only_of_the_highest_reward_that_was_seen():
    assert set(find(observe({}, *[rewards(1.0)] * 3))) == {"solved"}
    below = find(observe({}, *[rewards(0.5)] * 3))
    assert "solved" not in below
    assert "are 0.5, and 1 was seen before" in below["equal-rewards"]
    assert set(find(observe(*[rewards(1.0)] * 3))) == {"equal-rewards"}, "a reward that never differs"


def test_a_policy_that_solves_all_problems_with_the_same_words_has_not_collapsed():
    assert set(find(observe({}, *[rewards(1.0)] * 3, notes=SAME))) == {"solved"}
    assert set(find(observe(*[rewards(0.0)] * 3, notes=SAME))) == {"equal-rewards", "same-completions"}


def test_a_policy_that_had_rewards_and_has_none_now_has_collapsed_and_not_its_limits_tools_or_rewards():
    lost = {**rewards(0.0), "counters/status/truncated": 64, "rollout/num_tool_calls": 0}
    assert list(find(observe({}, *[lost] * 3, notes=SAME))) == ["collapse"]
    assert "collapse" not in find(replace(observe({}, *[lost] * 3), gets_harder=True))
    rare = {"reward/mean": 0.01, "reward/max": 1.0}
    found = find(observe(rare, *[rewards(0.0)] * 3))
    assert list(found) == ["equal-rewards"], "by chance: 0.99 ** 192 is 0.15"
    assert "are 0, and 1 was seen before" in found["equal-rewards"]


def test_a_policy_that_solves_some_of_few_problems_a_step_has_not_collapsed_when_three_steps_have_others():
    """Rollouts of one problem are alike: three steps of a problem each, none of them solved, are a chance of 1 in 8."""
    one = {"groups/num": 1, "rollout/num_trainable": 8, "rollout/num_trajectories": 8}
    solved, other = {**rewards(1.0), **one}, {**rewards(0.0), **one}
    assert "collapse" not in find(observe(solved, *[other] * 3))
    assert "collapse" not in find(observe(*[solved, other] * 10, *[other] * 3))
    rare = {"reward/mean": 0.1, "reward/max": 1.0, "groups/num": 8}
    assert "collapse" not in find(observe(*[rare] * 20, *[rewards(0.0)] * 3)), "by chance: 0.9 ** 24 is 0.08"


def test_of_rollouts_that_are_cut_the_cut_is_named_first_and_not_what_it_does_to_words_and_calls():
    """A call that is cut cannot be read, and a message that is cut at its beginning is empty in all rollouts."""
    cut = {"counters/status/truncated": 64, "counters/status/completed": 0, "counters/parse_failures": 64}
    silent = [note(k, given="") for k in range(16)]
    found = find(observe(*[{**rewards(0.0), **cut}] * 3, notes=silent))
    assert list(found) == ["cut", "equal-rewards"]
    assert "cut" in find(replace(observe({**rewards(0.0), **cut}, notes=silent), is_preflight=True))


def test_a_policy_that_says_the_same_to_a_problem_each_time_is_named_before_its_variance():
    found = find(observe(*[{"groups/num_zero_variance": 8, "reward/mean": 0.2}] * 3, notes=PAIRS))
    assert list(found) == ["same-completions"]
    assert "to a problem each time" in found["same-completions"]


def test_identical_rollouts_of_a_low_temperature_are_said_also_where_all_problems_are_solved():
    best = {"groups/num_zero_variance": 8, "reward/mean": 0.98}
    assert list(find(observe(*[best] * 3, notes=PAIRS, temperature=0.01))) == ["low-temperature"]
    others = [note(k, given=f"It is {k // 2}.", replies=f"{k} It is {k // 2}.") for k in range(16)]
    assert find(observe(*[best] * 3, notes=others, temperature=0.01)) == {}, "they called other tools before"
    assert find(observe(*[best] * 3, notes=PAIRS)) == {}


def test_groups_that_are_nearly_all_solved_are_no_finding():
    assert find(observe(*[{"groups/num_zero_variance": 8, "reward/mean": 0.98}] * 3)) == {}


def test_steps_that_take_seconds_are_not_called_slow():
    quick = {"seconds/wall": 0.2, "seconds/checkpoint": 0.15, "seconds/engine_mean": 0.0}
    assert find(observe(*[quick] * 3)) == {}


def test_time_in_reward_functions_is_found_though_no_rollout_has_it():
    step = {
        "seconds/rollout_max": 2.0,
        "seconds/rollout_mean": 1.5,
        "seconds/engine_mean": 1.4,
        "seconds/queue_mean": 0,
    }
    assert "in reward functions" in find(observe(*[step] * 3))["slow-environment"]


def test_a_model_that_passes_all_problems_of_an_evaluation_is_no_finding():
    step = {name: HEALTHY[name] for name in ("rollout/num_trajectories", "rollout/num_trainable")}
    for value, names in ((1.0, set()), (0.0, {"equal-rewards"})):
        numbers = {**step, "reward/mean": value, "reward/min": value, "reward/max": value}
        evidence = Evidence(is_evaluation=True).add_step(numbers, notes=[note(k) for k in range(16)])
        assert set(find(evidence)) == names


def test_the_rollouts_that_are_looked_at_are_of_many_groups_with_siblings():
    groups = [[f"{letter}{k}" for k in range(3)] for letter in "ABCD"]
    assert choose_evenly(groups, 4) == ["A0", "C0", "A1", "C1"]
    assert choose_evenly(groups[:1], 4) == ["A0", "A1", "A2"]
    assert choose_evenly([], 4) == []


def test_the_page_is_that_of_the_rules():
    spec = importlib.util.spec_from_file_location("write_troubleshooting", ROOT / "tools" / "write_troubleshooting.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text("utf-8")
    assert text == tool.make_page(text), "run python tools/write_troubleshooting.py"
    assert all(f'<a id="{rule.name}"></a>' in text for rule in RULES)


def test_the_answer_of_a_tool_that_failed_is_read_without_the_tools_name():
    failed = {
        "role": "tool",
        "tool_call_id": "call0",
        "name": "lookup",
        "content": "Error: lookup failed with ValueError",
    }
    calls = [
        {"id": f"call{k - 1}", "function": {"name": "lookup", "arguments": {"key": word}}}
        for k, word in enumerate(("bo", "da"))
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, failed]
    note = RolloutNote.of({"group": "a", "messages": messages, "turns": [{"unread_calls": ["<tool_call>{"]}]})
    assert note.tool_answer == "Error: lookup failed with ValueError"
    assert note.call == 'lookup({"key": "da"})', "the one that failed"
    assert note.unread_call == "<tool_call>{"


def test_equal_sums_are_no_finding_where_turns_spans_or_parts_were_compared():
    """As for gdpo and turn_grpo: most rollouts have advantages. With a few it is one group of many that differs."""
    row = {"advantages": [[4, 6, 0.0], [6, 9, -0.5]]}
    compared = RolloutNote.of({"group": "a", "turns": [], "rows": [{"advantages": [[0, 4, 0.0]]}, row]}).has_advantage
    assert compared
    assert not RolloutNote.of({"group": "a", "turns": [], "rows": [{"advantages": [[0, 4, 0.0]]}]}).has_advantage
    for steps, cause in (([rewards(0.0)] * 3, "equal-rewards"), ([{"groups/num_zero_variance": 8}] * 3, "no-variance")):
        assert cause not in find(observe(*steps, notes=[note(k, has_advantage=compared) for k in range(16)]))
        assert cause in find(observe(*steps, notes=[note(k, has_advantage=k < 2) for k in range(16)]))
