"""The command `hostcache`: look at caches and tidy them, whether engines run or not."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from hostcache import __version__, segments
from hostcache.config import ROOT_VARIABLE, format_bytes
from hostcache.errors import Damaged, HostCacheError, Unsupported

_ABOUT = """\
Look at the caches of this machine, and tidy them.

A cache is shared memory that the engines of one user fill and read together. It has a name, and
stays when they end: `hostcache ls` shows what there is, `hostcache rm` gives its memory back.
Looking changes no page and works whether engines run or not."""

_AFTER = f"""\
A root is the folder where caches lie: --root, else the variable {ROOT_VARIABLE}, else
/dev/shm/hostcache-<user number>. `hostcache COMMAND --help` says more of each command.

Exit status: 0 all is well, 1 `check` found something, 2 it could not be done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the entry point of the script `hostcache`."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except HostCacheError as error:
        print(f"hostcache: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        print("hostcache: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    # With SUPPRESS, --root may stand on either side of the command.
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--root", default=argparse.SUPPRESS, metavar="FOLDER", help="the folder of the caches"
    )
    parser = argparse.ArgumentParser(
        "hostcache",
        description=_ABOUT,
        epilog=_AFTER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"hostcache {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Any, does: str, named: bool = True) -> argparse.ArgumentParser:
        about = does[0].upper() + does[1:] + "."
        command = commands.add_parser(name, help=does, description=about, parents=[common])
        if named:
            command.add_argument("name", metavar="NAME", help="of the cache, as `ls` shows it")
        command.set_defaults(run=run)
        return command

    add("ls", _ls, "list the caches of the root: pages, sizes, whether in use", named=False)
    stat = add("stat", _stat, "show the counters, namespaces and sessions of a cache")
    stat.add_argument("--json", action="store_true", help="print one JSON object")
    add("check", _check, "verify every invariant of a cache; status 1 if something is wrong")
    clear = add("clear", _clear, "forget the pages of a cache; engines go on and fill it anew")
    which = clear.add_mutually_exclusive_group()
    which.add_argument(
        "--namespace", metavar="WHICH", help="only this: its label, or first digits of its digest"
    )
    which.add_argument("--everything", action="store_true", help="all namespaces (the default)")
    remove = add("rm", _rm, "remove a cache, and give its memory back with its last session")
    remove.add_argument("--force", action="store_true", help="even while sessions live in it")
    demo = add("demo", _demo, "show a real model staying warm after kill -9", named=False)
    demo.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def _root(options: argparse.Namespace) -> str | None:
    root: str | None = getattr(options, "root", None)
    return root


# ---------------------------------------------------------------------- commands


def _ls(options: argparse.Namespace) -> int:
    found = segments.caches(_root(options))
    rows = [
        (
            info.name,
            info.page_count,
            format_bytes(info.page_bytes),
            info.page_tokens,
            format_bytes(info.size_bytes),
            info.problem or ("in use" if info.living else "idle"),
        )
        for info in found
    ]
    if rows:
        _print_table(("NAME", "PAGES", "PAGE", "TOKENS", "MEMORY", "STATE"), rows)
    else:
        print("no caches")
    return 0


def _stat(options: argparse.Namespace) -> int:
    seen = segments.describe(options.name, _root(options))
    if options.json:
        print(json.dumps(_as_json(seen), indent=2))
    else:
        _print_stat(seen)
    return 0


def _check(options: argparse.Namespace) -> int:
    try:
        findings = segments.describe(options.name, _root(options), check=True).findings
    except Damaged as error:
        findings = [str(error)]
    for finding in findings:
        print(_one_line(finding))
    if not findings:
        print(f"{options.name}: clean")
    return 1 if findings else 0


def _clear(options: argparse.Namespace) -> int:
    before, after, what = segments.clear_namespaces(options.name, options.namespace, _root(options))
    print(
        f"{options.name}: cleared {what}; ready pages {before.ready} -> {after.ready}, "
        f"free {before.free} -> {after.free} of {after.page_count}"
    )
    return 0


def _rm(options: argparse.Namespace) -> int:
    segments.remove(options.name, _root(options), force=options.force)
    print(f"{options.name}: removed")
    return 0


def _demo(options: argparse.Namespace) -> int:
    try:
        demo = importlib.import_module("hostcache.demo")
    except ImportError as error:
        raise Unsupported(
            f"the demo needs a model and an engine that are not installed ({error}); "
            "in a checkout of the project run: make demo"
        ) from error
    status: int = demo.run_demo(options.json, _root(options))
    return status


# ---------------------------------------------------------------------- output


def _as_json(seen: segments.Description) -> dict[str, Any]:
    namespaces = [
        {
            "number": one["number"],
            "label": one["label"],
            "digest": one["digest"].hex(),
            "epoch": one["epoch"],
            "pages": one["ready_pages"],
        }
        for one in seen.namespaces
    ]
    sessions = [
        {
            "session": slot["session"],
            "pid": slot["pid"],
            "command": slot["command"],
            "alive": slot["alive"],
            "age_s": round(segments.age_s(slot), 3),
            "namespace": slot["namespace"],
            "holds": slot["holds"],
            "reserved_pages": slot["reserved_pages"],
            "oldest_hold_s": round(slot["oldest_hold_s"], 3),
        }
        for slot in seen.sessions
    ]
    return {
        **dataclasses.asdict(seen.stats),
        **dataclasses.asdict(seen.cache),
        "capacity_bytes": seen.cache.page_count * seen.cache.page_bytes,
        "namespaces": namespaces,
        "session_list": sessions,
    }


def _print_stat(seen: segments.Description) -> None:
    cache, stats = seen.cache, seen.stats
    state = cache.problem or ("in use" if cache.living else "idle: no session lives in it")
    capacity = format_bytes(cache.page_count * cache.page_bytes)
    pages = f"{stats.free} free, {stats.reserved} reserved, {stats.ready} ready"
    ready = f"{stats.pinned} pinned, {stats.evictable} evictable"
    stores = f"{stats.commits} pages committed, {stats.aborts} aborted, {stats.evictions} evicted"
    lines = (
        ("cache", f"{cache.name} ({cache.path}), {state}"),
        ("page", f"{cache.page_bytes} bytes, {cache.page_tokens} tokens"),
        ("memory", f"{format_bytes(cache.size_bytes)}, of these {capacity} for pages"),
        ("pages", f"{stats.page_count}: {pages} ({ready})"),
        ("lookups", f"{stats.hits} pages hit, {stats.misses} missed"),
        ("stores", f"{stores}, {stats.refused} refused"),
        ("trouble", f"{stats.repairs} repairs, {stats.lock_timeouts} lock time-outs"),
    )
    for title, text in lines:
        print(f"{title:<8} {_one_line(text)}")
    print()
    _print_table(
        ("NAMESPACE", "DIGEST", "PAGES"),
        [
            (segments.label_of(one), one["digest"].hex()[:12], one["ready_pages"])
            for one in seen.namespaces
        ],
    )
    print()
    _print_table(
        ("PID", "COMMAND", "AGE", "HOLDS", "RESERVED", "OLDEST HOLD", ""),
        [
            (
                slot["pid"],
                slot["command"],
                _seconds(segments.age_s(slot)),
                slot["holds"],
                slot["reserved_pages"],
                _seconds(slot["oldest_hold_s"]) if slot["holds"] else "-",
                "" if slot["alive"] else "dead",
            )
            for slot in seen.sessions
        ],
    )


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns: numbers to the right, text to the left."""
    cells = [[_one_line(str(value)) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    right = [bool(rows) and not isinstance(value, str) for value in (rows[0] if rows else titles)]
    for line in (list(titles), *cells):
        padded = (
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, right, strict=True)
        )
        print("  ".join(padded).rstrip())


def _seconds(age: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * length:
            return f"{age / length:.0f} {unit}"
    return f"{age:.1f} s"


def _one_line(text: str) -> str:
    """What other processes wrote, such as their command, may hold anything."""
    return "".join(c if c.isprintable() else "?" for c in text)
