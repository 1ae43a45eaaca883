"""Where a cache does not fit, `open` says so at once, with what was asked, what is there and what
to do, and leaves nothing behind. Where it fits it has real memory: no later store can fail.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hostcache as hc
from helpers import FORMAT, holds_right_bytes, keys_of, store, unheld
from processes import (
    Forked,
    command_of,
    make_memory_group,
    mount_tmpfs,
    remove_group,
    run_function,
    surely_look_up,
    surely_store,
    wait_until,
    why_no_mounts,
    with_own_mounts,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

MIB = 1 << 20


def used_bytes(root: str) -> int:
    status = os.statvfs(root)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def opened(root: str, capacity: str, **options: Any) -> hc.KvCache:
    return hc.KvCache.open("chat", FORMAT, capacity, root=root, **options)


def refusal_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except hc.NoRoom as error:
        return str(error)
    raise AssertionError("it did not fail")


@pytest.fixture
def in_tmpfs(root: str) -> Callable[..., None]:
    """Runs a function of this file in a process that has a tmpfs of its own mounted on `root`."""
    prefix = with_own_mounts()
    if not prefix:
        pytest.skip(f"no file system can be mounted here: {why_no_mounts()}")

    def run(function: Callable[..., None], size: str, *arguments: object) -> None:
        ended = run_function(
            mounts_and_runs, function.__name__, root, size, arguments, prefix=prefix
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        assert ended.stdout == "done\n"

    return run


def mounts_and_runs(name: str, root: str, size: str, arguments: list[Any]) -> None:
    mount_tmpfs(root, size)
    globals()[name](root, *arguments)
    print("done")


# ---------------------------------------------------------------- a small file system


def asks_too_much_then_less(root: str) -> None:
    for attempt in (
        lambda: opened(root, "64MiB"),
        lambda: hc.KvCache.create("chat", FORMAT, "64MiB", root=root),
        lambda: opened(root, "8MiB"),  # the table comes on top
    ):
        text = refusal_of(attempt)
        asked, left = map(int, re.findall(r"\((\d+) bytes\)", text)[:2])
        assert asked > (8 * MIB if "chat" in text else 0), text
        assert 0 < left <= 8 * MIB < asked, text
        assert root in text, text
        assert "'chat'" in text, text
        assert re.search(r"remount,size=.*--shm-size.*root=.*smaller capacity", text), text
        assert os.listdir(root) == [], os.listdir(root)
        assert used_bytes(root) == 0
    with opened(root, "4MiB") as cache:
        status = os.stat(cache.info["path"])
        assert status.st_size == cache.info["size_bytes"] > 4 * MIB
        assert status.st_blocks * 512 >= status.st_size  # nothing in it is a hole
        assert store(cache, keys_of("a", cache.page_count)) == cache.page_count == 1024
        with cache.lookup(keys_of("a", 1024)) as lease:
            assert holds_right_bytes(lease, keys_of("a", 1024))


@pytest.mark.portable
def test_a_file_system_that_is_too_small(in_tmpfs: Callable[..., None]) -> None:
    in_tmpfs(asks_too_much_then_less, "8m")


def fills_up_while_in_use(root: str) -> None:
    """What others put beside the cache never makes a store of ours fail."""
    with opened(root, "4MiB") as cache:
        with open(f"{root}/.others", "wb") as others, contextlib.suppress(OSError):
            while True:
                others.write(bytes(65536))
        assert os.statvfs(root).f_bavail == 0
        assert store(cache, keys_of("a", 1024)) == 1024
        with opened(root, "4MiB") as other:  # attaching needs no room either
            assert other.match(keys_of("a", 1024)) == 1024
        text = refusal_of(lambda: hc.KvCache.open("more", FORMAT, page_count=16, root=root))
        assert "'more'" in text
        assert sorted(os.listdir(root)) == [".chat.lock", ".others", "chat"], os.listdir(root)


def test_a_file_system_that_fills_up(in_tmpfs: Callable[..., None]) -> None:
    in_tmpfs(fills_up_while_in_use, "8m")


def races(root: str) -> None:
    """Room for one and a half: two makers at a time would starve each other."""
    gate = Path(f"{root}/.gate")

    def opens() -> None:
        assert wait_until(gate.exists)
        with opened(root, "16MiB") as cache:
            print("made" if cache.info["made"] else "attached", end=cache.info["replaced"])
            surely_store(cache, keys_of(str(os.getpid()), 2))

    for number in range(5):
        racers = [Forked(opens, Path(f"{root}/.{n}")) for n in range(8)]
        gate.touch()
        said = [(racer.wait(), racer.said()) for racer in racers]
        assert sorted(said) == [(0, "attached")] * 7 + [(0, "made")], (number, said)
        gate.unlink()
        with hc.KvCache.attach("chat", root=root) as cache:
            assert cache.stats().ready == 16
            assert cache.check() == []
            assert used_bytes(root) < cache.info["size_bytes"] + MIB
        del cache
        hc.remove("chat", root)
        assert used_bytes(root) < MIB


def test_eight_make_the_same_cache_at_once(in_tmpfs: Callable[..., None]) -> None:
    in_tmpfs(races, "26m")


# ---------------------------------------------------------------- a memory cgroup


@pytest.fixture
def group() -> Iterator[str]:
    """Limited to 256 MiB. Who runs in it is a child of this process, and still under its limits."""
    group, reason = make_memory_group(256 * MIB)
    if not group:
        pytest.skip(f"no memory cgroup can be made here: {reason}")
    os.mkdir(f"{group}/inner")
    yield group
    for folder in (f"{group}/inner", group):
        assert wait_until(lambda: remove_group(folder)), folder  # noqa: B023


def asks_too_much_of_a_group(root: str, group: str, inner: str) -> None:
    Path(group + inner, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    for attempt in (lambda: opened(root, "512MiB"), lambda: opened(root, "250MiB")):
        text = refusal_of(attempt)
        asked, left, limit = map(int, re.findall(r"\((?:limit [^(]*\()?(\d+) bytes\)", text))
        assert asked > 250 * MIB > left, text
        assert limit == 256 * MIB, text
        assert f"memory cgroup {group} " in text, text
        assert "raise the container's memory limit" in text, text
        assert os.listdir(root) == [], os.listdir(root)
        assert used_bytes(root) == 0
    with opened(root, "64MiB") as cache:
        assert store(cache, keys_of("a", 64)) == 64


@pytest.mark.parametrize("inner", ["", "/inner"], ids=["its own limit", "a limit above it"])
def test_a_memory_cgroup_that_is_too_small(
    in_tmpfs: Callable[..., None], group: str, inner: str
) -> None:
    in_tmpfs(asks_too_much_of_a_group, "1g", group, inner)


# ---------------------------------------------------------------- killed while making, and after


def makers_are_killed(root: str) -> None:
    capacity, size = "256MiB", 256 * MIB
    reached, waiting = Path(f"{root}/.reached"), Path(f"{root}/.waiting")

    def makes() -> None:
        def progress(done: int, total: int) -> None:
            if done >= size // 2:
                assert done < total
                reached.touch()
                time.sleep(600)

        opened(root, capacity, progress=progress)

    def waits() -> None:
        """Is told how far the maker is, and makes the cache itself when that one is dead."""
        with opened(root, capacity, progress=lambda *_: waiting.touch()) as cache:
            assert cache.info["made"]
            assert store(cache, keys_of("waiter", 2)) == 2

    for awaited in (False, True):
        maker = Forked(makes, Path(f"{root}/.maker"))
        assert wait_until(lambda: reached.exists() or maker.poll() is not None)  # noqa: B023
        assert maker.poll() is None, maker.said()
        assert not os.path.exists(f"{root}/chat"), "a cache appears all at once"
        assert used_bytes(root) > size // 2
        waiter = Forked(waits, Path(f"{root}/.waiter")) if awaited else None
        assert wait_until(lambda: not awaited or waiting.exists())  # noqa: B023
        assert maker.kill() == -9
        reached.unlink()
        if waiter:
            assert waiter.wait() == 0, waiter.said()
        with opened(root, capacity) as cache:
            assert cache.info["made"] == (waiter is None)
            assert cache.info["replaced"] == ""
            assert cache.match(keys_of("waiter", 2)) == (2 if waiter else 0)
            assert used_bytes(root) <= cache.info["size_bytes"] + 65536
            assert cache.check() == []
        del cache
        hc.remove("chat", root)


def closes_and_removes(root: str) -> None:
    """Room for one and a half; objects of closed caches are still about."""
    kept = []
    for number in range(3):
        with opened(root, "16MiB") as cache:
            assert cache.info["made"]
            keys = keys_of(str(number), 4)
            store(cache, keys)
            kept += [cache, cache.lookup(keys), cache.reserve(keys_of("b", 4))]
        hc.remove("chat", root)
        assert used_bytes(root) < MIB, f"round {number}: {used_bytes(root)} bytes are in use"
    assert len(kept) == 9


def test_what_was_closed_and_removed_gives_its_room_back(in_tmpfs: Callable[..., None]) -> None:
    in_tmpfs(closes_and_removes, "26m")


def test_a_maker_is_killed_in_the_middle(in_tmpfs: Callable[..., None]) -> None:
    in_tmpfs(makers_are_killed, "384m")


def engine(root: str, number: int, count: int) -> None:
    """Finds what the engine before it left, stores its own, and holds it until it is killed."""
    before, mine = keys_of(f"round/{number - 1}", count), keys_of(f"round/{number}", count)
    cache = hc.KvCache.open("chat", FORMAT, page_count=count, root=root)
    assert (cache.info["made"], cache.info["replaced"]) == (number == 0, "")
    with cache.lookup(before) as lease:
        assert len(lease) == (count if number else 0)
        assert holds_right_bytes(lease, before)
    assert store(cache, mine) == count
    held = cache.lookup(mine[:100]), cache.lookup(mine)
    Path(f"{root}/.filled").touch()
    time.sleep(600)
    assert held


def idler(root: str, number: int, count: int) -> None:
    assert wait_until(Path(f"{root}/.filled").exists)
    cache = hc.KvCache.attach("chat", root=root)
    held = cache.lookup(keys_of(f"round/{number}", count))
    assert len(held) == count
    Path(f"{root}/.attached").touch()
    time.sleep(600)


def restarts(root: str) -> None:
    """A fleet that is killed again and again: the same name, the same memory, its pages warm."""
    count, found = 256, set()
    for number in range(20):
        fleet = [
            Forked(functools.partial(work, root, number, count), Path(f"{root}/.{work.__name__}"))
            for work in (engine, idler)
        ]
        up = Path(f"{root}/.attached")
        wait_until(lambda: up.exists() or any(one.poll() is not None for one in fleet))  # noqa: B023
        codes = [one.kill() for one in fleet]
        assert codes == [-9, -9], (number, [one.said() for one in fleet])
        found.add((used_bytes(root) // MIB, *sorted(os.listdir(root))))
        up.unlink()
        os.unlink(f"{root}/.filled")
    assert len(found) == 1, found
    with hc.KvCache.attach("chat", root=root) as cache:
        assert unheld(cache)
        assert (cache.stats().ready, cache.stats().sessions) == (count, 1)
        assert cache.check() == []


def test_a_fleet_that_is_killed_20_times(in_tmpfs: Callable[..., None]) -> None:
    in_tmpfs(restarts, "3m")


# ---------------------------------------------------------------- session slots


@pytest.mark.parametrize("anybody", [True, False], ids=["beside one that lives", "alone"])
def test_300_attachers_are_killed(root: str, tmp_path: Path, anybody: bool) -> None:
    first = opened(root, "128KiB")
    store(first, keys_of("a", 4))
    if not anybody:
        first.close()

    def attaches() -> None:
        cache = hc.KvCache.attach("chat", root=root)
        held = surely_look_up(cache, keys_of("a", 4)), cache.reserve(keys_of("b", 4))
        assert held
        os.kill(os.getpid(), signal.SIGKILL)

    kills = 300 if anybody else 60
    for number in range(0, kills, 3):  # and a few at a time
        attachers = [Forked(attaches, tmp_path / f"attacher-{n}") for n in range(3)]
        for attacher in attachers:
            assert attacher.wait() == -9, (number, attacher.said())
    with hc.KvCache.attach("chat", root=root) as cache:
        assert unheld(cache)
        assert cache.stats().sessions == 1 + anybody
        assert cache.stats().repairs >= kills
        assert len(cache.reserve(keys_of("b", 4))) == 4
        assert cache.match(keys_of("a", 4)) == 4
        assert cache.check() == []
    first.close()


def takes_all_slots(root: str, said: str) -> None:
    sessions = [hc.KvCache.attach("chat", root=root) for _ in range(255)]
    Path(said).touch()
    time.sleep(600)
    assert sessions


def test_all_session_slots_are_taken(root: str, tmp_path: Path) -> None:
    with opened(root, "128KiB") as cache:
        assert cache.info["slot_count"] == 256
        others = subprocess.Popen(command_of(takes_all_slots, root, str(tmp_path / "said")))
        try:
            assert wait_until((tmp_path / "said").exists)
            for _ in range(3):
                text = refusal_of(lambda: hc.KvCache.attach("chat", root=root))
                assert re.search(r"256.*256", text), text  # how many there are, and are taken
                assert "hostcache stat chat" in text, text
            assert cache.stats().sessions == 256
            # One more closes than dies: then 255 die at once, and the next takes a dead one's.
            store(cache, keys_of("a", 4))
        finally:
            others.kill()
            others.wait()
        with hc.KvCache.attach("chat", root=root) as other:
            assert other.match(keys_of("a", 4)) == 4
            assert other.stats().sessions == 2
        assert cache.check() == []


def test_a_slot_is_free_when_one_closes(root: str) -> None:
    sessions = [opened(root, "128KiB") for _ in range(256)]
    try:
        with pytest.raises(hc.NoRoom, match="256"):
            opened(root, "128KiB")
        sessions.pop(100).close()
        sessions.append(opened(root, "128KiB"))
        with pytest.raises(hc.NoRoom, match="256"):
            opened(root, "128KiB")
        assert sessions[0].check() == []
    finally:
        for session in sessions:
            session.close()
