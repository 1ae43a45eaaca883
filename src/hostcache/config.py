"""Arguments given as text, names, and the folder where segments lie.

The only module that reads the environment (HOSTCACHE_ROOT), and only when asked.
"""

from __future__ import annotations

import operator
import os
import re
import stat
from fractions import Fraction

from hostcache.errors import BadValue, CacheNotFound, HostCacheError, NoRoom, NotAllowed

ROOT_VARIABLE = "HOSTCACHE_ROOT"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))? *([A-Za-z]*)")
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("kB", "MB", "GB", "TB")
_UNITS = {
    "b": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, start=1)},
}
_MOST_BYTES = 2**63 - 1


def resolve_root(root: str | os.PathLike[str] | None = None, *, make: bool = True) -> str:
    """The folder where segments lie, as an absolute path: `root`, else HOSTCACHE_ROOT, else a
    folder of this user's under /dev/shm.

    One that is not there is made (0700 whatever the umask, its parent must exist), or, without
    `make`, is `CacheNotFound`. One in which others could replace files is refused.
    """
    path = os.path.abspath(_chosen_root(root))
    if make:
        _make_folder(path)
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CacheNotFound(
            f"the root {path!r} is not there, so it holds no cache; "
            f"name the folder of the caches by root= or {ROOT_VARIABLE}"
        ) from None
    except OSError as error:
        raise NotAllowed(f"the root {path!r} can not be looked at: {error.strerror}") from error
    _refuse_unsafe(path, status)
    return path


def _chosen_root(root: str | os.PathLike[str] | None) -> str:
    chosen = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    if chosen is None:
        return f"/dev/shm/hostcache-{os.geteuid()}"
    try:
        path = os.fsdecode(chosen)
    except TypeError:
        raise BadValue(f"root is {chosen!r}, it must be a path") from None
    if not path or "\0" in path:
        raise BadValue(f"root is {path!r}, it must be a path")
    return path


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # a umask may have taken some of our own bits
    except FileExistsError:
        return
    except OSError as error:
        raise _why_not_made(path, error) from error


def _why_not_made(path: str, error: OSError) -> HostCacheError:
    text = f"the root {path!r} can not be made: {error.strerror}"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        parent = os.path.dirname(path)
        return BadValue(f"{text}; only its last folder is made for you: first make {parent!r}")
    if isinstance(error, PermissionError):
        return NotAllowed(f"{text}; choose another by root= or {ROOT_VARIABLE}")
    return NoRoom(f"{text}; free space there, or choose another by root= or {ROOT_VARIABLE}")


def _refuse_unsafe(path: str, status: os.stat_result) -> None:
    """Whoever may rename files in the root could put another file in a cache's place."""
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    inside = f"use a sub-folder: {ROOT_VARIABLE}={os.path.join(path, 'hostcache')}"
    if stat.S_ISLNK(status.st_mode):
        raise NotAllowed(
            f"the root {path!r} is a link, which could be made to lead elsewhere; "
            f"name the folder itself: {ROOT_VARIABLE}={os.path.realpath(path)}"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise NotAllowed(f"the root {path!r} is not a folder (mode {mode}); name another one")
    if status.st_uid != os.geteuid():
        raise NotAllowed(
            f"the root {path!r} belongs to user {status.st_uid} (mode {mode}), this process is "
            f"user {os.geteuid()}; {inside}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        shared = status.st_mode & stat.S_ISVTX  # meant for many: its right is not ours to take
        raise NotAllowed(
            f"the root {path!r} has mode {mode}, so others than its owner (user {status.st_uid}) "
            f"may write there; {inside}" + ("" if shared else f", or run: chmod go-w {path}")
        )


def check_name(name: str) -> str:
    """`name`, if a segment may have it."""
    if not isinstance(name, str):
        raise BadValue(f"name is {name!r} of type {type(name).__name__}, it must be text")
    if _NAME.fullmatch(name):
        return name
    if "/" in name:
        raise BadValue(f"name {name!r} has a slash: a name is no path, name the folder by root=")
    if name.startswith("."):
        raise BadValue(f"name {name!r} starts with a dot; names like that are kept for lock files")
    odd = sorted({c for c in name if not re.fullmatch("[A-Za-z0-9._-]", c)})
    what = f"has {odd[0]!r}" if odd else f"has {len(name)} characters"
    raise BadValue(f"name {name!r} {what}; a name is 1 to 100 of letters, digits, '.', '_' and '-'")


def parse_bytes(size: int | str, what: str = "size") -> int:
    """A number of bytes, given as one or as text such as "4GiB", "1.5 TiB", "512MB" or "4096"."""
    count = _from_text(size, what) if isinstance(size, str) else whole_number(size, what)
    if not 0 <= count <= _MOST_BYTES:
        raise BadValue(f"{what} is {size!r}, it must be from 0 to {_MOST_BYTES} bytes")
    return count


def _from_text(text: str, what: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[3].lower()) if match and match[3] else None
    if match is None or (match[3] and unit is None) or (match[2] and not match[3]):
        raise BadValue(
            f"{what} is {text!r}, which is no size: write whole bytes ('4096'), or a number with "
            f"one of {', '.join((*_BINARY, *_DECIMAL))} ('4GiB')"
        )
    return int(Fraction(f"{match[1]}.{match[2] or 0}") * (unit or 1))


def whole_number(value: int, what: str) -> int:
    """`value` as an int: NumPy's integers are taken, bools and floats are not."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    kind = type(value).__name__
    raise BadValue(f"{what} is {value!r} of type {kind}, it must be a whole number")


def format_bytes(count: int) -> str:
    """For people: "512 B", "1.4 MiB", "64 TiB"."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _BINARY:
        size /= 1024
        if size < 1023.95 or unit == _BINARY[-1]:
            break
    return f"{size:.1f} {unit}".replace(".0 ", " ")
