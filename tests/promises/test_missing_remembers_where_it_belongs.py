"""`lease.missing` is a sequence of keys that remembers the page before it and its epoch."""

from __future__ import annotations

import numpy as np
import pytest

import hostcache as hc
from helpers import FORMAT, keys_of, store, unheld


@pytest.mark.portable
def test_it_is_a_sequence_of_keys(cache: hc.KvCache) -> None:
    keys = keys_of("a", 5)
    missing = cache.lookup(keys).missing
    texts = list(map(bytes, keys))
    assert isinstance(missing, hc.Missing)
    assert isinstance(missing, hc.KeyList)
    assert len(missing) == 5
    assert list(missing) == texts
    assert missing[1] == texts[1]
    assert missing[-1] == texts[-1]
    assert missing == texts == list(missing)
    assert missing != texts[1:]
    assert texts[2] in missing
    assert missing.index(texts[3]) == 3
    assert np.array_equal(np.asarray(missing), keys)
    assert missing.array.shape == (5, 32)
    with pytest.raises(IndexError):
        missing[5]
    with pytest.raises(TypeError):
        missing[0] = texts[1]  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        missing.array[0] = 0
    assert "5 keys" in repr(missing)


def test_it_does_not_follow_the_callers_array(cache: hc.KvCache) -> None:
    keys = keys_of("a", 3)
    missing = cache.lookup(keys).missing
    keys[:] = 0
    assert missing == list(map(bytes, keys_of("a", 3)))


@pytest.fixture
def prompt(cache: hc.KvCache) -> np.ndarray:
    """Twelve keys, of which the first four are ready and nobody holds a page."""
    keys = keys_of("prompt", 12)
    assert store(cache, keys[:4]) == 4
    assert unheld(cache)
    return keys


def pinned_by(cache: hc.KvCache, keys: object, **options: object) -> int:
    """How many ready pages a reservation of these keys protects: those before it."""
    with cache.reserve(keys, **options) as reservation:  # type: ignore[arg-type]
        assert len(reservation) > 0
        return cache.stats().pinned


@pytest.mark.portable
def test_reserve_links_it_to_the_page_before(cache: hc.KvCache, prompt: np.ndarray) -> None:
    with cache.lookup(prompt) as lease:
        missing = lease.missing
    assert pinned_by(cache, missing) == 4
    assert pinned_by(cache, missing[:3]) == 4
    assert pinned_by(cache, missing[:-1][0:2]) == 4
    assert pinned_by(cache, prompt) == 4
    assert pinned_by(cache, prompt[4:], after=bytes(prompt[3])) == 4
    assert pinned_by(cache, prompt[4:], after=prompt[3]) == 4
    assert pinned_by(cache, prompt[4:], after=prompt[3:4]) == 4


def test_any_other_slice_is_a_bare_suffix(cache: hc.KvCache, prompt: np.ndarray) -> None:
    with cache.lookup(prompt) as lease:
        missing = lease.missing
    assert pinned_by(cache, missing[1:]) == 0
    assert pinned_by(cache, missing[::2]) == 0
    assert pinned_by(cache, list(missing)) == 0
    assert pinned_by(cache, prompt[4:]) == 0
    assert pinned_by(cache, missing, linked=False) == 0
    assert pinned_by(cache, missing[1:], after=bytes(prompt[2])) == 3


def test_a_parent_that_was_evicted_meanwhile_is_forgotten(
    cache: hc.KvCache, prompt: np.ndarray
) -> None:
    with cache.lookup(prompt) as lease:
        missing = lease.missing
    cache.clear()
    store(cache, prompt[:4])
    with cache.reserve(missing) as reservation:
        assert len(reservation) == 0  # the epoch of the miss is over
    assert pinned_by(cache, missing.array) == 0


@pytest.mark.portable
def test_what_was_missed_before_a_clear_is_not_stored_after_it(
    cache: hc.KvCache, other: hc.KvCache, prompt: np.ndarray
) -> None:
    missing = cache.lookup(prompt).missing
    other.clear()
    for late in (missing, missing[:3], missing[2:]):
        assert late.epoch < cache.epoch
        with cache.reserve(late) as reservation:
            assert len(reservation) == 0
            assert reservation.refused == list(late)
            assert reservation.commit() == 0
    assert cache.match(prompt) == 0
    assert store(cache, cache.lookup(prompt).missing) == 12


def test_an_older_epoch_may_be_given(cache: hc.KvCache, prompt: np.ndarray) -> None:
    began = cache.epoch
    cache.clear()
    missing = cache.lookup(prompt).missing
    assert len(cache.reserve(missing, epoch=began).refused) == 12
    assert len(cache.reserve(prompt, epoch=began).refused) == 12
    with cache.reserve(missing, epoch=cache.epoch) as reservation:
        assert len(reservation) == 12
    for wrong in ("1", 1.0, True, -1, 2**32 + cache.epoch):
        with pytest.raises(hc.BadValue, match="epoch"):
            cache.reserve(missing, epoch=wrong)  # type: ignore[arg-type]


def test_in_another_cache_it_is_just_keys(cache: hc.KvCache, prompt: np.ndarray, root: str) -> None:
    missing = cache.lookup(prompt).missing
    cache.clear()
    with hc.KvCache.open("elsewhere", FORMAT, page_count=16, root=root) as elsewhere:
        assert store(elsewhere, missing) == 8
    assert missing.origin("another source") == ((-1, 0), -1)
