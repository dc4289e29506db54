"""Random histories through all flows at once, with upkeep and kills between any two steps: every end equals the source."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chain import Chain
from tests.fix_postgres import Database

Databases = Callable[[], contextlib.AbstractContextManager[Database]]
SECONDS = float(os.environ.get("AQUEDUCK_CHAIN_SECONDS", "600"))


def run(seed: int, db: Database, directory: Path, rounds: int) -> Chain:
    chain = Chain(seed, db, directory)
    try:
        chain.run(rounds)
    finally:
        chain.close()
    return chain


@pytest.mark.parametrize("seed", [2, 3])
def test_a_chain_of_flows_ends_as_the_source(db: Database, tmp_path: Path, seed: int) -> None:
    """P-T03, P-T04, hazard 13: steps of all flows and upkeep in random order, some of them killed, lose and double nothing."""
    run(seed, db, tmp_path, rounds=25)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_chains_of_many_seeds_end_as_the_source(databases: Databases, tmp_path: Path) -> None:
    """The same for as long as `AQUEDUCK_CHAIN_SECONDS` says, each time with another seed."""
    deadline, seed = time.monotonic() + SECONDS, int(os.environ.get("AQUEDUCK_CHAIN_SEED", "100"))
    while time.monotonic() < deadline:
        directory = tmp_path / str(seed)
        directory.mkdir()
        with databases() as db:
            run(seed, db, directory, rounds=60)
        seed += 1
