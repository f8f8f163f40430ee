"""I1 for any template: bridges of generated templates, which depend on anything, are exact or refused."""

import pytest

from support.effort import num_cases
from support.generated_runs import judge_seed

NUM_TEMPLATES = num_cases(40)
NUM_CONVERSATIONS = 24


@pytest.mark.parametrize("seed", range(NUM_TEMPLATES))
def test_i1_bridges_of_a_generated_template_are_exact_or_refused(seed: int) -> None:
    template, _, wrong = judge_seed(seed, NUM_CONVERSATIONS)
    assert wrong == [], template.condition


def test_generated_templates_are_bridged_and_refused() -> None:
    """Else the property above would show nothing."""
    outcomes = [judge_seed(seed, NUM_CONVERSATIONS)[1] for seed in range(40)]
    assert sum(counts["exact"] > 0 for counts in outcomes) >= 8
    assert sum(counts["history_dependent"] > 0 for counts in outcomes) >= 20
