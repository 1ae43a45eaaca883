"""Processes that are forked, killed, stopped or put into namespaces.

No child here is left behind: each dies with the process that started it. None writes into a pipe
that its parent has to read: what a forked one says goes to a file, which a failing test shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hostcache as hc
from helpers import store

PARENT_DIES = 1  # prctl(PR_SET_PDEATHSIG)
NEW_PID_NAMESPACE = 0x20000000  # unshare(CLONE_NEWPID)
LOCK_AT = 12288  # of the segment file: the lock word, session id << 1 | waiters
TESTS = Path(__file__).resolve().parent
LONG_S = 60.0  # how long anything may take on a loaded machine


def wait_until(condition: Callable[[], bool], timeout_s: float = LONG_S) -> bool:
    """Whether it came true in time; asked often at first, then every few milliseconds."""
    until, nap = time.monotonic() + timeout_s, 0.0002
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(nap)
        nap = min(nap * 2, 0.005)
    return True


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # it died before we asked; 0: it is in another namespace
        os._exit(99)


def process_state(pid: int) -> str:
    """One letter as in ps: T is stopped, Z ended and not waited for; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def lock_word(path: str) -> int:
    """The session id in the lock of a segment; 0: nobody is inside."""
    with open(path, "rb") as segment:
        segment.seek(LOCK_AT)
        return int.from_bytes(segment.read(8), "little") >> 1


def surely_store(cache: hc.KvCache, keys: Any) -> None:
    """Also where a neighbour, on a loaded machine, keeps the lock longer than a call waits."""
    count = len(keys)
    assert wait_until(lambda: store(cache, keys) == count or cache.match(keys) == count)


def surely_look_up(cache: hc.KvCache, keys: Any) -> hc.Lease:
    """A lease of all of them, which are ready; see `surely_store`."""
    leases = [cache.lookup(keys)]
    assert wait_until(lambda: len(leases[-1]) == len(keys) or leases.append(cache.lookup(keys)))
    return leases[-1]


class Forked:
    """A forked process that runs `work` and ends with 0, or with 99 where it raised."""

    def __init__(self, work: Callable[[], object], log: Path, own_pids: bool = False) -> None:
        self._log = log
        self._status: int | None = None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_forked(work, log, parent, own_pids)

    def poll(self) -> int | None:
        """Its exit code (a signal as -number), None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout_s: float = LONG_S) -> int | None:
        wait_until(lambda: self.poll() is not None, timeout_s)
        return self._status

    def send_kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def kill(self) -> int | None:
        """SIGKILL, and the exit code: -9, or another where it had ended by itself before."""
        self.send_kill()
        return self.wait()

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def _run_forked(work: Callable[[], object], log: Path, parent: int, own_pids: bool) -> NoReturn:
    code = 99
    try:
        die_with_parent(parent)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        if own_pids:
            code = _in_own_pid_namespace(work)
        else:
            work()
            code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 98
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _in_own_pid_namespace(work: Callable[[], object]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_PID_NAMESPACE) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    alive, held_open = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(PARENT_DIES, signal.SIGKILL)
        os.close(held_open)
        if select.select([alive], [], [], 0)[0]:  # its parent, outside, died before we asked
            os._exit(99)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


@functools.cache
def refusal(*command: str) -> str:
    """Why a command can not be run here; empty: it can."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = ended.stderr.strip() or f"status {ended.returncode}"
    return "" if ended.returncode == 0 else f"{' '.join(command)}: {said}"


# With mounts of its own, as root or as the root of a user namespace.
_UNSHARE = ("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")


@functools.cache
def with_own_mounts() -> tuple[str, ...]:
    """What goes before a command to give it mounts of its own; empty: nothing does here."""
    return next((p for p in _UNSHARE if not refusal(*p, "mount", "-t", "tmpfs", "x", "/mnt")), ())


def why_no_mounts() -> str:
    return "; ".join(refusal(*p, "mount", "-t", "tmpfs", "x", "/mnt") for p in _UNSHARE)


def mount_tmpfs(root: str, size: str) -> None:
    """On `root`, for a process that was started `with_own_mounts`."""
    options = f"mode=0700,size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "hostcache-test", root], check=True)


def make_memory_group(limit_bytes: int) -> tuple[str, str]:
    """A child of this process's own memory cgroup, and why there is none."""
    refused = []
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("memory", ""):
            continue
        for mount in ("memory",) if controllers else ("", "unified"):
            group = f"/sys/fs/cgroup/{mount}{path}".rstrip("/") + f"/hostcache-test-{os.getpid()}"
            try:
                os.mkdir(group)
            except OSError as error:
                refused.append(str(error))
                continue
            limit = Path(group, "memory.limit_in_bytes" if controllers else "memory.max")
            if limit.exists():
                limit.write_text(str(limit_bytes), encoding="ascii")
                return group, ""
            os.rmdir(group)
            refused.append(f"{group} has no {limit.name}")
    return "", "; ".join(refused) or "there is no cgroup"


def remove_group(folder: str) -> bool:
    with contextlib.suppress(OSError):  # busy, until the kernel has taken the last process apart
        os.rmdir(folder)
    return not os.path.exists(folder)


_RUN = """
import ctypes, importlib, json, os, sys
ctypes.CDLL(None).prctl(1, 9)
sys.path[:0] = json.loads(sys.argv[1])
function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
function(*json.loads(sys.argv[4]))
"""


def command_of(function: Callable[..., object], *arguments: Any) -> list[str]:
    """To run a function of a test module in a fresh interpreter; the arguments go as JSON."""
    source = Path(inspect.getfile(function)).resolve()
    folders = json.dumps([str(TESTS), str(source.parent)])
    what = [folders, source.stem, function.__name__, json.dumps(arguments)]
    return [sys.executable, "-c", _RUN, *what]


def run_function(
    function: Callable[..., object], *arguments: Any, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; all that it started goes with it where that takes too long."""
    command = [*prefix, *command_of(function, *arguments)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(timeout=100)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, said)


def say(said: str, *numbers: int) -> None:
    """For `started`, all at once: whoever sees the file sees all of it."""
    Path(said + ".new").write_text(" ".join(map(str, numbers)), encoding="ascii")
    os.rename(said + ".new", said)


@contextlib.contextmanager
def started(
    said: Path, function: Callable[..., object], *arguments: Any
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Runs function(*arguments, str(said)) in a fresh interpreter until it has called `say`, with
    numbers of processes that it left. Neither those nor it outlive the `with`.
    """
    process = subprocess.Popen(command_of(function, *arguments, str(said)))
    pids: list[int] = []
    try:
        assert wait_until(lambda: said.exists() or process.poll() is not None)
        assert process.poll() is None
        pids += map(int, said.read_text(encoding="ascii").split())
        yield process, pids
    finally:
        process.kill()
        process.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
