"""A session that is stopped (SIGSTOP, a debugger, a frozen container) is not dead: it keeps what it
holds. Nobody waits for it without a bound, not even where it was stopped inside the table lock.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
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
from processes import Forked, lock_word, wait_until


def is_stopped(pid: int) -> bool:
    """Whether every thread of it is."""
    states = [
        Path(f"/proc/{pid}/task/{task}/stat").read_text(encoding="ascii").rpartition(")")[2]
        for task in os.listdir(f"/proc/{pid}/task")
    ]
    return all(state.split()[0] == "T" for state in states)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(pid))


@pytest.mark.portable
def test_the_stopped_keep_what_they_hold_and_others_go_on(
    cache: hc.KvCache, start_child: Callable[[], Child]
) -> None:
    read, written = keys_of("read", 6), keys_of("written", 6)
    store(cache, read)
    reader, writer, busy = start_child(), start_child(), start_child()
    reader.run("lease = cache.lookup(keys_of('read', 6)); view = lease.view(5)")
    writer.run("mine = cache.reserve(keys_of('written', 6)); fill(mine, mine.keys[:3])")
    stop(reader.process.pid)
    stop(writer.process.pid)
    assert len(cache.reserve(written).pending) == 6
    assert cache.wait(written, timeout_s=0.1) == 0

    # All that can be evicted is, twice over, by two sessions; a third comes and goes.
    press(cache)
    busy.run("press(cache, 'busy'); result = cache.check()")
    newcomer = start_child()
    assert newcomer.run("result = cache.match(keys_of('read', 6))") == 6
    assert newcomer.leave() == 0
    with cache.reserve(keys_of("big", PAGE_COUNT)) as reservation:
        assert len(reservation) == PAGE_COUNT - 12
        assert len(reservation.refused) == 12
    stats = cache.stats()
    assert (stats.reserved, stats.pinned, stats.sessions) == (6, 6, 4)
    assert stats.repairs == 0
    assert cache.check() == []

    for child in (reader, writer):
        child.signal(signal.SIGCONT)
    assert reader.run("result = holds_right_bytes(lease, keys_of('read', 6))")
    assert reader.run("result = bytes(view) == page_of(keys_of('read', 6)[5])")
    assert writer.run("fill(mine, mine.keys); result = mine.commit()") == 6
    with cache.lookup(written) as lease:
        assert len(lease) == 6
        assert holds_right_bytes(lease, written)


def test_a_stopped_session_that_is_killed_is_dead(cache: hc.KvCache, child: Child) -> None:
    store(cache, keys_of("a", 4))
    child.run("held = cache.lookup(keys_of('a', 4)), cache.reserve(keys_of('b', 8))")
    stop(child.process.pid)
    assert (cache.stats().pinned, cache.stats().reserved) == (4, 8)
    child.kill()  # SIGKILL needs no SIGCONT
    assert unheld(cache)
    assert len(cache.reserve(keys_of("b", 8))) == 8


# ---------------------------------------------------------------- inside the lock

# Pages so small, and prompts so long, that a call spends milliseconds inside.
SMALL = hc.PageFormat(page_bytes=64, page_tokens=1)
LONG = 16000


def open_big(root: str) -> hc.KvCache:
    return hc.KvCache.open("big", SMALL, page_count=LONG + 384, root=root)


def reserves_for_ever(root: str, shared: mmap.mmap) -> NoReturn:
    cache = open_big(root)
    shared[:8] = int(cache.info["session"]).to_bytes(8, "little")
    keys = np.frombuffer(random.randbytes(LONG * 32), np.uint8).reshape(LONG, 32)
    while True:
        with cache.reserve(keys):
            pass
        shared[8:16] = (int.from_bytes(shared[8:16], "little") + 1).to_bytes(8, "little")


class Busy:
    """A process that is inside the lock most of the time, and can be stopped there."""

    def __init__(self, root: str, log: Path, path: str) -> None:
        self._shared = mmap.mmap(-1, 16)
        self._path = path
        self.forked = Forked(lambda: reserves_for_ever(root, self._shared), log)
        assert wait_until(lambda: self.rounds() > 0 or self.forked.poll() is not None)
        assert self.forked.poll() is None, self.forked.said()

    def rounds(self) -> int:
        return int.from_bytes(self._shared[8:16], "little")

    def is_inside(self) -> bool:
        return lock_word(self._path) == int.from_bytes(self._shared[:8], "little")

    def stop_inside(self) -> bool:
        for _ in range(2000):
            stop(self.forked.pid)
            if self.is_inside():
                return True
            self.resume()
            time.sleep(random.uniform(0, 0.003))
        return False

    def resume(self) -> None:
        os.kill(self.forked.pid, signal.SIGCONT)

    def goes_on(self) -> bool:
        before = self.rounds()
        return wait_until(lambda: self.rounds() > before)


@pytest.fixture
def big(root: str) -> Iterator[hc.KvCache]:
    with open_big(root) as cache:
        yield cache


@pytest.fixture
def start_busy(big: hc.KvCache, root: str, tmp_path: Path) -> Iterator[Callable[[], Busy]]:
    started = []

    def start() -> Busy:
        started.append(Busy(root, tmp_path / "busy", big.info["path"]))
        return started[-1]

    yield start
    for busy in started:
        busy.forked.kill()


forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def look_on(cache: hc.KvCache, known: np.ndarray, lent: bytes, fresh: np.ndarray) -> None:
    """What another session's calls answer while the lock can not be had."""
    before = cache.stats().lock_timeouts
    for _ in range(50):
        lease = cache.lookup(known)
        assert (len(lease), len(lease.missing)) == (0, 4)
        reservation = cache.reserve(fresh)
        assert (len(reservation), len(reservation.refused)) == (0, 4)
        assert reservation.commit() == 0
        lease.release()
    assert cache.claim(lent, 0) is None
    assert cache.match(known) == 4  # takes no lock
    assert cache.wait(known, 60) == 4
    assert cache.wait(fresh, 60) == 0
    assert cache.stats().lock_timeouts > before
    assert cache.epoch == 0
    assert not cache.orphaned


@forks
@pytest.mark.parametrize("then", ["it resumes", "it is killed"])
def test_a_session_is_stopped_inside_the_lock(
    big: hc.KvCache, root: str, start_busy: Callable[[], Busy], then: str
) -> None:
    known, mine, fresh = keys_of("known", 4), keys_of("mine", 4), keys_of("fresh", 4)
    with big.reserve(known) as reservation:
        fill(reservation, known)
        assert reservation.commit() == 4
    lease, written = big.lookup(known), big.reserve(mine)
    dropped, aborted = big.lookup(known[:2]), big.reserve(keys_of("aborted", 4))
    lent = big.reserve(keys_of("lent", 4), parts=1)
    fill(written, mine)
    view = lease.view(3)
    assert [len(hold) for hold in (lease, written, dropped, aborted, lent)] == [4, 4, 2, 4, 4]
    busy = start_busy()
    assert busy.stop_inside(), "never caught inside the lock"

    token = lent.token()
    look_on(big, known, token, fresh)
    assert bytes(view) == page_of(known[3], 64)
    # Ends are remembered in order, and made when the lock can be had.
    assert written.commit() == 0
    aborted.abort()
    del dropped
    with hc.KvCache.attach("big", root=root) as newcomer:
        look_on(newcomer, known, token, fresh)
    with pytest.raises(hc.Busy, match=r"stopped.*hostcache stat"):
        big.check()
    assert busy.is_inside()  # nobody took the lock from the living
    assert big.match(mine) == 0

    if then == "it resumes":
        busy.resume()
        assert busy.goes_on()
    else:
        assert busy.forked.kill() == -9
    assert wait_until(lambda: big.match(mine) == 4)  # by the session's timer
    assert big.check() == []
    assert busy.forked.kill() == -9
    assert wait_until(lambda: big.stats().sessions == 1)
    part = big.claim(token, 0)
    assert part is not None
    part.abort()
    lease.release()
    assert bytes(view) == page_of(known[3], 64)
    del view
    assert unheld(big)
    stats = big.stats()
    assert (stats.sessions, stats.ready) == (1, 8)
    for keys in (known, mine):
        with big.lookup(keys) as again:
            assert len(again) == 4
            assert all(bytes(again.view(i)) == page_of(keys[i], 64) for i in range(4))
    assert big.check() == []


@forks
def test_a_session_is_stopped_again_and_again(
    big: hc.KvCache, start_busy: Callable[[], Busy]
) -> None:
    """Wherever it is stopped, others are answered, and afterwards all is as it should be."""
    keys, busy = keys_of("mine", 4), start_busy()
    inside = rounds = 0
    while rounds < 20 or (inside < 3 and rounds < 500):
        rounds += 1
        stop(busy.forked.pid)
        if busy.is_inside():
            inside += 1
            assert len(big.lookup(keys)) == 0
        else:
            with big.reserve(keys) as reservation:
                assert len(reservation) + len(reservation.refused) == 4
        busy.resume()
        assert busy.goes_on()
        assert big.check() == []
    assert inside >= 3
    assert busy.forked.kill() == -9
    assert unheld(big)
    assert big.stats().free == LONG + 384
