"""Keys that come back from a call: immutable, in the order asked, usable wherever keys are."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, final, overload

import numpy as np
from numpy.typing import NDArray

NO_PARENT = (-1, 0)  # page and version

_Scalar = TypeVar("_Scalar", bound=np.generic)


def frozen(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """A read-only view of an array that nobody else writes."""
    view: NDArray[_Scalar] = array.view()
    view.flags.writeable = False
    return view


class KeyList(Sequence[bytes]):
    """Some keys of one call, in the order asked: an immutable sequence of 32-byte `bytes`.

    Whatever takes keys takes it. `array` is the same as a read-only array [n, 32] of uint8.
    """

    __slots__ = ("_array",)

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = frozen(array)

    @property
    def array(self) -> NDArray[np.uint8]:
        return self._array

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        return np.array(self._array, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> KeyList: ...
    def __getitem__(self, index: int | slice) -> bytes | KeyList:
        if isinstance(index, slice):
            return self._slice(index)
        row: NDArray[np.uint8] = self._array[operator.index(index)]
        return row.tobytes()

    def _slice(self, index: slice) -> KeyList:
        return KeyList(self._array[index])

    def __iter__(self) -> Iterator[bytes]:
        return (row.tobytes() for row in self._array)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, KeyList):
            return np.array_equal(self._array, other._array)
        if isinstance(other, (list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        first = ", ".join(f"{key[:4].hex()}.." for key in self[:3])
        return f"<{type(self).__name__}: {len(self)} keys{': ' if first else ''}{first}>"


@final
class Missing(KeyList):
    """The keys of a lookup from the first that was not ready, and where they belong.

    `reserve` links the first of them to the page before it, so that a prompt's beginning can not
    be evicted before its end, and publishes nothing if the cache was cleared since the lookup.
    A slice from the start keeps both. Any other slice, such as `missing[4:]`, makes a tree of its
    own and keeps the epoch; given to another cache or namespace, or made a list, it is just keys.
    """

    __slots__ = ("_parent", "_source", "epoch")

    def __init__(
        self,
        array: NDArray[np.uint8],
        epoch: int,
        parent: tuple[int, int] = NO_PARENT,
        source: object = None,
    ) -> None:
        super().__init__(array)
        self.epoch = epoch
        self._parent = parent
        self._source = source

    def _slice(self, index: slice) -> Missing:
        start, _, step = index.indices(len(self))
        parent = self._parent if (start, step) == (0, 1) else NO_PARENT
        return Missing(self._array[index], self.epoch, parent, self._source)

    def origin(self, source: object) -> tuple[tuple[int, int], int]:
        """Parent page with its version, and epoch, as `source` (a cache and namespace) knows
        them; nothing and -1 where this comes from another source.
        """
        return (self._parent, self.epoch) if source == self._source else (NO_PARENT, -1)
