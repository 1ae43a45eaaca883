"""What the tests of the adapters share."""

from __future__ import annotations

import os

import pytest

# Before torch is imported anywhere: nothing is fetched, and threads that wait by sleeping do not
# starve the tests that run beside them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "model: runs SmolLM2-135M (its package must be installed)")
