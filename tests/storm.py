"""What a process of a storm does: everything that a session can do, at random, until it is killed;
and what its pages hold, so that any wrong byte shows.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
import zlib
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import hostcache as hc
from helpers import FORMAT, PAGE_BYTES, keys_of

# A page has two halves of 64-bit words: a version drawn by whoever wrote the half, then words
# that follow from version, key and place. So bytes of two writers, of another key, or of a half
# that nobody finished do not pass; and two writers of one key never write the same bytes.
_HALF = PAGE_BYTES // 16
_PLACES = np.arange(1, _HALF, dtype=np.uint64)


def _base(version: int, key: Any, half: int) -> np.uint64:
    return np.uint64((version ^ int.from_bytes(bytes(key)[:8], "little")) + half & 2**63 - 1)


def _half(view: memoryview, half: int) -> NDArray[np.uint64]:
    return np.frombuffer(view, np.uint64)[half * _HALF : (half + 1) * _HALF]


def write_half(view: memoryview, key: Any, half: int) -> None:
    words, version = _half(view, half), random.getrandbits(63)
    words[0] = version
    words[1:] = _base(version, key, half) + _PLACES


def is_right(view: memoryview, key: Any) -> bool:
    for half in (0, 1):
        words = _half(view, half)
        if not np.array_equal(words[1:], _base(int(words[0]), key, half) + _PLACES):
            return False
    return True


STORM_PAGES = 96
PROMPTS = [keys_of(f"storm/{i}", 24) for i in range(8)]
EVERY_KEY = np.concatenate(PROMPTS)
UNREAD = [keys_of(f"unread/{i}", 64) for i in range(3)]  # no one looks into these pages
WRONG_BYTES = 7


class Letters:
    """Memory that the processes of a storm share: a few letters, which one lends by (tokens and
    their keys), and of each process its session and how many steps it took. A letter torn by a
    death does not open.
    """

    COUNT, SIZE, STEPS_AT = 4, 8192, 4 * 8192

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.STEPS_AT + 4096)
        self._steps = np.frombuffer(self._memory, np.uint64, 64, self.STEPS_AT)
        self.sessions = np.frombuffer(self._memory, np.uint64, 64, self.STEPS_AT + 512)

    def post(self, kind: str, token: bytes, keys: Any) -> None:
        text = json.dumps([kind, token.hex(), [bytes(key).hex() for key in keys]]).encode()
        head = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
        at = random.randrange(self.COUNT) * self.SIZE
        if len(text) <= self.SIZE - 8:
            self._memory[at : at + 8 + len(text)] = head + text

    def read(self) -> tuple[str, bytes, list[bytes]] | None:
        at = random.randrange(self.COUNT) * self.SIZE
        length, check = np.frombuffer(self._memory[at : at + 8], np.uint32).tolist()
        text = self._memory[at + 8 : at + 8 + min(length, self.SIZE)]
        if not text or zlib.crc32(text) != check:
            return None
        kind, token, keys = json.loads(text)
        return kind, bytes.fromhex(token), [bytes.fromhex(key) for key in keys]

    def step(self, worker: int) -> None:
        self._steps[worker] += np.uint64(1)

    def steps(self) -> list[int]:
        return self._steps.tolist()


class StormWorker:
    """Does everything that a session can do, at random, until it is killed."""

    def __init__(self, root: str, letters: Letters, number: int, pause_s: float) -> None:
        random.seed()
        os.nice(3)  # so that who kills and looks on has its turn on few cores
        self.letters, self.number, self.pause_s = letters, number, pause_s
        self.cache = hc.KvCache.open("storm", FORMAT, page_count=STORM_PAGES, root=root)
        assert self.cache.info["replaced"] == ""
        letters.sessions[number] = self.cache.info["session"]
        self.held: list[Any] = []

    def run(self) -> NoReturn:
        does = [self.look_up, self.store_whole, self.borrow, self.lend, self.lend_to_read]
        does += [self.churn, self.forget, self.clear]
        while True:
            act = random.choices(does, [40, 25, 12, 8, 4, 30, 9, 1])[0]
            act(PROMPTS[random.randrange(len(PROMPTS))][: random.randint(1, 24)])
            while len(self.held) > 4:
                self.held.pop(0)
            self.letters.step(self.number)

    def pause(self) -> None:
        if self.pause_s:
            time.sleep(random.uniform(0, self.pause_s))

    def verify(self, hold: hc.Lease | hc.Part, keys: Any) -> None:
        for i in range(len(hold.pages)):
            if not is_right(hold.view(i), keys[i]):
                print(f"wrong bytes in page {hold.pages[i]}: {bytes(hold.view(i))[:64].hex()}")
                sys.exit(WRONG_BYTES)

    def look_up(self, keys: Any) -> None:
        lease = self.cache.lookup(keys)
        self.verify(lease, keys)
        self.pause()
        if random.random() < 0.8:
            self.write(self.cache.reserve(lease.missing))
        self.verify(lease, keys)
        if random.random() < 0.5:
            self.held.append(lease)

    def store_whole(self, keys: Any) -> None:
        self.write(self.cache.reserve(keys))

    def write(self, reservation: hc.Reservation) -> None:
        for i, key in enumerate(reservation.keys):
            write_half(reservation.view(i), key, 0)
            self.pause()
            write_half(reservation.view(i), key, 1)
            if random.random() < 0.02:
                self.held.append(reservation.view(i))  # outlives the commit or abort
        fate = random.random()
        if fate < 0.7:
            reservation.commit()
        elif fate < 0.8:
            reservation.commit(random.randint(0, len(reservation)))
        elif fate < 0.9:
            reservation.abort()  # else: dropped

    def churn(self, _: Any) -> None:
        """Nearly all of its time is spent inside the lock, where kills are worth most."""
        for _ in range(16):
            with self.cache.reserve(random.choice(UNREAD)) as reservation:
                if random.random() < 0.2:
                    reservation.commit(min(len(reservation), random.randrange(8)))
            self.cache.lookup(EVERY_KEY, gaps=True)

    def lend(self, keys: Any) -> None:
        reservation = self.cache.reserve(keys, parts=2)
        if len(reservation):
            self.letters.post("write", reservation.token(), reservation.keys)
            self.held.append(reservation)

    def lend_to_read(self, keys: Any) -> None:
        lease = self.cache.lookup(keys, parts=2)
        if len(lease):
            self.letters.post("read", lease.token(), keys[: len(lease)])
            self.held.append(lease)

    def borrow(self, _: Any) -> None:
        letter = self.letters.read()
        if letter is None:
            return
        kind, token, keys = letter
        number = random.randrange(2)
        part = self.cache.claim(token, number)
        if part is None:
            return
        if kind == "read":
            self.verify(part, keys)
        else:
            for i, key in enumerate(keys):
                write_half(part.view(i), key, number)
        self.pause()
        if random.random() < 0.9:
            part.commit()
        elif random.random() < 0.5:
            self.held.append(part)

    def forget(self, _: Any) -> None:
        if self.held:
            self.held.pop(random.randrange(len(self.held)))

    def clear(self, _: Any) -> None:
        self.cache.clear(everything=True)
