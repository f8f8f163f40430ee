"""I1 for any template: bridges of generated templates, which depend on anything, are exact or refused."""

import functools
from collections import Counter

import pytest

from support.effort import num_cases
from support.generated_runs import judge_seed
from support.template_generator import GeneratedTemplate

NUM_TEMPLATES = num_cases(40)
NUM_CONVERSATIONS = 24


@functools.cache
def judge(seed: int) -> tuple[GeneratedTemplate, Counter[str], list[str]]:
    """What became of the bridges of one template, for both tests."""
    return judge_seed(seed, NUM_CONVERSATIONS)


@pytest.mark.parametrize("seed", range(NUM_TEMPLATES))
def test_i1_bridges_of_a_generated_template_are_exact_or_refused(seed: int) -> None:
    template, _, wrong = judge(seed)
    assert wrong == [], template.condition


def test_generated_templates_are_bridged_and_refused() -> None:
    """Else the property above would show nothing."""
    outcomes = [judge(seed)[1] for seed in range(40)]
    assert sum(counts["exact"] > 0 for counts in outcomes) >= 8
    assert sum(counts["history_dependent"] > 0 for counts in outcomes) >= 20
