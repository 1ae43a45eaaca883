"""What one page holds, and what one call holds: leases, reservations and their parts.

    lookup   -> Lease          pages to read, until `release()`
    reserve  -> Reservation    pages to write, until `commit()` or `abort()`
    claim    -> Part           one session's share of either, where it was taken with `parts=`

Each is a context manager, may be ended twice, and ends by itself when it is dropped. A hold lasts
as long as it or any view of it lives, and arrays made from a view keep the view. In a forked child
inherited ones do nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from hostcache import _core
from hostcache.config import parse_bytes, whole_number
from hostcache.errors import BadValue, LeaseEnded, Unsupported
from hostcache.keylists import KeyList, Missing, frozen

MOST_FRAGMENTS = 1024
RESERVED, PRESENT, PENDING, REFUSED = range(4)  # what became of a key, in the core's answer

_Self = TypeVar("_Self", bound="_Held")


@final
@dataclass(frozen=True, init=False)
class PageFormat:
    """What one page holds: its bytes, its tokens, and the bytes of its fragments in order.

    A fragment is what an engine copies as one piece, such as the K or V of one layer. Without
    `fragments` the page is one. All who open a cache must name the same format.
    """

    page_bytes: int
    page_tokens: int
    fragments: tuple[int, ...]

    def __init__(
        self, page_bytes: int | str, page_tokens: int, fragments: Iterable[int] | None = None
    ) -> None:
        size = parse_bytes(page_bytes, "page_bytes")
        tokens = whole_number(page_tokens, "page_tokens")
        if size < 1:
            raise BadValue(f"page_bytes is {size}, a page has 1 byte or more")
        if not 1 <= tokens < 2**32:
            raise BadValue(f"page_tokens is {tokens}, a page has 1 to {2**32 - 1} tokens")
        object.__setattr__(self, "page_bytes", size)
        object.__setattr__(self, "page_tokens", tokens)
        object.__setattr__(self, "fragments", _fragments(fragments, size))


def _fragments(fragments: Iterable[int] | None, page_bytes: int) -> tuple[int, ...]:
    if fragments is None:
        return (page_bytes,)
    sizes = tuple(whole_number(size, f"fragments[{i}]") for i, size in enumerate(fragments))
    if not 1 <= len(sizes) <= MOST_FRAGMENTS:
        raise BadValue(f"a page has 1 to {MOST_FRAGMENTS} fragments, not {len(sizes)}")
    if min(sizes) < 1:
        i = next(i for i, size in enumerate(sizes) if size < 1)
        raise BadValue(f"fragments[{i}] is {sizes[i]}, a fragment has 1 byte or more")
    if sum(sizes) != page_bytes:
        raise BadValue(
            f"the fragments have {sum(sizes)} bytes together, page_bytes is {page_bytes}"
        )
    return sizes


@final
class Nothing:
    """Stands in for the core's hold where a call found, or was given, no page."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.part = -1
        self.pages: NDArray[np.int32] = np.empty(0, np.int32)
        self.ended = False

    def view(self, i: int) -> memoryview:
        raise IndexError(f"view({i}) of a hold without pages")

    def finish(self, ok: bool, _count: int = -1) -> int:
        if ok and self.ended:
            raise LeaseEnded("this reservation (of no page) was committed or aborted already")
        self.ended = True
        return 0

    def end(self) -> None:
        self.ended = True

    def token(self) -> bytes:
        return b""


Hold: TypeAlias = "_core.Hold | Nothing"


class _Held:
    """What leases, reservations and parts have in common: pages, views, and one end."""

    __slots__ = ("__weakref__", "_hold", "_pages")

    def __init__(self, hold: Hold, pages: NDArray[np.int32]) -> None:
        self._hold = hold
        self._pages = frozen(pages)

    @property
    def pages(self) -> NDArray[np.int32]:
        """Page numbers, in key order; kept after the end."""
        return self._pages

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        raise NotImplementedError

    def _view(self, i: int) -> memoryview:
        if self._hold.ended:
            raise LeaseEnded(f"view({i}) of a {type(self).__name__} after its end; take a new one")
        i = operator.index(i)
        if not 0 <= i < len(self._pages):
            raise IndexError(f"view({i}) of a {type(self).__name__} of {len(self._pages)} pages")
        if self._pages[i] < 0:
            raise IndexError(f"view({i}): that key was not ready, its page is -1")
        return self._hold.view(i)

    def _token(self, taken_by: str) -> bytes:
        if not self._hold.parts:
            raise Unsupported(
                f"only a {type(self).__name__} taken with parts= has a token: {taken_by}(..., "
                "parts=N); without it the caller is the only part itself"
            )
        return self._hold.token()

    def __repr__(self) -> str:
        state = "ended" if self._hold.ended else "held"
        parts = f", {self._hold.parts} parts" if self._hold.parts else ""
        return f"<{type(self).__name__} of {len(self._pages)} pages{parts}, {state}>"


@final
class Lease(_Held):
    """Pages held for reading: none of them is evicted or changed before `release()`.

    `pages` are those of the leading run, and `missing` all keys behind it. With `gaps=True` there
    is one page for each key, -1 where it is not ready.
    """

    __slots__ = ("_missing",)

    def __init__(self, hold: Hold, pages: NDArray[np.int32], missing: Missing) -> None:
        super().__init__(hold, pages)
        self._missing = missing

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def missing(self) -> Missing:
        """The keys from the first that is not ready, for `reserve`; kept after the end."""
        return self._missing

    @property
    def below(self) -> KeyList:
        """Those of `missing` that a slower tier has: none, in a cache without tiers."""
        return KeyList(self._missing.array[:0])

    @property
    def epoch(self) -> int:
        """The epoch in which the miss was seen."""
        return self._missing.epoch

    def view(self, i: int) -> memoryview:
        """The bytes of page `i`, read-only. A page stays held while a view of it lives."""
        return self._view(i)

    def token(self) -> bytes:
        """For `claim` in the sessions that read; empty where nothing is held (claim refuses it)."""
        return self._token("lookup")

    def release(self) -> None:
        """Give the pages back. With `parts=`: forget them, claimed parts finish by themselves."""
        self._hold.end()

    end = release
    _leave = release


@final
class Reservation(_Held):
    """Pages being written, seen by nobody else until `commit()`: `keys[i]`, `pages[i]` and
    `view(i)` are one page.

    `present` names the keys that are ready already. `pending` ones are being written, by others
    (`wait` for them) or in this very call, where they were named twice. `refused` ones found no
    room.
    """

    __slots__ = ("_keys", "_pending", "_present", "_refused")

    def __init__(
        self,
        hold: Hold,
        keys: NDArray[np.uint8],
        pages: NDArray[np.int32],
        outcomes: NDArray[np.uint8],
    ) -> None:
        reserved = outcomes == RESERVED
        super().__init__(hold, pages[reserved])
        self._keys = frozen(keys[reserved])
        self._present = KeyList(keys[outcomes == PRESENT])
        self._pending = KeyList(keys[outcomes == PENDING])
        self._refused = KeyList(keys[outcomes == REFUSED])

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def keys(self) -> NDArray[np.uint8]:
        """The keys that got a page, [n, 32]."""
        return self._keys

    @property
    def present(self) -> KeyList:
        """Keys that are ready already."""
        return self._present

    @property
    def pending(self) -> KeyList:
        """Keys that are being written now: by others, or named twice in this call."""
        return self._pending

    @property
    def refused(self) -> KeyList:
        """Keys without room, or whose epoch is over: compute them and do not store them."""
        return self._refused

    def view(self, i: int) -> memoryview:
        """The bytes of page `i`, writable. After `commit` nothing may be written there."""
        self._refuse_taker("view")
        return self._view(i)

    def commit(self, n: int | None = None) -> int:
        """Publish the first `n` pages (all without it), give back the rest, and return how many
        are ready now: fewer where a key was cleared or reserved anew meanwhile, and 0 where the
        lock could not be had, in which case it is made by the session's next call or timer.

        `LeaseEnded` after a commit or abort.
        """
        self._refuse_taker("commit")
        count = -1 if n is None else whole_number(n, "n")
        if n is not None and not 0 <= count <= len(self._pages):
            raise BadValue(f"commit({n}) of a reservation of {len(self._pages)} pages")
        return self._hold.finish(True, count)

    def abort(self) -> None:
        """Give all pages back unpublished; after a commit, or a second time, nothing.

        With `parts=` this is `end()`.
        """
        if self._hold.parts:
            self._hold.end()
        else:
            self._hold.finish(False)

    def end(self) -> None:
        """Forget the reservation: what is not yet published never will be. Parts that were
        claimed finish by themselves, others can not be claimed any more. Again: nothing.
        """
        self.abort()

    _leave = end

    def token(self) -> bytes:
        """For `claim` in the sessions that write; empty where no page was reserved (claim
        refuses it).
        """
        return self._token("reserve")

    def _refuse_taker(self, what: str) -> None:
        if self._hold.parts:
            raise Unsupported(
                f"{what}: this reservation was taken with parts={self._hold.parts} and holds no "
                "part itself; claim one: part = cache.claim(reservation.token(), part=0)"
            )


@final
class Part(_Held):
    """One share of a hold, claimed by this session: of a reservation to write, of a lease to read.

    Of a reservation the last part's `commit` publishes, if none was aborted. Of a lease both ends
    give the share back.
    """

    __slots__ = ()

    def __init__(self, hold: Hold) -> None:
        super().__init__(hold, hold.pages)

    @property
    def part(self) -> int:
        """Its number, 0 .. parts-1."""
        return self._hold.part

    def view(self, i: int) -> memoryview:
        """The bytes of page `i`: writable in a part of a reservation, read-only of a lease."""
        return self._view(i)

    def commit(self) -> int:
        """Say that this part is done, and return how many pages became ready by it: all of a
        reservation's if it was the last part, else 0. There `LeaseEnded` after a commit or abort.
        """
        return self._hold.finish(True)

    def abort(self) -> None:
        """Say that this part will not be written: nothing of the hold is published. After a
        commit, or a second time, nothing.
        """
        self._hold.finish(False)

    _leave = abort
