"""Run the portable tests on each other CPython that this machine has.

Found by running candidates: a version manager's shim answers `which` and then fails. Each
version gets a small environment `.venvs/3.X` of its own, with the package installed as a wheel
would be (not editable), so that this also tests what is packed. Which versions were run, and
why others were not, is printed at the end.
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import environment
from environment import ROOT, Step

VERSIONS = ("3.10", "3.12", "3.13")
BOUND_S = 120
QUESTION = """
import ensurepip, os, platform, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(platform.python_implementation(), "%d.%d" % sys.version_info[:2], sys.executable)
sys.exit(0 if os.path.exists(header) else "it has no Python.h: install its development files")
"""


@dataclass(frozen=True)
class Search:
    """What looking for one version came to."""

    python: str | None
    reason: str


def candidates(version: str) -> Iterator[Path]:
    """Where a CPython of this version may be, likelier places first."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder) / f"python{version}"
    roots = [os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")]
    try:
        said = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        roots.append(said.stdout.strip())
    except OSError:
        pass  # no pyenv here
    for root in dict.fromkeys(filter(None, roots)):
        for found in sorted(glob.glob(f"{root}/versions/{version}*/bin/python3")):
            yield Path(found)


def ask(python: Path, version: str) -> Search:
    """Run one candidate: is it a CPython of this version that can build the package?"""
    try:
        answer = subprocess.run(
            [python, "-c", QUESTION], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Search(None, f"{python}: {error}")
    said = answer.stdout.split(maxsplit=2)
    if answer.returncode != 0:
        complaint = answer.stderr.strip().splitlines() or [f"status {answer.returncode}"]
        return Search(None, f"{python}: {complaint[-1] if said else complaint[0]}")
    if said[:2] != ["CPython", version]:
        return Search(None, f"{python}: is {' '.join(said[:2])}")
    return Search(said[2].strip(), "")


def find(version: str) -> Search:
    """The first candidate that answers as it should, or why there is none."""
    reason = f"no python{version} on PATH or under pyenv"
    for candidate in candidates(version):
        if not os.path.exists(candidate):  # Path.exists raises where a folder is closed to us
            continue
        answer = ask(candidate, version)
        if answer.python:
            return answer
        reason = answer.reason
    return Search(None, reason)


def steps_for(python: str, version: str) -> list[Step]:
    """Build tools, pytest and the package, for one version."""
    folder = ROOT / ".venvs" / version
    inner = folder / "bin" / "python"
    pins = ROOT / "requirements" / "test.txt"
    exact = subprocess.run([python, "-VV"], capture_output=True, text=True, check=True).stdout
    venv = environment.venv_step(python, folder, exact)
    tools = Step(
        "requirements", environment.pip(inner, "-r", pins), [environment.content(pins)], venv
    )
    sources = environment.content(*environment.build_inputs(), *environment.python_sources())
    install = environment.install_package(inner, "--force-reinstall", ".")
    return [venv, tools, Step("package", install, [sources], tools)]


def passes(version: str) -> bool:
    """Run the portable tests on one version, inside the bound."""
    python = ROOT / ".venvs" / version / "bin" / "python"
    options = ["-m", "portable", "-q", "-p", "no:cacheprovider", "--ignore=tests/adapters"]
    print(f"portable tests on CPython {version}", flush=True)
    begun = time.monotonic()
    try:
        status = subprocess.run(
            [python, "-m", "pytest", *options], cwd=ROOT, timeout=BOUND_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"CPython {version}: not done after {BOUND_S} s")
        return False
    print(f"CPython {version}: {time.monotonic() - begun:.0f} s", flush=True)
    return status == 0


def main() -> None:
    """Every version that is there; non-zero when one of them fails."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    ran: list[str] = []
    failed: list[str] = []
    absent: list[str] = []
    for version in VERSIONS:
        if version == own:
            continue
        found = find(version)
        if found.python is None:
            absent.append(f"{version} ({found.reason})")
            continue
        with environment.one_at_a_time():
            environment.bring_up(ROOT / ".venvs" / version, steps_for(found.python, version))
        (ran if passes(version) else failed).append(version)
    print(f"other CPythons: passed {', '.join(ran) or 'none'}", end="")
    print(f"; FAILED {', '.join(failed)}" if failed else "", end="")
    print(f"; not run: {'; '.join(absent)}" if absent else "")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
