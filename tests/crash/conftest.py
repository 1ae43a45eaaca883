"""A second build of the core, with kill points compiled in, beside the package's Python files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "kill-points"


def _run(*command: str | Path) -> None:
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


@pytest.fixture(scope="session")
def kill_points() -> Path:
    """The folder of the package whose core can kill its process; built where it is not current."""
    tools = Path(sys.executable).parent
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    _run(
        tools / "cmake",
        *("-S", ROOT, "-B", TREE, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"),
        "-DHOSTCACHE_KILL_POINTS=ON",
    )
    _run(tools / "cmake", "--build", TREE)
    package = TREE / "package"
    shutil.rmtree(package, ignore_errors=True)
    (package / "hostcache").mkdir(parents=True)
    for source in [*(ROOT / "src" / "hostcache").iterdir(), *TREE.glob("_core*.so")]:
        (package / "hostcache" / source.name).symlink_to(source)
    return package
