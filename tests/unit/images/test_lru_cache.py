"""What was used last stays within its limit."""

from __future__ import annotations

from unbroken.images.lru_cache import LruCache


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    recent: LruCache[str, str] = LruCache(10, len)
    recent.put("a", "1234")
    recent.put("b", "1234")
    assert recent.get("a") == "1234"
    recent.put("c", "123")
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == ("1234", None, "123")
    assert recent.size == 7


def test_a_value_larger_than_all_the_room_is_not_kept_and_drives_nothing_out() -> None:
    recent: LruCache[str, str] = LruCache(4, len)
    recent.put("a", "1234")
    recent.put("b", "12345")
    assert (recent.get("a"), recent.get("b"), recent.size) == ("1234", None, 4)


def test_putting_what_is_here_counts_as_use_and_not_twice() -> None:
    recent: LruCache[int, str] = LruCache(2)
    for key in (1, 2, 1, 3):
        recent.put(key, "x")
    assert (recent.get(1), recent.get(2), recent.get(3), recent.size) == ("x", None, "x", 2)


def test_clearing_forgets_everything() -> None:
    recent: LruCache[int, str] = LruCache(2)
    recent.put(1, "x")
    recent.clear()
    assert (recent.get(1), recent.size) == (None, 0)
