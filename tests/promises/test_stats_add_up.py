"""`stats()`: every page is in one state, and every event is counted once."""

from __future__ import annotations

import dataclasses
import random

import pytest

import hostcache as hc
from helpers import PAGE_COUNT, Child, fill, keys_of, store

FIELDS = (
    *("page_count", "free", "reserved", "ready", "pinned", "evictable", "sessions"),
    *("hits", "misses", "commits", "aborts", "evictions", "repairs", "refused", "lock_timeouts"),
)


def states_add_up(stats: hc.Stats) -> bool:
    return (
        stats.free + stats.reserved + stats.ready == stats.page_count == PAGE_COUNT
        and stats.pinned + stats.evictable == stats.ready
        and min(dataclasses.astuple(stats)) >= 0
    )


@pytest.mark.portable
def test_the_fields_are_those_that_are_promised(cache: hc.KvCache) -> None:
    stats = cache.stats()
    assert tuple(field.name for field in dataclasses.fields(stats)) == FIELDS
    assert all(type(value) is int for value in dataclasses.astuple(stats))
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.free = 0  # type: ignore[misc]
    expected = dict.fromkeys(FIELDS, 0) | {"page_count": 32, "free": 32, "sessions": 1}
    assert dataclasses.asdict(stats) == expected
    assert hc.Stats.from_dict({**expected, "another": 1}) == stats


@pytest.mark.portable
def test_events_are_counted_by_pages(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 10)
    store(cache, keys[:6])
    cache.match(keys)
    other.lookup(keys).release()
    cache.lookup(keys, gaps=True).release()
    with cache.reserve(keys) as reservation:
        reservation.commit(1)
    cache.reserve(keys[8:]).abort()
    store(cache, keys_of("b", PAGE_COUNT))
    with cache.lookup(keys_of("b", PAGE_COUNT)), cache.reserve(keys) as refused:
        assert len(refused.refused) == 10
    stats = cache.stats()
    assert stats == other.stats()
    assert (stats.hits, stats.misses) == (12 + PAGE_COUNT, 8)
    assert stats.commits == 7 + PAGE_COUNT
    assert stats.aborts == 5  # three were given back by commit(1)
    assert stats.evictions == 7
    assert stats.refused == 10
    assert (stats.repairs, stats.lock_timeouts, stats.sessions) == (0, 0, 2)


@pytest.mark.portable
def test_pinned_counts_all_that_is_protected(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 8)
    store(cache, keys)
    with cache.lookup(keys[:3]):
        assert cache.stats().pinned == 3
        with other.lookup(keys[:5]):
            assert cache.stats().pinned == 5
            with other.reserve(keys_of("b", 2), after=bytes(keys[6])):
                assert cache.stats().pinned == 7
                assert cache.stats().reserved == 2
        assert cache.stats().pinned == 3
    assert cache.stats().pinned == 0


def end_somehow(hold: hc.Lease | hc.Reservation, chance: random.Random) -> None:
    if isinstance(hold, hc.Lease):
        hold.release()
    elif chance.random() < 0.6:
        hold.commit(chance.randrange(len(hold) + 1))
    else:
        hold.abort()


def take_somehow(session: hc.KvCache, chance: random.Random) -> hc.Lease | hc.Reservation:
    keys = keys_of(f"prompt/{chance.randrange(8)}", chance.randrange(1, 12))
    if chance.random() < 0.5:
        return session.lookup(keys, gaps=chance.random() < 0.3)
    reservation = session.reserve(session.lookup(keys).missing)
    fill(reservation, reservation.keys)
    return reservation


def test_they_add_up_whatever_is_done(cache: hc.KvCache, other: hc.KvCache) -> None:
    chance = random.Random(20)
    held: list[hc.Lease | hc.Reservation] = []
    for step in range(600):
        session = chance.choice((cache, other))
        what = chance.random()
        if what < 0.6:
            held.append(take_somehow(session, chance))
        elif what < 0.62:
            session.clear()
        elif held:
            end_somehow(held.pop(chance.randrange(len(held))), chance)
        assert states_add_up(session.stats()), step
        if step % 50 == 0:
            assert cache.check() == []
    held.clear()
    stats = cache.stats()
    assert states_add_up(stats)
    assert (stats.reserved, stats.pinned) == (0, 0)


@pytest.mark.portable
def test_the_dead_are_taken_back_first(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    child.run("held = [cache.lookup(keys_of('a', 4)), cache.reserve(keys_of('b', 4))]")
    stats = cache.stats()
    assert (stats.sessions, stats.pinned, stats.reserved) == (2, 4, 4)
    child.kill()
    stats = cache.stats()
    assert (stats.sessions, stats.pinned, stats.reserved, stats.repairs) == (1, 0, 0, 1)
    assert states_add_up(stats)
