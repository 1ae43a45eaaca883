"""Sessions in separate PID namespaces that share the folder: each may be process number 1, and
none sees the others' processes. Whose holds go when one is killed is told by the kernel's locks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import hostcache as hc
from helpers import Child, holds_right_bytes, keys_of, store, unheld
from processes import process_state, refusal, wait_until

# As root, or as the root of a user namespace: then files are still this user's own.
_FLAGS = ("--pid", "--fork", "--mount-proc", "--kill-child")
_PREFIXES = ("unshare", *_FLAGS), ("unshare", "--user", "--map-root-user", *_FLAGS)


@pytest.fixture(scope="module")
def prefix() -> tuple[str, ...]:
    reasons = [refusal(*prefix, "true") for prefix in _PREFIXES]
    for number, reason in enumerate(reasons):
        if not reason:
            return _PREFIXES[number]
    pytest.skip("PID namespaces can not be made here: " + "; ".join(reasons))


def outer_pid(child: Child) -> int:
    """Of the process that `unshare` started, as seen from here."""
    pid = child.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    assert len(children) == 1
    return int(children[0])


def kill_inside(child: Child) -> None:
    """SIGKILL for the session itself, not for the `unshare` before it."""
    pid = outer_pid(child)
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: process_state(pid) in ("", "Z"))
    child.process.wait()


def test_equal_numbers_are_not_the_same_process(
    cache: hc.KvCache, start_child: Callable[..., Child], prefix: tuple[str, ...]
) -> None:
    store(cache, keys_of("a", 4))
    first, second = start_child(*prefix), start_child(*prefix)
    for child in (first, second):
        assert child.run("result = [os.getpid(), os.listdir('/proc').count('1')]") == [1, 1]
        assert child.run("result = sorted(int(p) for p in os.listdir('/proc') if p.isdigit())") == [
            1
        ]
    places = [os.readlink(f"/proc/{outer_pid(child)}/ns/pid") for child in (first, second)]
    assert len({*places, os.readlink("/proc/self/ns/pid")}) == 3
    for prompt, child in (("b", first), ("c", second)):
        child.run("lease = cache.lookup(keys_of('a', 4)); view = lease.view(0)")
        child.run(f"mine = cache.reserve(keys_of('{prompt}', 4)); fill(mine, mine.keys)")
    assert (cache.stats().sessions, cache.stats().reserved, cache.stats().pinned) == (3, 8, 4)

    kill_inside(first)
    assert second.run("result = cache.wait(keys_of('b', 4), 60)") == 0
    assert wait_until(lambda: cache.stats().sessions == 2)
    assert (cache.stats().reserved, cache.stats().pinned) == (4, 4)
    assert len(cache.reserve(keys_of("c", 4)).pending) == 4
    assert second.run("result = store(cache, keys_of('b', 4))") == 4
    assert second.run("result = bytes(view) == page_of(keys_of('a', 4)[0])")
    assert second.run("result = mine.commit()") == 4
    assert second.run("result = cache.check()") == []

    third = start_child(*prefix)  # again number 1
    assert third.run("result = [cache.match(keys_of(p, 4)) for p in 'abc']") == [4, 4, 4]
    assert third.run("lease = cache.lookup(keys_of('c', 4)); result = len(lease)") == 4
    kill_inside(second)
    assert third.run("result = holds_right_bytes(lease, keys_of('c', 4))")
    assert wait_until(lambda: cache.stats().sessions == 2)
    assert cache.stats().pinned == 4
    assert third.leave() == 0
    assert unheld(cache)
    for prompt in "abc":
        with cache.lookup(keys_of(prompt, 4)) as lease:
            assert len(lease) == 4
            assert holds_right_bytes(lease, keys_of(prompt, 4))


def test_parts_cross_namespaces(
    cache: hc.KvCache, start_child: Callable[..., Child], prefix: tuple[str, ...]
) -> None:
    """A scheduler and its workers in containers of their own; one worker dies, the next works."""
    keys = keys_of("a", 4)
    taker, worker = start_child(*prefix), start_child(*prefix)
    ask = "mine = cache.reserve(keys_of('a', 4), parts=2); result = mine.token().hex()"
    claim = "part = cache.claim(bytes.fromhex('{}'), {}); result = part is not None"
    token = taker.run(ask)
    assert worker.run(claim.format(token, 0))
    assert taker.run(claim.format(token, 1))
    assert not worker.run(claim.format(token, 1))
    kill_inside(worker)
    assert taker.run("fill(part, keys_of('a', 4)); result = cache.wait(keys_of('a', 4), 60)") == 0
    assert taker.run("result = part.commit()") == 0

    worker, token = start_child(*prefix), taker.run(ask)
    assert worker.run(claim.format(token, 0))
    assert taker.run(claim.format(token, 1))
    assert worker.run("fill(part, keys_of('a', 4)); result = part.commit()") == 0
    assert taker.run("fill(part, keys_of('a', 4)); result = part.commit()") == 4
    with cache.lookup(keys) as lease:
        assert len(lease) == 4
        assert holds_right_bytes(lease, keys)


def test_the_last_one_dies_in_its_namespace(
    cache: hc.KvCache, root: str, start_child: Callable[..., Child], prefix: tuple[str, ...]
) -> None:
    child = start_child(*prefix)
    cache.close()
    assert child.run("result = store(cache, keys_of('a', 4))") == 4
    child.run("lease = cache.lookup(keys_of('a', 4)); mine = cache.reserve(keys_of('b', 8))")
    assert [info.living for info in hc.caches(root)] == [True]
    kill_inside(child)
    assert wait_until(lambda: [info.living for info in hc.caches(root)] == [False])
    with hc.KvCache.attach("chat", root=root) as anew:
        assert unheld(anew)
        assert anew.stats().ready == anew.match(keys_of("a", 4)) == 4
        assert len(anew.reserve(keys_of("b", 8))) == 8
