"""However a process ends, politely or not, nothing that it held outlives it, it does not crash, and
no code at exit is needed for that: the kernel tells.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hostcache as hc
from helpers import FORMAT, PAGE_COUNT, fill, keys_of, page_of, store, unheld
from hostcache.segments import describe
from processes import run_function

READY, WRITTEN, LENT = (keys_of(prompt, 4) for prompt in ("ready", "written", "lent"))

kept: dict[str, Any] = {}  # lives until the interpreter takes its modules apart


def opened(root: str) -> hc.KvCache:
    return hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=root)


def take_everything(root: str) -> None:
    """One of each hold and view, in globals."""
    cache = kept["cache"] = opened(root)
    store(cache, READY)
    lease = kept["lease"] = cache.lookup(READY)
    kept["view"] = lease.view(1)
    kept["array"] = np.frombuffer(lease.view(2), np.uint8)
    reservation = kept["reservation"] = cache.reserve(WRITTEN)
    fill(reservation, WRITTEN[:2])
    kept["writable"] = np.frombuffer(reservation.view(3), np.uint8)
    lent = kept["lent"] = cache.reserve(LENT, parts=2)
    part = kept["part"] = cache.claim(lent.token(), 1)
    assert part is not None
    kept["part view"] = part.view(0)
    reading = kept["reading"] = cache.lookup(READY, parts=2)
    kept["read part"] = cache.claim(reading.token(), 0)
    kept["other"] = opened(root)


def uses_everything() -> None:
    """As code at exit may: nothing of it crashes, whatever has ended by then."""
    assert bytes(kept["view"]) == page_of(READY[1])
    assert kept["array"].tobytes() == page_of(READY[2])
    kept["writable"][:9] = 7
    for end in ("release", "end"):
        getattr(kept["lease"], end)()
    calls: list[Callable[[], object]] = [
        kept["reservation"].commit,
        kept["part"].commit,
        lambda: kept["cache"].lookup(READY),
        lambda: kept["cache"].reserve(keys_of("late", 2)),
        kept["cache"].stats,
    ]
    for call in calls:
        try:
            call()
        except hc.HostCacheError:  # the session may have ended already
            pass
    kept["lent"].end()
    kept["read part"].abort()
    kept["other"].close()
    kept["cache"].close()


class Cycle:
    """Ends what it holds when the collector finds it, which may be very late."""

    def __init__(self, *things: Any) -> None:
        self.things, self.me = things, self

    def __del__(self) -> None:
        for thing in self.things:
            if hasattr(thing, "release"):
                thing.release()


def in_a_thread(work: Callable[[], object], daemon: bool = False) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=daemon)
    thread.start()
    return thread


def raise_on_purpose() -> None:
    raise RuntimeError("on purpose")


def look_up_for_ever() -> None:
    while True:
        try:
            kept["cache"].lookup(READY).release()
            store(kept["other"], keys_of("busy", 8))
        except hc.HostCacheError:
            time.sleep(0.001)


def term_while_waiting() -> None:
    """In the core, without the GIL, when the signal comes."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    kept["cache"].wait(WRITTEN, 600)


def exit_by_handler() -> None:
    def leave(number: int, frame: object) -> None:
        sys.exit(4)

    signal.signal(signal.SIGTERM, leave)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    kept["cache"].wait(WRITTEN, 600)


def busy_daemons(then: Callable[[], object]) -> None:
    for _ in range(2):
        in_a_thread(look_up_for_ever, daemon=True)
    time.sleep(0.05)
    then()


def make_cycles() -> None:
    gc.disable()
    for name in ("lease", "reservation", "part", "reading", "cache"):
        Cycle(*kept.values(), kept[name])
    kept.clear()


def exec_another_program() -> None:
    """The process lives on under its number, but the session is gone with its memory."""
    code = "import sys; sys.exit('hostcache-test-' in open('/proc/self/maps').read())"
    os.execv(sys.executable, [sys.executable, "-S", "-c", code])


def close_descriptors() -> None:
    """As careless daemons do; the session lives on by its mapping, and ends like any other."""
    os.closerange(3, 100)
    assert kept["other"].match(READY) == 4


RUDE: dict[str, tuple[Callable[[], object], int]] = {
    "os._exit": (lambda: os._exit(3), 3),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "SIGTERM in a wait": (term_while_waiting, -signal.SIGTERM),
    "os._exit with busy daemon threads": (lambda: busy_daemons(lambda: os._exit(3)), 3),
    "exec": (exec_another_program, 0),
}

POLITE: dict[str, tuple[Callable[[], object], int]] = {
    "return": (lambda: None, 0),
    "sys.exit": (lambda: sys.exit(5), 5),
    "a handler of SIGTERM": (exit_by_handler, 4),
    "busy daemon threads": (lambda: busy_daemons(lambda: None), 0),
    "all dropped": (kept.clear, 0),
    "all used in an exit handler": (lambda: atexit.register(uses_everything), 0),
    "holds taken in an exit handler": (
        lambda: atexit.register(lambda: kept.update(late=kept["cache"].lookup(READY))),
        0,
    ),
    "cycles": (make_cycles, 0),
    "descriptors closed": (close_descriptors, 0),
    "all ended, then used": (lambda: (hc._core.shutdown(), uses_everything()), 0),
}

LOUD: dict[str, tuple[Callable[[], object], int]] = {
    "an exception": (raise_on_purpose, 1),
    "an exception in a thread": (lambda: in_a_thread(raise_on_purpose).join(), 0),
    "an exception in an exit handler": (lambda: atexit.register(raise_on_purpose), 0),
}

ENDS = {**RUDE, **POLITE, **LOUD}


def holds_and_ends(root: str, way: str) -> None:
    take_everything(root)
    sys.stdout.write("taken")
    sys.stdout.flush()
    ENDS[way][0]()


_PORTABLE = ("os._exit", "return", "all used in an exit handler")


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=[pytest.mark.portable] if w in _PORTABLE else []) for w in ENDS],
)
def test_nothing_is_held_afterwards(cache: hc.KvCache, root: str, way: str) -> None:
    ended = run_function(holds_and_ends, root, way)
    assert (ended.returncode, ended.stdout) == (ENDS[way][1], "taken"), ended.stderr
    if way in LOUD:
        assert ended.stderr.count("Traceback") == 1
        assert ended.stderr.endswith("RuntimeError: on purpose\n")
    else:
        assert ended.stderr == ""
    assert cache.wait(WRITTEN, 60) == (4 if way == "all used in an exit handler" else 0)
    assert unheld(cache)
    stats = cache.stats()
    assert stats.sessions == 1
    assert cache.match(READY) == 4
    assert cache.match(LENT) == 0
    assert len(cache.reserve(LENT)) == 4
    assert cache.check() == []
    if way in POLITE and way != "busy daemon threads":  # those may be too busy to leave in order
        assert stats.repairs == 0  # it gave back itself
    if way in RUDE:
        assert stats.repairs >= 2


def test_statistics_of_the_dead_are_not_those_of_the_living(root: str) -> None:
    """A list of processes would still name it; and who looks with no session living sees it too."""
    ended = run_function(holds_and_ends, root, "SIGKILL")
    assert ended.returncode == -9
    assert [info.living for info in hc.caches(root)] == [False]
    seen = describe("chat", root)
    assert [slot["alive"] for slot in seen.sessions] == [False, False]
    assert seen.findings == []
    with opened(root) as cache:
        assert (cache.info["made"], cache.info["replaced"]) == (False, "")
        assert unheld(cache)
        assert cache.stats().sessions == 1
        assert cache.match(READY) == 4
