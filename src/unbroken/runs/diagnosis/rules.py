"""The rules of a diagnosis: a function each, and one table of them at the end.

A rule gets all the evidence and says in a sentence what it has found, or None. It waits for a number of steps and of
rollouts, and one about learning is silent while the reward rises. To add one, write its function and its entry in
`RULES`; then `python tools/write_troubleshooting.py` writes its line in docs/troubleshooting.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from unbroken.reports import link_pages, shorten
from unbroken.runs.diagnosis.evidence import Evidence, Numbers, RolloutNote

DOCS = "docs/troubleshooting.md"
_MIN_ROLLOUTS = 8
"""Of so many rollouts, or calls, a share says something."""
_MAX_QUOTE = 60
_LOW_TEMPERATURE = 0.5
"""Below, an id with twice the probability of another is sampled more than four times as often."""
_MIN_WALL_S = 5.0
"""A step that is shorter is fast enough."""
_BUSY_CORES = 1.5
"""Load for each core: the run's own threads make up to 1."""
_NUM_COMPARED = 5
"""Of so many first steps, and so many newest ones, means are compared."""
_CHANCE = 1e-3
"""What is less likely than this is not called chance."""
_LONG_RUN = 100
"""Steps after which a run that goes on should have learned something."""


class Topic(StrEnum):
    """What a rule is about: a section of the page, which begins with these words."""

    LEARNING = "My run does not learn"
    NUMBERS = "NaN, and updates that are too large"
    SLOW = "My run is slow"
    MEMORY = "My run is out of memory"
    ENDED = "My run has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """When a diagnosis speaks, and what it advises."""

    name: str
    topic: Topic
    find: Callable[[Evidence], str | None]
    when: str
    """The condition, for the page."""
    advice: str
    explains: frozenset[str] = frozenset()
    """Rules that then say nothing: what they find follows from this, and their advice would lead astray."""

    @property
    def link(self) -> str:
        """Where the page speaks of it."""
        return f"{DOCS}#{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule has found."""

    name: str
    """Of the rule."""
    sentence: str
    advice: str
    link: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """All that the rules find, in the order of the table, and then what the run has said and is found no more."""
    found = _find_unexplained(evidence)
    for name, words in evidence.said.items():
        found.setdefault(name, f"earlier, {words}")
    rules = {rule.name: rule for rule in RULES}
    return [
        Finding(name=name, sentence=sentence, advice=link_pages(rules[name].advice), link=link_pages(rules[name].link))
        for name, sentence in found.items()
        if name in rules  # another version may have said what no rule of this one is
    ]


def _find_unexplained(evidence: Evidence) -> dict[str, str]:
    """What each rule says, by its name, but for those that another one explains."""
    speaking = {rule: sentence for rule in RULES if (sentence := rule.find(evidence)) is not None}
    explained = frozenset[str]().union(*(rule.explains for rule in speaking))
    return {rule.name: sentence for rule, sentence in speaking.items() if rule.name not in explained}


def _is_learning(evidence: Evidence) -> bool:
    """Whether the mean reward has risen by more than twice its standard error, from the first steps to the newest.

    Worked example, 4 steps of 64 rollouts with the means 0.1 0.1 0.3 0.3, and a standard deviation of 0.4: the mean of
    the last two is higher by 0.2, and its error is 0.4 * sqrt(2 / 128) = 0.05.
    """
    if _are_all(evidence.last[-2:], "train/num_rows", lambda value: value == 0):
        return False  # whatever the rewards of the last problems are
    known = [step for step in evidence.last if step.get("reward/mean") is not None]
    number = min(len(evidence.first), len(known) // 2)
    if number == 0:
        return False
    before, after = evidence.first[:number], known[-number:]
    rise = fmean(_get(step, "reward/mean") for step in after) - fmean(_get(step, "reward/mean") for step in before)
    errors = [
        _get(step, "reward/std") ** 2 / max(_get(step, "rollout/num_trainable"), 1.0) for step in (*before, *after)
    ]
    return rise > 2 * math.sqrt(sum(errors)) / number and rise > 0


def _get(step: Numbers, name: str) -> float:
    """A number of a step; 0 where nothing was counted."""
    return float(step.get(name) or 0.0)


def _sum(steps: Sequence[Numbers], *names: str) -> float:
    return sum(_get(step, name) for step in steps for name in names)


def _are_all(steps: Sequence[Numbers], name: str, holds: Callable[[float], bool]) -> bool:
    """Whether there are steps, and each has this number, for which it holds."""
    values = [step.get(name) for step in steps]
    return bool(values) and all(value is not None and holds(value) for value in values)


def _find_share(
    steps: Sequence[Numbers], parts: Sequence[str], of: str, *, least: float, less: Sequence[str] = ()
) -> tuple[int, int] | None:
    """How many of how many, if there are enough of them and the share is at least `least`."""
    part, whole = _sum(steps, *parts), _sum(steps, of) - _sum(steps, *less)
    return (round(part), round(whole)) if whole >= _MIN_ROLLOUTS and part >= least * whole else None


def _name_span(evidence: Evidence, steps: Sequence[Numbers]) -> str:
    if evidence.is_preflight:
        return "of the preflight"
    if evidence.is_evaluation:
        return "of the evaluation"
    return "of the last step" if len(steps) == 1 else f"of the last {len(steps)} steps"


def _quote(text: str) -> str:
    """A text in quotation marks and on one line; a long one by its end, where an answer stands."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _MAX_QUOTE else f"... {line[-_MAX_QUOTE:]}")


def _show_pair(notes: Sequence[RolloutNote]) -> str:
    """One expected and one given answer, where the rows of the data set have an answer."""
    note = next((each for each in notes if each.expected is not None and each.error is None), None)
    if note is None:
        return ""
    after = "" if note.call is None else f", after the call {_put_on_one_line(note.call, most=_MAX_QUOTE)}"
    return f"; for example, {_quote(note.expected or '')} was expected and {_quote(note.given)} given{after}"


def _show_failed_call(notes: Sequence[RolloutNote]) -> str:
    """One call of a tool that failed, and what the policy got."""
    note = next((each for each in notes if each.tool_answer is not None), None)
    if note is None:
        return ""
    call = "" if note.call is None else f"for example, of {_put_on_one_line(note.call, most=_MAX_QUOTE)} "
    return f"; {call}the policy gets {_quote(note.tool_answer or '')}"


def _show_unread_call(notes: Sequence[RolloutNote]) -> str:
    """The beginning of one call that could not be read."""
    call = next((each.unread_call for each in notes if each.unread_call is not None), None)
    return "" if call is None else f"; one is {_put_on_one_line(call, most=2 * _MAX_QUOTE)!r}"


def _find_equal(evidence: Evidence) -> tuple[Sequence[Numbers], float] | None:
    """The newest steps and their only reward, if all of their rollouts have it."""
    steps = evidence.get_recent(3)
    rewards = {step.get(name) for step in steps for name in ("reward/min", "reward/max")}
    value = next(iter(rewards), None)
    if len(rewards) != 1 or value is None or _sum(steps, "rollout/num_trainable") < _MIN_ROLLOUTS:
        return None
    if _compares_more(evidence):
        return None
    return steps, value


def _compares_more(evidence: Evidence) -> bool:
    """Whether most rollouts have advantages, so that their sums may be equal: of turns or spans, or of parts (gdpo)."""
    return sum(note.has_advantage for note in evidence.notes) > len(evidence.notes) / 2


def _is_solved(evidence: Evidence, value: float) -> bool:
    """Whether a reward that all rollouts have is the highest that was seen, and others were seen before."""
    lowest, highest = evidence.lowest, evidence.highest
    return lowest is not None and highest is not None and lowest < highest <= value


def _find_solved(evidence: Evidence) -> str | None:
    """All rewards are equal, at the highest that was seen."""
    if (found := _find_equal(evidence)) is None or not _is_solved(evidence, found[1]):
        return None
    span = _name_span(evidence, found[0])
    return (
        f"all rollouts {span} have the reward {found[1]:.4g}, the highest that was seen in this run: if that is the "
        "highest there is, the task is solved"
    )


def _find_equal_rewards(evidence: Evidence) -> str | None:
    """All rewards are equal, and nothing says that the task is solved."""
    if (found := _find_equal(evidence)) is None or _is_solved(evidence, found[1]):
        return None
    steps, value = found
    number, pair = round(_sum(steps, "rollout/num_trainable")), _show_pair(evidence.notes)
    if evidence.highest is not None and value < evidence.highest:
        span = _name_span(evidence, steps)
        return (
            f"all rewards {span} are {value:.4g}, and {evidence.highest:.4g} was seen before: there is nothing "
            f"to compare{pair}"
        )
    if evidence.is_evaluation and value > 0:  # what is left to say of a model that solves all problems?
        return None
    if evidence.is_evaluation or evidence.is_preflight:
        said = f"every reward {_name_span(evidence, steps)} is {value:.4g} ({number} of {number} rollouts)"
    else:
        said = f"every reward so far is {value:.4g} (all {number} of the newest rollouts)"
    return f"{said}: there is nothing to compare{_limit_others(evidence, number)}{pair}"


def _limit_others(evidence: Evidence, number: int) -> str:
    """What it means that all of the few rollouts of a preflight are alike: how frequent others may be.

    Worked example: if 31 % of all rollouts are others, 1 of 20 preflights has none among its 8, as 0.69 ** 8 = 0.05.
    """
    if not evidence.is_preflight:
        return ""
    share = 1 - 0.05 ** (1 / number)
    return f"; {number} are few: up to about {share:.0%} of all rollouts may get another reward (95% confidence)"


def _find_collapse(evidence: Evidence) -> str | None:
    """Rewards were seen, and then none: not by chance, and not because problems get harder."""
    if (found := _find_equal(evidence)) is None or evidence.gets_harder:
        return None
    (steps, value), best, (total, num_steps, num_groups) = found, evidence.highest, evidence.means
    num_before, groups = num_steps - len(steps), _sum(steps, "groups/num")
    if num_before < 1 or best is None or best <= value:
        return None
    mean, before = (total - value * len(steps)) / num_before, num_groups - groups
    # At least this share of earlier rollouts had a higher reward, less where few problems say so. Those of one problem
    # may all be alike, so problems are counted: by chance, none of so many has one.
    share = (mean - value) / (best - value) * before / (before + 1)
    if share <= 0 or (1 - share) ** groups > _CHANCE:
        return None
    number = _sum(steps, "rollout/num_trainable")
    says = f"; one says {_quote(evidence.notes[0].given)} now" if evidence.notes else ""
    return (
        f"the policy has collapsed: all {number:.0f} rewards {_name_span(evidence, steps)} are {value:.4g}, and the "
        f"mean of the steps before was {mean:.3g}{says}"
    )


def _find_no_variance(evidence: Evidence) -> str | None:
    """Rewards differ between problems, and never within one."""
    steps = evidence.get_recent(3)
    found = _find_share(steps, ["groups/num_zero_variance"], "groups/num_compared", least=0.95)
    if found is None or _is_at_best(evidence, steps) or _compares_more(evidence):
        return None
    others = (_find_equal, _find_same_completions, _find_low_temperature)
    if any(find(evidence) is not None for find in others):
        return None
    low, high = min(_get(step, "reward/min") for step in steps), max(_get(step, "reward/max") for step in steps)
    if low == high:
        return None
    return (
        f"in {found[0]} of {found[1]} groups {_name_span(evidence, steps)} all rewards are equal, though they are from "
        f"{low:.4g} to {high:.4g} between problems: each problem is solved always or never{_show_pair(evidence.notes)}"
    )


def _is_at_best(evidence: Evidence, steps: Sequence[Numbers]) -> bool:
    """Whether the mean reward is within a tenth of the highest reward that was seen, by the span of all rewards."""
    low, high = evidence.lowest, evidence.highest
    if low is None or high is None or low == high or not steps:
        return False
    means = [each for step in steps if (each := step.get("reward/mean")) is not None]
    return bool(means) and fmean(means) >= high - (high - low) / 10


def _find_same_completions(evidence: Evidence) -> str | None:
    """The policy says the same to different problems, or to one problem each time."""
    notes = [note for note in evidence.notes if note.error is None]
    steps = evidence.get_recent(2)
    if len(notes) < _MIN_ROLLOUTS or not steps or _is_learning(evidence) or _is_at_best(evidence, steps):
        return None
    if _are_cut(steps):  # what was not said to its end may be the same
        return None
    texts = _find_alike(notes, lambda note: note.given)
    if texts is None:
        return None
    if len(texts) == 1:
        said = f"says {_quote(notes[0].given)}" if notes[0].given else "says nothing"
        return f"the policy {said} to all problems ({_count_looked_at(notes)})"
    # In an evaluation: greedy sampling, or problems that are solved each time.
    if evidence.is_evaluation or _find_low_temperature(evidence) is not None:
        return None
    # Two rollouts of each group are looked at: they were alike where others of the step's groups had other rewards.
    if _find_share(steps, ["groups/num_zero_variance"], "groups/num_compared", least=0.95) is None:
        return None
    return f"the policy says the same to a problem each time it is asked ({_count_looked_at(notes)})"


def _find_low_temperature(evidence: Evidence) -> str | None:
    """All rollouts of a problem are the same word for word, and the temperature is low."""
    notes = [note for note in evidence.notes if note.error is None]
    temperature = evidence.temperature
    if temperature is None or temperature >= _LOW_TEMPERATURE or evidence.is_evaluation or _is_learning(evidence):
        return None
    if len(notes) < _MIN_ROLLOUTS or _find_alike(notes, lambda note: note.replies) is None:
        return None
    num_groups = len({note.group for note in notes})
    return (
        f"all rollouts of a group are identical ({_count_looked_at(notes)}, of {num_groups} groups), and the "
        f"temperature is {temperature:g}: of equal rollouts nothing can be learned"
    )


def _find_alike(notes: Sequence[RolloutNote], get: Callable[[RolloutNote], str]) -> set[str] | None:
    """What the rollouts of each problem say, if all of one say the same; None with other words, or without siblings."""
    groups = {note.group for note in notes}
    texts = {(note.group, get(note)) for note in notes}
    if len(groups) < 2 or len(texts) > len(groups) or len(notes) < 2 * len(groups):
        return None
    return {text for _, text in texts}


def _count_looked_at(notes: Sequence[RolloutNote]) -> str:
    return f"{len(notes)} of {len(notes)} rollouts that were looked at"


def _find_entropy_fall(evidence: Evidence) -> str | None:
    """The policy has become nearly deterministic, and the reward is no better."""
    steps, first = evidence.get_recent(3), [each for each in evidence.first if each.get("train/entropy") is not None]
    if not first or _is_learning(evidence) or _is_at_best(evidence, steps):
        return None
    before = fmean(_get(step, "train/entropy") for step in first)
    bound = min(0.05, 0.1 * before)
    if not _are_all(steps, "train/entropy", lambda value: value < bound):
        return None
    now = _get(steps[-1], "train/entropy")
    return (
        f"the policy's entropy fell from {before:.3g} to {now:.3g} nats, and the reward has not risen: it "
        "hardly explores"
    )


def _find_tool_errors(evidence: Evidence) -> str | None:
    """Tools raise, or do not answer in time, in nearly every call."""
    steps = evidence.get_recent(2)
    failures = ["counters/tool_errors/error", "counters/tool_errors/timeout"]
    found = _find_share(steps, failures, "rollout/num_tool_calls", least=0.9, less=["counters/parse_failures"])
    if found is None:
        return None
    example = _show_failed_call(evidence.notes)
    return f"{found[0]} of {found[1]} tool calls {_name_span(evidence, steps)} failed in the tool itself{example}"


def _find_wrong_calls(evidence: Evidence) -> str | None:
    """The policy calls tools that do not exist, or with arguments that do not fit."""
    steps = evidence.get_recent(5)
    failures = ["counters/tool_errors/unknown_tool", "counters/tool_errors/invalid_arguments"]
    found = _find_share(steps, failures, "rollout/num_tool_calls", least=0.9, less=["counters/parse_failures"])
    if found is None or _is_learning(evidence):
        return None
    example = _show_failed_call(evidence.notes)
    return (
        f"{found[0]} of {found[1]} tool calls {_name_span(evidence, steps)} name no tool or do not fit its "
        f"arguments{example}"
    )


def _find_parse_failures(evidence: Evidence) -> str | None:
    """Most calls cannot be read."""
    steps = evidence.get_recent(3)
    found = _find_share(steps, ["counters/parse_failures"], "rollout/num_tool_calls", least=0.5)
    if found is None or _is_learning(evidence) or _are_cut(steps):  # a call that is cut cannot be read
        return None
    return (
        f"{found[0]} of {found[1]} tool calls {_name_span(evidence, steps)} could not be "
        f"read{_name_reason(steps, 'parse_failures')}{_show_unread_call(evidence.notes)}"
    )


def _find_unused_tools(evidence: Evidence) -> str | None:
    """There are tools, and nobody calls them."""
    steps = evidence.get_recent(3)
    with_tools = sum(note.has_tools for note in evidence.notes)
    number = round(_sum(steps, "rollout/num_trajectories"))
    is_called = _sum(steps, "rollout/num_tool_calls") > 0
    if is_called or not with_tools or number < _MIN_ROLLOUTS or _is_learning(evidence) or _is_at_best(evidence, steps):
        return None
    return (
        f"none of {number} rollouts {_name_span(evidence, steps)} has called a tool, and they have "
        f"tools{_show_pair(evidence.notes)}"
    )


def _find_falling_part(evidence: Evidence) -> str | None:
    """The reward rises, and a part of it is lost."""
    weights = next((note.weights for note in evidence.notes if note.weights), {})
    whole = _compare_ends(evidence, "reward/mean")
    if len(weights) < 2 or whole is None or whole.rise <= 2 * whole.error:
        return None
    falls = (_describe_fall(evidence, name, weight) for name, weight in weights.items())
    fall = next(filter(None, falls), None)
    if fall is None:
        return None
    return f"the reward rises from {whole.before:.3g} to {whole.after:.3g}, and {fall}: the policy gives it up"


def _describe_fall(evidence: Evidence, name: str, weight: float) -> str | None:
    """From where to where a part of the reward fell, if by more than chance; of a punishment, more is worse."""
    part = _compare_ends(evidence, f"reward/{name}_mean")
    if part is None or weight == 0:
        return None
    fall = -part.rise if weight > 0 else part.rise
    if fall <= max(3 * part.error, 0.1 * max(abs(part.before), abs(part.after))):
        return None
    return f"its part {name} goes from {part.before:.3g} to {part.after:.3g} (weight {weight:g})"


def _find_constant_part(evidence: Evidence) -> str | None:
    """A part of the reward is the same in all rollouts, and at its worst as far as is known, while their sum varies.

    It is not silent while the sum rises, which hides it: what rises is another part. An evaluation teaches nothing,
    and a penalty that a trained model never gets is as it should be.
    """
    if evidence.is_evaluation:
        return None
    weights = next((note.weights for note in evidence.notes if note.weights), {})
    if len(weights) < 2 or evidence.lowest == evidence.highest or not evidence.get_recent(3):
        return None
    sentences = (_describe_constant(evidence, name, weight) for name, weight in weights.items())
    return next(filter(None, sentences), None)


def _describe_constant(evidence: Evidence, name: str, weight: float) -> str | None:
    """That a part of the reward is the same in all rollouts; None if it is not, or is more than nothing."""
    value, number = _find_constant(evidence, name), round(_sum(evidence.last, "rollout/num_trainable"))
    if value is None or weight == 0 or value * weight > 0 or number < _MIN_ROLLOUTS:
        return None
    is_all = evidence.num_steps == len(evidence.last) and not evidence.is_preflight
    span = "so far" if is_all else _name_span(evidence, evidence.last)
    best = ", unless that is the best it can be" if value == 0 else ""
    shown = f"{value + 0.0:g}"  # -0 is 0
    rest = f"{_limit_others(evidence, number)}{_show_pair(evidence.notes)}"
    return f"{name} is {shown} in all {number} rollouts {span}: it teaches nothing{best}{rest}"


def _find_constant(evidence: Evidence, name: str) -> float | None:
    """The only value that a part had: that of the rollouts that are looked at, if the means of all steps are the same.

    Only means are kept of a step: values that differ would have to have this very mean, each time.
    """
    values = {note.parts[name] for note in evidence.notes if name in note.parts}
    means = _list_values((*evidence.first, *evidence.last), f"reward/{name}_mean")
    if len(values) != 1 or not means:
        return None
    (value,) = values
    return value if all(math.isclose(each, value, abs_tol=1e-9) for each in means) else None


def _find_no_rise(evidence: Evidence) -> str | None:
    """The reward of a whole run is as it was, and no other rule says why."""
    found = _compare_ends(evidence, "reward/mean") if _should_rise(evidence) else None
    if found is None or found.has_risen or _is_at_best(evidence, evidence.last[-_NUM_COMPARED:]):
        return None
    if _has_other_cause(evidence):
        return None
    moved = "fallen" if found.rise < -2 * found.error else "not risen by more than chance"
    return (
        f"the reward has {moved}: {found.before:.3g} in the first {_NUM_COMPARED} steps and {found.after:.3g} in the "
        f"last {_NUM_COMPARED}, with an error of {found.error:.2g}"
    )


def _has_other_cause(evidence: Evidence) -> bool:
    """Whether another rule says why nothing is learned."""
    others = (rule for rule in RULES if rule.topic is Topic.LEARNING and rule.find is not _find_no_rise)
    return any(rule.find(evidence) is not None for rule in others)


def _should_rise(evidence: Evidence) -> bool:
    """Whether no more steps come, or many were made; and the reward, of problems like the first, is what is trained."""
    is_long = evidence.ending.is_over or evidence.num_steps >= _LONG_RUN
    return is_long and not evidence.gets_harder and "teacher/kl" not in evidence.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """A number in the first steps of a run and in the newest ones."""

    before: float
    after: float
    error: float
    """The standard error of their difference."""
    best_rise: float
    """From the first step, the first two and so on, the largest rise, in its standard errors."""

    @property
    def rise(self) -> float:
        return self.after - self.before

    @property
    def has_risen(self) -> bool:
        """Also if it rose in the first steps alone: then it is above the first one. The best of five is 2 by chance."""
        return self.rise > 2 * self.error or self.best_rise > 3


def _compare_ends(evidence: Evidence, name: str) -> _Ends | None:
    """Compare a number's first steps with its newest; None with too few steps.

    A step's noise is how far it is from the step before: so a rise is no noise, and rollouts of one problem may have
    similar rewards. Worked example, ten steps 2 2 3 2 2 4 5 4 4 4: from 2.2 to 4.2. The squares of the changes, 0 1 1
    0 4 1 1 0 0, are 8/9 on average, which is twice a step's variance: the error of the difference is
    sqrt(4/9 * (1/5 + 1/5)) = 0.42.
    """
    before, after = _list_values(evidence.first, name), _list_values(evidence.last, name)
    if len(before) < _NUM_COMPARED or len(after) < 2 * _NUM_COMPARED:
        return None
    variance = fmean((right - left) ** 2 for left, right in itertools.pairwise(after)) / 2
    newest = fmean(after[-_NUM_COMPARED:])
    rises = [newest - fmean(before[:number]) for number in range(1, _NUM_COMPARED + 1)]
    errors = [math.sqrt(variance * (1 / number + 1 / _NUM_COMPARED)) for number in range(1, _NUM_COMPARED + 1)]
    best = max(rise / max(error, 1e-12) for rise, error in zip(rises, errors, strict=True))  # 0 if nothing varies
    return _Ends(before=fmean(before), after=newest, error=errors[-1], best_rise=best)


def _list_values(steps: Sequence[Numbers], name: str) -> list[float]:
    return [float(value) for step in steps if (value := step.get(name)) is not None]


def _name_reason(steps: Sequence[Numbers], event: str) -> str:
    """The most frequent reason of an event, in brackets."""
    prefix = f"counters/{event}/"
    reasons = {name for step in steps for name in step if name.startswith(prefix)}
    most = max(sorted(reasons), key=lambda name: _sum(steps, name), default=None)
    return "" if most is None else f" ({most.removeprefix(prefix)})"


def _find_cut(evidence: Evidence) -> str | None:
    """Most rollouts are cut by a limit of tokens."""
    steps = evidence.get_recent(3)
    found = _are_cut(steps)
    if found is None or _is_learning(evidence) or _is_at_best(evidence, steps):
        return None
    longest = max((_get(step, "rollout/completion_tokens_max") for step in steps), default=0.0)
    length = f"; the longest has {longest:.0f} tokens" if longest else ""
    return f"{found[0]} of {found[1]} rollouts {_name_span(evidence, steps)} were cut at a limit of tokens{length}"


def _are_cut(steps: Sequence[Numbers]) -> tuple[int, int] | None:
    """How many rollouts of how many were cut by a limit of tokens, if nearly all were."""
    statuses = ["counters/status/truncated", "counters/status/max_tokens"]
    return _find_share(steps, statuses, "rollout/num_trajectories", least=0.9)


def _find_many_turns(evidence: Evidence) -> str | None:
    """Most rollouts use up their turns."""
    steps = evidence.get_recent(3)
    found = _find_share(steps, ["counters/status/max_turns"], "rollout/num_trajectories", least=0.8)
    if found is None or _is_learning(evidence) or _is_at_best(evidence, steps):
        return None
    return f"{found[0]} of {found[1]} rollouts {_name_span(evidence, steps)} used up their turns"


def _find_failures(evidence: Evidence) -> str | None:
    """Rollouts fail by an exception of an environment, a reward or an engine."""
    steps = evidence.get_recent(1)
    found = _find_share(steps, ["counters/status/failed"], "rollout/num_trajectories", least=0.05)
    if found is None:
        return None
    error = next((note.error for note in evidence.notes if note.error is not None), None)
    example = "" if error is None else f", one with {' '.join(error.split())}"
    return f"{found[0]} of {found[1]} rollouts {_name_span(evidence, steps)} failed{example}"


def _find_timeouts(evidence: Evidence) -> str | None:
    """Rollouts run out of time."""
    steps = evidence.get_recent(2)
    found = _find_share(steps, ["counters/status/timeout"], "rollout/num_trajectories", least=0.2)
    if found is None:
        return None
    return f"{found[0]} of {found[1]} rollouts {_name_span(evidence, steps)} ran out of time"


def _find_unscored(evidence: Evidence) -> str | None:
    """No reward function has an opinion on most rollouts."""
    steps = evidence.get_recent(2)
    found = _find_share(steps, ["counters/dropped_rows/unscored"], "rollout/num_trajectories", least=0.5)
    if found is None:
        return None
    span = _name_span(evidence, steps)
    return f"{found[0]} of {found[1]} rollouts {span} have no reward: each function returned None"


def _find_lonely_groups(evidence: Evidence) -> str | None:
    """Groups are left with one member or none, so nothing is compared; a teacher needs no comparison."""
    steps = [step for step in evidence.get_recent(2) if "teacher/kl" not in step]
    groups, compared = _sum(steps, "groups/num"), _sum(steps, "groups/num_compared")
    if groups < 2 or compared >= groups / 2:
        return None
    return (
        f"{groups - compared:.0f} of {groups:.0f} groups {_name_span(evidence, steps)} have fewer than two "
        "rollouts to compare"
    )


def _find_reward_range(evidence: Evidence) -> str | None:
    """Rewards are huge, or differ by less than rounding may."""
    steps = evidence.get_recent(1)
    if not steps or steps[-1].get("reward/max") is None:
        return None
    low, high = _get(steps[-1], "reward/min"), _get(steps[-1], "reward/max")
    size = max(abs(low), abs(high))
    if size <= 1000 and not 0 < high - low < 1e-4 * size:
        return None
    return f"rewards are from {low:.6g} to {high:.6g} in the last step"


def _find_forks(evidence: Evidence) -> str | None:
    """Most turns do not continue the one before."""
    steps = evidence.get_recent(3)
    turns = sum(_get(step, "rollout/turns_mean") * _get(step, "rollout/num_trajectories") for step in steps)
    continued = turns - _sum(steps, "rollout/num_trajectories")
    forks = _sum(steps, "counters/forks")
    if continued < _MIN_ROLLOUTS or forks < 0.5 * continued:
        return None
    return (
        f"{forks:.0f} of {continued:.0f} later turns {_name_span(evidence, steps)} begin a new "
        f"row{_name_reason(steps, 'forks')}"
    )


def _find_no_learning_rate(evidence: Evidence) -> str | None:
    """Updates are made with a learning rate of 0."""
    steps = evidence.get_recent(3)
    if not _are_all(steps, "train/learning_rate", lambda value: value == 0):
        return None
    return f"the learning rate is 0 in the last {len(steps)} updates: the weights do not change"


def _find_no_gradient(evidence: Evidence) -> str | None:
    """There are rows to train on, and no gradient."""
    steps = evidence.get_recent(2)
    if not _are_all(steps, "train/grad_norm", lambda value: value < 1e-12):
        return None
    return (
        f"the gradient is 0 {_name_span(evidence, steps)}, though {_sum(steps, 'train/num_rows'):.0f} rows were trained"
    )


def _find_small_updates(evidence: Evidence) -> str | None:
    """The policy does not move, after many updates."""
    steps = evidence.get_recent(20)
    if (
        len(steps) < 20
        or _is_learning(evidence)
        or not _are_all(steps, "train/learning_rate", lambda value: 0 < value < 1e-8)
    ):
        return None
    return (
        f"the learning rate is {_get(steps[-1], 'train/learning_rate'):.2g}, and the reward has not risen in "
        f"{evidence.num_steps} steps"
    )


def _find_clipping(evidence: Evidence) -> str | None:
    """Much of each update is clipped away."""
    steps = evidence.get_recent(3)
    if not _are_all(steps, "train/clip_fraction", lambda value: value > 0.3):
        return None
    return (
        f"{fmean(_get(step, 'train/clip_fraction') for step in steps):.0%} of the tokens "
        f"{_name_span(evidence, steps)} were clipped"
    )


def _find_large_updates(evidence: Evidence) -> str | None:
    """The policy moves far within a step."""
    steps = evidence.get_recent(3)
    if not _are_all(steps, "train/k3", lambda value: value > 0.1):
        return None
    return (
        f"each of the last {len(steps)} steps moved the policy by more than 0.1 nats a token (train/k3 "
        f"{_get(steps[-1], 'train/k3'):.3g})"
    )


def _find_large_gradients(evidence: Evidence) -> str | None:
    """Gradients have become far larger than they were."""
    norms = [each for step in evidence.last if (each := step.get("train/grad_norm")) is not None]
    if len(norms) < 4 or norms[-1] < 100 or norms[-1] < 100 * median(norms[:-1]):
        return None
    return f"the gradient's norm is {norms[-1]:.3g}, and {median(norms[:-1]):.3g} in the steps before"


def _find_mismatch(evidence: Evidence) -> str | None:
    """The sampler has another policy than the trainer, at the same weights."""
    steps = evidence.get_recent(1)
    if not _are_all(steps, "mismatch/k3_lag_0", lambda value: value > 0.01):
        return None
    k3 = _get(steps[-1], "mismatch/k3_lag_0")
    return f"sampler and trainer have two policies at the same weights (k3 {k3:.3g}, rounding is below 0.001)"


def _find_stale(evidence: Evidence) -> str | None:
    """Rollouts are of weights that are too old."""
    steps = evidence.get_recent(3)
    is_far = _are_all(steps, "mismatch/k3", lambda value: value > 0.05)
    is_corrected = _are_all(steps, "train/corrected_fraction", lambda value: value > 0.3)
    if not (is_far or is_corrected) or not _are_all(steps, "staleness/max", lambda value: value >= 1):
        return None
    return (
        f"rollouts are {_get(steps[-1], 'staleness/mean'):.2g} versions old on average, and their policy is "
        "another one: "
        f"k3 {_get(steps[-1], 'mismatch/k3'):.3g}, {_get(steps[-1], 'train/corrected_fraction'):.0%} of the "
        "tokens corrected"
    )


def _find_not_finite(evidence: Evidence) -> str | None:
    """The run ended with a number that is not finite."""
    error = evidence.ending.error
    words = ("norm is nan", "norm is inf", " is nan", " is inf", "not finite", "non-finite", "nan or inf")
    if not any(word in error.lower() for word in words):
        return None
    return f"the run ended at a number that is not finite: {_put_on_one_line(error)}"


_PARTS = {
    "log": "writing metrics and trackers",
    "after_step": "evaluations, and models that are written (--evaluation.every, --export.every)",
    "units": "making rows of the rollouts",
    "sleep": "the engine's falling asleep",
    "records": "writing rollouts, and scoring them (--rollout-log.scored-groups 0)",
    "score": "scoring rollouts that are not trained on",
    "checkpoint": "checkpoints (--checkpoints.every)",
    "publish": "publishing the weights to the engines",
    "metrics": "computing metrics",
    "outages": "waiting for engines that were away",
    "other": "waiting for the other processes",
}
"""Parts of `seconds/wall` that neither sample nor train, and what they are."""


def _get_slow_steps(evidence: Evidence) -> Sequence[Numbers]:
    """The newest steps of a run that takes a while for each."""
    steps = evidence.get_recent(3)
    return steps if _are_all(steps, "seconds/wall", lambda value: value >= _MIN_WALL_S) else ()


def _find_other_work(evidence: Evidence) -> str | None:
    """Much of the time is neither sampling nor training."""
    steps = _get_slow_steps(evidence)
    wall_s = _sum(steps, "seconds/wall")
    part = max(_PARTS, key=lambda name: _sum(steps, f"seconds/{name}"))
    if not steps or (taken_s := _sum(steps, f"seconds/{part}")) < 0.4 * wall_s:
        return None
    return f"{taken_s / wall_s:.0%} of the time {_name_span(evidence, steps)} is seconds/{part}: {_PARTS[part]}"


def _find_slow_environment(evidence: Evidence) -> str | None:
    """Sampling waits for tools, environments and rewards more than for the engine."""
    steps = _get_slow_steps(evidence)
    collect_s = _sum(steps, "seconds/collect")
    if not steps or collect_s < 0.5 * _sum(steps, "seconds/wall"):
        return None
    rollout_s, span, busy = _sum(steps, "seconds/rollout_mean"), _name_span(evidence, steps), _show_load(steps)
    outside_s = rollout_s - _sum(steps, "seconds/engine_mean")
    if rollout_s and outside_s >= 0.5 * rollout_s:
        return (
            f"{outside_s / rollout_s:.0%} of a rollout's time {span} is spent in tools, environments and agents{busy}"
        )
    after_s = collect_s - _sum(steps, "seconds/rollout_max")
    if after_s < 0.5 * collect_s:
        return None
    # A group's reward functions are called when its rollouts have ended, and are in none of their times.
    return (
        f"{after_s / collect_s:.0%} of the sampling {span} is no rollout's time: it is spent in reward functions, or "
        f"waiting for groups that may start{busy}"
    )


def _show_load(steps: Sequence[Numbers]) -> str:
    """That the machine's cores have more work than this run's, where it is so."""
    load = _sum(steps, "idle/machine_load") / len(steps)
    return f"; the machine's load is {load:.1f} for each core, so all of it is slower" if load > _BUSY_CORES else ""


def _find_slow_queue(evidence: Evidence) -> str | None:
    """Requests wait in the engine's queue."""
    steps = _get_slow_steps(evidence)
    queue_s, engine_s = _sum(steps, "seconds/queue_mean"), _sum(steps, "seconds/engine_mean")
    if not steps or not engine_s or queue_s < 0.5 * engine_s:
        return None
    return f"{queue_s / engine_s:.0%} of the engine's time {_name_span(evidence, steps)} requests waited in its queue"


def _find_little_memory(evidence: Evidence) -> str | None:
    """The machine, or the container, has hardly any memory left."""
    step = evidence.newest
    if not _are_all([step], "memory/available_share", lambda value: value < 0.03) or evidence.ending.status == "died":
        return None
    return (
        f"{_get(step, 'memory/available_share'):.1%} of the machine's or container's memory is "
        f"available{_describe_peak(step)}"
    )


def _describe_peak(step: Numbers) -> str:
    peak = _get(step, "memory/peak_bytes")
    return f"; the first process of the run had up to {peak / 2**30:.1f} GiB" if peak else ""


_MEMORY_ERRORS = ("out of memory", "outofmemory", "memoryerror", "needs more memory", "cannot allocate memory")


def _is_memory_error(evidence: Evidence) -> bool:
    return any(words in evidence.ending.error.lower() for words in _MEMORY_ERRORS)


def _find_out_of_memory(evidence: Evidence) -> str | None:
    """The run ended for want of memory."""
    ending, newest = evidence.ending, evidence.newest
    if _is_memory_error(evidence):
        return f"the run ran out of memory: {_put_on_one_line(ending.error)}"
    if ending.status != "died" or not (
        ending.num_memory_kills or _are_all([newest], "memory/available_share", lambda x: x < 0.1)
    ):
        return None
    reason = (
        f"the kernel has ended {ending.num_memory_kills} processes of this machine for want of memory since it began"
        if ending.num_memory_kills
        else f"{_get(newest, 'memory/available_share'):.1%} of the memory was available in its last step"
    )
    return (
        f"the run's process is gone without a word {_say_when(evidence)}, likely for want of memory: "
        f"{reason}{_describe_peak(newest)}"
    )


def _find_death(evidence: Evidence) -> str | None:
    """The process is gone, and left no word."""
    if evidence.ending.status != "died" or _find_out_of_memory(evidence) is not None:
        return None
    return (
        f"the run's process is gone without a word {_say_when(evidence)}: it was killed (kill -9, a scheduler, "
        "a crash of the machine or of a library)"
    )


def _find_error(evidence: Evidence) -> str | None:
    """The run ended with an error."""
    if evidence.ending.status != "failed" or _is_memory_error(evidence) or _find_not_finite(evidence) is not None:
        return None
    return f"the run ended with an error {_say_when(evidence)}: {_put_on_one_line(evidence.ending.error)}"


def _say_when(evidence: Evidence) -> str:
    if evidence.num_steps == 0:
        return "before its first step had ended"
    return f"after {evidence.num_steps} step{'' if evidence.num_steps == 1 else 's'}"


def _put_on_one_line(error: str, *, most: int = 600) -> str:
    return shorten(" ".join(error.split()), most)


RULES: tuple[_Rule, ...] = (
    _Rule(
        name="failures",
        topic=Topic.LEARNING,
        find=_find_failures,
        when="at least 5 % of a step's rollouts failed by an exception",
        advice="read the exception: it is in your environment, tool, reward or agent, or in the engine. A rollout that "
        "fails is not trained on",
    ),
    _Rule(
        name="tool-errors",
        topic=Topic.LEARNING,
        find=_find_tool_errors,
        when="at least 90 % of the tool calls of two steps raise, or take too long",
        advice="call the tool yourself with the arguments of a rollout; the policy learns to live without a tool that "
        "never answers",
    ),
    _Rule(
        name="collapse",
        topic=Topic.LEARNING,
        find=_find_collapse,
        when="all rewards of three steps are one number, and the mean of the earlier ones was so much higher that "
        "this is no chance",
        advice="an update was too large: take a lower --trainer.optimizer.learning-rate and another --output; "
        "train/grad_norm and train/k3 of the steps show which one it was. `unbroken export RUN/checkpoints/STEP MODEL` "
        "writes the policy of a step before it, while its checkpoint is kept",
        explains=frozenset(
            {"cut", "equal-rewards", "same-completions", "parse-failures", "wrong-calls", "unused-tools"}
        ),
    ),
    _Rule(
        name="cut",
        topic=Topic.LEARNING,
        find=_find_cut,
        when="at least 90 % of the rollouts of three steps are cut by a limit of tokens, and the reward does not rise",
        advice="raise --rollouts.sampling.max-tokens, close reasoning that is too long "
        "(--rollouts.limits.thinking-tokens), ask for shorter answers in the prompt, or see that the "
        "model ends its "
        "turns (`unbroken audit MODEL`)",
    ),
    _Rule(
        name="low-temperature",
        topic=Topic.LEARNING,
        find=_find_low_temperature,
        when="all rollouts of each problem that is looked at are identical, and the temperature is below 0.5",
        advice="raise --rollouts.sampling.temperature: 1 is usual, and gives a group rollouts that differ",
    ),
    _Rule(
        name="equal-rewards",
        topic=Topic.LEARNING,
        find=_find_equal_rewards,
        when="all rewards of three steps are one number: others were never seen, or higher ones were",
        advice="try the reward function on an answer that you wrote yourself, a right and a wrong one: it may compare "
        "other texts than you think. If it is right, take problems that the policy solves sometimes, or more "
        "rollouts of each "
        "(--rollouts.group-size)",
    ),
    _Rule(
        name="solved",
        topic=Topic.LEARNING,
        find=_find_solved,
        when="all rewards of three steps are the highest number that was seen, and lower ones were seen before",
        advice="if it is: `unbroken export RUN MODEL` writes the model; if not, take harder problems",
    ),
    _Rule(
        name="same-completions",
        topic=Topic.LEARNING,
        find=_find_same_completions,
        when="all rollouts that are looked at, of several problems, end with the same words, or all of "
        "each problem do, and the reward is not near its best",
        advice="the policy has collapsed, or never read the problem: look at the prompt of a rollout; then lower "
        "the learning "
        "rate, or reward what differs between problems. In a run, `unbroken export RUN/checkpoints/STEP` has a policy "
        "from before",
    ),
    _Rule(
        name="entropy-fall",
        topic=Topic.LEARNING,
        find=_find_entropy_fall,
        when="the entropy is below 0.05 nats and a tenth of what it was, and the reward has not risen",
        advice="lower the learning rate, set --trainer.entropy-control.target, or a higher temperature",
    ),
    _Rule(
        name="no-variance",
        topic=Topic.LEARNING,
        find=_find_no_variance,
        when="in 95 % of the groups of three steps all rewards are equal, though problems differ",
        advice="take problems that the policy solves sometimes, more rollouts of each (--rollouts.group-size), "
        "or replace such "
        "groups (--loop.max-replacements)",
    ),
    _Rule(
        name="turns",
        topic=Topic.LEARNING,
        find=_find_many_turns,
        when="at least 80 % of the rollouts of three steps use up their turns, and the reward does not rise",
        advice="raise --rollouts.limits.max-turns, or have the environment end the episode",
    ),
    _Rule(
        name="parse-failures",
        topic=Topic.LEARNING,
        find=_find_parse_failures,
        when="at least half of the tool calls of three steps cannot be read, and the reward does not rise",
        advice="look at a call as it was sampled: the model may call in another format than its template "
        "(`unbroken audit MODEL`), or be too small for it",
    ),
    _Rule(
        name="wrong-calls",
        topic=Topic.LEARNING,
        find=_find_wrong_calls,
        when="at least 90 % of the tool calls of five steps name no tool or have wrong arguments, and the reward "
        "does not rise",
        advice="give tools simple names and few arguments, describe them with an example, and see in a rollout "
        "that the prompt "
        "shows them",
    ),
    _Rule(
        name="unused-tools",
        topic=Topic.LEARNING,
        find=_find_unused_tools,
        when="there are tools and no call in three steps, and the reward does not rise",
        advice="see in a rollout that the prompt shows the tools (`unbroken audit MODEL` says whether the "
        "template does), and say "
        "in the prompt when to call them",
    ),
    _Rule(
        name="timeouts",
        topic=Topic.LEARNING,
        find=_find_timeouts,
        when="at least 20 % of the rollouts of two steps run out of time",
        advice="raise --rollouts.limits.timeout-s, or make tools and environment faster: their times are in each "
        "rollout",
    ),
    _Rule(
        name="unscored",
        topic=Topic.LEARNING,
        find=_find_unscored,
        when="at least half of the rollouts of two steps have no reward",
        advice="return a number where a reward function has an opinion: None is for rollouts that it does not judge",
    ),
    _Rule(
        name="lonely-groups",
        topic=Topic.LEARNING,
        find=_find_lonely_groups,
        when="more than half of the groups of two steps have fewer than two rollouts left",
        advice="look for rollouts that failed, were aborted or have no reward, or raise --rollouts.group-size",
    ),
    _Rule(
        name="forks",
        topic=Topic.LEARNING,
        find=_find_forks,
        when="at least half of the later turns of three steps do not continue the ids so far",
        advice="the template or the agent rewrites what was said: each such turn is a row of its own, which "
        "costs time and "
        "credit (docs/bridges.md, `unbroken audit MODEL`)",
    ),
    _Rule(
        name="no-learning-rate",
        topic=Topic.LEARNING,
        find=_find_no_learning_rate,
        when="the learning rate is 0 in three steps",
        advice="set --trainer.optimizer.learning-rate, or a schedule that does not end before the run "
        "(--trainer.optimizer.decay-updates)",
    ),
    _Rule(
        name="small-updates",
        topic=Topic.LEARNING,
        find=_find_small_updates,
        when="the learning rate is below 1e-8 in twenty steps, and the reward does not rise",
        advice="raise --trainer.optimizer.learning-rate: 1e-6 is usual for all weights, 1e-5 to 1e-4 with LoRA",
    ),
    _Rule(
        name="no-gradient",
        topic=Topic.LEARNING,
        find=_find_no_gradient,
        when="the gradient is 0 in two steps that have rows",
        advice="look at your loss or advantages (--loss, --advantages): they return nothing that depends on the policy",
    ),
    _Rule(
        name="constant-part",
        topic=Topic.LEARNING,
        find=_find_constant_part,
        when="a reward function with a weight gives 0, or less, to all rollouts of the preflight or of three steps and "
        "more, while the sum of several functions varies; of a negative weight, 0 or more",
        advice="try the function on an answer that you wrote yourself. If it is right, the model never does what it "
        "rewards, and training amplifies only what some rollouts do: reward a part of the way, take easier problems, "
        "a warm start (docs/supervised.md) or another model",
    ),
    _Rule(
        name="part-falls",
        topic=Topic.LEARNING,
        find=_find_falling_part,
        when="the reward rises from the first five steps to the newest, and the part of one function falls by more "
        "than three times its error and a tenth of itself",
        advice="read rollouts, and see whether that is what you want: raise the function's weight (`weight` in "
        "[[rewards]]), or multiply it with the other in one function, so that one cannot be had without the other",
    ),
    _Rule(
        name="no-rise",
        topic=Topic.LEARNING,
        find=_find_no_rise,
        when="the mean reward of the last five steps is not above that of the first by twice its error, in a run of "
        "ten steps and more that is over, or after 100 steps, without a curriculum or several policies; and no other "
        "line of this table speaks",
        advice="see in rollouts what a better one would do, and whether the policy ever does it: if not, take easier "
        "problems or reward a part of the way; if it does, take a higher --trainer.optimizer.learning-rate, more "
        "--loop.num-steps, or more rollouts a step (--rollouts.group-size)",
    ),
    _Rule(
        name="reward-range",
        topic=Topic.NUMBERS,
        find=_find_reward_range,
        when="a reward is beyond 1,000, or all differ by less than a ten-thousandth of their size",
        advice="scale rewards to about 0 to 1: one that is huge drowns all others, and float32 rounds small "
        "differences away",
    ),
    _Rule(
        name="not-finite",
        topic=Topic.NUMBERS,
        find=_find_not_finite,
        when="a run ended because a gradient, a loss or a metric is NaN or infinite",
        advice="the update was not made, so the last checkpoint is sound: lower the learning rate, scale rewards "
        "down, and see "
        "mismatch/max_abs of the steps before",
    ),
    _Rule(
        name="large-gradients",
        topic=Topic.NUMBERS,
        find=_find_large_gradients,
        when="the gradient's norm is above 100 and 100 times what it was",
        advice="look at the rewards and rollouts of this step, and lower the learning rate or "
        "--trainer.optimizer.max-grad-norm",
    ),
    _Rule(
        name="large-updates",
        topic=Topic.NUMBERS,
        find=_find_large_updates,
        when="train/k3 is above 0.1 in three steps",
        advice="lower the learning rate or --trainer.num-iterations",
    ),
    _Rule(
        name="clipping",
        topic=Topic.NUMBERS,
        find=_find_clipping,
        when="more than 30 % of the tokens of three steps are clipped",
        advice="lower the learning rate or --trainer.num-iterations",
    ),
    _Rule(
        name="mismatch",
        topic=Topic.NUMBERS,
        find=_find_mismatch,
        when="mismatch/k3_lag_0 is above 0.01",
        advice="see docs/engines.md#one-policy, and `unbroken numerics MODEL` for what this machine does",
    ),
    _Rule(
        name="stale",
        topic=Topic.NUMBERS,
        find=_find_stale,
        when="rollouts of older weights have mismatch/k3 above 0.05, or 30 % of their tokens corrected, in three steps",
        advice="lower --loop.max-staleness or the learning rate (docs/sampling-ahead.md)",
    ),
    _Rule(
        name="other-work",
        topic=Topic.SLOW,
        find=_find_other_work,
        when="40 % of three steps of five seconds and more is one part that neither samples nor trains",
        advice="do that less often; the run's timeline shows when (docs/runs.md#timeline)",
    ),
    _Rule(
        name="slow-environment",
        topic=Topic.SLOW,
        find=_find_slow_environment,
        when="sampling is most of three steps of five seconds and more, and half of it is outside of the engine",
        advice="if other programs have the cores (`uptime`: a load above their number), stop them, or set "
        "OMP_NUM_THREADS=1; make tools and rewards asynchronous or faster, sample while training "
        "(--loop.max-staleness 1), "
        "or in processes of "
        "their own (--rollouts.samplers)",
    ),
    _Rule(
        name="slow-queue",
        topic=Topic.SLOW,
        find=_find_slow_queue,
        when="half of the engine's time is its queue",
        advice="give the engine more memory or more GPUs, or fewer rollouts at once (--rollouts.problems-per-step)",
    ),
    _Rule(
        name="little-memory",
        topic=Topic.MEMORY,
        find=_find_little_memory,
        when="less than 3 % of the memory of the machine or container is available",
        advice="the kernel may end the run without a word: take fewer rollouts at once, fewer samplers, or a "
        "machine with more "
        "memory",
    ),
    _Rule(
        name="out-of-memory",
        topic=Topic.MEMORY,
        find=_find_out_of_memory,
        when="a run ended with an error of memory, or its process is gone and the kernel has ended processes for "
        "memory",
        advice="on a GPU set trainer.tokens_per_micro_batch or trainer.gradient_checkpointing, use LoRA "
        "(--lora.rank 16), or bound the rows "
        "(--rollouts.sampling.max-tokens); on the machine take a smaller model or fewer processes. The same "
        "command continues "
        "from the last checkpoint",
    ),
    _Rule(
        name="died",
        topic=Topic.ENDED,
        find=_find_death,
        when="its process is gone and has not said how it ended",
        advice="look into the log of your scheduler and `dmesg`; the same command continues from the last checkpoint",
    ),
    _Rule(
        name="error",
        topic=Topic.ENDED,
        find=_find_error,
        when="it ended with any other error",
        advice="mend what it names; `traceback.txt` in its folder, if it is there, has the lines of your own code. The "
        "same command continues from the last checkpoint, or begins anew without one",
    ),
)
