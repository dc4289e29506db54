"""What tests ask of the registry, and how they look at the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqueduck.config.sync import SyncConfig, parse_config
from aqueduck.model.errors import (
    AqueduckError,
)
from aqueduck.postgres.registry.registry import (
    GroupRow,
    TableRow,
    call,
    read_desired,
    rows_of,
)
from tests.fix_postgres import Database

Connection = psycopg.Connection[Any]


def run_all(db: Database, statements: str | tuple[str, ...] | None) -> None:
    assert statements
    db.execute(statements if isinstance(statements, str) else "; ".join(statements))


def config_of(*groups: dict[str, Any], data_path: str = "/lake", **lake: Any) -> SyncConfig:
    values = {
        "source": {"dsn": "host=db"},
        "lake": {"catalog": "lake.db", "data_path": data_path, **lake},
        "groups": [{"tables": [{"source": t} for t in g.pop("names", ())], **g} for g in map(dict, groups)],
    }
    return parse_config(json.dumps(values), base_dir=Path("/"), env={})


def group(conn: Connection, name: str = "default") -> GroupRow:
    [found] = [row for row in read_desired(conn) if row.name == name]
    return found


def table(conn: Connection, name: str = "a") -> TableRow:
    rows = [t for g in read_desired(conn) for t in g.tables if not t.removed]
    [found] = [row for row in rows if row.source.name == name]
    return found


def synced(conn: Connection) -> set[tuple[str, str]]:
    return {(row["group_name"], row["source"]) for row in rows_of(conn, "tables")}


def refused(conn: Connection, function: str, **arguments: Any) -> AqueduckError:
    with pytest.raises(AqueduckError) as caught:
        call(conn, function, **arguments)
    return caught.value
