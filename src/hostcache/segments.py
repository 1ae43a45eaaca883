"""The segments of a root: list, remove, and describe them without taking part in them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

from hostcache import _core
from hostcache.config import check_name, resolve_root
from hostcache.errors import BadValue, Busy, CacheNotFound, HostCacheError, NoRoom
from hostcache.kv import Root
from hostcache.stats import Stats


@dataclass(frozen=True)
class CacheInfo:
    """What can be told of a cache from outside.

    `living` says whether some session lives in it. `problem` says why it can not be used (made
    by another version or before a reboot, damaged, not ours); empty: nothing. `size_bytes` is the
    shared memory that it takes.
    """

    name: str
    path: str
    page_bytes: int
    page_tokens: int
    page_count: int
    size_bytes: int
    living: bool
    problem: str


def caches(root: Root = None) -> list[CacheInfo]:
    """The caches of a root, by name. Makes and changes nothing."""
    try:
        folder = resolve_root(root, make=False)
    except CacheNotFound:
        return []
    found = (_cache_info(folder, name) for name in sorted(_core.names(folder)))
    return [info for info in found if info is not None]


def _cache_info(root: str, name: str) -> CacheInfo | None:
    try:
        peek = _core.peek(root, name)
    except CacheNotFound:  # removed since it was listed
        return None
    except HostCacheError as error:
        return CacheInfo(name, f"{root}/{name}", 0, 0, 0, 0, False, str(error))
    return CacheInfo(
        peek["name"],
        peek["path"],
        peek["page_bytes"],
        peek["page_tokens"],
        peek["page_count"],
        peek["size_bytes"],
        peek["living"],
        peek["problem"],
    )


def remove(name: str, root: Root = None, *, force: bool = True) -> None:
    """Take a cache's name away at once, also a damaged one's, and its memory with the last
    session. Those inside keep what they have. Without `force`, `Busy` while sessions live in it.
    """
    check_name(name)
    _core.remove(resolve_root(root, make=False), name, bool(force))


@dataclass(frozen=True)
class Description:
    """All that `hostcache stat` and `check` show."""

    cache: CacheInfo
    stats: Stats
    namespaces: list[_core.NamespaceInfo]
    sessions: list[_core.SlotInfo]
    findings: list[str]


def describe(name: str, root: Root = None, *, check: bool = False) -> Description:
    """Look at a cache: with a session of our own while others live in it, else without any.

    `findings` are those of a check, which is made if asked for (without sessions always).
    """
    check_name(name)
    folder = resolve_root(root, make=False)
    peek = _cache_info(folder, name)
    if peek is None:
        raise CacheNotFound(f"there is no cache {name!r} in {folder}; see: hostcache ls")
    try:
        seen = _core.inspect(folder, name)
    except Busy:
        try:
            return _describe_living(peek, folder, check)
        except NoRoom:  # every slot is taken: then without one, and unchecked
            if check:
                raise
            seen = _core.inspect(folder, name, living_too=True)
    return Description(
        peek,
        Stats.from_dict(seen["stats"]),
        cast("list[_core.NamespaceInfo]", seen["namespaces"]),
        cast("list[_core.SlotInfo]", seen["sessions"]),
        cast("list[str]", seen["findings"]),
    )


def _describe_living(cache: CacheInfo, root: str, check: bool) -> Description:
    session = _core.Cache.open(root, cache.name, "attach")
    try:
        me = session.info["session"]
        counters = session.stats()
        counters["sessions"] -= 1  # whoever looks does not count
        others = [slot for slot in session.sessions() if slot["session"] != me]
        findings = session.check() if check else []
        return Description(cache, Stats.from_dict(counters), session.namespaces(), others, findings)
    finally:
        session.close()


def clear_namespaces(name: str, wanted: str | None, root: Root = None) -> tuple[Stats, Stats, str]:
    """Clear the namespace that `wanted` means (its label, or the first digits of its digest), all
    without one. Returns the counters before and after, and what was cleared.
    """
    check_name(name)
    session = _core.Cache.open(resolve_root(root, make=False), name, "attach")
    try:
        before = Stats.from_dict(session.stats())
        if wanted is None:
            what = "all namespaces"
            session.clear(True)
        else:
            chosen = _find_namespace(session.namespaces(), wanted, name)
            what = f"namespace {label_of(chosen)!r} ({chosen['digest'].hex()[:12]})"
            session.clear_namespace(chosen["number"])
        return before, Stats.from_dict(session.stats()), what
    finally:
        session.close()


def label_of(namespace: _core.NamespaceInfo) -> str:
    """What people call it. Number 0 holds the pages of sessions opened without a namespace."""
    return namespace["label"] or ("(none)" if namespace["number"] == 0 else "(no label)")


def _find_namespace(
    known: list[_core.NamespaceInfo], wanted: str, name: str
) -> _core.NamespaceInfo:
    digits = wanted.lower()
    chosen = [
        one
        for one in known
        if wanted and (label_of(one) == wanted or one["digest"].hex().startswith(digits))
    ]
    if len(chosen) == 1:
        return chosen[0]
    found = ", ".join(f"{label_of(one)!r} ({one['digest'].hex()[:12]})" for one in chosen or known)
    how_many = f"{len(chosen)} of the" if chosen else "none of the"
    raise BadValue(f"{wanted!r} means {how_many} {len(known)} namespaces of {name!r}: {found}")


def age_s(slot: _core.SlotInfo) -> float:
    """Seconds since a session was opened."""
    return max(0.0, time.time() - slot["opened_s"])
