"""
Fixtures around a real DuckLake, on every kind of catalog.

`lake` runs its test once for each; with a DuckDB file in `make test-long`.  `Lake.read` looks at the lake as somebody
else would: on a connection of its own, except with a DuckDB file, which one process can open only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import LakeSession, open_lake

CATALOGS = ("sqlite", "duckdb", "postgres")


@dataclass
class Lake:
    """A lake for one test."""

    kind: str
    config: LakeConfig
    session: LakeSession

    @property
    def data_path(self) -> Path:
        return Path(self.config.data_path)

    def read(self, statement: str) -> list[tuple[Any, ...]]:
        """What an independent observer sees."""
        if self.kind == "duckdb":
            return self.session.query(statement)[0]
        with open_lake(self.config, read_only=True) as observer:
            return observer.query(statement)[0]

    def second_session(self) -> LakeSession:
        """Another writer; not with a DuckDB file."""
        return open_lake(self.config)

    def files(self) -> set[str]:
        """Names of all files in the data path."""
        return {path.name for path in self.data_path.rglob("*") if path.is_file()}


def catalog_of(kind: str, directory: Path, request: pytest.FixtureRequest) -> str:
    """The configuration's text for a catalog that does not exist yet."""
    if kind == "postgres":
        return "postgres:" + str(request.getfixturevalue("db").dsn)
    return (
        f"sqlite:{directory / 'catalog.sqlite'}" if kind == "sqlite" else str(directory / "catalog.ducklake")
    )


@pytest.fixture(params=[c if c == "sqlite" else pytest.param(c, marks=pytest.mark.slow) for c in CATALOGS])
def lake_config(request: pytest.FixtureRequest, tmp_path: Path) -> LakeConfig:
    """Where a lake could be made."""
    catalog = catalog_of(request.param, tmp_path, request)
    return LakeConfig(catalog=catalog, data_path=str(tmp_path / "data"), inline_rows=10)


@pytest.fixture
def lake(lake_config: LakeConfig) -> Iterator[Lake]:
    with open_lake(lake_config, threads=2) as session:
        yield Lake(session.kind, lake_config, session)
