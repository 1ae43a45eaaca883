"""`KvCache`: one session of one shared cache of KV pages."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from hostcache import _core
from hostcache.config import check_name, format_bytes, parse_bytes, resolve_root, whole_number
from hostcache.errors import BadValue, HostCacheError, Unsupported
from hostcache.keylists import NO_PARENT, Missing
from hostcache.keys import KeyArray, Keys, Namespace, as_key_array
from hostcache.pages import Lease, Nothing, PageFormat, Part, Reservation
from hostcache.stats import Stats

MOST_PARTS = 64
MOST_PAGES = 2**30

_log = logging.getLogger("hostcache")

Root = str | os.PathLike[str] | None
Progress = Callable[[int, int], object]


@final
class KvCache:
    """One session of the cache that has a name: made by `open`, `create` or `attach`.

    Its methods may be called by many threads. Where the table's lock can not be had in its bound,
    they answer as if the cache were empty and count `lock_timeouts`. A forked child that goes on
    using it gets a session of its own.
    """

    def __init__(self, session: _core.Cache, namespace: Namespace | None) -> None:
        """For `open`, `create` and `attach`, which see."""
        info = session.info
        self._session = session
        self._info = info
        # What a Missing carries means nothing elsewhere: epochs are those of a namespace.
        self._source = (info["random"], namespace.digest if namespace else None)
        self._format = PageFormat(info["page_bytes"], info["page_tokens"], info["fragments"])
        if info["replaced"]:
            _log.warning("cache %r was made anew: %s", info["name"], info["replaced"])

    # ------------------------------------------------------------------ one session

    @classmethod
    def open(
        cls,
        name: str,
        page_format: PageFormat,
        capacity: int | str | None = None,
        *,
        page_count: int | None = None,
        namespace: Namespace | None = None,
        root: Root = None,
        max_reserved: int | float | None = None,
        progress: Progress | None = None,
        group: object = None,
        tiers: Sequence[object] = (),
    ) -> KvCache:
        """Attach to the cache of that name, or make it.

        capacity      of page bytes, as a number or as "4GiB": page_count = capacity // page_bytes.
                      `page_count` may be given instead. The maker's size holds for all
        namespace     which pages `clear` and `stat` mean by this session's
        root          the folder; default HOSTCACHE_ROOT, else one of this user's under /dev/shm
        max_reserved  pages that this session may have reserved at a time, as a number (int) or as
                      a share of all (float); default: no limit
        progress      called with (bytes made, bytes in all) while a cache is made
        """
        _refuse_later(group, tiers)
        count = _page_count(page_format, capacity, page_count)
        where, limit = resolve_root(root), max_reserved
        return cls._start("open", where, name, page_format, count, namespace, limit, progress)

    @classmethod
    def create(
        cls,
        name: str,
        page_format: PageFormat,
        capacity: int | str | None = None,
        *,
        page_count: int | None = None,
        namespace: Namespace | None = None,
        root: Root = None,
        max_reserved: int | float | None = None,
        progress: Progress | None = None,
        group: object = None,
        tiers: Sequence[object] = (),
    ) -> KvCache:
        """Make a cache; `CacheExists` where the name is taken. Arguments as of `open`."""
        _refuse_later(group, tiers)
        count = _page_count(page_format, capacity, page_count)
        where, limit = resolve_root(root), max_reserved
        return cls._start("create", where, name, page_format, count, namespace, limit, progress)

    @classmethod
    def attach(cls, name: str, *, root: Root = None, namespace: Namespace | None = None) -> KvCache:
        """Join the cache of that name, whatever its page format; `CacheNotFound` without one."""
        check_name(name)
        where = resolve_root(root, make=False)
        return cls._start("attach", where, name, None, 0, namespace, None, None)

    @classmethod
    def _start(
        cls,
        mode: str,
        root: str,
        name: str,
        page_format: PageFormat | None,
        page_count: int,
        namespace: Namespace | None,
        max_reserved: int | float | None,
        progress: Progress | None,
    ) -> KvCache:
        if namespace is not None and not isinstance(namespace, Namespace):
            raise BadValue(f"namespace is {namespace!r}, it must be a hostcache.Namespace or None")
        session = _core.Cache.open(
            root,
            check_name(name),
            mode,
            page_bytes=page_format.page_bytes if page_format else 0,
            page_tokens=page_format.page_tokens if page_format else 0,
            fragments=page_format.fragments if page_format else (),
            page_count=page_count,
            namespace=namespace.digest if namespace else None,
            label=namespace.label if namespace else "",
            max_reserved=_most_reserved(max_reserved, root, name, page_count),
            progress=progress or _no_progress,
        )
        return cls(session, namespace)

    def close(self) -> None:
        """End the session and all that it holds; again: nothing. Memory goes with its last view,
        pages stay for the other sessions and the next.
        """
        self._session.close()

    def __enter__(self) -> KvCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        pages = f"{self.page_count} pages of {format_bytes(self._format.page_bytes)}"
        state = ", closed" if self._session.closed else ""
        return f"<KvCache {self.name!r}: {pages}, {self._format.page_tokens} tokens each{state}>"

    # ------------------------------------------------------------------ what it is

    @property
    def name(self) -> str:
        """What others open or attach to."""
        return self._info["name"]

    @property
    def format(self) -> PageFormat:
        """What one page holds."""
        return self._format

    @property
    def page_count(self) -> int:
        """Pages of the cache: the maker's number, whatever this session asked for."""
        return self._info["page_count"]

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the segment and the session: its path, sizes in bytes, whether this session
        made it, and what it replaced.
        """
        return cast("dict[str, Any]", self._session.info)

    @property
    def epoch(self) -> int:
        """Rises with each `clear` that concerns this session; `reserve` takes it, see there."""
        return self._session.epoch

    @property
    def orphaned(self) -> bool:
        """Whether the name was taken away from this segment; the session goes on."""
        return self._session.orphaned

    # ------------------------------------------------------------------ pages

    def match(self, keys: Keys) -> int:
        """How many leading keys are ready now. Holds nothing, so the next call may differ."""
        return self._session.match(as_key_array(keys))

    def lookup(self, keys: Keys, parts: int | None = None, gaps: bool = False) -> Lease:
        """Hold the leading pages that are ready, for reading; a miss is an empty lease.

        With `gaps` every ready key is held. With `parts` the pages are read by others, which
        claim their part by the lease's token.
        """
        wanted = as_key_array(keys)
        count = _parts(parts)
        hold, pages, run, parent, version, epoch = self._session.lookup(wanted, count, bool(gaps))
        missing = Missing(wanted[run:].copy(), epoch, (parent, version), self._source)
        return Lease(hold or Nothing(count), pages, missing)

    def reserve(
        self,
        keys: Keys,
        parts: int | None = None,
        linked: bool = True,
        starts: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        epoch: int | None = None,
        after: bytes | KeyArray | None = None,
    ) -> Reservation:
        """Take pages to write, for the keys that have none and are not being written.

        The keys are one prompt, each page the parent of the next: give `lease.missing`, which
        knows the page before, or the whole prompt. What can not be had is named in the result.

        parts   shares for others to claim by the reservation's token; the caller then has none
        linked  False: unrelated keys, pages without parents
        starts  positions in `keys` where another prompt begins
        epoch   `cache.epoch` of when the work began, where that is older than the lookup: after a
                `clear` since then the keys are refused
        after   the key of the page before the first, for a bare suffix
        """
        wanted = as_key_array(keys)
        prompts = _starts(starts, len(wanted))
        before = None if after is None else _one_key(after)
        if not linked and (prompts is not None or before is not None):
            raise BadValue("linked=False makes pages without parents: leave starts= and after= out")
        parent, since = NO_PARENT, -1
        if isinstance(keys, Missing):
            parent, since = keys.origin(self._source)
        if before is not None or not linked:
            parent = NO_PARENT
        if epoch is not None:
            began = whole_number(epoch, "epoch")
            if not 0 <= began < 2**32:
                raise BadValue(f"epoch is {began}, it must be one that cache.epoch gave")
            since = began if since < 0 else min(began, since)
        count = _parts(parts)
        hold, pages, outcomes = self._session.reserve(
            wanted, prompts, linked, since, *parent, before, count
        )
        return Reservation(hold or Nothing(count), wanted, pages, outcomes)

    def claim(self, token: bytes, part: int) -> Part | None:
        """Take part `part` of what a token stands for, before the first byte is stored or read.

        None when refused: it was claimed already, the taker has ended, or the lock could not be
        had. Then touch nothing.
        """
        if not isinstance(token, bytes):
            raise BadValue(f"token is a {type(token).__name__}, it must be bytes from token()")
        number = whole_number(part, "part")
        if not token or not 0 <= number < MOST_PARTS:
            return None
        try:
            hold = self._session.claim(token, number)
        except BadValue:  # not a token, or not all of one
            return None
        return None if hold is None else Part(hold)

    def wait(self, keys: Keys, timeout_s: float) -> int:
        """Wait until the pending ones of `keys` are ready or their writers are gone, and return
        how many leading keys are ready. A time-out is no error; keys that nobody writes are not
        waited for.
        """
        try:
            bound = float(timeout_s)
        except (TypeError, ValueError):
            bound = math.nan
        if not 0 <= bound < math.inf:
            raise BadValue(f"timeout_s is {timeout_s!r}, it must be a number of seconds from 0 on")
        return self._session.wait(as_key_array(keys), bound)

    def clear(self, everything: bool = False) -> None:
        """Forget, in one step, all pages of the namespace that this session was opened with (all
        pages if it was opened without), or with `everything` those of all namespaces.

        What was begun before, by anybody, publishes nothing. Leases stay valid to their end.
        """
        self._session.clear(bool(everything))

    # ------------------------------------------------------------------ questions

    def stats(self) -> Stats:
        """Counters of the cache, after dead sessions were taken back."""
        return Stats.from_dict(self._session.stats())

    def check(self) -> list[str]:
        """Verify every invariant, without changing anything: what is wrong; empty: nothing."""
        return self._session.check()


def _no_progress(done: int, total: int) -> None:
    """Called between the steps of making a large cache, so that Ctrl-C is seen there."""


def _refuse_later(group: object, tiers: Sequence[object]) -> None:
    if group is not None:
        raise Unsupported("group=: groups come with the LightLLM adapter; leave it out")
    if tiers:
        raise Unsupported("tiers=: this version keeps pages in host memory only; leave it out")


def _page_count(page_format: PageFormat, capacity: int | str | None, page_count: int | None) -> int:
    if not isinstance(page_format, PageFormat):
        raise BadValue(f"the page format is {page_format!r}, it must be a hostcache.PageFormat")
    if (capacity is None) == (page_count is None):
        given = "neither" if capacity is None else "both"
        raise BadValue(f"give capacity= or page_count=, one of the two; {given} was given")
    if capacity is not None:
        size = parse_bytes(capacity, "capacity")
        count = size // page_format.page_bytes
        if count == 0:
            raise BadValue(
                f"a capacity of {size} bytes holds no page of {page_format.page_bytes} bytes; "
                "ask for more, or for smaller pages"
            )
    else:
        count = whole_number(cast("int", page_count), "page_count")
    if not 1 <= count <= MOST_PAGES:
        raise BadValue(f"page_count is {count}, a cache has 1 to {MOST_PAGES} pages")
    return count


def _most_reserved(limit: int | float | None, root: str, name: str, page_count: int) -> int:
    """In pages; 0: no limit."""
    if limit is None:
        return 0
    if isinstance(limit, float):
        if not 0 < limit <= 1:
            raise BadValue(f"max_reserved is {limit}, as a share it is above 0.0 and at most 1.0")
        try:  # a share is one of the cache that is there, which may have another size
            page_count = _core.peek(root, name)["page_count"] or page_count
        except HostCacheError:
            pass  # none is there, or `open` will say what is wrong with it
        return max(1, int(limit * page_count))
    pages = whole_number(limit, "max_reserved")
    if pages < 1:
        raise BadValue(f"max_reserved is {pages}, it must be 1 page or more (a share: 0.75)")
    return min(pages, 2**31)


def _parts(parts: int | None) -> int:
    """As the core counts them: 0 where the caller is the only part itself."""
    if parts is None:
        return 0
    count = whole_number(parts, "parts")
    if not 1 <= count <= MOST_PARTS:
        raise BadValue(f"parts is {count}, a hold has 1 to {MOST_PARTS} parts (None: no parts)")
    return count


def _starts(
    starts: Sequence[int] | NDArray[np.integer[Any]] | None, key_count: int
) -> NDArray[np.int32] | None:
    if starts is None:
        return None
    places = [whole_number(start, f"starts[{i}]") for i, start in enumerate(starts)]
    for i, place in enumerate(places):
        if not 0 <= place < key_count:
            raise BadValue(f"starts[{i}] is {place}, positions of {key_count} keys are below it")
        if i and place <= places[i - 1]:
            raise BadValue(f"starts[{i}] is {place} after {places[i - 1]}, positions must rise")
    return np.array(places, np.int32)


def _one_key(key: bytes | KeyArray) -> KeyArray:
    if isinstance(key, np.ndarray):
        return as_key_array(key.reshape(1, -1))
    return as_key_array([key])
