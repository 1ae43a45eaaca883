"""`clear` forgets a namespace, or all, at once; what began before is void, leases stay valid."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hostcache as hc
from helpers import PAGE_COUNT, fill, holds_right_bytes, keys_of, store, unheld


def namespace(salt: str) -> hc.Namespace:
    return hc.Namespace(
        model="tiny", weights="sha256:" + "0" * 64, dtype="float32", layout="test/1", salt=salt
    )


@pytest.mark.portable
def test_all_pages_are_forgotten_and_come_back(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys)
    before = cache.epoch
    other.clear()
    assert cache.match(keys) == 0
    assert len(cache.lookup(keys)) == 0
    assert cache.epoch > before
    assert cache.epoch == other.epoch
    assert cache.stats().free == PAGE_COUNT
    assert store(cache, keys) == 6
    assert cache.match(keys) == 6


@pytest.mark.portable
def test_leases_stay_valid_to_their_end(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys)
    with cache.lookup(keys) as lease:
        cache.clear()
        assert cache.match(keys) == 0
        assert store(cache, keys) == 6
        assert store(cache, keys_of("b", 20)) == 20
        assert holds_right_bytes(lease, keys)
        assert cache.check() == []
    assert unheld(cache)
    assert cache.match(keys) == 6


def test_a_reservation_begun_before_is_void(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    cache.clear()
    with cache.reserve(keys) as anew:
        assert len(anew) == 6
        assert reservation.commit() == 0
        assert anew.commit() == 6
    assert cache.match(keys) == 6
    assert unheld(cache)


@pytest.mark.portable
def test_a_namespace_is_cleared_without_the_others(opened: Callable[..., hc.KvCache]) -> None:
    a, b, none = opened(namespace=namespace("a")), opened(namespace=namespace("b")), opened()
    again = opened(namespace=namespace("a"))
    stored = {session: keys_of(name, 4) for session, name in ((a, "a"), (b, "b"), (none, "c"))}
    for session, keys in stored.items():
        assert store(session, keys) == 4
    began = a.epoch, b.epoch, none.epoch
    again.clear()
    assert [none.match(keys) for keys in stored.values()] == [0, 4, 4]
    assert a.epoch == again.epoch > began[0]
    assert (b.epoch, none.epoch) == began[1:]
    assert none.stats().ready == 8
    store(a, stored[a])
    b.clear(everything=True)
    assert [a.match(keys) for keys in stored.values()] == [0, 0, 0]
    assert none.stats().free == PAGE_COUNT
    for session, keys in stored.items():
        store(session, keys)
    none.clear()
    assert [a.match(keys) for keys in stored.values()] == [0, 0, 0]


def test_clearing_an_empty_cache(cache: hc.KvCache) -> None:
    for _ in range(3):
        cache.clear()
        cache.clear(everything=True)
    assert cache.stats().free == PAGE_COUNT


def test_inside_a_tree_pages_come_back_when_the_lease_ends(cache: hc.KvCache) -> None:
    keys = keys_of("a", 8)
    store(cache, keys)
    lease = cache.lookup(keys[:4])
    cache.clear()
    assert cache.stats().ready >= 4
    lease.release()
    assert store(cache, keys_of("b", PAGE_COUNT)) == PAGE_COUNT
    assert unheld(cache)
