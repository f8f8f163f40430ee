"""A body that is read from where it is new has the value that it has when it is read as a whole."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unbroken.server.http.known_bodies as known_bodies
from support.effort import num_cases
from unbroken.server.http.known_bodies import KnownBodies
from unbroken.untrusted import bound_values, count_opened, parse_exactly

MAX_VALUES = 2**20
TEXTS = st.text(alphabet='ab"\\{}[],:é\u2028😀\n\0', max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.dictionaries(st.sampled_from(["role", "content", "messages", "input"]) | TEXTS, VALUES, max_size=4)
OTHERS = st.dictionaries(st.sampled_from(["model", "tools", "messages ", "x"]) | TEXTS, VALUES, max_size=3)
SPACES = st.sampled_from(["", " ", "\n\t "])


@pytest.fixture(autouse=True)
def _read_short_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bodies, "_MIN_BYTES", 0)


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Bodies as an agent sends them in turn: each has the items of the one before, and more; or something changed."""
    name = draw(st.sampled_from(["messages", "input", "contents", "mess\\u0061ges", "other"]))
    before, after = draw(OTHERS), draw(OTHERS)
    items = [_spell(draw, item) for item in draw(st.lists(ITEMS, max_size=4))]
    sent = []
    for _ in range(draw(st.integers(2, 4))):
        items = items + [_spell(draw, item) for item in draw(st.lists(ITEMS, max_size=3))]
        if draw(st.integers(0, 5)) == 0:
            items = [*items, draw(st.sampled_from(["1", '"a"', "null", "[]", "[[{}]]"]))]
        if items and draw(st.integers(0, 3)) == 0:
            place = draw(st.integers(0, len(items) - 1))
            items = [*items[:place], _spell(draw, draw(ITEMS)), *items[place + 1 :]]
        space = draw(SPACES)
        pairs = [f'"{name}"{space}:{space}[{space}{f",{space}".join(items)}{space}]']
        if draw(st.integers(0, 4)) == 0:  # the key comes twice
            pairs.append(f'"{draw(st.sampled_from([name, "messages", "input"]))}":[{",".join(items[:1])}]')
        body = ",".join([*_spell_pairs(before), *pairs, *_spell_pairs(after)])
        raw = f"{{{space}{body}}}".encode()
        if draw(st.integers(0, 5)) == 0:  # a byte is another one
            place = draw(st.integers(0, len(raw) - 1))
            raw = (
                raw[:place]
                + draw(st.sampled_from([b'"', b"\\", b"}", b"]", b"{", b",", b"0", b"", b"\xff"]))
                + raw[place + 1 :]
            )
        sent.append(raw)
    return sent


def _spell(draw: st.DrawFn, item: Any) -> str:
    text = json.dumps(item, ensure_ascii=False)
    return draw(st.sampled_from([text, text.replace("a", "\\u0061"), text.replace(",", " ,\n")]))


def _spell_pairs(value: dict[str, Any]) -> list[str]:
    text = json.dumps(value, ensure_ascii=False)[1:-1]
    return [text] if text else []


@given(bodies())
@settings(max_examples=num_cases(50, in_fuzz=3000))
def test_a_body_that_begins_like_the_last_one_has_the_value_of_the_whole(sent: list[bytes]) -> None:
    known = KnownBodies()
    for raw in [*sent, *sent[::-1]]:
        try:
            whole = parse_exactly(raw, orjson.loads)
        except orjson.JSONDecodeError:
            assert known.parse("s", raw, max_values=MAX_VALUES) is None
            continue
        value = known.parse("s", raw, max_values=MAX_VALUES)
        if value is None:
            known.learn("s", raw, whole)
        else:
            assert json.dumps(value) == json.dumps(json.loads(raw))


def make_body(items: list[Any], **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": items, **fields})


def message(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f'{number}: "quoted", {{braces}} and ]', "parts": [{"deep": [number]}]}


def test_known_items_are_not_parsed_again_also_if_the_last_ones_changed() -> None:
    known = KnownBodies()
    items = [message(number) for number in range(9)]
    known.learn("s", make_body(items), orjson.loads(make_body(items)))
    first = known.parse("s", make_body([*items, message(9)], tools=[{"a": "]"}]), max_values=MAX_VALUES)
    changed = [*items[:8], message(80), message(90), message(10)]
    second = known.parse("s", make_body(changed), max_values=MAX_VALUES)
    assert first["messages"] == [*items, message(9)]
    assert first["tools"] == [{"a": "]"}]
    assert second["messages"] == changed
    assert [a is b for a, b in zip(first["messages"], second["messages"], strict=False)] == [True] * 8 + [False] * 2


@pytest.mark.parametrize(
    "body",
    [
        make_body([{"role": "system", "content": "other"}, message(1)]),
        b" " + make_body([message(0), message(1)]),
        make_body([message(0), message(1)])[:-1] + b',"messages":[]}',
        make_body([message(0), message(1)])[:-1] + b',"mess\\u0061ges":[]}',
        make_body([message(0)])[:-2],
        make_body([message(0), message(1)]) + b"x",
    ],
    ids=["other bytes", "a space", "the key twice", "the key twice, escaped", "no end", "more than JSON"],
)
def test_on_any_doubt_a_body_is_read_as_a_whole(body: bytes) -> None:
    known = KnownBodies()
    known.learn("s", make_body([message(0)]), orjson.loads(make_body([message(0)])))
    assert known.parse("s", make_body([message(0), message(1)]), max_values=MAX_VALUES) is not None
    known.learn("s", make_body([message(0)]), orjson.loads(make_body([message(0)])))
    assert known.parse("s", body, max_values=MAX_VALUES) is None


def count_values(body: bytes) -> int:
    return bound_values(body, count_opened(body))


def test_limits_count_known_items_too_and_stay_exact_over_many_turns() -> None:
    known = KnownBodies()
    items = [message(0)]
    known.learn("s", make_body(items), orjson.loads(make_body(items)))
    for number in range(1, 50):
        items.append(message(number))
        most = count_values(make_body(items)) + 1  # the stand-in
        assert known.parse("s", make_body(items), max_values=most) is not None
    items.append(message(50))
    assert known.parse("s", make_body(items), max_values=count_values(make_body(items)) - 1) is None
    deep = make_body(items)[:-2] + b"," + b"[" * 200 + b"]" * 200 + b"]}"
    assert known.parse("s", deep, max_values=MAX_VALUES) is None


def test_a_session_that_was_deleted_and_another_one_are_not_known() -> None:
    known = KnownBodies()
    body = make_body([message(0)])
    known.learn("s", body, orjson.loads(body))
    assert known.parse("other", body, max_values=MAX_VALUES) is None
    assert known.parse("s", body, max_values=MAX_VALUES) is not None
    known.forget("s")
    assert known.parse("s", body, max_values=MAX_VALUES) is None
