"""Detached copies: equal, and nothing that is done to one shows in the other."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.messages import copy_containers

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=12,
)


def ruin(value):
    """Empty every list and dictionary inside."""
    for child in list(value.values() if isinstance(value, dict) else value):
        if isinstance(child, (dict, list)):
            ruin(child)
    value.clear()


@settings(max_examples=500, derandomize=True)
@given(JSON)
def test_for_any_json_the_copy_is_equal_and_apart(value):
    before = json.dumps(value)
    copy = copy_containers([value])
    assert copy == [value]
    ruin(copy)
    assert json.dumps(value) == before


def test_what_is_no_list_and_no_dictionary_is_shared():
    image = object()
    message = {"role": "user", "content": [{"type": "image", "image": image}]}
    copy = copy_containers(message)
    assert copy["content"][0] is not message["content"][0]
    assert copy["content"][0]["image"] is image


def test_nesting_deeper_than_the_stack_and_circles_are_copied():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    copy, depth = copy_containers(deep), 0
    while copy:
        copy, deep, depth = copy[0], deep[0], depth + 1
    assert depth == 100_000
    circle = {"rows": []}
    circle["rows"].append(circle)
    copied = copy_containers(circle)
    assert copied["rows"][0]["rows"] is copied["rows"] is not circle["rows"]
