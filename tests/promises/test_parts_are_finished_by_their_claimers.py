"""A hold taken with `parts=` is written or read by others, each of whom claims one part."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

import hostcache as hc
from helpers import (
    PAGE_COUNT,
    Child,
    fill,
    holds_right_bytes,
    keys_of,
    page_of,
    press,
    store,
    unheld,
)


def claim(cache: hc.KvCache, token: bytes, part: int) -> hc.Part:
    claimed = cache.claim(token, part)
    assert claimed is not None
    return claimed


@pytest.mark.portable
def test_the_last_commit_publishes(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys, parts=2) as reservation:
        token = reservation.token()
        first, second = claim(cache, token, 0), claim(other, token, 1)
        assert (first.part, second.part) == (0, 1)
        assert first.pages.tolist() == second.pages.tolist() == reservation.pages.tolist()
        fill(first, keys)
        assert first.commit() == 0
        assert cache.match(keys) == 0
        assert second.commit() == 4
        assert cache.match(keys) == 4
    assert cache.match(keys) == 4
    with other.lookup(keys) as lease:
        assert holds_right_bytes(lease, keys)


@pytest.mark.portable
def test_the_taker_itself_holds_no_part(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys, parts=1) as reservation:
        for call in (
            lambda: reservation.view(0),
            reservation.commit,
            lambda: reservation.commit(1),
        ):
            with pytest.raises(hc.Unsupported, match="claim"):
                call()
        with claim(cache, reservation.token(), 0) as part:
            fill(part, keys)
            assert part.commit() == 4
    with cache.lookup(keys, parts=1) as lease:
        with pytest.raises(hc.Unsupported):
            lease.view(0)
        with claim(cache, lease.token(), 0) as part:
            assert part.view(0).readonly


def test_without_parts_there_is_no_token(cache: hc.KvCache) -> None:
    keys = keys_of("a", 2)
    with cache.reserve(keys) as reservation:
        with pytest.raises(hc.Unsupported, match="parts"):
            reservation.token()
        reservation.commit()
    with cache.lookup(keys) as lease, pytest.raises(hc.Unsupported, match="parts"):
        lease.token()
    with cache.lookup(keys_of("b", 1)) as lease, pytest.raises(hc.Unsupported, match="parts"):
        lease.token()


@pytest.mark.portable
def test_a_part_is_claimed_once(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys, parts=2)
    token = reservation.token()
    first = claim(cache, token, 0)
    assert cache.claim(token, 0) is None
    assert other.claim(token, 0) is None
    assert other.claim(token, 2) is None
    assert other.claim(token, -1) is None
    assert other.claim(token, 64) is None
    first.commit()
    assert cache.claim(token, 0) is None
    assert claim(other, token, 1).commit() == 4
    assert cache.claim(token, 1) is None


def test_what_is_no_token_is_refused(cache: hc.KvCache) -> None:
    keys = keys_of("a", 2)
    with cache.reserve(keys, parts=2) as reservation:
        token = reservation.token()
        assert isinstance(token, bytes)
        for wrong in (b"", b"x", token[:-1], token + b"x", bytes(len(token)), token[::-1]):
            assert cache.claim(wrong, 0) is None
        for place in range(len(token)):
            flipped = bytearray(token)
            flipped[place] ^= 1
            assert cache.claim(bytes(flipped), 0) is None
        with pytest.raises(hc.BadValue, match="token"):
            cache.claim(token.hex(), 0)  # type: ignore[arg-type]
        with pytest.raises(hc.BadValue, match="part"):
            cache.claim(token, 0.0)  # type: ignore[arg-type]
        assert claim(cache, token, 0).commit() == 0


def test_a_token_of_another_segment_is_refused(cache: hc.KvCache, root: str) -> None:
    keys = keys_of("a", 2)
    with (
        hc.KvCache.open("other", cache.format, page_count=PAGE_COUNT, root=root) as elsewhere,
        cache.reserve(keys, parts=1) as here,
        elsewhere.reserve(keys, parts=1) as there,
    ):
        assert cache.claim(there.token(), 0) is None
        assert elsewhere.claim(here.token(), 0) is None


@pytest.mark.portable
def test_one_abort_spoils(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys, parts=3) as reservation:
        token = reservation.token()
        parts = [claim(session, token, i) for i, session in enumerate((cache, other, other))]
        assert parts[0].commit() == 0
        parts[1].abort()
        parts[1].abort()
        with pytest.raises(hc.LeaseEnded):
            parts[1].commit()
        with pytest.raises(hc.LeaseEnded):
            parts[0].commit()
        with pytest.raises(hc.LeaseEnded):
            parts[0].view(0)
        assert cache.stats().reserved == 4  # part 2 may still be writing
        assert parts[2].commit() == 0
        assert cache.stats().free == PAGE_COUNT
    assert cache.match(keys) == 0


@pytest.mark.parametrize("way", ["end", "abort", "leave", "raise", "drop"])
def test_when_the_taker_ends_claimed_parts_finish_by_themselves(
    cache: hc.KvCache, other: hc.KvCache, way: str
) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys, parts=2)
    token = reservation.token()
    part = claim(other, token, 0)
    if way in ("end", "abort"):
        getattr(reservation, way)()
        getattr(reservation, way)()
    elif way == "raise":
        with pytest.raises(KeyError), reservation:
            raise KeyError
    elif way == "leave":
        with reservation:
            pass
    del reservation
    gc.collect()
    assert cache.claim(token, 1) is None
    assert cache.stats().reserved == 4
    fill(part, keys)
    assert part.commit() == 0
    assert cache.match(keys) == 0
    assert cache.stats().free == PAGE_COUNT
    assert store(cache, keys) == 4


def test_what_was_published_stays_when_the_taker_ends(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys, parts=1)
    claim(cache, reservation.token(), 0).commit()
    reservation.end()
    assert cache.match(keys) == 4


def test_a_part_left_or_dropped_without_commit_aborts(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    for way in ("leave", "raise", "drop"):
        with cache.reserve(keys, parts=1) as reservation:
            part = claim(cache, reservation.token(), 0)
            if way == "leave":
                with part:
                    pass
            elif way == "raise":
                with pytest.raises(KeyError), part:
                    raise KeyError
            del part
            gc.collect()
            assert cache.match(keys) == 0
            assert cache.stats().free == PAGE_COUNT


@pytest.mark.portable
def test_a_lease_in_parts_lasts_until_all_have_read(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys)
    with cache.lookup(keys, parts=2) as lease:
        token = lease.token()
        first, second = claim(cache, token, 0), claim(other, token, 1)
        assert first.pages.tolist() == lease.pages.tolist()
        assert [bytes(first.view(i))[:32] for i in range(6)] == list(map(bytes, keys))
        assert first.commit() == 0
    press(cache)
    assert cache.match(keys) == 6  # the second still reads
    assert [bytes(second.view(i))[:32] for i in range(6)] == list(map(bytes, keys))
    assert cache.claim(token, 0) is None
    second.abort()
    assert unheld(cache)
    assert cache.match(keys) == 6


def test_a_part_of_a_lease_with_gaps_has_them_too(cache: hc.KvCache) -> None:
    keys = keys_of("a", 5)
    store(cache, keys[:2])
    store(cache, keys[4:])
    with cache.lookup(keys, parts=1, gaps=True) as lease:
        part = claim(cache, lease.token(), 0)
        assert part.pages.tolist() == lease.pages.tolist()
        assert bytes(part.view(4)) == page_of(keys[4])
        for gap in (2, 3):
            with pytest.raises(IndexError):
                part.view(gap)
        part.commit()


def test_a_lease_in_parts_ends_when_nobody_claimed(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease = cache.lookup(keys, parts=2)
    assert cache.stats().pinned == 4
    lease.release()
    lease.end()
    assert unheld(cache)
    assert cache.claim(lease.token(), 0) is None


def test_a_token_of_nothing_is_refused(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.lookup(keys, parts=2) as lease:
        assert cache.claim(lease.token(), 0) is None
        assert lease.missing == list(map(bytes, keys))
    store(cache, keys)
    with cache.reserve(keys, parts=2) as reservation:
        assert cache.claim(reservation.token(), 0) is None
        with pytest.raises(hc.Unsupported):
            reservation.commit()


@pytest.mark.portable
def test_a_scheduler_reserves_and_its_workers_write(
    cache: hc.KvCache, start_child: Callable[[], Child]
) -> None:
    keys = keys_of("a", 6)
    workers = [start_child(), start_child()]
    with cache.reserve(keys, parts=2) as reservation:
        token = reservation.token()
        for number, worker in enumerate(workers):
            worker.run(f"part = cache.claim({token!r}, {number}); keys = keys_of('a', 6)")
            worker.run(f"for i in range({number}, 6, 2): part.view(i)[:] = page_of(keys[i])")
        assert [worker.run("result = part.commit()") for worker in workers] == [0, 6]
    with cache.lookup(keys) as lease:
        assert holds_right_bytes(lease, keys)


def test_a_killed_workers_part_is_failed_for_it(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys, parts=2) as reservation:
        token = reservation.token()
        child.run(f"part = cache.claim({token!r}, 1); part.view(0)[:10] = b'unfinished'")
        mine = claim(cache, token, 0)
        child.kill()
        assert mine.commit() == 0
        assert cache.wait(keys, 60) == 0
    assert cache.match(keys) == 0
    assert cache.stats().free == PAGE_COUNT
