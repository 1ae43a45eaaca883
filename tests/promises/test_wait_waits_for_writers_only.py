"""`wait` returns when pending pages are ready or their writer is gone; never for want of one."""

from __future__ import annotations

import signal
import threading

import pytest

import hostcache as hc
from helpers import Child, fill, keys_of, store

LONG_S = 3600.0  # a test that really waited would be stopped long before


@pytest.mark.portable
def test_keys_that_nobody_writes_are_not_waited_for(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    assert cache.wait(keys, timeout_s=LONG_S) == 0
    store(cache, keys[:4])
    assert cache.wait(keys, timeout_s=LONG_S) == 4
    assert cache.wait(keys[:4], timeout_s=LONG_S) == 4


def test_a_time_out_is_no_error(cache: hc.KvCache) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:2])
    with cache.reserve(keys) as reservation:
        assert len(reservation) == 4
        assert cache.wait(keys, timeout_s=0) == 2
        assert cache.wait(keys, timeout_s=0.05) == 2
    for wrong in (-1, float("nan"), float("inf"), "soon", None):
        with pytest.raises(hc.BadValue, match="timeout_s"):
            cache.wait(keys, wrong)  # type: ignore[arg-type]


@pytest.mark.portable
@pytest.mark.parametrize(("way", "ready"), [("commit", 6), ("abort", 2), ("clear", 0)])
def test_it_ends_with_the_writer(cache: hc.KvCache, child: Child, way: str, ready: int) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:2])
    reservation = cache.reserve(keys)
    fill(reservation, reservation.keys)
    child.send("result = cache.wait(keys_of('a', 6), 3600.0)")
    if way == "clear":
        cache.clear()
    getattr(reservation, "commit" if way == "commit" else "abort")()
    assert child.answer() == ready


@pytest.mark.portable
def test_it_ends_when_the_writer_is_killed(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 6)
    store(cache, keys[:2])
    child.run("held = cache.reserve(keys_of('a', 6)); result = len(held)")
    answers: list[int] = []
    waiter = threading.Thread(target=lambda: answers.append(cache.wait(keys, LONG_S)))
    waiter.start()
    child.kill()
    waiter.join()
    assert answers == [2]
    assert cache.stats().reserved == 0


def test_other_threads_go_on_while_one_waits(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    reservation = cache.reserve(keys)
    answers: list[int] = []
    waiter = threading.Thread(target=lambda: answers.append(cache.wait(keys, LONG_S)))
    waiter.start()
    fill(reservation, keys)
    assert store(cache, keys_of("b", 4)) == 4
    assert reservation.commit() == 4
    waiter.join()
    assert answers == [4]


def test_it_can_be_interrupted(cache: hc.KvCache, child: Child) -> None:
    reservation = cache.reserve(keys_of("a", 4))
    child.run("import signal, threading")
    child.send(
        "main = threading.main_thread().ident\n"
        "threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()\n"
        "try: cache.wait(keys_of('a', 4), 3600.0)\n"
        "except KeyboardInterrupt: result = 'interrupted'\n"
    )
    assert child.answer() == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert reservation.commit() == 4
