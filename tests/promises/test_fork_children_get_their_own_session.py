"""A forked child has its parent's objects but not its parent's session: what was held before the
fork is the parent's alone, and a cache that the child goes on using gets a session of its own.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostcache as hc
from helpers import FORMAT, PAGE_COUNT, fill, holds_right_bytes, keys_of, page_of, store, unheld
from processes import (
    Forked,
    process_state,
    run_function,
    say,
    started,
    surely_look_up,
    surely_store,
)

# Our timer is a thread, so CPython 3.12 and later warn of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

READY, WRITTEN, LENT, OWN = (keys_of(prompt, 4) for prompt in ("ready", "written", "lent", "own"))


def opened(root: str) -> hc.KvCache:
    return hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=root)


class Taken:
    """One of everything that can be held, taken by whoever makes it."""

    def __init__(self, cache: hc.KvCache) -> None:
        store(cache, READY)
        self.lease = cache.lookup(READY)
        self.view = self.lease.view(1)
        self.array = np.frombuffer(self.lease.view(2), np.uint8)
        self.reservation = cache.reserve(WRITTEN)
        fill(self.reservation, WRITTEN)
        self.lent = cache.reserve(LENT, parts=2)
        part, reading = cache.claim(self.lent.token(), 0), cache.lookup(READY, parts=1)
        read_part = cache.claim(reading.token(), 0)
        assert part is not None
        assert read_part is not None
        self.part, self.reading, self.read_part = part, reading, read_part
        fill(self.part, LENT)

    def bytes_are_right(self) -> bool:
        return bytes(self.view) == page_of(READY[1]) and self.array.tobytes() == page_of(READY[2])

    def is_untouched(self, cache: hc.KvCache, other: hc.KvCache) -> None:
        """All that was taken is still held, and can be brought to its end."""
        stats = other.stats()
        assert (stats.pinned, stats.reserved) == (4, 8), stats
        assert other.match(READY) == 4
        assert len(other.reserve(WRITTEN).pending) == 4
        assert self.bytes_are_right()
        assert holds_right_bytes(self.lease, READY)
        assert bytes(self.read_part.view(3)) == page_of(READY[3])
        assert self.reservation.commit() == 4
        last = other.claim(self.lent.token(), 1)
        assert last is not None
        assert (self.part.commit(), last.commit()) == (0, 4)
        for keys in (WRITTEN, LENT):
            with other.lookup(keys) as lease:
                assert len(lease) == 4
                assert holds_right_bytes(lease, keys)
        del self.view, self.array, self.lease, self.read_part, self.reading
        gc.collect()
        assert unheld(other)
        assert other.stats().sessions == 2
        assert other.check() == []


def end_all(taken: Taken) -> None:
    """Every end there is, twice."""
    for _ in range(2):
        taken.lease.release()
        taken.reservation.abort()
        taken.reservation.end()
        taken.lent.end()
        taken.part.abort()
        taken.reading.release()
        taken.read_part.abort()
    taken.view.release()


def views_and_commits_are_refused(taken: Taken) -> None:
    calls: list[Callable[[], object]] = [
        lambda: taken.lease.view(0),
        lambda: taken.reservation.view(0),
        lambda: taken.part.view(0),
        lambda: taken.read_part.view(0),
        taken.reservation.commit,
        lambda: taken.reservation.commit(2),
        taken.part.commit,
    ]
    for call in calls:
        with pytest.raises(hc.LeaseEnded):
            call()


def with_statements(taken: Taken) -> None:
    for hold in (taken.lease, taken.part, taken.reading, taken.reservation, taken.read_part):
        with hold:
            pass


def drop_all(taken: Taken) -> None:
    taken.__dict__.clear()
    gc.collect()


_DOES: dict[str, Callable[[Taken], None]] = {
    "every end": end_all,
    "views and commits": views_and_commits_are_refused,
    "with statements": with_statements,
    "dropping": drop_all,
    "reading": lambda taken: sys.exit(not taken.bytes_are_right()),
}


@pytest.mark.portable
@pytest.mark.parametrize("does", list(_DOES))
def test_what_a_child_does_with_inherited_holds_is_nothing(
    cache: hc.KvCache, other: hc.KvCache, tmp_path: Path, does: str
) -> None:
    taken = Taken(cache)
    child = Forked(lambda: _DOES[does](taken), tmp_path / "child")
    assert child.wait() == 0, child.said()
    taken.is_untouched(cache, other)


# ---------------------------------------------------------------- how a child ends


def end_as(way: str) -> None:
    """In a forked child; its caller returns to the end of the program where this returns."""
    if way == "sys.exit":
        sys.exit(5)
    if way == "os._exit":
        os._exit(6)
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exception":
        raise RuntimeError("on purpose")


WAYS = {"return": 0, "sys.exit": 5, "os._exit": 6, "SIGKILL": -9, "exception": 1}


def holds_forks_and_looks(root: str, way: str) -> None:
    cache, other = opened(root), opened(root)
    taken = Taken(cache)
    for uses in (False, True):
        pid = os.fork()
        if pid == 0:
            if uses:  # its own session ends with holds too
                own = cache.lookup(READY), cache.reserve(OWN), other.lookup(READY)
                assert [len(hold) for hold in own] == [4, 4, 4]
            end_as(way)
            return
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == WAYS[way]
        assert cache.wait(OWN, 60) == 0
    taken.is_untouched(cache, other)
    assert other.stats().repairs == (2 if way in ("os._exit", "SIGKILL") else 0)
    print("untouched")


@pytest.mark.parametrize("way", list(WAYS))
def test_however_a_child_ends(root: str, way: str) -> None:
    ended = run_function(holds_forks_and_looks, root, way)
    assert (ended.returncode, ended.stdout) == (0, "untouched\n"), ended.stderr
    if way == "exception":
        assert ended.stderr.count("Traceback") == 2
        assert ended.stderr.endswith("RuntimeError: on purpose\n")
    else:
        assert ended.stderr == ""
    with hc.KvCache.attach("chat", root=root) as cache:
        assert unheld(cache)
        assert (cache.info["replaced"], cache.stats().sessions) == ("", 1)
        assert cache.match(READY) == 4


def hammer(cache: hc.KvCache, number: int, going_on: threading.Event, wrong: list[str]) -> None:
    keys = keys_of(f"thread/{number}", 5)
    while going_on.is_set():
        with cache.lookup(keys) as lease:
            if not holds_right_bytes(lease, keys):
                wrong.append(f"thread {number} read wrong bytes")
            store(cache, lease.missing)
        if number == 0:
            cache.reserve(keys_of("never", 3)).abort()
        time.sleep(0.0002)  # the one that forks wants the GIL too


def forks_while_threads_hammer(root: str) -> None:
    """Whatever lock a thread holds at the fork must not hang or mislead the child."""
    cache, going_on, wrong = opened(root), threading.Event(), list[str]()
    going_on.set()
    threads = [
        threading.Thread(target=hammer, args=(cache, number, going_on, wrong))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    surely_store(cache, READY)
    lease = surely_look_up(cache, READY)
    codes = []
    for number in range(20):
        way = list(WAYS)[number % len(WAYS)] if number % 5 != 4 else "return"
        pid = os.fork()
        if pid == 0:
            if number % 2:
                session = cache.info["session"]
                mine = keys_of(f"child/{number}", 3)
                surely_store(cache, mine)
                mine_held = surely_look_up(cache, mine), cache.reserve(OWN)
                assert mine_held
                assert cache.info["session"] == session
            lease.release()
            end_as(way)
            return
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == WAYS[way])
    going_on.clear()
    for thread in threads:
        thread.join()
    assert all(codes), codes
    assert not wrong, wrong
    assert holds_right_bytes(lease, READY)
    assert cache.stats().pinned == 4
    lease.release()
    assert unheld(cache)
    assert cache.stats().sessions == 1
    assert cache.check() == []
    print("20 forks")


def test_20_forks_of_a_process_whose_threads_hammer(root: str) -> None:
    ended = run_function(forks_while_threads_hammer, root)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "20 forks\n", "")


# ---------------------------------------------------------------- whose session


@pytest.mark.portable
def test_each_generation_has_a_session_of_its_own(
    cache: hc.KvCache, other: hc.KvCache, tmp_path: Path
) -> None:
    store(cache, READY)
    mine = cache.info["session"]
    seen: Any = {}

    def grandchild() -> None:
        with cache.lookup(READY) as lease:
            assert holds_right_bytes(lease, READY)
        assert len({mine, seen["child"], cache.info["session"]}) == 3
        assert other.stats().sessions == 5  # ours twice, the child's, and two of this one

    def child() -> None:
        lease = cache.lookup(READY)
        seen["child"] = cache.info["session"]
        assert seen["child"] != mine
        assert holds_right_bytes(lease, READY)
        assert Forked(grandchild, tmp_path / "grandchild").wait() == 0
        assert cache.info["session"] == seen["child"]
        assert len(lease) == 4
        (tmp_path / "seen").write_text(json.dumps(seen), encoding="ascii")

    forked = Forked(child, tmp_path / "child")
    assert forked.wait() == 0, forked.said() + (tmp_path / "grandchild").read_text("utf-8")
    theirs = json.loads((tmp_path / "seen").read_text(encoding="ascii"))
    assert theirs["child"] > mine
    assert cache.info["session"] == mine
    assert unheld(other)
    assert other.stats().sessions == 2


def test_a_child_claims_as_itself(cache: hc.KvCache, other: hc.KvCache, tmp_path: Path) -> None:
    """Parts are how a parent shares a hold with its forked children on purpose."""
    reservation = cache.reserve(LENT, parts=2)
    mine = cache.claim(reservation.token(), 0)
    assert mine is not None
    token = reservation.token()

    def claims() -> None:
        assert cache.claim(token, 0) is None  # it is its parent's
        theirs = cache.claim(token, 1)
        assert theirs is not None
        fill(theirs, LENT)
        assert theirs.commit() == 0

    def claims_and_dies() -> None:
        assert cache.claim(lost.token(), 0) is not None
        os.kill(os.getpid(), signal.SIGKILL)

    child = Forked(claims, tmp_path / "child")
    assert child.wait() == 0, child.said()
    assert mine.commit() == 4
    assert other.match(LENT) == 4
    lost = cache.reserve(WRITTEN, parts=1)
    child = Forked(claims_and_dies, tmp_path / "child")
    assert child.wait() == -9, child.said()
    assert other.wait(WRITTEN, 60) == 0
    assert unheld(other)


def test_children_of_a_closed_or_removed_cache(
    cache: hc.KvCache, other: hc.KvCache, root: str, tmp_path: Path
) -> None:
    def finds_it_closed() -> None:
        with pytest.raises(hc.HostCacheError, match="closed"):
            other.match(READY)

    def finds_it_gone() -> None:
        with pytest.raises(hc.CacheNotFound, match="chat"):
            cache.match(READY)

    store(cache, READY)
    lease = cache.lookup(READY)
    other.close()
    child = Forked(finds_it_closed, tmp_path / "child")
    assert child.wait() == 0, child.said()
    hc.remove("chat", root)
    child = Forked(finds_it_gone, tmp_path / "child")
    assert child.wait() == 0, child.said()
    assert holds_right_bytes(lease, READY)


def holds_forks_and_sleeps(root: str, uses: bool, said: str) -> None:
    """To be killed: the parent of a child that lives on with all it inherited."""
    cache = opened(root)
    taken = Taken(cache)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = [cache.lookup(READY), cache.reserve(OWN)] if uses else []
        os.write(write, b"x")
        time.sleep(600)
        assert taken
        assert own
    os.read(read, 1)
    say(said, child)
    time.sleep(600)


@pytest.mark.parametrize("uses", [False, True], ids=["idle", "with a session of its own"])
def test_a_parent_is_killed_and_its_child_lives(root: str, tmp_path: Path, uses: bool) -> None:
    with (
        opened(root) as cache,
        started(tmp_path / "said", holds_forks_and_sleeps, root, uses) as (parent, pids),
    ):
        assert cache.stats().sessions == 2 + uses
        assert cache.stats().reserved == 8 + 4 * uses
        parent.kill()
        parent.wait()
        assert cache.wait(WRITTEN, 60) == 0
        assert len(cache.reserve(WRITTEN)) == 4
        assert process_state(pids[0]) not in ("", "Z")
        if uses:  # what the child holds itself stays
            assert (cache.stats().pinned, cache.stats().reserved) == (4, 4)
            assert cache.stats().sessions == 2
            os.kill(pids[0], signal.SIGKILL)
            assert cache.wait(OWN, 60) == 0
        assert unheld(cache)
        assert cache.stats().sessions == 1
        assert cache.match(READY) == 4
        assert cache.check() == []
