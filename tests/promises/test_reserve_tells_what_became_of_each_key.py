"""`reserve` gives pages to write, in key order, and names the keys that got none and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import hostcache as hc
from helpers import (
    FORMAT,
    PAGE_BYTES,
    PAGE_COUNT,
    fill,
    holds_right_bytes,
    keys_of,
    press,
    store,
    unheld,
)
from hostcache import _core


@pytest.mark.portable
def test_keys_pages_and_views_are_one_page_each(cache: hc.KvCache) -> None:
    keys = keys_of("a", 5)
    with cache.reserve(keys) as reservation:
        assert len(reservation) == 5
        assert np.array_equal(reservation.keys, keys)
        assert reservation.pages.dtype == np.int32
        for i in range(5):
            reservation.view(i)[:] = bytes([i]) * PAGE_BYTES
        assert (reservation.present, reservation.pending, reservation.refused) == ([], [], [])
        assert cache.stats().reserved == 5
        assert cache.match(keys) == 0
        assert reservation.commit() == 5
        pages = reservation.pages.tolist()
    with cache.lookup(keys) as lease:
        assert lease.pages.tolist() == pages
        assert [lease.view(i)[0] for i in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.portable
def test_two_that_reserve_the_same_keys(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:2])
    with cache.reserve(keys[:4]) as first, other.reserve(keys) as second:
        assert np.array_equal(first.keys, keys[2:4])
        assert first.present == list(map(bytes, keys[:2]))
        assert second.present == list(map(bytes, keys[:2]))
        assert second.pending == list(map(bytes, keys[2:4]))
        assert np.array_equal(second.keys, keys[4:])
        assert set(first.pages.tolist()).isdisjoint(second.pages.tolist())
        assert first.commit() == 2
        assert second.commit() == 2
    assert cache.match(keys) == 6


def test_ones_own_reservation_is_pending_too(cache: hc.KvCache) -> None:
    keys = keys_of("a", 3)
    with cache.reserve(keys), cache.reserve(keys) as again:
        assert len(again) == 0
        assert again.pending == list(map(bytes, keys))


def test_a_key_named_twice_gets_one_page(cache: hc.KvCache) -> None:
    first, second, third = keys_of("a", 3)
    with cache.reserve([bytes(k) for k in (first, second, first, third, first)]) as reservation:
        assert [bytes(k) for k in reservation.keys] == [bytes(k) for k in (first, second, third)]
        assert reservation.pending == [bytes(first)] * 2
        assert reservation.commit() == 3


@pytest.mark.portable
def test_room_is_given_in_key_order(cache: hc.KvCache) -> None:
    keys = keys_of("a", PAGE_COUNT + 8)
    before = cache.stats().refused
    with cache.reserve(keys) as reservation:
        assert np.array_equal(reservation.keys, keys[:PAGE_COUNT])
        assert reservation.refused == list(map(bytes, keys[PAGE_COUNT:]))
        assert cache.stats().free == 0
        assert cache.stats().refused == before + 8
        with cache.reserve(keys_of("b", 2)) as late:
            assert len(late) == 0
            assert len(late.refused) == 2
            assert late.commit() == 0
    assert unheld(cache)


def test_it_never_evicts_a_key_that_it_was_asked_for(cache: hc.KvCache) -> None:
    keys = keys_of("a", PAGE_COUNT + 8)
    store(cache, keys[20:28])
    store(cache, keys_of("b", 20))
    with cache.reserve(keys) as reservation:
        assert reservation.present == list(map(bytes, keys[20:28]))
        assert np.array_equal(reservation.keys, np.concatenate([keys[:20], keys[28:32]]))
        assert reservation.refused == list(map(bytes, keys[32:]))


def test_it_never_evicts_the_beginning_of_its_own_prompt(cache: hc.KvCache) -> None:
    keys = keys_of("a", PAGE_COUNT + 8)
    store(cache, keys[:20])
    with cache.lookup(keys) as lease:
        missing = lease.missing
    store(cache, keys_of("b", 12))
    with cache.reserve(missing) as reservation:
        assert np.array_equal(reservation.keys, keys[20:PAGE_COUNT])
        assert reservation.commit() == 12
    assert cache.match(keys) == PAGE_COUNT


@pytest.mark.portable
def test_the_tail_of_a_conversation_goes_before_its_head(cache: hc.KvCache) -> None:
    keys = keys_of("a", 12)
    store(cache, keys[:6])
    with cache.lookup(keys) as lease, cache.reserve(lease.missing) as reservation:
        reservation.commit()
    left = []
    for number in range(16):
        store(cache, keys_of(f"new/{number}", 4))
        run = cache.match(keys)
        ready = sum(cache.match(keys[i : i + 1]) for i in range(12))
        assert run == ready  # what is left is always a beginning
        left.append(run)
    assert left == sorted(left, reverse=True)


def test_unrelated_keys_have_no_parents(cache: hc.KvCache) -> None:
    keys = keys_of("images", 6)
    assert store(cache, keys, linked=False) == 6
    with cache.lookup(keys[5:]):
        assert cache.stats().pinned == 1
    with cache.lookup(keys):
        assert cache.stats().pinned == 6
    assert unheld(cache)


def test_several_prompts_in_one_call(cache: hc.KvCache) -> None:
    keys = np.concatenate([keys_of("a", 3), keys_of("b", 4), keys_of("c", 2)])
    assert store(cache, keys, starts=[3, 7]) == 9
    for last, ancestors in ((2, 3), (6, 4), (8, 2)):
        with cache.lookup(keys[last : last + 1]):
            assert cache.stats().pinned == ancestors
    more = keys_of("d", 4)
    assert store(cache, more, starts=np.array([0, 2], np.int64)) == 4
    with cache.lookup(more[3:]):
        assert cache.stats().pinned == 2


def test_wrong_arguments_are_refused_before_anything_is_taken(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"starts": [4]}, "4 keys"),
        ({"starts": [-1]}, "-1"),
        ({"starts": [2, 2]}, "rise"),
        ({"starts": [1.0]}, "whole number"),
        ({"starts": [1], "linked": False}, "linked"),
        ({"after": bytes(keys[0]), "linked": False}, "linked"),
        ({"after": b"short"}, "32"),
        ({"after": keys[:2]}, "32"),
        ({"parts": 0}, "1 to 64"),
        ({"parts": 65}, "1 to 64"),
        ({"parts": True}, "parts"),
    ]
    for options, text in wrong:
        with pytest.raises(hc.BadValue, match=text):
            cache.reserve(keys, **options)  # type: ignore[arg-type]
    with pytest.raises(hc.BadValue):
        cache.reserve([b"short"])
    assert cache.stats().reserved == 0


def test_a_session_can_be_kept_from_reserving_all(opened: Callable[..., hc.KvCache]) -> None:
    keys = keys_of("a", 20)
    for limit, pages in ((8, 8), (0.25, PAGE_COUNT // 4), (1.0, 20), (1, 1), (0.0001, 1)):
        session = opened(max_reserved=limit)
        with session.reserve(keys[:5]) as first, session.reserve(keys) as second:
            assert len(first) + len(second) == pages
            assert len(second.refused) == 20 - pages
        session.close()
    for wrong in (0, -1, 0.0, 1.5, float("nan"), True, "8"):
        with pytest.raises(hc.BadValue, match="max_reserved"):
            opened(max_reserved=wrong)


def test_a_share_is_one_of_the_cache_that_is_there(cache: hc.KvCache, root: str) -> None:
    with hc.KvCache.open(cache.name, FORMAT, page_count=4, root=root, max_reserved=0.5) as session:
        assert session.page_count == PAGE_COUNT
        assert len(session.reserve(keys_of("a", 30))) == PAGE_COUNT // 2


def test_no_way_out_of_a_with_leaves_pages_reserved(cache: hc.KvCache) -> None:
    press(cache)
    for number in range(PAGE_COUNT):
        with pytest.raises(RuntimeError), cache.reserve(keys_of(f"x/{number}", 8)):
            raise RuntimeError
        with cache.reserve(keys_of(f"y/{number}", 8)):
            pass
        cache.reserve(keys_of(f"z/{number}", 8))
    assert unheld(cache)


def pinned_by_the_last(cache: hc.KvCache, keys: np.ndarray) -> int:
    """How many pages are safe with the last one of a prompt: those that are linked."""
    with cache.lookup(keys[-1:]) as lease:
        assert len(lease) == 1
        return cache.stats().pinned


@pytest.mark.portable
def test_a_prompt_that_comes_in_pieces_is_linked(cache: hc.KvCache, other: hc.KvCache) -> None:
    """As chunked prefill does: the next piece is reserved while the one before is written."""
    keys = keys_of("a", 9)
    first = cache.reserve(keys[:3])
    second = cache.reserve(keys[3:6], after=bytes(keys[2]))
    third = other.reserve(keys)  # the whole prompt: what is pending is another's
    assert third.pending == list(map(bytes, keys[:6]))
    assert [piece.commit() for piece in (first, second, third)] == [3, 3, 3]
    assert pinned_by_the_last(cache, keys) == 9


def test_a_piece_that_is_published_before_the_one_before_has_no_link(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    first = cache.reserve(keys[:3])
    second = cache.reserve(keys[3:], after=bytes(keys[2]))
    assert (second.commit(), first.commit()) == (3, 3)
    assert cache.match(keys) == 6
    assert pinned_by_the_last(cache, keys) == 3
    with cache.lookup(keys):
        assert cache.stats().pinned == 6  # a lease of both holds both


def test_a_piece_after_one_that_was_aborted(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    first = cache.reserve(keys[:3])
    second = cache.reserve(keys[3:], after=bytes(keys[2]))
    first.abort()
    assert second.commit() == 3
    assert cache.match(keys[3:]) == 3
    assert pinned_by_the_last(cache, keys) == 3


@pytest.fixture
def impatient(cache: hc.KvCache, root: str) -> Iterator[hc.KvCache]:
    """A session for which every reservation is older than the bound already."""
    session = _core.Cache.open(root, cache.name, "attach", pending_bound_s=0.0)
    with hc.KvCache(session, None) as impatient:
        yield impatient


@pytest.mark.portable
def test_a_key_reserved_for_too_long_may_be_reserved_anew(
    cache: hc.KvCache, impatient: hc.KvCache
) -> None:
    keys = keys_of("a", 4)
    old = cache.reserve(keys)
    fill(old, keys)
    with impatient.reserve(keys) as new:
        assert np.array_equal(new.keys, keys)
        assert set(new.pages.tolist()).isdisjoint(old.pages.tolist())
        assert cache.stats().reserved == 8
        fill(new, keys)
        assert old.commit() == 0  # the keys lead elsewhere now
        assert cache.match(keys) == 0
        assert new.commit() == 4
    with cache.lookup(keys) as lease:
        assert lease.pages.tolist() == new.pages.tolist()
        assert holds_right_bytes(lease, keys)
    assert unheld(cache)


def test_never_two_ready_pages_for_a_key(cache: hc.KvCache, impatient: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    for first_commits, second_commits in ((True, True), (True, False), (False, True)):
        old, new = cache.reserve(keys), impatient.reserve(keys)
        published = [
            hold.commit() if commits else hold.abort() or 0
            for hold, commits in ((old, first_commits), (new, second_commits))
        ]
        assert published == [0, 4 if second_commits else 0]
        assert cache.stats().ready == sum(published)
        assert unheld(cache)
        assert cache.check() == []
        cache.clear()
