"""Fixtures are plugins, one for each thing that tests touch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest

from aqueduck import faults

_PLUGINS = (
    "tests.fix_postgres",
    "tests.fix_lake",
    "tests.fix_service",
    "tests.local_service",
    "tests.fix_failover",
    "tests.fix_events",
    "tests.fix_pooler",
    "tests.fix_s3",
)

pytest_plugins = [name for name in _PLUGINS if importlib.util.find_spec(name)]


@pytest.fixture
def arm() -> Iterator[Callable[[str], None]]:
    """Takes a fault point of this process, as `AQUEDUCK_FAULT` names it; disarmed afterwards."""
    yield faults.arm
    faults.arm("")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """A command that runs in this process sets its mask for new files; other tests keep theirs."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
