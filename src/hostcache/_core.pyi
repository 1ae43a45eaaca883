"""The compiled core: types translated, nothing else. Use `hostcache`, not this module.

Keys are C-contiguous uint8 arrays [n, 32]. Every call lets the GIL go. A call that can not have
the table lock in its bound answers as if the cache were empty and counts `lock_timeouts`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

class Info(TypedDict):
    name: str
    path: str
    format: int
    random: int
    page_bytes: int
    page_tokens: int
    page_count: int
    fragments: list[int]
    table_bytes: int  # header, table and ledgers: all that comes before page 0
    size_bytes: int  # of the file
    made: bool  # this open made the segment
    replaced: str  # what stood there before and why it was replaced; empty: nothing
    session: int  # id
    slot_count: int

class SlotInfo(TypedDict):
    session: int
    pid: int  # in its own PID namespace: for people
    command: str
    opened_s: float  # seconds since the Unix epoch
    namespace: int
    alive: bool
    holds: int
    reserved_pages: int
    oldest_hold_s: float  # age; 0.0 where it holds nothing

class NamespaceInfo(TypedDict):
    number: int  # 0: pages of sessions opened without a namespace
    digest: bytes
    label: str
    epoch: int
    ready_pages: int

class Peek(TypedDict):
    """What can be told of a segment without a session (`info`, plain counters)."""

    name: str
    path: str
    format: int
    page_bytes: int
    page_tokens: int
    page_count: int
    size_bytes: int
    living: bool  # some session lives in it
    problem: str  # why it can not be used (another format, damage, another boot); empty: nothing

class Hold:
    """One hold of this session: what lookup, reserve or claim took."""

    @property
    def number(self) -> int: ...
    @property
    def kind(self) -> str: ...  # "read" or "write"
    @property
    def parts(self) -> int: ...  # 0: the caller is the only part itself
    @property
    def part(self) -> int: ...  # the claimed part; -1: this is the taker of a hold with parts
    @property
    def pages(self) -> NDArray[np.int32]: ...
    @property
    def ended(self) -> bool: ...  # an end was called (it may still wait for views)
    def view(self, i: int) -> memoryview:
        """Page i of `pages`, one-dimensional bytes; read-only for a read hold.

        Raises LeaseEnded after an end or in a forked child, Unsupported on a taker that holds no
        part, IndexError.
        """
    def finish(self, ok: bool, count: int = -1) -> int:
        """Finish the claimed (or only) part. Returns how many pages became ready in this call.

        count: publish the first `count` pages and give the rest back (single part only); -1: all.
        A second call raises LeaseEnded if `ok`, else does nothing.
        """
    def end(self) -> None:
        """Release a read hold, or forget a write hold that was taken with parts; again: nothing."""
    def token(self) -> bytes:
        """For `claim` in any session. Unsupported where the hold was taken without parts."""

class Cache:
    """One session of one segment."""

    @staticmethod
    def open(
        root: str,
        name: str,
        mode: str,  # "open": make or attach; "create": only make; "attach": only attach
        page_bytes: int = 0,
        page_tokens: int = 0,
        fragments: Sequence[int] = (),
        page_count: int = 0,
        namespace: bytes | None = None,
        label: str = "",
        max_reserved: int = 0,
        pending_bound_s: float = 5.0,  # a key reserved longer ago may be reserved anew
        any_filesystem: bool = False,
        progress: Callable[[int, int], Any] | None = None,  # bytes made, bytes in all
    ) -> Cache: ...
    @property
    def info(self) -> Info: ...
    @property
    def epoch(self) -> int: ...
    @property
    def orphaned(self) -> bool: ...  # the name no longer leads to this segment
    @property
    def closed(self) -> bool: ...
    def match(self, keys: NDArray[np.uint8]) -> int: ...
    def lookup(
        self, keys: NDArray[np.uint8], parts: int = 0, gaps: bool = False
    ) -> tuple[Hold | None, NDArray[np.int32], int, int, int, int]:
        """(hold, pages, run, parent page, parent version, epoch).

        pages: of the leading run, or with gaps one for each key and -1 where it is not ready.
        parent page and version: of the last page of the leading run; -1 and 0 without one.
        epoch: the one in which the miss was seen. hold is None where nothing is held.
        """
    def reserve(
        self,
        keys: NDArray[np.uint8],
        starts: NDArray[np.int32] | None = None,  # positions where a prompt begins (0 implied)
        linked: bool = True,
        epoch: int = -1,  # -1: now
        parent_page: int = -1,
        parent_version: int = 0,
        after: NDArray[np.uint8] | None = None,  # [1, 32]: key of the page before keys[0]
        parts: int = 0,
    ) -> tuple[Hold | None, NDArray[np.int32], NDArray[np.uint8]]:
        """(hold, page of each key or -1, what became of each key).

        0 reserved, 1 present (ready already), 2 pending (another's, or named twice), 3 refused.
        `hold.pages` are the reserved ones in key order.
        """
    def claim(self, token: bytes, part: int) -> Hold | None: ...
    def wait(self, keys: NDArray[np.uint8], timeout_s: float) -> int: ...
    def clear(self, everything: bool) -> None: ...
    def clear_namespace(self, number: int) -> None: ...
    def stats(self, count_pinned: bool = True) -> dict[str, int]: ...
    def sessions(self) -> list[SlotInfo]: ...
    def namespaces(self) -> list[NamespaceInfo]: ...
    def check(self) -> list[str]: ...
    def sweep(self) -> int: ...  # dead sessions cleared up
    def close(self) -> None: ...

def peek(root: str, name: str, any_filesystem: bool = False) -> Peek:
    """CacheNotFound where there is no such file, NotAllowed where it is not ours."""

def inspect(
    root: str, name: str, any_filesystem: bool = False, living_too: bool = False
) -> dict[str, Any]:
    """Of a segment, without making a session and without writing:

    {"stats": dict, "namespaces": list[NamespaceInfo], "sessions": list[SlotInfo],
     "findings": list[str]}. Under the attach lock, an open log seen as rolled back in a private
    copy. Where a session lives it raises Busy (attach instead), or with `living_too` gives the
    numbers as they are, unchecked. Damaged where nothing can be read.
    """

def names(root: str) -> list[str]: ...
def remove(root: str, name: str, force: bool, any_filesystem: bool = False) -> None:
    """Take the name away at once. Without force, Busy while sessions live in it."""

def shutdown() -> None:
    """End every session of the process and join the timer; called at interpreter exit."""
