"""Fixtures: a private root under /dev/shm, a small cache in it, and other processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hostcache as hc
from helpers import FORMAT, PAGE_COUNT, Child


@pytest.fixture(autouse=True)
def _no_root_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may touch the caches of whoever runs it."""
    monkeypatch.delenv("HOSTCACHE_ROOT", raising=False)


@pytest.fixture
def root() -> Iterator[str]:
    """A fresh private folder under /dev/shm, removed afterwards."""
    folder = tempfile.mkdtemp(prefix="hostcache-test-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cache_name() -> str:
    return "chat"


@pytest.fixture
def opened(root: str, cache_name: str) -> Iterator[Callable[..., hc.KvCache]]:
    """Opens sessions of the same small cache; whatever the test did, it must verify at the end."""
    sessions = []

    def open_session(**options: Any) -> hc.KvCache:
        options = {"page_count": PAGE_COUNT, "root": root, **options}
        sessions.append(hc.KvCache.open(cache_name, FORMAT, **options))
        return sessions[-1]

    yield open_session
    for session in sessions:
        session.close()
    if any(info.name == cache_name and not info.problem for info in hc.caches(root)):
        with hc.KvCache.attach(cache_name, root=root) as last:
            assert last.check() == []


@pytest.fixture
def cache(opened: Callable[..., hc.KvCache]) -> hc.KvCache:
    """A session of a cache of 32 pages of 4 KiB."""
    return opened()


@pytest.fixture
def other(cache: hc.KvCache, opened: Callable[..., hc.KvCache]) -> hc.KvCache:
    """Another session of the same cache, in this process."""
    return opened()


@pytest.fixture
def start_child(root: str, cache_name: str) -> Iterator[Callable[..., Child]]:
    """Starts other processes with a session of the same cache; they are ended afterwards."""
    children = []

    def start(*prefix: str) -> Child:
        children.append(Child(root, cache_name, *prefix))
        return children[-1]

    yield start
    for child in children:
        child.drop()


@pytest.fixture
def child(start_child: Callable[..., Child]) -> Child:
    """One other process."""
    return start_child()
