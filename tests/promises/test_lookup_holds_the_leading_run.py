"""`lookup` holds the leading pages that are ready, until its end; `match` only asks."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import hostcache as hc
from helpers import PAGE_BYTES, holds_right_bytes, keys_of, press, store, unheld


@pytest.mark.portable
def test_a_miss_is_an_empty_lease(cache: hc.KvCache) -> None:
    keys = keys_of("a", 5)
    lease = cache.lookup(keys)
    assert len(lease) == 0
    assert lease.pages.shape == (0,)
    assert lease.missing == list(map(bytes, keys))
    assert list(lease.below) == []
    assert lease.epoch == cache.epoch
    with pytest.raises(IndexError):
        lease.view(0)
    lease.release()
    lease.release()
    with pytest.raises(hc.LeaseEnded):
        lease.view(0)


@pytest.mark.portable
def test_a_hit_has_the_bytes_that_were_stored(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    assert store(cache, keys) == 6
    with cache.lookup(keys) as lease:
        assert len(lease) == len(lease.pages) == 6
        assert lease.pages.dtype == np.int32
        assert len(set(lease.pages.tolist())) == 6
        assert list(lease.missing) == []
        assert holds_right_bytes(lease, keys)


def test_keys_may_be_an_array_a_list_or_what_a_call_gave(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:4])
    texts = list(map(bytes, keys))
    for form in (keys, texts, tuple(texts), hc.KeyList(keys), keys[::-1][::-1]):
        assert cache.match(form) == len(cache.lookup(form)) == 4
    for wrong in (keys[0], keys[:, :31], keys.astype(np.int64), bytes(keys[0]), [b"short"], "text"):
        with pytest.raises(hc.BadValue):
            cache.lookup(wrong)  # type: ignore[arg-type]


@pytest.mark.portable
def test_missing_starts_at_the_first_hole(cache: hc.KvCache) -> None:
    keys = keys_of("a", 8)
    store(cache, keys[:3])
    store(cache, keys[5:])
    assert cache.match(keys) == 3
    with cache.lookup(keys) as lease:
        assert len(lease) == 3
        assert lease.missing == list(map(bytes, keys[3:]))
        with cache.reserve(lease.missing) as reservation:
            assert np.array_equal(reservation.keys, keys[3:5])
            assert reservation.present == list(map(bytes, keys[5:]))


@pytest.mark.portable
def test_what_a_lease_holds_is_not_evicted(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys)
    with cache.lookup(keys) as lease:
        press(other)
        assert cache.match(keys) == 6
        assert holds_right_bytes(lease, keys)
    press(other)
    assert cache.match(keys) == 0


def test_after_its_end_a_lease_keeps_pages_and_missing(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:4])
    lease = cache.lookup(keys)
    pages = lease.pages.tolist()
    lease.release()
    assert lease.pages.tolist() == pages
    assert len(lease) == 4
    assert lease.missing == list(map(bytes, keys[4:]))
    assert lease.epoch == cache.epoch
    with pytest.raises(hc.LeaseEnded):
        lease.view(0)
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 1


def test_a_dropped_lease_ends_by_itself(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease = cache.lookup(keys)
    assert cache.stats().pinned == 4
    del lease
    gc.collect()
    assert unheld(cache)


def test_an_exception_in_the_with_releases(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    with pytest.raises(KeyError), cache.lookup(keys):
        raise KeyError
    assert unheld(cache)


def test_only_lookup_counts_hits_and_holds(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:4])
    before = cache.stats()
    assert cache.match(keys) == 4
    assert cache.stats() == before
    with cache.lookup(keys):
        after = cache.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (4, 2)
    assert after.pinned == 4


def test_views_are_asked_by_position(cache: hc.KvCache) -> None:
    keys = keys_of("a", 3)
    store(cache, keys)
    with cache.lookup(keys) as lease:
        assert len(lease.view(np.int64(2))) == PAGE_BYTES  # type: ignore[arg-type]
        for wrong in (3, -1, 1 << 40):
            with pytest.raises(IndexError, match="3 pages"):
                lease.view(wrong)
        with pytest.raises(TypeError):
            lease.view("0")  # type: ignore[arg-type]


def test_no_keys_are_no_question(cache: hc.KvCache) -> None:
    none = keys_of("a", 0)
    assert cache.match(none) == 0
    assert cache.match([]) == 0
    assert cache.wait([], 0) == 0
    with cache.lookup(none) as lease, cache.reserve(lease.missing) as reservation:
        assert len(lease) == len(lease.missing) == len(reservation) == reservation.commit() == 0


@pytest.mark.portable
def test_with_gaps_every_ready_key_is_held(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 9)
    store(cache, keys[:2])
    store(cache, keys[4:6])
    store(cache, keys[8:])
    ready = [True, True, False, False, True, True, False, False, True]
    with cache.lookup(keys, gaps=True) as lease:
        assert len(lease) == len(lease.pages) == len(keys)
        assert [page >= 0 for page in lease.pages] == ready
        assert set(lease.pages[~np.array(ready)].tolist()) == {-1}
        assert lease.missing == list(map(bytes, keys[2:]))
        for i, there in enumerate(ready):
            if there:
                assert bytes(lease.view(i)) == bytes(keys[i]) * (PAGE_BYTES // 32)
            else:
                with pytest.raises(IndexError, match="-1"):
                    lease.view(i)
        assert cache.stats().pinned == 5
        press(other)
        assert [cache.match(keys[i : i + 1]) for i in range(9)] == [int(is_) for is_ in ready]
    assert unheld(cache)


def test_with_gaps_a_whole_miss_has_a_place_for_each_key(cache: hc.KvCache) -> None:
    keys = keys_of("a", 3)
    with cache.lookup(keys, gaps=True) as lease:
        assert lease.pages.tolist() == [-1, -1, -1]
        assert len(lease) == len(lease.missing) == 3
        with pytest.raises(IndexError):
            lease.view(1)


def test_a_lease_of_a_prompts_end_protects_its_beginning(
    cache: hc.KvCache, other: hc.KvCache
) -> None:
    keys = keys_of("a", 6)
    store(cache, keys)
    with cache.lookup(keys[4:]) as lease:
        assert len(lease) == 2
        press(other)
        assert cache.match(keys) == 6
