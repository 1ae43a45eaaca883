"""The README's example runs as it stands there, and does what the text beside it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    found = re.search(r"## In fifteen lines\n\n```python\n(.*?)```", README.read_text(), re.S)
    assert found, "the README has no example under 'In fifteen lines'"
    return found[1]


@pytest.mark.portable
def test_the_example_is_cold_once_and_warm_then(root: str) -> None:
    said = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", example()],
            env={"HOSTCACHE_ROOT": root, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        said.append(ran.stdout.strip())
    assert said == [
        "0 of 10 pages were cached, 10 are now",
        "10 of 10 pages were cached, 10 are now",
    ]
    for line in said[:1]:
        assert f"`{line}`" in README.read_text()


def test_nothing_is_left_to_be_filled_in() -> None:
    assert "DEMO_OUTPUT" not in README.read_text()


def test_the_example_has_about_fifteen_lines() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 18
