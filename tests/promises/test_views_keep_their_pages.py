"""A page stays held while any view of it, or array made from a view, lives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

import hostcache as hc
from helpers import PAGE_BYTES, PAGE_COUNT, fill, keys_of, page_of, press, store, unheld


@pytest.mark.portable
def test_views_are_one_dimensional_bytes(cache: hc.KvCache) -> None:
    keys = keys_of("a", 2)
    with cache.reserve(keys) as reservation:
        view = reservation.view(1)
        assert (view.ndim, view.format, view.nbytes, view.readonly) == (1, "B", PAGE_BYTES, False)
        np.frombuffer(view, np.uint8)[:] = 7
        del view
        reservation.commit()
    with cache.lookup(keys) as lease:
        view = lease.view(1)
        assert (view.ndim, view.format, view.nbytes, view.readonly) == (1, "B", PAGE_BYTES, True)
        assert bytes(view) == b"\x07" * PAGE_BYTES
        del view


@pytest.mark.portable
def test_views_of_a_lease_are_read_only(cache: hc.KvCache) -> None:
    keys = keys_of("a", 2)
    store(cache, keys)
    with cache.lookup(keys) as lease:
        view = lease.view(0)
        with pytest.raises(TypeError):
            view[0] = 1
        array = np.frombuffer(view, np.uint8)
        assert not array.flags.writeable
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(view)[0] = 1
        with pytest.raises(TypeError, match="read-only"):
            memoryview(view).cast("Q")[0] = 1
        del view, array
    with cache.lookup(keys) as lease:
        assert bytes(lease.view(0)) == page_of(keys[0])


@pytest.mark.portable
def test_pages_stay_held_while_a_view_lives(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease = cache.lookup(keys)
    first, last = lease.view(0), lease.view(3)
    lease.release()
    assert other.stats().pinned == 4  # one pin holds all of a lease
    press(other)
    assert (bytes(first), bytes(last)) == (page_of(keys[0]), page_of(keys[3]))
    del first
    gc.collect()
    press(other)
    assert bytes(last) == page_of(keys[3])
    del last
    gc.collect()
    assert unheld(other)
    press(other)
    assert other.match(keys) == 0


def test_a_released_memoryview_lets_go(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    with cache.lookup(keys) as lease, lease.view(2) as view:
        assert bytes(view) == page_of(keys[2])
    assert unheld(cache)
    with pytest.raises(ValueError, match="released"):
        bytes(view)


@pytest.mark.portable
def test_arrays_outlive_release_and_close(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease = cache.lookup(keys)
    array = np.frombuffer(lease.view(2), np.uint32)[5:900].reshape(5, 179)
    expected = array.copy()
    lease.release()
    cache.close()
    del lease
    gc.collect()
    press(other)
    assert np.array_equal(array, expected)
    assert other.stats().pinned == 4
    assert other.stats().sessions == 2  # the session ends with its last view
    del array
    gc.collect()
    assert unheld(other)
    assert other.stats().sessions == 1
    assert other.check() == []


@pytest.mark.portable
def test_arrays_that_outlive_a_commit_make_it_a_lease(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    array = np.frombuffer(reservation.view(5), np.uint8)
    assert reservation.commit() == 6
    assert other.match(keys) == 6
    assert (other.stats().reserved, other.stats().pinned) == (0, 6)
    press(other)
    assert array.tobytes() == page_of(keys[5])
    del array
    gc.collect()
    assert unheld(other)
    press(other)
    assert other.match(keys) == 0


def test_a_commit_of_the_first_pages_under_a_view(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    views = [reservation.view(i) for i in (0, 5)]
    assert reservation.commit(4) == 4
    press(other)
    assert other.match(keys) == 4
    assert bytes(views[1]) == page_of(keys[5])  # its page is nobody else's yet
    views.clear()
    gc.collect()
    assert unheld(other)
    assert other.stats().free + other.stats().ready == PAGE_COUNT


@pytest.mark.parametrize("way", ["abort", "raise", "leave"])
def test_arrays_that_outlive_an_abort_keep_the_page_to_themselves(
    cache: hc.KvCache, other: hc.KvCache, way: str
) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys)
    fill(reservation, keys)
    array = np.frombuffer(reservation.view(1), np.uint8)
    if way == "abort":
        reservation.abort()
    elif way == "raise":
        with pytest.raises(KeyError), reservation:
            raise KeyError
    else:
        with reservation:
            pass
    assert other.wait(keys, 60) == 0
    assert other.stats().reserved == 4
    assert store(other, keys) == 4  # the keys left at once
    press(other)
    assert array.tobytes() == page_of(keys[1])
    del array
    gc.collect()
    assert unheld(other)


def test_a_dropped_reservation_lasts_as_long_as_its_arrays(
    cache: hc.KvCache, other: hc.KvCache
) -> None:
    keys = keys_of("a", 4)
    array = np.frombuffer(cache.reserve(keys).view(1), np.uint8)
    gc.collect()
    array[:] = 3
    assert other.stats().reserved == 4
    assert other.reserve(keys).pending == list(map(bytes, keys))
    del array
    gc.collect()
    assert other.stats().free == PAGE_COUNT


def test_a_part_is_committed_when_its_arrays_are_gone(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    with cache.reserve(keys, parts=2) as reservation:
        first = other.claim(reservation.token(), 0)
        second = cache.claim(reservation.token(), 1)
        assert first is not None
        assert second is not None
        fill(first, keys)
        view = first.view(0)
        assert first.commit() == 0
        assert second.commit() == 0
        assert cache.match(keys) == 0
        with pytest.raises(hc.LeaseEnded):
            first.view(0)
        del view
        gc.collect()
        assert cache.wait(keys, 60) == 4
    assert cache.match(keys) == 4


def release_orders() -> list[tuple[str, ...]]:
    """Every order in which a lease, its views and its session can go."""
    return list(permutations(("release", "lease", "view", "array", "close")))


def test_no_order_of_going_keeps_a_page(opened: Callable[..., hc.KvCache]) -> None:
    keys = keys_of("a", 4)
    judge = opened()
    store(judge, keys)
    for order in release_orders():
        session = opened()
        lease = session.lookup(keys)
        held: dict[str, object] = {"lease": lease, "view": lease.view(1)}
        held["array"] = np.frombuffer(lease.view(2), np.uint8)
        for step in order:
            if step == "release":
                lease.release()
            elif step == "close":
                session.close()
            else:
                del held[step]
                gc.collect(0)
        del lease, session, held
        assert unheld(judge), order
        assert judge.match(keys) == 4, order
        assert judge.check() == [], order
    gc.collect()
    assert judge.stats().sessions == 1


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_no_order_of_going_keeps_a_reserved_page(
    opened: Callable[..., hc.KvCache], end: str
) -> None:
    judge = opened()
    for number, order in enumerate(permutations(("end", "reservation", "view", "array", "close"))):
        keys = keys_of(f"{number}", 3)
        session = opened()
        reservation = session.reserve(keys)
        held: dict[str, object] = {"reservation": reservation, "view": reservation.view(1)}
        held["array"] = np.frombuffer(reservation.view(2), np.uint8)
        closed_first = order.index("close") < order.index("end")
        for step in order:
            if step == "end" and closed_first and end == "commit":
                with pytest.raises(hc.LeaseEnded):
                    reservation.commit()
            elif step == "end":
                getattr(reservation, end)()
            elif step == "close":
                session.close()
            else:
                del held[step]
                gc.collect(0)
        del reservation, session, held
        assert unheld(judge), order
        assert judge.match(keys) == (3 if end == "commit" and not closed_first else 0), order
        assert judge.check() == [], order
    gc.collect()
    assert judge.stats().sessions == 1


def test_a_cycle_of_garbage_is_given_back(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    ring: list[object] = [cache.lookup(keys), other.lookup(keys).view(0), other.reserve(keys[:0])]
    ring.append(ring)
    del ring
    gc.collect()
    assert unheld(cache)


def test_many_leases_come_and_go(cache: hc.KvCache) -> None:
    keys = keys_of("a", 8)
    store(cache, keys)
    leases = [cache.lookup(keys[: 1 + i % 8]) for i in range(1000)]
    views = [lease.view(0) for lease in leases]
    for lease in leases[::2]:
        lease.release()
    del leases, lease
    gc.collect()
    assert cache.stats().pinned == 8
    assert all(bytes(view) == page_of(keys[0]) for view in views)
    del views
    gc.collect()
    assert unheld(cache)
