"""Processes of any origin share one copy of the pages, and none of them is needed by the rest."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hostcache as hc
from helpers import Child, fill, holds_right_bytes, keys_of, run_python, store, unheld


@pytest.mark.portable
def test_what_one_stores_another_reads(cache: hc.KvCache, child: Child) -> None:
    keys, theirs = keys_of("a", 4), keys_of("b", 4)
    store(cache, keys)
    assert child.run(
        "lease = cache.lookup(keys_of('a', 4))\n"
        "result = len(lease) == 4 and holds_right_bytes(lease, keys_of('a', 4))"
    )
    assert child.run("result = store(cache, keys_of('b', 4))") == 4
    with cache.lookup(theirs) as lease:
        assert len(lease) == 4
        assert holds_right_bytes(lease, theirs)
    assert cache.stats().sessions == 2
    assert child.leave() == 0
    assert cache.stats().sessions == 1
    assert cache.match(theirs) == 4


@pytest.mark.portable
def test_two_processes_that_reserve_the_same_keys(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 6)
    child.run("mine = cache.reserve(keys_of('a', 4)); fill(mine, keys_of('a', 4))")
    with cache.reserve(keys) as reservation:
        assert reservation.pending == list(map(bytes, keys[:4]))
        assert np.array_equal(reservation.keys, keys[4:])
        fill(reservation, keys[4:])
        assert reservation.commit() == 2
    assert child.run("result = mine.commit()") == 4
    with cache.lookup(keys) as lease:
        assert len(lease) == 6
        assert holds_right_bytes(lease, keys)


@pytest.mark.portable
def test_a_kill_costs_nothing_but_unfinished_work(
    cache: hc.KvCache, start_child: Callable[[], Child]
) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    for _ in range(3):
        child = start_child()
        child.run("lease = cache.lookup(keys_of('a', 4)); view = lease.view(0)")
        child.run("mine = cache.reserve(keys_of('b', 8)); mine.view(0)[:9] = b'half done'")
        assert len(cache.reserve(keys_of("b", 8)).pending) == 8
        child.kill()
        assert cache.wait(keys_of("b", 8), 60) == 0
        with cache.reserve(keys_of("b", 8)) as anew:
            assert len(anew) == 8
        with cache.lookup(keys) as lease:
            assert len(lease) == 4
            assert holds_right_bytes(lease, keys)
        assert unheld(cache)
        assert cache.check() == []
    assert cache.stats().repairs == 3
    assert cache.stats().sessions == 1


def test_the_stopped_keep_what_they_hold(cache: hc.KvCache, child: Child) -> None:
    keys = keys_of("a", 4)
    child.run("mine = cache.reserve(keys_of('a', 4)); fill(mine, keys_of('a', 4))")
    child.signal(signal.SIGSTOP)
    assert cache.wait(keys, timeout_s=0.2) == 0
    assert len(cache.reserve(keys).pending) == 4
    assert store(cache, keys_of("b", 8)) == 8
    assert cache.stats().sessions == 2
    assert cache.stats().reserved == 4
    child.signal(signal.SIGCONT)
    assert child.run("result = mine.commit()") == 4
    assert cache.match(keys) == 4


def _stores(root: str, prompt: str) -> None:
    with hc.KvCache.attach("chat", root=root) as mine:
        held = store(mine, keys_of(prompt, 3)), mine.match(keys_of("first", 3))
    sys.exit(0 if held == (3, 3) else 1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.portable
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_however_processes_are_started(cache: hc.KvCache, root: str, method: Any) -> None:
    store(cache, keys_of("first", 3))
    context = multiprocessing.get_context(method)
    others = [context.Process(target=_stores, args=(root, f"{method}/{i}")) for i in range(2)]
    for process in others:
        process.start()
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0, 0]
    assert [cache.match(keys_of(f"{method}/{i}", 3)) for i in range(2)] == [3, 3]
    assert cache.stats().sessions == 1
    assert unheld(cache)


_SHELL = """
from helpers import *
with hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=sys.argv[1]) as cache:
    print(cache.match(keys_of("a", 4)), store(cache, keys_of("b", 4)))
"""


def test_processes_of_plain_shells(cache: hc.KvCache, root: str) -> None:
    store(cache, keys_of("a", 4))
    ended = run_python(_SHELL, root)
    assert (ended.stdout, ended.stderr) == ("4 4\n", "")
    assert cache.match(keys_of("b", 4)) == 4


def unshare_works() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    command = ["unshare", "--pid", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not unshare_works(), reason="PID namespaces can not be made here")
def test_between_pid_namespaces(cache: hc.KvCache, start_child: Callable[..., Child]) -> None:
    keys = keys_of("a", 4)
    store(cache, keys)
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    first, second = start_child(*prefix), start_child(*prefix)
    assert [child.run("result = os.getpid()") for child in (first, second)] == [1, 1]
    first.run("mine = cache.reserve(keys_of('b', 4)); lease = cache.lookup(keys_of('a', 4))")
    assert second.run("result = len(cache.reserve(keys_of('b', 4)).pending)") == 4
    first.kill()
    assert second.run("result = cache.wait(keys_of('b', 4), 60)") == 0
    assert second.run("result = store(cache, keys_of('b', 4))") == 4
    assert cache.match(keys_of("b", 4)) == 4
    assert second.leave() == 0
    assert unheld(cache)
    assert cache.stats().sessions == 1


def test_many_start_at_once(root: str) -> None:
    code = """
from helpers import *
with hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=sys.argv[1]) as cache:
    keys = keys_of(sys.argv[2], 2)
    store(cache, keys)
    print(cache.info["made"], cache.match(keys))
"""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = f"import sys; sys.path.insert(0, {tests!r})\n{code}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, root, f"p{i}"], stdout=subprocess.PIPE, text=True
        )
        for i in range(8)
    ]
    lines = sorted(process.communicate()[0].strip() for process in running)
    assert lines == ["False 2"] * 7 + ["True 2"]
