"""`make check`: formatters, linters, types, and a build with warnings as errors.

    .venv/bin/python tools/check.py          # look
    .venv/bin/python tools/check.py --fix    # let ruff and clang-format rewrite (make format)

Runs everything even when something fails, then says what did.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TREE = ROOT / "build" / "check"
SHOWN_LINES = 100
PYTHON_FOLDERS = ("src", "tests", "tools", "benchmarks")


def passes(name: str, *command: str | Path) -> bool:
    """Run one check; its output is shown only when it fails."""
    begun = time.monotonic()
    child = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    word = "ok" if child.returncode == 0 else "FAILED"
    print(f"  {name}: {word}, {time.monotonic() - begun:.1f} s", flush=True)
    if child.returncode != 0:
        lines = child.stdout.splitlines()
        cut = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
        shown = "\n".join(lines[:SHOWN_LINES] + cut)
        print(f"$ {shlex.join(map(str, command))}\n{shown}", flush=True)
    return child.returncode == 0


def sources(*suffixes: str) -> list[Path]:
    """Our C++ files, the tests' among them."""
    folders = (ROOT / "core", ROOT / "tests" / "core")
    return sorted(p for f in folders for p in f.glob("*") if p.suffix in suffixes)


def configured() -> bool:
    """Configure the tree that the strict build and clang-tidy share."""
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    settings = {
        "HOSTCACHE_WERROR": "ON",
        "nanobind_DIR": nanobind,
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_MAKE_PROGRAM": str(BIN / "ninja"),
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    return passes("cmake", BIN / "cmake", "-G", "Ninja", "-S", ROOT, "-B", TREE, *defines)


def tidy(files: Sequence[Path]) -> bool:
    """clang-tidy on each file that changed, or whose headers did, since it last passed."""
    newest = max((p.stat().st_mtime for p in [*sources(".h"), ROOT / ".clang-tidy"]), default=0)

    def one(path: Path) -> bool:
        stamp = TREE / f"{path.name}.tidy"
        if stamp.exists() and stamp.stat().st_mtime > max(newest, path.stat().st_mtime):
            return True
        fine = passes(f"clang-tidy {path.name}", BIN / "clang-tidy", "--quiet", "-p", TREE, path)
        if fine:
            stamp.touch()
        return fine

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(one, files)))


def look() -> list[str]:
    """Run every check; the names of those that failed."""
    folders = [f for f in PYTHON_FOLDERS if (ROOT / f).is_dir()]
    cpp = sources(".cpp", ".h")
    results = {
        "ruff format": passes("ruff format", BIN / "ruff", "format", "--check", "--diff", *folders),
        "ruff check": passes("ruff check", BIN / "ruff", "check", *folders),
        "mypy": passes("mypy", BIN / "mypy"),
        "clang-format": passes("clang-format", BIN / "clang-format", "--dry-run", "-Werror", *cpp),
    }
    results["build"] = configured() and passes("build", BIN / "cmake", "--build", TREE)
    results["clang-tidy"] = results["build"] and tidy(sources(".cpp"))
    return [name for name, fine in results.items() if not fine]


def fix() -> list[str]:
    """Rewrite what can be rewritten."""
    folders = [f for f in PYTHON_FOLDERS if (ROOT / f).is_dir()]
    results = {
        "ruff check": passes("ruff check", BIN / "ruff", "check", "--fix", *folders),
        "ruff format": passes("ruff format", BIN / "ruff", "format", *folders),
        "clang-format": passes("clang-format", BIN / "clang-format", "-i", *sources(".cpp", ".h")),
    }
    return [name for name, fine in results.items() if not fine]


def main() -> None:
    """Exit non-zero with the names of the checks that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fix", action="store_true", help="rewrite what can be rewritten")
    failed = fix() if parser.parse_args().fix else look()
    if failed:
        sys.exit(f"failed: {', '.join(failed)} (`make format` repairs formats)")
    print("all checks passed")


if __name__ == "__main__":
    main()
