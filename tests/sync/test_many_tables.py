"""A database with very many tables and few that are synced: nothing that we do reads the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aqueduck.lake.session.sql import ident
from aqueduck.postgres.registry.registry import install, reconcile_file
from aqueduck.sync.check import run_checks
from tests.fix_postgres import Database
from tests.small_service import SmallService, small_config

SYNCED = ["orders", 'Ünïcode "quoted".name', "x" * 63]


def _timed(what: Callable[[], object]) -> float:
    began = time.monotonic()
    what()
    return time.monotonic() - began


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.mark.parametrize("others", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_tables_beside_three_that_are_synced(
    db: Database, tmp_path: Path, others: int, record_property: Callable[[str, object], None]
) -> None:
    """Check, registry, preparation, start and changes take the seconds that they take without the others."""
    names = [_quoted(name) for name in SYNCED]
    for name in names:
        db.execute(f"create table {name} (id int primary key, v text)")
    seconds = {}
    for round_ in ("alone", "beside"):
        if round_ == "beside":
            for start in range(0, others, 500):
                db.execute(
                    f"do $$ begin for i in {start} .. {start + 499} loop"
                    " execute format('create table other_%s (id int primary key, v text)', i); end loop; end $$"
                )
        directory = tmp_path / round_
        directory.mkdir()
        config = small_config(db, directory, *names)
        seconds[f"check {round_}"] = _timed(lambda: run_checks(config))  # noqa: B023 - used at once
        with db.connect() as conn:
            install(conn)
            seconds[f"reconcile {round_}"] = _timed(lambda: reconcile_file(conn, config))  # noqa: B023
        began = time.monotonic()
        service = SmallService(db, directory, *names)
        try:
            for n, name in enumerate(names):
                db.execute(
                    f"insert into {name} values ({n}, '{round_}') on conflict (id) do update set v = excluded.v"
                )
            if round_ == "beside":
                db.execute("insert into other_7 values (1, 'not ours')")
            service.apply()
            seconds[f"start {round_}"] = time.monotonic() - began
            for n, name in enumerate(SYNCED):
                assert service.lake.query(f"from lake.main.{ident(name)}")[0] == [(n, round_)]
        finally:
            service.close()
        db.execute(
            "select pg_drop_replication_slot('aqueduck_test'); drop publication aqueduck_test; drop schema aqueduck cascade"
        )
    for name, value in seconds.items():
        record_property(name, round(value, 2))
    for step in ("check", "reconcile", "start"):
        assert seconds[f"{step} beside"] < seconds[f"{step} alone"] + 5.0, seconds
