"""Whatever is called in whatever order: the cache gives what was last published for a key, or
nothing, exactly as a plain dict would that now and then forgets what nobody holds.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import hostcache as hc
from helpers import keys_of

FORMAT = hc.PageFormat(64, 4)
PAGES = 12
PROMPTS = [keys_of(f"prompt/{number}", 7) for number in range(3)]

sessions = st.integers(0, 2)
spans = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 7))
chances = st.floats(0, 1)


def keys_in(span: tuple[int, int, int]) -> np.ndarray:
    prompt, start, count = span
    return PROMPTS[prompt][start : start + count]


@dataclass
class Reading:
    lease: hc.Lease
    session: int
    keys: list[bytes]
    contents: list[bytes | None]  # of each page; None: a gap
    views: list[memoryview] = field(default_factory=list)
    void: bool = False  # cleared since


@dataclass
class Writing:
    reservation: hc.Reservation
    session: int
    keys: list[bytes]
    contents: list[bytes]
    parts: dict[int, hc.Part] = field(default_factory=dict)
    count: int = 0  # of parts; 0: taken without
    finished: int = 0
    void: bool = False  # cleared, failed or ended since


class Model(RuleBasedStateMachine):
    """Three sessions of one cache of 12 pages."""

    @initialize()
    def start(self) -> None:
        self.root = tempfile.mkdtemp(prefix="hostcache-test-", dir="/dev/shm")
        self.sessions = [self.open() for _ in range(3)]
        self.published: dict[bytes, bytes] = {}
        self.reading: list[Reading] = []
        self.writing: list[Writing] = []
        self.serial = 0

    def open(self) -> hc.KvCache:
        return hc.KvCache.open("chat", FORMAT, page_count=PAGES, root=self.root)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.reading.clear()
            self.writing.clear()
            gc.collect()
            stats = self.sessions[0].stats()
            assert (stats.reserved, stats.pinned) == (0, 0)
            for session in self.sessions:
                session.close()
            shutil.rmtree(self.root)

    # ------------------------------------------------------------------ reading

    @rule(session=sessions, span=spans, gaps=st.booleans(), viewed=chances)
    def lookup(self, session: int, span: tuple[int, int, int], gaps: bool, viewed: float) -> None:
        keys = keys_in(span)
        lease = self.sessions[session].lookup(keys, gaps=gaps)
        names = list(map(bytes, keys))
        run = len(names) - len(lease.missing)
        assert lease.missing == names[run:]
        contents: list[bytes | None] = []
        for i, page in enumerate(lease.pages):
            there = page >= 0
            contents.append(self.published[names[i]] if there else None)
            if not there:
                self.forget(names[i])
        if run < len(names):
            self.forget(names[run])
        reading = Reading(lease, session, names, contents)
        if viewed < 0.3:
            reading.views = [lease.view(i) for i, one in enumerate(contents) if one is not None]
        self.reading.append(reading)

    def forget(self, key: bytes) -> None:
        """A key that is not ready was evicted, which none that is held may be."""
        if self.published.pop(key, None) is not None:
            for held in self.reading:
                there = dict(zip(held.keys, held.contents, strict=False))
                assert held.void or there.get(key) is None, "a held page was evicted"

    @precondition(lambda self: self.reading)
    @rule(chance=chances, drop=st.booleans())
    def release(self, chance: float, drop: bool) -> None:
        held = self.reading.pop(int(chance * (len(self.reading) - 1)))
        if not drop:
            held.lease.release()
            held.lease.release()

    @rule(session=sessions, span=spans)
    def match(self, session: int, span: tuple[int, int, int]) -> None:
        names = list(map(bytes, keys_in(span)))
        run = self.sessions[session].match(keys_in(span))
        assert all(name in self.published for name in names[:run])
        if run < len(names):
            self.forget(names[run])

    # ------------------------------------------------------------------ writing

    @rule(
        session=sessions,
        span=spans,
        how=st.sampled_from(["whole", "missing", "unlinked", "suffix"]),
        parts=st.sampled_from([None, None, 1, 2]),
    )
    def reserve(
        self, session: int, span: tuple[int, int, int], how: str, parts: int | None
    ) -> None:
        cache, keys = self.sessions[session], keys_in(span)
        if how == "missing":
            reservation = cache.reserve(cache.lookup(keys).missing, parts=parts)
        elif how == "suffix":
            before = bytes(PROMPTS[span[0]][span[1] - 1])
            reservation = cache.reserve(keys, after=before, parts=parts)
        else:
            reservation = cache.reserve(keys, linked=how == "whole", parts=parts)
        names = [bytes(key) for key in reservation.keys]
        being_written = {name for one in self.writing if not one.void for name in one.keys}
        assert being_written.isdisjoint(names)
        assert all(name in self.published for name in reservation.present)
        for name in names:
            self.forget(name)
        contents = []
        for _ in names:
            self.serial += 1
            contents.append(self.serial.to_bytes(8, "little") * 8)
        writing = Writing(reservation, session, names, contents, count=parts or 0)
        if parts is None:
            for i, content in enumerate(contents):
                reservation.view(i)[:] = content
        if names:
            self.writing.append(writing)

    @precondition(lambda self: self.writing)
    @rule(chance=chances, session=sessions, part=st.integers(0, 1))
    def claim(self, chance: float, session: int, part: int) -> None:
        one = self.writing[int(chance * (len(self.writing) - 1))]
        if not one.count:
            return
        claimed = self.sessions[session].claim(one.reservation.token(), part)
        if claimed is not None:
            assert part < one.count
            assert part not in one.parts
            one.parts[part] = claimed
            for i, content in enumerate(one.contents):
                claimed.view(i)[:] = content

    @precondition(lambda self: any(one.parts for one in self.writing))
    @rule(chance=chances, ok=st.booleans())
    def finish_part(self, chance: float, ok: bool) -> None:
        able = [one for one in self.writing if one.parts]
        one = able[int(chance * (len(able) - 1))]
        number = min(one.parts)
        part = one.parts.pop(number)
        one.finished += 1
        one.void = one.void or not ok
        if ok:
            last = one.finished == one.count and not one.void
            assert part.commit() == (len(one.keys) if last else 0)
            if last:
                self.published.update(zip(one.keys, one.contents, strict=True))
        else:
            part.abort()
        if one.finished == one.count:
            self.writing.remove(one)

    @precondition(lambda self: self.writing)
    @rule(chance=chances, how=st.sampled_from(["commit", "some", "abort", "drop", "end"]))
    def finish(self, chance: float, how: str) -> None:
        one = self.writing[int(chance * (len(self.writing) - 1))]
        if one.count:
            one.reservation.end()
            one.void = True
            if not one.parts:
                self.writing.remove(one)
            return
        self.writing.remove(one)
        count = len(one.keys) if how == "commit" else len(one.keys) // 2
        if how in ("commit", "some"):
            assert one.reservation.commit(count) == (0 if one.void else count)
            if not one.void:
                first = zip(one.keys[:count], one.contents[:count], strict=True)
                self.published.update(first)
        elif how != "drop":
            getattr(one.reservation, how)()

    # ------------------------------------------------------------------ all of it

    @rule(session=sessions)
    def clear(self, session: int) -> None:
        self.sessions[session].clear()
        self.published.clear()
        for held in (*self.reading, *self.writing):
            held.void = True

    @rule(session=sessions)
    def close(self, session: int) -> None:
        """Ends what this session took; parts that others claimed go on."""
        for held in [one for one in self.reading if one.session == session]:
            held.views.clear()
            self.reading.remove(held)
        self.sessions[session].close()
        for one in [one for one in self.writing if one.session == session]:
            one.void = True
            self.writing.remove(one)
            for part in one.parts.values():
                part.abort()
        for one in list(self.writing):
            for number, part in list(one.parts.items()):
                try:
                    part.view(0)
                except hc.LeaseEnded:  # it was claimed by the session that is gone
                    del one.parts[number]
                    one.finished += 1
                    one.void = True
            if one.count and one.finished == one.count:
                self.writing.remove(one)
        self.sessions[session] = self.open()

    @invariant()
    def what_is_held_does_not_change(self) -> None:
        for held in getattr(self, "reading", []):
            for i, content in enumerate(held.contents):
                assert content is None or bytes(held.lease.view(i)) == content

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "root"):
            return
        stats = self.sessions[0].stats()
        assert stats.free + stats.reserved + stats.ready == PAGES
        assert stats.pinned + stats.evictable == stats.ready
        assert stats.sessions == 3
        assert stats.lock_timeouts == stats.repairs == 0
        assert self.sessions[1].check() == []


Model.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestThePlainDict = Model.TestCase
