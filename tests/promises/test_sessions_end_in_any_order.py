"""No order of close, fork and interpreter exit crashes, leaks a hold or ends another's."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

import hostcache as hc
from helpers import PAGE_COUNT, holds_right_bytes, keys_of, page_of, run_python, store, unheld


@pytest.mark.portable
def test_close_ends_what_the_session_holds(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease, reservation = cache.lookup(keys), cache.reserve(keys_of("b", 4))
    cache.close()
    assert unheld(other)
    for call in (lambda: lease.view(0), lambda: reservation.view(0), reservation.commit):
        with pytest.raises(hc.LeaseEnded):
            call()
    lease.release()
    reservation.abort()
    reservation.end()
    assert lease.pages.shape == (4,)
    assert other.match(keys) == 4
    assert other.stats().sessions == 1


@pytest.mark.portable
def test_close_may_come_twice_and_by_with(opened: Callable[..., hc.KvCache]) -> None:
    keys = keys_of("a", 2)
    with opened() as cache:
        store(cache, keys)
        cache.close()
    cache.close()
    assert "closed" in repr(cache)
    assert (cache.name, cache.page_count, cache.format.page_bytes) == ("chat", PAGE_COUNT, 4096)
    calls: list[Callable[[], object]] = [
        lambda: cache.match(keys),
        lambda: cache.lookup(keys),
        lambda: cache.reserve(keys),
        lambda: cache.wait(keys, 0),
        cache.clear,
        cache.stats,
        cache.check,
    ]
    for call in calls:
        with pytest.raises(hc.HostCacheError, match="closed"):
            call()
    assert opened().match(keys) == 2  # pages outlive their sessions


def test_a_session_lives_as_long_as_what_it_gave(opened: Callable[..., hc.KvCache]) -> None:
    keys = keys_of("a", 4)
    judge = opened()
    store(judge, keys)
    lease = hc.KvCache.attach(judge.name, root=os.path.dirname(judge.info["path"])).lookup(keys)
    gc.collect()
    assert judge.stats().pinned == 4
    assert holds_right_bytes(lease, keys)
    lease.release()
    del lease
    gc.collect()
    assert unheld(judge)
    assert judge.stats().sessions == 1


def test_two_opens_in_one_process_are_two_sessions(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    mine, others = cache.lookup(keys), other.lookup(keys)
    assert cache.stats().sessions == 2
    assert cache.info["session"] != other.info["session"]
    cache.close()
    assert holds_right_bytes(others, keys)
    assert other.stats().pinned == 4
    with pytest.raises(hc.LeaseEnded):
        mine.view(0)


def test_many_threads_use_one_cache(cache: hc.KvCache) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        keys = keys_of(f"thread/{number % 3}", 5)
        for _ in range(60):
            with cache.lookup(keys) as lease:
                if not holds_right_bytes(lease, keys):
                    wrong.append(keys)
                store(cache, lease.missing)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert unheld(cache)


_EXIT = """
import gc, os
import numpy as np
import hostcache as hc
from helpers import *
root = sys.argv[1]
def opened():
    return hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=root)
cache, keys = opened(), keys_of("a", 4)
store(cache, keys)
"""


# What a program leaves alive when it ends.
_LEFT = {
    "a view of a lease": "lease = cache.lookup(keys); view = lease.view(0)",
    "an array of a lease": "array = np.frombuffer(cache.lookup(keys).view(0), np.uint8)",
    "an array of a closed session": """
array = np.frombuffer(cache.reserve(keys_of('b', 4)).view(0), np.uint8)
cache.close()
""",
    "a lease of a closed session": "lease = cache.lookup(keys); cache.close(); del cache",
    "a view of what was committed": """
reservation = cache.reserve(keys_of('b', 4))
view = reservation.view(1)
reservation.commit()
""",
    "a claimed part": """
reservation = cache.reserve(keys_of('b', 4), parts=2)
part = cache.claim(reservation.token(), 0)
view = part.view(0)
""",
    "a cycle": "ring = [cache, cache.lookup(keys)]; ring.append(ring); del cache",
    "a builtin": "import builtins; builtins.kept = [cache.lookup(keys).view(0), cache, opened()]",
    "a thread that waits": """
import threading
held = opened().reserve(keys_of('b', 4))
threading.Thread(target=cache.wait, args=(keys_of('b', 4), 0.5)).start()
""",
    "a daemon thread that waits": """
import threading
held = opened().reserve(keys_of('b', 4))
threading.Thread(target=cache.wait, args=(keys_of('b', 4), 3600.0), daemon=True).start()
""",
    "daemon threads that look up": """
import threading, time
def look_up():
    while True:
        try: cache.lookup(keys).release()
        except hc.LeaseEnded: pass
for _ in range(2): threading.Thread(target=look_up, daemon=True).start()
time.sleep(0.05)
""",
    "a view that is read last": """
import atexit
view = cache.lookup(keys).view(0)
atexit.register(lambda: bytes(view))
""",
    "nothing": "hc._core.shutdown(); hc._core.shutdown(); cache.close()",
}


_PORTABLE = ("a view of a lease", "a view of what was committed", "a daemon thread that waits")


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(code, id=name, marks=[pytest.mark.portable] if name in _PORTABLE else [])
        for name, code in _LEFT.items()
    ],
)
def test_the_interpreter_exits_with_anything_alive(cache: hc.KvCache, root: str, last: str) -> None:
    ended = run_python(_EXIT + last, root)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert cache.wait(keys_of("b", 4), 60) >= 0
    assert unheld(cache)
    assert cache.stats().sessions == 1
    assert cache.match(keys_of("a", 4)) == 4


# Our timer is a thread, so CPython 3.12 and later warn of every fork.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def in_a_fork(work: Callable[[], bool]) -> int:
    """Run `work` in a forked child; 0 if it returned True."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@forks
@pytest.mark.portable
def test_in_a_forked_child_inherited_holds_do_nothing(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys, more = keys_of("a", 4), keys_of("b", 4)
    store(cache, keys)
    lease, reservation = cache.lookup(keys), cache.reserve(more)
    array = np.frombuffer(lease.view(1), np.uint8)

    def inherited() -> bool:
        nonlocal array
        ends = [lease.release, reservation.abort, reservation.end]
        for end in ends:
            end()
        for call in (lambda: lease.view(0), lambda: reservation.view(0), reservation.commit):
            with pytest.raises(hc.LeaseEnded):
                call()
        readable = array.tobytes() == page_of(keys[1])
        del array
        gc.collect()
        return readable

    assert in_a_fork(inherited) == 0
    assert (other.stats().pinned, other.stats().reserved) == (4, 4)
    assert holds_right_bytes(lease, keys)
    assert reservation.commit() == 4
    assert other.match(more) == 4


@forks
@pytest.mark.portable
def test_a_forked_child_gets_a_session_of_its_own(cache: hc.KvCache, other: hc.KvCache) -> None:
    keys, more = keys_of("a", 4), keys_of("b", 4)
    store(cache, keys)

    def goes_on() -> bool:
        with cache.lookup(keys) as lease:
            right = len(lease) == 4 and holds_right_bytes(lease, keys)
        stored = store(cache, more)
        cache.close()
        return right and stored == 4

    assert in_a_fork(goes_on) == 0
    assert other.match(more) == 4
    assert cache.match(keys) == 4  # the parent's session is untouched
    assert unheld(other)
    assert other.stats().sessions == 2


@forks
def test_closing_in_a_forked_child_closes_nothing_of_the_parent(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease = cache.lookup(keys)

    def closes() -> bool:
        cache.close()
        gc.collect()
        return True

    assert in_a_fork(closes) == 0
    assert cache.match(keys) == 4
    assert holds_right_bytes(lease, keys)
    assert cache.stats().pinned == 4


@forks
def test_a_forked_child_that_dies_takes_nothing_along(cache: hc.KvCache) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)

    def dies() -> bool:
        held = cache.lookup(keys), cache.reserve(keys_of("b", 4))
        os.kill(os.getpid(), 9)
        return bool(held)

    assert in_a_fork(dies) == -9
    assert cache.wait(keys_of("b", 4), 60) == 0
    assert unheld(cache)
    assert cache.stats().sessions == 1
    assert cache.stats().repairs == 1


@forks
def test_forks_of_a_busy_process(cache: hc.KvCache) -> None:
    """Other threads are in calls, and so may hold anything, when the process forks."""
    going_on = threading.Event()
    going_on.set()

    def work(number: int) -> None:
        while going_on.is_set():
            keys = keys_of(f"thread/{number}", 4)
            with cache.lookup(keys) as lease:
                store(cache, lease.missing)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    statuses = []
    for number in range(12):
        keys = keys_of(f"child/{number}", 3)
        statuses.append(in_a_fork(lambda keys=keys: store(cache, keys) == 3))  # type: ignore[misc]
    going_on.clear()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 12
    assert unheld(cache)
    assert cache.stats().sessions == 1
