"""However a process was started, it shares the pages; and no helper of Python's, and no child
that merely inherited from a session, removes anything or keeps a dead session alive.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hostcache as hc
from helpers import FORMAT, PAGE_COUNT, holds_right_bytes, keys_of, store, unheld
from processes import command_of, process_state, run_function, say, started, wait_until

METHODS = ("spawn", "fork", "forkserver", "spawn")


def opened(root: str) -> hc.KvCache:
    return hc.KvCache.open("chat", FORMAT, page_count=PAGE_COUNT, root=root)


def reads_and_stores(root: str, reads: list[str], writes: str) -> None:
    """What each of the others does: find the pages of those before it, and leave some."""
    with opened(root) as cache:
        assert (cache.info["made"], cache.info["replaced"]) == (False, "")
        for prompt in reads:
            keys = keys_of(prompt, 3)
            with cache.lookup(keys) as lease:
                assert len(lease) == 3, prompt
                assert holds_right_bytes(lease, keys), prompt
        assert store(cache, keys_of(writes, 3)) == 3


def shares_with_all(root: str) -> None:
    """Starts the others one after another by every method; each reads what all before stored."""
    with opened(root) as cache:
        assert store(cache, keys_of("mine", 3)) == 3
        done = ["mine"]
        for method in METHODS:
            context: Any = multiprocessing.get_context(method)
            name = f"{method}/{len(done)}"
            other = context.Process(target=reads_and_stores, args=(root, list(done), name))
            other.start()
            other.join(60)
            assert other.exitcode == 0, (method, other.exitcode)
            done.append(name)
        shell = subprocess.run(command_of(reads_and_stores, root, done, "shell"), check=False)
        assert shell.returncode == 0
        for prompt in (*done, "shell"):
            keys = keys_of(prompt, 3)
            with cache.lookup(keys) as lease:
                assert len(lease) == 3, prompt
                assert holds_right_bytes(lease, keys), prompt
        assert cache.stats().sessions == 1
        assert unheld(cache)
        assert cache.check() == []


@pytest.mark.portable
def test_processes_of_every_start_share(root: str) -> None:
    ended = run_function(shares_with_all, root)
    # The tracker writes when its last client is gone; its end of the pipe was waited for too.
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert sorted(os.listdir(root)) == [".chat.lock", "chat"]
    with hc.KvCache.attach("chat", root=root) as cache:
        assert cache.match(keys_of("mine", 3)) == 3
        assert cache.match(keys_of("shell", 3)) == 3
        assert cache.info["replaced"] == ""


def uses_and_ends(root: str, way: str) -> None:
    """With the resource tracker running, as under any engine; then ends in some way."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    cache = hc.KvCache.attach("chat", root=root)
    held = cache.lookup(keys_of("mine", 3)), cache.reserve(keys_of(way, 3))
    sys.stdout.write(f"{len(held[0])} {len(held[1])}")
    sys.stdout.flush()
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "at once":
        os._exit(0)


@pytest.mark.parametrize("way", ["returns", "at once", "killed"])
def test_no_tracker_removes_what_others_use(root: str, way: str) -> None:
    with opened(root) as cache:
        store(cache, keys_of("mine", 3))
        inode = os.stat(cache.info["path"]).st_ino
        ended = run_function(uses_and_ends, root, way)
        assert ended.stdout == "3 3"
        assert ended.stderr == ""
        assert ended.returncode == (-9 if way == "killed" else 0)
        assert unheld(cache)
        assert os.stat(cache.info["path"]).st_ino == inode
        assert cache.match(keys_of("mine", 3)) == 3
        assert not cache.orphaned
    # The last session leaves: the pages stay for the next.
    with hc.KvCache.attach("chat", root=root) as cache:
        assert cache.match(keys_of("mine", 3)) == 3


# ---------------------------------------------------------------- what must not keep it alive

SLEEPER = [shutil.which("sleep") or "/bin/sleep", "600"]


def open_files(pid: int) -> Iterator[str]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            yield os.readlink(f"/proc/{pid}/fd/{number}")


def starts_a_sleeper(root: str, how: str, said: str) -> None:
    """Holds pages, starts a process that has nothing to do with us, and waits to be killed."""
    cache = hc.KvCache.attach("chat", root=root)
    held = cache.lookup(keys_of("mine", 3)), cache.reserve(keys_of("theirs", 3))
    view = held[0].view(0)
    if how == "subprocess":
        pid = subprocess.Popen(SLEEPER).pid
    elif how == "all descriptors":
        pid = subprocess.Popen(SLEEPER, close_fds=False).pid
    elif how == "posix_spawn":
        pid = os.posix_spawn(SLEEPER[0], SLEEPER, os.environ)
    else:
        pid = os.fork()
        if pid == 0:
            os.execv(SLEEPER[0], SLEEPER)
    # Through its exec: until then it is a copy of its parent, which keeps it alive for a while.
    assert wait_until(lambda: b"600" in Path(f"/proc/{pid}/cmdline").read_bytes())
    say(said, pid)
    time.sleep(600)
    del held, view


@pytest.mark.parametrize("how", ["subprocess", "all descriptors", "posix_spawn", "fork and exec"])
def test_a_child_program_does_not_keep_a_session_alive(root: str, tmp_path: Path, how: str) -> None:
    with opened(root) as cache:
        store(cache, keys_of("mine", 3))
        with started(tmp_path / "said", starts_a_sleeper, root, how) as (process, pids):
            sleeper = pids[0]
            assert len(cache.reserve(keys_of("theirs", 3)).pending) == 3
            assert not [place for place in open_files(sleeper) if root in place]
            process.kill()
            process.wait()
            assert cache.wait(keys_of("theirs", 3), 60) == 0
            assert unheld(cache)
            assert cache.stats().sessions == 1
            assert len(cache.reserve(keys_of("theirs", 3))) == 3
            assert process_state(sleeper) not in ("", "Z")


def test_who_was_refused_keeps_nothing(root: str) -> None:
    """The error, its traceback included, is alive; no descriptor and no liveness lock is."""
    opened(root).close()
    before = sorted(os.listdir("/proc/self/fd"))
    errors = []
    for attempt in (
        lambda: hc.KvCache.open("chat", hc.PageFormat(8192, 16), page_count=8, root=root),
        lambda: hc.KvCache.open("chat", hc.PageFormat(4096, 7), page_count=8, root=root),
        lambda: hc.KvCache.create("chat", FORMAT, page_count=8, root=root),
        lambda: hc.KvCache.attach("none", root=root),
        lambda: hc.KvCache.open("big", FORMAT, "8TiB", root=root),
    ):
        with pytest.raises(hc.HostCacheError) as caught:
            attempt()
        errors.append(caught)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert [info.living for info in hc.caches(root)] == [False]
    hc.remove("chat", root, force=False)  # Busy if anybody lived in it
    assert os.listdir(root) == []
    assert len(errors) == 5
