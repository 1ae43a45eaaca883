"""The counters of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Stats:
    """Pages and sessions now, and what happened since the cache was made.

    `free + reserved + ready == page_count` and `ready == pinned + evictable`: exact when nothing
    runs. `pinned` counts the ready pages that a lease or a reservation protects, the pages before
    them in their prompts included. Only `lookup` counts hits and misses. `repairs` are dead
    sessions cleared up and locks taken over from the dead.
    """

    page_count: int
    free: int
    reserved: int
    ready: int
    pinned: int
    evictable: int
    sessions: int
    hits: int
    misses: int
    commits: int
    aborts: int
    evictions: int
    repairs: int
    refused: int
    lock_timeouts: int

    @classmethod
    def from_dict(cls, counters: Mapping[str, int]) -> Stats:
        """From the core's counters; others than ours are left out."""
        return cls(**{field.name: counters[field.name] for field in fields(cls)})
