"""A process that dies at any store to shared memory costs only its own unfinished work.

Each scenario (tests/crash/scenarios.py) is run once to count the kill points that it passes, then
again and again in new processes, each killed with SIGKILL at one of them. Then: `check` finds
nothing, nothing of the dead is held, pages that were ready are ready with their own bytes, and the
cache goes on. Here at the first and last passing of each place in the code; `limit` 0 takes all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scenarios import SCENARIOS

DRIVER = Path(__file__).parent / "driver.py"


def kill_at_each(package: Path, scenario: str, mode: str, limit: int) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, DRIVER, package, scenario, mode, str(limit)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(400)  # the first one builds the core
@pytest.mark.parametrize("mode", ["survivor", "alone"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_death_costs_unfinished_work_only(kill_points: Path, scenario: str, mode: str) -> None:
    found = kill_at_each(kill_points, scenario, mode, limit=1)
    assert found["failures"] == {}
    assert found["kills"] != 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", ["commit_some", "reserve_after_clear", "sweep"])
def test_the_one_that_repairs_may_die_too(kill_points: Path, scenario: str) -> None:
    found = kill_at_each(kill_points, scenario, "repair", limit=1)
    assert found["failures"] == {}
