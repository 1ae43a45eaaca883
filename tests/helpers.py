"""What many tests use: keys, page bytes that tell whose they are, and other processes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hostcache as hc

PAGE_BYTES = 4096
PAGE_COUNT = 32
FORMAT = hc.PageFormat(page_bytes=PAGE_BYTES, page_tokens=16)


def keys_of(prompt: str, count: int) -> NDArray[np.uint8]:
    """`count` keys of a prompt that is known by a name, [count, 32]."""
    digests = (hashlib.sha256(f"{prompt}/{i}".encode()).digest() for i in range(count))
    return np.frombuffer(b"".join(digests), np.uint8).reshape(count, 32).copy()


def page_of(key: Any, page_bytes: int = PAGE_BYTES) -> bytes:
    """What the page of a key holds in these tests: its key over and over."""
    return (bytes(key) * (page_bytes // 32 + 1))[:page_bytes]


def fill(reservation: hc.Reservation | hc.Part, keys: Any) -> None:
    """Write the pages of a reservation or part, whose keys are these."""
    for i, key in enumerate(keys):
        view = reservation.view(i)
        view[:] = page_of(key, len(view))


def store(cache: hc.KvCache, keys: Any, **options: Any) -> int:
    """Reserve, fill and commit; returns how many pages were published."""
    with cache.reserve(keys, **options) as reservation:
        fill(reservation, reservation.keys)
        return reservation.commit()


def holds_right_bytes(lease: hc.Lease, keys: Any) -> bool:
    """Whether each page of a lease holds what its key says."""
    return all(bytes(lease.view(i)) == page_of(keys[i]) for i in range(len(lease)))


def press(cache: hc.KvCache, name: str = "pressure") -> None:
    """Store as many other pages as the cache has, so that all that may be evicted is."""
    for number in range(2):
        for start in range(0, cache.page_count, 8):
            store(cache, keys_of(f"{name}/{number}/{start}", 8))


def unheld(cache: hc.KvCache) -> bool:
    """Whether nobody holds a page. What a finaliser could not give back at once (it tries the lock
    once) is given back by its session's timer, so this waits for it, with a bound.
    """
    for _ in range(500):
        stats = cache.stats()
        if stats.pinned == 0 and stats.reserved == 0:
            return True
        time.sleep(0.02)
    return False


_SERVER = """
import base64, json, sys
names = {}
exec(base64.b64decode(sys.argv[1]), names)
print(json.dumps({"value": None}), flush=True)
for line in sys.stdin:
    names["result"] = None
    try:
        exec(json.loads(line), names)
        answer = {"value": names["result"]}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""

_PRELUDE = """
import os, sys
sys.path.insert(0, {tests!r})
import numpy as np
import hostcache as hc
from helpers import *
root, name = {root!r}, {name!r}
cache = hc.KvCache.open(name, FORMAT, page_count=PAGE_COUNT, root=root)
"""


class ChildError(Exception):
    """What a child's code raised: name of the class and text."""


class Child:
    """Another process, with a session `cache` of its own; it runs the Python that it is given.

    `run` returns what that code bound to `result`, which must be JSON.
    """

    def __init__(self, root: str, name: str, *prefix: str) -> None:
        tests = str(Path(__file__).parent)
        prelude = _PRELUDE.format(tests=tests, root=root, name=name)
        encoded = base64.b64encode(prelude.encode()).decode()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _SERVER, encoded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, code: str) -> Any:
        self.send(code)
        return self._answer()

    def send(self, code: str) -> None:
        """Start `code` without waiting for it; `answer` fetches its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildError(f"the child ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{answer['error']}: {answer['text']}")
        return answer["value"]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it apart."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def leave(self) -> int:
        """Let it end by itself, and return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait()
        self.process.stdout.close()
        return status

    def drop(self) -> None:
        """End it whatever it is doing."""
        if self.process.poll() is None:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter to its end; output is captured."""
    tests = str(Path(__file__).parent)
    prelude = f"import sys\nsys.path.insert(0, {tests!r})\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        **options,
    )
