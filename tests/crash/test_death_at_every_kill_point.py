"""A process that dies at any store to shared memory costs only its own unfinished work.

Each scenario (tests/crash/scenarios.py) is run once to count the kill points that it passes, then
again and again in new processes, each killed with SIGKILL at one of them. Then: `check` finds
nothing, nothing of the dead is held, pages that were ready are ready with their own bytes, and the
cache goes on. Here at the first passing of each place in the code; the driver's `all` takes every
one.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios import SCENARIOS

DRIVER = Path(__file__).parent / "driver.py"
REPAIRED = ("commit_some", "reserve_after_clear", "sweep")


@functools.cache
def killed(package: Path, mode: str, which: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What the driver found, by scenario: one process for all of a mode, as each start counts."""
    ended = subprocess.run(
        [sys.executable, DRIVER, package, mode, which, *names],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return {one["scenario"]: one for one in found}


def judge(found: dict[str, Any]) -> None:
    assert found["failures"] == {}
    assert found["kills"] != 0


@pytest.mark.timeout(600)  # the first one builds the core, and runs them all
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_others_live_through_it(kill_points: Path, scenario: str) -> None:
    judge(killed(kill_points, "survivor", "first", ())[scenario])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_are_dead_and_the_next_one_finds_it(kill_points: Path, scenario: str) -> None:
    judge(killed(kill_points, "alone", "first", ())[scenario])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", REPAIRED)
def test_the_one_that_repairs_dies_too(kill_points: Path, scenario: str) -> None:
    judge(killed(kill_points, "repair", "first", REPAIRED)[scenario])
