from hypothesis import given
from hypothesis import strategies as st

from unbroken.counters import Counters, Event

EVENTS = st.lists(st.tuples(st.sampled_from(Event), st.sampled_from(["a", "b"])))


def count(events):
    counters = Counters()
    for event, reason in events:
        counters.count(event, reason)
    return counters


@given(EVENTS, EVENTS)
def test_i8_merging_loses_and_adds_nothing(first, second):
    merged = count(first)
    merged.merge(count(second))
    assert merged.as_dict() == count(first + second).as_dict()


@given(EVENTS)
def test_i8_a_total_is_the_sum_over_reasons(events):
    counters = count(events)
    for event in Event:
        assert counters.total(event) == sum(e is event for e, _ in events)


def test_a_count_is_found_by_event_and_reason():
    assert count([(Event.FORK, "rewritten_history")])["forks/rewritten_history"] == 1
