"""A table with row-level security is read whole or not at all: neither a copy nor verify is thinned by a policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import RowSecurityError
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.quoting import identifier
from aqueduck.spark.formats.table_source import PostgresTableSource, TableReader
from aqueduck.sync.check import run_checks
from aqueduck.sync.control import Wanted
from aqueduck.sync.prepare import prepare_group
from tests.fix_postgres import Database
from tests.small_service import small_config
from tests.whole_group import whole_group

ROWS = "insert into public.t select n, n % 10 from generate_series(1, 1000) n"


@pytest.fixture
def reader(db: Database) -> Iterator[str]:
    """A role that may replicate and read; the table `t` of another role has 1000 rows, and a policy shows 100 of them."""
    name = f"{db.name} reader"
    quoted = identifier(name)
    db.execute(
        f"create role {quoted} login replication;"
        " create table public.t (id int primary key, tenant int);"
        f" grant select on public.t to {quoted}; grant create on database {identifier(db.name)} to {quoted};"
        " create publication aqueduck_test for table public.t"
        " with (publish_via_partition_root = true);"
    )
    db.execute(ROWS)
    yield name
    db.execute(f"drop owned by {quoted} cascade; drop role {quoted}")


def protect(db: Database) -> None:
    """The policy's function leaves a trace of who ran it."""
    db.execute(
        "create table public.trace (who text); grant insert on public.trace to public;"
        " create function public.shown(tenant int) returns bool language plpgsql as"
        " $$ begin insert into public.trace values (current_user); return tenant = 1; end $$;"
        " create policy thin on public.t using (public.shown(tenant));"
        " alter table public.t enable row level security"
    )


def test_check_and_start_refuse_it_with_the_statement_that_helps(
    db: Database, reader: str, tmp_path: Path
) -> None:
    """P-T09, hazard 16, P-S24: following the printed statement is enough."""
    protect(db)
    config = small_config(db, tmp_path, {"source": "public.t", "copy": True}, user=reader)
    [refused] = [r for r in run_checks(config) if r.name == "table public.t"]
    assert isinstance(refused.error, RowSecurityError)
    with open_lake(config.lake) as lake, pytest.raises(RowSecurityError):
        prepare_group(config, Wanted(config.groups[0]), lake)
    assert refused.fix is not None
    db.execute(refused.fix)
    assert all(r.ok for r in run_checks(config) if r.name == "table public.t")
    with open_lake(config.lake) as lake:
        assert not prepare_group(config, Wanted(config.groups[0]), lake).refused


def test_an_owner_that_is_not_exempt_gets_both_ways_out(db: Database, reader: str, tmp_path: Path) -> None:
    """P-T09, hazard 16: with `force`, policies hold for the owner, too."""
    protect(db)
    db.execute(
        f"alter table public.t owner to {identifier(reader)}; alter table public.t force row level security"
    )
    config = small_config(db, tmp_path, "public.t", user=reader)
    [refused] = [r for r in run_checks(config) if r.name == "table public.t"]
    assert isinstance(refused.error, RowSecurityError)
    assert refused.fix is not None
    db.execute(refused.fix.partition("-- or ")[2])
    assert all(r.ok for r in run_checks(config) if r.name == "table public.t")


def test_a_policy_of_a_partition_counts(db: Database, reader: str, tmp_path: Path) -> None:
    """P-T09, hazard 16: copies read partitions one by one, each with its own policies."""
    quoted = identifier(reader)
    db.execute(
        "create table public.p (id int primary key) partition by range (id);"
        " create table public.p1 partition of public.p default; alter table public.p1 enable row level security;"
        f" grant select on public.p, public.p1 to {quoted}; alter publication aqueduck_test set table public.p"
    )
    config = small_config(db, tmp_path, "public.p", user=reader)
    [refused] = [r for r in run_checks(config) if r.name == "table public.p"]
    assert isinstance(refused.error, RowSecurityError)
    assert "public.p1" in refused.error.message


def test_a_policy_that_comes_later_stops_copies_and_verify(db: Database, reader: str, tmp_path: Path) -> None:
    """P-T09, hazard 16: row-level security that is enabled while a service runs: the stream continues, the next read of the table fails."""
    with whole_group(db, tmp_path, {"public.t": {}}, user=reader) as group:
        [result] = group.verify()
        assert (result.verdict, result.source_rows) == ("identical", 1000)
        protect(db)
        db.execute("update public.t set tenant = 7 where id = 1")
        group.apply()
        assert group.read("select tenant from lake.main.t where id = 1") == [(7,)]
        [result] = group.verify()
        assert result.verdict == "not compared"
        assert "[pg.row_security]" in (result.note or "")
        [oid] = group.runner.tables
        group.runner.resync(oid)
        with pytest.raises(RowSecurityError):
            group.copy()
        assert group.read("select count(*) from lake.main.t") == [(1000,)]
    assert db.query("select * from public.trace") == []


def test_a_spark_read_refuses_it_before_any_task(db: Database, reader: str) -> None:
    """P-T09, hazard 16: `postgres_table` shares the rule."""
    protect(db)
    source = PostgresTableSource({"dsn": db.dsn_for(reader), "table": "public.t"})
    plan = source.reader(source.schema())
    assert isinstance(plan, TableReader)
    with pytest.raises(RowSecurityError):
        plan.partitions()


def test_sessions_of_ours_are_refused_by_the_server(db: Database, reader: str) -> None:
    """P-T09, hazard 16: without our check, PostgreSQL itself refuses."""
    protect(db)
    with connect(db.dsn_for(reader)) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("select * from public.t")
