"""Pages of a reservation are seen by all after `commit()`, by nobody before and otherwise."""

from __future__ import annotations

import gc

import pytest

import hostcache as hc
from helpers import PAGE_COUNT, fill, holds_right_bytes, keys_of, store, unheld


@pytest.mark.portable
def test_commit_publishes_all_at_once(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    assert other.match(keys) == 0
    assert reservation.commit() == 6
    assert other.match(keys) == 6
    with other.lookup(keys) as lease:
        assert holds_right_bytes(lease, keys)
    assert cache.stats().commits == 6


@pytest.mark.portable
def test_commit_of_the_first_pages_gives_back_the_rest(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    with cache.reserve(keys) as reservation:
        fill(reservation, keys)
        assert reservation.commit(4) == 4
    assert cache.match(keys) == 4
    assert [cache.match(keys[i : i + 1]) for i in (4, 5)] == [0, 0]
    stats = cache.stats()
    assert (stats.ready, stats.free, stats.reserved) == (4, PAGE_COUNT - 4, 0)


def test_commit_of_nothing_is_nothing(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys) as reservation:
        assert reservation.commit(0) == 0
    assert cache.stats().free == PAGE_COUNT
    store(cache, keys)
    reservation = cache.reserve(keys)
    assert len(reservation) == 0
    assert reservation.keys.shape == (0, 32)
    with pytest.raises(IndexError):
        reservation.view(0)
    assert reservation.commit() == 0
    with pytest.raises(hc.LeaseEnded):
        reservation.commit()
    aborted = cache.reserve(keys)
    aborted.abort()
    with pytest.raises(hc.LeaseEnded):
        aborted.commit()
    assert cache.match(keys) == 4


@pytest.mark.portable
def test_a_second_commit_is_refused(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys) as reservation:
        assert reservation.commit() == 4
        with pytest.raises(hc.LeaseEnded):
            reservation.commit()
        with pytest.raises(hc.LeaseEnded):
            reservation.commit(2)
        with pytest.raises(hc.LeaseEnded):
            reservation.view(0)
        reservation.abort()
        reservation.end()
    assert cache.match(keys) == 4


@pytest.mark.portable
def test_an_abort_gives_all_back(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    reservation.abort()
    reservation.abort()
    reservation.end()
    with pytest.raises(hc.LeaseEnded):
        reservation.commit()
    with pytest.raises(hc.LeaseEnded):
        reservation.view(0)
    assert cache.match(keys) == 0
    stats = cache.stats()
    assert (stats.free, stats.aborts) == (PAGE_COUNT, 4)
    assert store(cache, keys) == 4


def test_an_exception_aborts(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    with pytest.raises(KeyError), reservation:
        raise KeyError
    assert cache.match(keys) == 0
    with pytest.raises(hc.LeaseEnded):
        reservation.commit()


def test_leaving_or_dropping_without_commit_gives_back(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys):
        pass
    assert cache.stats().free == PAGE_COUNT
    reservation = cache.reserve(keys)
    assert cache.stats().reserved == 4
    del reservation
    gc.collect()
    assert cache.stats().free == PAGE_COUNT


def test_only_a_beginning_can_be_published(cache: hc.KvCache) -> None:
    with cache.reserve(keys_of("a", 4)) as reservation:
        for wrong in (5, -1, 1.0, "1", True):
            with pytest.raises(hc.BadValue):
                reservation.commit(wrong)  # type: ignore[arg-type]
        with pytest.raises(hc.BadValue, match=r"commit\(5\).* 4 pages"):
            reservation.commit(5)
        assert reservation.commit(4) == 4


@pytest.mark.portable
def test_what_began_before_a_clear_publishes_nothing(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys) as reservation:
        fill(reservation, keys)
        other.clear()
        assert reservation.commit() == 0
    assert cache.match(keys) == 0
    assert unheld(cache)
    assert store(cache, keys) == 4


def test_leaving_in_any_order(cache: hc.KvCache) -> None:
    keys = keys_of("a", 12)
    first, second, third = (cache.reserve(keys[i : i + 4]) for i in (0, 4, 8))
    assert second.commit() == 4
    third.abort()
    assert first.commit() == 4
    assert cache.match(keys) == 8
    assert unheld(cache)
