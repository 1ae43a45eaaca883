"""A release is by handle: repeating it, late or in another process, never frees another's hold."""

from __future__ import annotations

import pytest

import hostcache as hc
from helpers import Child, holds_right_bytes, keys_of, press, store, unheld


@pytest.mark.portable
def test_two_holders_of_the_same_pages(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    first, second = cache.lookup(keys), other.lookup(keys)
    for _ in range(3):
        first.release()
    with first:
        pass
    press(cache)
    assert cache.match(keys) == 4
    assert holds_right_bytes(second, keys)
    second.release()
    press(cache)
    assert cache.match(keys) == 0
    assert unheld(cache)


def test_two_leases_of_one_session(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    first, second = cache.lookup(keys), cache.lookup(keys)
    first.release()
    first.release()
    press(cache)
    assert holds_right_bytes(second, keys)
    second.release()
    assert unheld(cache)


@pytest.mark.portable
def test_a_holder_in_another_process(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    child.run("keys = keys_of('a', 4); lease = cache.lookup(keys); result = len(lease)")
    mine = cache.lookup(keys)
    for _ in range(3):
        mine.release()
    press(cache)
    assert cache.match(keys) == 4
    assert child.run("result = holds_right_bytes(lease, keys)") is True
    child.run("lease.release(); lease.release()")
    press(cache)
    assert cache.match(keys) == 0


def test_a_late_abort_frees_nothing_of_the_next_reservation(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    first = cache.reserve(keys)
    first.abort()
    with cache.reserve(keys) as second:
        assert set(second.pages.tolist()) & set(first.pages.tolist())
        first.abort()
        first.end()
        assert cache.stats().reserved == 4
        assert second.commit() == 4
    first.abort()
    assert cache.match(keys) == 4


def test_a_late_end_of_a_taker_frees_nothing(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    old = cache.reserve(keys, parts=1)
    token = old.token()
    old.end()
    with cache.reserve(keys, parts=1) as new:
        old.end()
        assert cache.claim(token, 0) is None
        part = cache.claim(new.token(), 0)
        assert part is not None
        assert part.commit() == 4
    assert cache.match(keys) == 4
