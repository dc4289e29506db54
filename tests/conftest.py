"""Fixtures are plugins, one for each thing that tests touch."""

from __future__ import annotations

import importlib.util

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
