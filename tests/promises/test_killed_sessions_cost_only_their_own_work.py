"""SIGKILL at any moment: what was ready stays, what was held goes, and the others go on."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hostcache as hc
from helpers import (
    FORMAT,
    PAGE_COUNT,
    Child,
    holds_right_bytes,
    keys_of,
    press,
    run_python,
    store,
    unheld,
)
from processes import LOCK_AT, LONG_S, Forked, refusal, wait_until
from storm import PROMPTS, STORM_PAGES, Letters, StormWorker, is_right

# Our timer is a thread, so CPython 3.12 and later warn of every fork.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Storm:
    """Four workers, killed and replaced at random, and a session of ours that looks on."""

    def __init__(self, root: str, logs: Path, pause_s: float, own_pids: bool) -> None:
        self.root, self.logs, self.pause_s, self.own_pids = root, logs, pause_s, own_pids
        self.letters = Letters()
        self.dying: list[Forked] = []
        self.logs_begun = 0
        self.cache = hc.KvCache.open("storm", FORMAT, page_count=STORM_PAGES, root=root)
        with open(self.cache.info["path"], "rb") as segment:
            self.words = mmap.mmap(segment.fileno(), LOCK_AT + 4096, prot=mmap.PROT_READ)
        self.workers = [self.start(number) for number in range(4)]

    def start(self, number: int) -> Forked:
        def work() -> None:
            StormWorker(self.root, self.letters, number, self.pause_s).run()

        self.logs_begun += 1
        return Forked(work, self.logs / f"worker-{self.logs_begun}", self.own_pids)

    def aim(self, number: int) -> None:
        """Wait a little for the moment at which it is inside the lock."""
        wanted = int(self.letters.sessions[number])
        until = time.monotonic() + 0.01
        while int.from_bytes(self.words[LOCK_AT : LOCK_AT + 8], "little") >> 1 != wanted:
            if time.monotonic() > until:
                return

    def kill(self, number: int) -> None:
        """Its successor does not wait until the kernel has taken it apart."""
        self.workers[number].send_kill()
        self.dying.append(self.workers[number])

    def bury(self, timeout_s: float = 0) -> None:
        """Whoever is dead by now; each must have died of the kill."""
        codes = [(worker, worker.wait(timeout_s)) for worker in self.dying]
        for worker, code in codes:
            assert code in (None, -9), f"a worker ended by itself and said: {worker.said()}"
        self.dying = [worker for worker, code in codes if code is None]

    def all_go_on(self, but: int = -1) -> bool:
        """Whether the workers take further steps, whatever a kill left behind."""
        before = self.letters.steps()
        others = [number for number in range(4) if number != but]
        return wait_until(lambda: all(self.letters.steps()[n] > before[n] for n in others))

    def run(self, kills: int, least_s: float, most_s: float) -> None:
        assert self.all_go_on()
        for kill in range(kills):
            time.sleep(random.uniform(least_s, most_s))
            number = random.randrange(4)
            if kill % 3:
                self.aim(number)
            self.kill(number)
            if kill % 25 == 0:
                assert self.all_go_on(but=number), f"kill {kill}: the others stand still"
            self.workers[number] = self.start(number)
            if kill % 4 == 0:
                self.bury()
                assert self.cache.check() == [], f"kill {kill}"
        assert self.all_go_on()

    def ready_keys(self) -> int:
        """How many of all keys are ready; each must have bytes of its own."""
        ready = 0
        for keys in PROMPTS:
            with self.cache.lookup(keys, gaps=True) as lease:
                found = [i for i in range(len(keys)) if lease.pages[i] >= 0]
                assert all(is_right(lease.view(i), keys[i]) for i in found)
                ready += len(found)
        return ready

    def judge(self, kills: int) -> int:
        """After all were killed: nothing is held and all adds up. Returns how many are ready."""
        for number in range(4):
            self.kill(number)
        self.bury(LONG_S)
        assert self.dying == []
        assert wait_until(lambda: self.cache.stats().sessions == 1)
        assert unheld(self.cache)
        assert self.cache.check() == []
        stats = self.cache.stats()
        assert stats.free + stats.reserved + stats.ready == stats.page_count == STORM_PAGES
        assert stats.repairs > kills // 4  # some were killed before they had a session
        assert min(stats.commits, stats.hits, stats.evictions) > 10 * kills // 100
        assert not self.cache.orphaned
        ready = self.ready_keys()
        assert ready <= stats.ready  # those of an older epoch are found by nobody
        return ready


_AFTERWARDS = """
from helpers import *
from storm import *
with hc.KvCache.open("storm", FORMAT, page_count=STORM_PAGES, root=sys.argv[1]) as cache:
    found = [cache.lookup(keys, gaps=True) for keys in PROMPTS]
    ready = [(lease, i, keys) for lease, keys in zip(found, PROMPTS)
             for i in range(len(keys)) if lease.pages[i] >= 0]
    right = sum(is_right(lease.view(i), keys[i]) for lease, i, keys in ready)
    print(len(ready), right, cache.info["made"], cache.info["replaced"], cache.check())
"""


@pytest.fixture
def storm_of(root: str, tmp_path: Path) -> Iterator[Callable[..., Storm]]:
    storms = []

    def start(pause_s: float = 0.0, own_pids: bool = False) -> Storm:
        storms.append(Storm(root, tmp_path, pause_s, own_pids))
        return storms[-1]

    yield start
    for storm in storms:
        for worker in storm.workers + storm.dying:
            worker.kill()
        storm.cache.close()


@forks
@pytest.mark.parametrize(
    ("kills", "least_s", "most_s", "pause_s"),
    [
        pytest.param(300, 0.001, 0.008, 0.0, id="300 kills"),
        pytest.param(100, 0.005, 0.030, 0.0015, id="100 kills of workers that pause"),
        pytest.param(30, 0.001, 0.008, 0.0, id="30 kills", marks=pytest.mark.portable),
    ],
)
def test_a_storm_of_kills(
    storm_of: Callable[..., Storm],
    root: str,
    kills: int,
    least_s: float,
    most_s: float,
    pause_s: float,
) -> None:
    storm = storm_of(pause_s)
    storm.run(kills, least_s, most_s)
    ready = storm.judge(kills)
    # With the last session gone, a new process verifies the table and serves all that was ready.
    storm.cache.close()
    ended = run_python(_AFTERWARDS, root)
    assert (ended.stdout, ended.stderr) == (f"{ready} {ready} False  []\n", "")


@forks
def test_a_storm_in_which_each_is_process_1(storm_of: Callable[..., Storm]) -> None:
    """Numbers of processes and threads tell nothing between PID namespaces."""
    reason = refusal("unshare", "--pid", "--fork", "true")
    if reason:
        pytest.skip(f"PID namespaces can not be made here: {reason}")
    storm = storm_of(own_pids=True)
    storm.run(60, 0.002, 0.012)
    storm.judge(60)


@pytest.mark.portable
def test_all_die_and_every_ready_page_is_served(
    root: str, start_child: Callable[[], Child]
) -> None:
    children = [start_child() for _ in range(3)]
    for number, child in enumerate(children):
        assert child.run(f"result = store(cache, keys_of('p{number}', 8))") == 8
        child.run(f"lease = cache.lookup(keys_of('p{number}', 8)); view = lease.view(7)")
        child.run(f"mine = cache.reserve(keys_of('q{number}', 2)); mine.view(0)[:4] = b'half'")
    for child in children:
        child.kill()
    with hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=root) as cache:
        assert (cache.info["made"], cache.info["replaced"]) == (False, "")
        assert unheld(cache)
        assert cache.stats().ready == 24
        assert cache.stats().free == PAGE_COUNT - 24
        for number in range(3):
            keys = keys_of(f"p{number}", 8)
            with cache.lookup(keys) as lease:
                assert len(lease) == 8
                assert holds_right_bytes(lease, keys)
            assert len(cache.reserve(keys_of(f"q{number}", 2))) == 2
        assert cache.check() == []


def test_what_a_killed_writer_had_begun_is_gone(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 8)
    child.run("mine = cache.reserve(keys_of('a', 8)); fill(mine, mine.keys[:5])")
    child.run("mine.view(5)[:100] = bytes(100)")
    assert len(cache.reserve(keys).pending) == 8
    child.kill()
    # `stats` takes back what the dead held; the next call finds all of it free.
    assert wait_until(lambda: cache.stats().sessions == 1)
    assert cache.stats().reserved == 0
    assert cache.match(keys) == 0
    with cache.reserve(keys) as anew:
        assert (len(anew), anew.pending, anew.present) == (8, [], [])
    assert store(cache, keys) == 8
    assert cache.stats().aborts >= 8


def test_who_needs_room_takes_it_from_the_dead(cache: hc.KvCache, child: Child) -> None:
    """Nobody asks for statistics: a reservation alone finds what a dead writer and reader held."""
    store(cache, keys_of("a", 8))
    child.run("lease = cache.lookup(keys_of('a', 8))")
    child.run("mine = cache.reserve(keys_of('b', 24))")
    child.kill()

    def all_fit() -> bool:
        with cache.reserve(keys_of("c", PAGE_COUNT)) as reservation:
            return len(reservation) == PAGE_COUNT

    assert wait_until(all_fit)


def test_what_a_killed_reader_held_can_be_evicted(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 8)
    store(cache, keys)
    child.run("held = [cache.lookup(keys_of('a', n)) for n in (8, 3, 5)]; view = held[1].view(2)")
    assert cache.stats().pinned == 8
    press(cache)
    assert cache.match(keys) == 8
    child.kill()
    assert wait_until(lambda: cache.stats().pinned == 0)
    assert cache.stats().evictable == cache.stats().ready
    assert store(cache, keys_of("b", PAGE_COUNT)) == PAGE_COUNT
    assert cache.match(keys) == 0


@pytest.mark.parametrize("cleared", ["before the sweep", "after the sweep", "before the kill"])
def test_clear_works_on_what_the_dead_had_pending(
    cache: hc.KvCache, child: Child, cleared: str
) -> None:
    keys = keys_of("a", 8)
    store(cache, keys_of("b", 4))
    child.run("mine = cache.reserve(keys_of('a', 8)); fill(mine, mine.keys[:3])")
    child.run("lease = cache.lookup(keys_of('b', 4))")
    if cleared == "before the kill":
        cache.clear()
    child.kill()
    if cleared == "after the sweep":
        assert unheld(cache)
    if cleared != "before the kill":
        cache.clear()
    assert cache.match(keys_of("b", 4)) == 0
    assert wait_until(lambda: not cache.reserve(keys).pending)
    assert unheld(cache)
    assert store(cache, keys) == 8
    assert cache.match(keys) == 8
    press(cache)
    assert store(cache, keys_of("c", PAGE_COUNT)) == PAGE_COUNT


def test_a_taker_dies_and_its_claimer_lives(
    cache: hc.KvCache, start_child: Callable[[], Child]
) -> None:
    """The claimer may still be storing, so its pages stay; but nobody waits for them any more."""
    keys, taker = keys_of("a", 4), start_child()
    token = bytes.fromhex(
        taker.run("mine = cache.reserve(keys_of('a', 4), parts=2); result = mine.token().hex()")
    )
    part = cache.claim(token, 0)
    assert part is not None
    taker.kill()
    assert wait_until(lambda: len(cache.reserve(keys)) == 4)
    assert cache.stats().reserved == 4
    for i in range(4):
        part.view(i)[:] = b"\xee" * 4096
    assert store(cache, keys) == 4  # the same keys, elsewhere
    assert cache.claim(token, 1) is None
    assert part.commit() == 0
    assert unheld(cache)
    with cache.lookup(keys) as lease:
        assert len(lease) == 4
        assert holds_right_bytes(lease, keys)


def test_a_claimer_dies_and_its_taker_lives(
    cache: hc.KvCache, start_child: Callable[[], Child]
) -> None:
    keys, claimer = keys_of("a", 4), start_child()
    reservation = cache.reserve(keys, parts=2)
    claimer.run(f"part = cache.claim(bytes.fromhex('{reservation.token().hex()}'), 1)")
    assert claimer.run("result = len(part.pages)") == 4
    mine = cache.claim(reservation.token(), 0)
    assert mine is not None
    claimer.kill()
    assert wait_until(lambda: cache.stats().sessions == 1)
    assert mine.commit() == 0
    assert cache.match(keys) == 0
    assert unheld(cache)
    assert store(cache, keys) == 4
    reservation.end()
    assert cache.match(keys) == 4


def test_a_reader_of_a_lent_lease_dies(cache: hc.KvCache, start_child: Callable[[], Child]) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    lease = cache.lookup(keys, parts=2)
    text, readers = lease.token().hex(), [start_child(), start_child()]
    for number, reader in enumerate(readers):
        reader.run(f"part = cache.claim(bytes.fromhex('{text}'), {number})")
    lease.end()
    readers[0].kill()
    assert wait_until(lambda: cache.stats().sessions == 2)
    press(cache)
    assert cache.stats().pinned == 4
    assert readers[1].run(
        "result = holds_right_bytes(cache.lookup(keys_of('a', 4)), "
        "keys_of('a', 4)) and bytes(part.view(3)) == page_of(keys_of('a', 4)[3])"
    )
    readers[1].kill()
    assert unheld(cache)


def test_names_taken_away_from_the_dead(cache: hc.KvCache, root: str, child: Child) -> None:
    """A session of a removed cache dies: the new cache of that name is not touched."""
    child.run("mine = cache.reserve(keys_of('a', 8)); lease = cache.lookup(keys_of('b', 1))")
    hc.remove("chat", root)
    with hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=root) as anew:
        assert cache.orphaned
        mine = anew.reserve(keys_of("a", 8))
        child.kill()
        assert unheld(cache)
        assert anew.stats().reserved == 8
        assert mine.commit() == 8
        assert sorted(os.listdir(root)) == [".chat.lock", "chat"]
