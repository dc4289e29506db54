"""Connections that readers of chunks leave to the next ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aqueduck.model.errors import AqueduckError
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.copy import table_copy
from aqueduck.postgres.copy.copy_connections import CopyConnections
from aqueduck.postgres.copy.table_copy import Chunk, ChunkReader, export_snapshot, plan_chunks
from tests.fix_postgres import Database, wait_until

ROWS = 30_000


class Table:
    """A table, a snapshot of it, and the connections of its readers."""

    def __init__(self, db: Database, snapshot: str, kept: CopyConnections) -> None:
        self.db, self.snapshot, self.kept = db, snapshot, kept
        self.dsn = db.dsn_for("postgres", application_name="reader")
        self.schema: TableSchema = describe_table(db.observer, "t")
        self.chunks: list[Chunk] = plan_chunks(db.observer, self.schema, chunk_bytes=1 << 19)

    def read(self, dsn: str | None = None) -> int:
        with ChunkReader(dsn or self.dsn, self.snapshot) as reader:
            return sum(b.num_rows for chunk in self.chunks for b in reader.rows(self.schema, chunk))

    def connections(self) -> list[int]:
        found = "select pid from pg_stat_activity where application_name = 'reader' and datname = current_database()"
        return [pid for (pid,) in self.db.query(found)]


@pytest.fixture
def table(db: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    db.execute("create table t (id int primary key, v text)")
    db.execute(f"insert into t select g, repeat('x', 100) from generate_series(1, {ROWS}) g")
    kept = CopyConnections(idle_seconds=3600)
    monkeypatch.setattr(table_copy, "copy_connections", kept)
    snapshot = export_snapshot(db.dsn)
    yield Table(db, snapshot.name, kept)
    snapshot.close()


def test_the_next_reader_has_the_same_connection(table: Table) -> None:
    """In no transaction meanwhile: it holds back no vacuum and no lock."""
    assert table.read() == ROWS
    [pid] = table.connections()
    assert table.read() == ROWS
    assert table.connections() == [pid]
    of_it = "select state, backend_xmin from pg_stat_activity where pid = %s"
    assert table.db.query(of_it, [pid]) == [("idle", None)]
    locks = "select count(*) from pg_locks where pid = %s and relation is not null"
    assert table.db.value(locks, [pid]) == 0


def test_readers_at_the_same_time_have_their_own(table: Table) -> None:
    with ChunkReader(table.dsn, table.snapshot) as one:
        rows = one.rows(table.schema, table.chunks[0])
        first = next(rows).num_rows
        assert table.read() == ROWS
        first += sum(batch.num_rows for batch in rows)
    assert 0 < first < ROWS
    assert len(table.connections()) == 2


def test_another_user_has_another_one(table: Table) -> None:
    table.db.execute("create role kept_other login superuser")
    other = table.db.dsn_for("kept_other", application_name="reader")
    try:
        table.read()
        table.read(other)
        assert len(table.connections()) == 2
    finally:
        table.kept.take(other).close()
        table.db.execute("drop role kept_other")


def test_what_was_left_in_the_middle_is_closed(table: Table) -> None:
    with ChunkReader(table.dsn, table.snapshot) as reader:
        next(reader.rows(table.schema, table.chunks[0]))
    wait_until(lambda: not table.connections(), "the connection is closed")
    with pytest.raises(AqueduckError), ChunkReader(table.dsn, "none") as reader:
        next(reader.rows(table.schema, table.chunks[0]))
    wait_until(lambda: not table.connections(), "the connection is closed")
    assert table.read() == ROWS


def test_one_that_the_server_ended_is_not_used(table: Table) -> None:
    table.read()
    [pid] = table.connections()
    assert table.db.value("select pg_terminate_backend(%s, 10000)", [pid])
    assert table.read() == ROWS
    assert pid not in table.connections()


def test_an_unused_one_is_closed(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_copy, "copy_connections", CopyConnections(idle_seconds=0.2))
    for _ in range(3):
        assert table.read() == ROWS
    wait_until(lambda: not table.connections(), "the connection is closed")
    assert table.read() == ROWS
