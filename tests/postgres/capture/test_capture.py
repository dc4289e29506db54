"""Capture against a real server: what is confirmed, what is staged, and what happens when things go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.columns.typemap import cast_sql, lake_type
from aqueduck.model.errors import AqueduckError, SlotActiveError
from aqueduck.model.schema import TableSchema, parse_lsn
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.readers import Readers
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.decode.decoder import Decoder
from aqueduck.postgres.publications.slots import create_slot
from aqueduck.postgres.registry.registry import emit_heartbeat
from aqueduck.postgres.session.wire import READ_BYTES
from aqueduck.state_files.files import read_confirmation, write_tables
from tests.fix_postgres import Database, wait_until
from tests.tls_proxy import make_certificates, tls_proxy


class Running:
    """A capture of the table `t` of a database, without Spark."""

    def __init__(
        self,
        db: Database,
        directory: Path,
        *,
        dsn: str | None = None,
        bytes_max: int = 1 << 30,
        slot_retries: int = 1,
        **settings: Any,
    ) -> None:
        db.execute(
            "create table if not exists t (id int primary key, v text); create table if not exists other (id int)"
        )
        if not db.query("select from pg_publication where pubname = 'p'"):
            db.execute("create publication p for table t")
        with db.connect() as conn:
            position = create_slot(conn, "s")
            table = describe_table(conn, "public.t")
        self.db = db
        self.settings = CaptureSettings(
            dsn=dsn or db.dsn,
            slot="s",
            publication="p",
            position=position,
            directory=str(directory),
            segment_bytes=64 << 10,
            slot_retries=slot_retries,
            **settings,
        )
        write_tables(directory / "tables.json", [(table, None)])
        self.stage = Stage(
            directory / "stage", segment_bytes=64 << 10, bytes_max=bytes_max, position=self.settings.position
        )
        self.capture = Capture(self.settings, self.stage)
        self.capture.start()

    def position(self) -> int:
        return parse_lsn(self.db.value("select pg_current_wal_flush_lsn()::text"))

    def confirmed(self) -> int:
        return parse_lsn(
            self.db.value("select confirmed_flush_lsn::text from pg_replication_slots where slot_name = 's'")
        )

    def wait_seen(self, position: int) -> None:
        def seen() -> bool:
            self.capture.check()
            return self.capture.seen >= position

        wait_until(seen, "the capture has seen it")

    def rows(self) -> int:
        """Rows that are ready for a batch, read from their segments."""
        self.stage.cut()
        cuts = self.stage.between(0, 1 << 62)
        return sum(
            pa.ipc.open_file(s.path).read_all().num_rows for cut in cuts for s in cut.segments if s.path
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def make(db: Database, **keywords: object) -> Running:
        directory = tmp_path / str(len(running))
        directory.mkdir()
        running.append(Running(db, directory, **keywords))  # type: ignore[arg-type]
        return running[-1]

    yield make
    for one in running:
        one.capture.stop()


def test_the_slot_is_not_confirmed_past_what_is_durable(db: Database, start: Callable[..., Running]) -> None:
    """Promise 3: staged changes hold the confirmation back; the lake's word releases it."""
    run = start(db)
    db.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    committed = run.position()
    run.wait_seen(committed)
    db.execute("insert into other select generate_series(1, 1000)")
    run.wait_seen(run.position())
    assert run.rows() == 100
    assert run.confirmed() < committed
    end = run.stage.furthest(0, 1 << 40)
    run.stage.release(end)
    wait_until(lambda: run.confirmed() >= run.position() - 256, "the slot follows once nothing is pending")


def test_an_idle_table_pins_no_wal(db: Database, start: Callable[..., Running]) -> None:
    """Hazard 4, P-S18: the slot follows the server through traffic of other tables, and notes it first."""
    run = start(db)
    for _ in range(3):
        db.execute("insert into other select generate_series(1, 5000)")
        target = run.position()
        wait_until(lambda: run.confirmed() >= target, "the slot follows")  # noqa: B023 - used at once
    noted = read_confirmation(run.settings.confirmed_path)
    assert noted is not None
    assert noted.position >= run.confirmed()
    assert noted.durable == run.settings.position, "the lake did not move"


def test_a_server_that_asks_does_not_take_back_what_was_noted(
    db: Database, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Hazard 4: after a restart on an idle database, before the first second is over.

    Whoever was killed then took its own slot for one that was made again: the note said less than the slot.
    """
    run = start(db)
    db.execute("insert into other select generate_series(1, 5000)")
    target = run.position()
    wait_until(lambda: run.confirmed() >= target, "the slot follows")
    run.capture.stop()
    monkeypatch.setattr(
        "aqueduck.postgres.capture.capture.STATUS_SECONDS", 20.0
    )  # only the first of them is due
    monkeypatch.setattr(Decoder, "take_reply_request", lambda _: True)
    again = Capture(run.settings, run.stage)
    again.start()
    try:
        wait_until(lambda: again.seen >= target, "the capture has seen it")
        sent = "select flush_lsn from pg_stat_replication where pid = (select active_pid from pg_replication_slots where slot_name = 's')"
        wait_until(lambda: db.value(sent) is not None, "the first status has arrived")
        noted = read_confirmation(run.settings.confirmed_path)
        assert noted is not None
        assert noted.position >= run.confirmed() >= target > run.settings.position
    finally:
        again.stop()


def test_a_large_row_leaves_no_large_buffer(db: Database, start: Callable[..., Running]) -> None:
    """P-S32: the memory of the largest row that ever came was kept until the end."""
    running = start(db)
    for size in (30_000_000, 1):
        db.execute(f"insert into t values ({size}, repeat('x', {size}))")
        running.wait_seen(running.position())
    assert running.rows() == 2
    assert running.capture._buf.nbytes == 2 * READ_BYTES


def test_a_full_stage_pauses_the_reader_and_loses_nothing(
    db: Database, start: Callable[..., Running]
) -> None:
    """Hazard 12, P-S20: a backlog far beyond the stage's limit arrives whole; the stage stays near its limit."""
    run = start(db, bytes_max=512 << 10)
    for i in range(40):
        db.execute(f"insert into t select {i} * 500 + g, repeat('x', 200) from generate_series(1, 500) g")
    end = run.position()
    wait_until(lambda: run.stage.full, "the stage is full")
    seen = 0
    most = 0
    after = 0
    while after < end and seen < 20_000:
        wait_until(lambda: run.stage.has_ready(after), "more is staged")  # noqa: B023 - used at once
        run.stage.cut()
        upto = run.stage.furthest(after, 256 << 10)
        cuts = run.stage.between(after, upto)
        most = max(most, run.stage.staged_bytes)
        seen += sum(s.rows for cut in cuts for s in cut.segments)
        run.stage.release(upto)
        after = upto
    assert seen == 20_000
    assert most < 8 << 20


def test_a_paused_reader_is_heard_of(db: Database, start: Callable[..., Running]) -> None:
    """P-S20, P-E04: only reading pauses; the server hears of us each second, and does not take us for gone."""
    run = start(db, dsn=make_conninfo(db.dsn, options="-c wal_sender_timeout=1500ms"), bytes_max=512 << 10)
    for i in range(40):
        db.execute(f"insert into t select {i} * 500 + g, repeat('x', 200) from generate_series(1, 500) g")
    wait_until(lambda: run.stage.full, "the stage is full")
    reader = "select active_pid from pg_replication_slots where slot_name = 's'"
    paused_at, pid = db.query(f"select clock_timestamp(), ({reader})")[0]
    heard = f"select reply_time > %s + interval '3 s' from pg_stat_replication where pid = ({reader})"
    wait_until(lambda: db.value(heard, (paused_at,)), "the server still hears of us")
    assert db.value(reader) == pid
    run.capture.check()


def test_a_transaction_is_offered_only_when_it_is_whole(db: Database, start: Callable[..., Running]) -> None:
    """Long and short transactions interleave; each appears at its commit, in commit order."""
    run = start(db)
    with db.connect() as long:
        long.execute("begin")
        long.execute("insert into t select g, repeat('long', 50) from generate_series(1, 5000) g")
        db.execute("insert into t values (9001, 'short')")
        run.wait_seen(run.position())
        assert run.rows() == 1
        long.execute("commit")
    run.wait_seen(run.position())
    assert run.rows() == 5001


def test_columns_that_the_stream_announces_are_mapped_as_the_catalog_would(
    db: Database, start: Callable[..., Running]
) -> None:
    """P-S12: a column of a domain or of an array of an enum, added on the way, gets the type that a new copy would give it."""
    run = start(db)
    db.execute("create type mood as enum ('ok'); create domain amount as numeric(10, 2)")
    db.execute("alter table t add a amount, add b mood[], add c amount[], add d int[], add e mood")
    db.execute("insert into t values (1, 'x', 1.5, '{ok}', '{2}', '{3}', 'ok')")
    run.wait_seen(run.position())
    run.stage.cut()
    [segment] = [s for cut in run.stage.between(0, 1 << 62) for s in cut.segments]
    announced = TableSchema.from_json(segment.schema_json)
    with db.connect() as conn:
        described = describe_table(conn, "t")
    mapped = [(c.name, lake_type(c), cast_sql(c, "x")) for c in described.columns]
    assert [(c.name, lake_type(c), cast_sql(c, "x")) for c in announced.columns] == mapped
    assert [kind for _, kind, _ in mapped] == [
        "INTEGER", "VARCHAR", "DECIMAL(10,2)", "JSON", "JSON", "JSON", "VARCHAR"
    ]  # fmt: skip


def test_a_held_capture_lets_go_of_the_slot_and_misses_nothing(
    db: Database, start: Callable[..., Running]
) -> None:
    """P-S19: while a capture is held, its slot is free; afterwards every change arrives once."""
    run = start(db)
    db.execute("insert into t values (1, 'before')")
    run.wait_seen(run.position())
    hold = run.settings.hold_path
    hold.touch()
    wait_until(
        lambda: not db.value("select active from pg_replication_slots where slot_name = 's'"), "it lets go"
    )
    db.execute("insert into t values (2, 'meanwhile')")
    hold.unlink()
    run.wait_seen(run.position())
    assert run.rows() == 2


def test_a_slot_with_another_reader_is_an_error_after_some_tries(
    db: Database, start: Callable[..., Running]
) -> None:
    """P-S31: bounded retries, then a typed error."""
    first = start(db)
    wait_until(
        lambda: db.value("select active from pg_replication_slots where slot_name = 's'"), "the first has it"
    )
    second = start(db)
    wait_until(lambda: not second.capture.is_alive(), "the second gives up")
    with pytest.raises(SlotActiveError):
        second.capture.check()
    first.capture.check()


def test_a_slot_that_is_let_go_is_taken(
    db: Database, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S31: a service that starts while the last reader still has the slot waits for it, a little longer each time."""
    refused: list[float] = []

    open_reader = Readers.open

    def opened(*arguments: Any, **keywords: Any) -> Any:
        try:
            return open_reader(*arguments, **keywords)
        except SlotActiveError:
            refused.append(time.monotonic())
            raise

    first = start(db)
    wait_until(
        lambda: db.value("select active from pg_replication_slots where slot_name = 's'"), "the first has it"
    )
    monkeypatch.setattr(Readers, "open", opened)
    second = start(db, slot_retries=10)
    wait_until(lambda: len(refused) == 3, "the second is refused")
    first.capture.stop()
    db.execute("insert into t values (1, 'x')")
    second.wait_seen(second.position())
    assert second.rows() == 1
    assert refused[1] - refused[0] >= 0.25
    assert refused[2] - refused[1] >= 0.5


def test_a_server_that_goes_away_is_a_typed_error(
    new_server: Callable[..., EmbeddedPostgres], start: Callable[..., Running]
) -> None:
    """The thread ends with an error that says whether to try again, and `check` raises it."""
    server = new_server()
    run = start(Database(server, "postgres"))
    run.db.execute("insert into t values (1, 'x')")
    run.wait_seen(run.position())
    server.stop(mode="immediate")
    wait_until(lambda: not run.capture.is_alive(), "the capture notices")
    with pytest.raises(AqueduckError) as error:
        run.capture.check()
    assert error.value.code in ("pg.connection_lost", "pg.unreachable")


def test_capture_works_over_tls_and_scram(
    new_server: Callable[..., EmbeddedPostgres], start: Callable[..., Running], tmp_path: Path
) -> None:
    """P-S23: the same rows come through libpq's TLS, also large ones, with a password."""
    server = new_server(password="s3cret")
    database = Database(server, "postgres")
    files = make_certificates(tmp_path, "127.0.0.1")
    with tls_proxy(server.port, files.server) as port:
        tls = {"sslmode": "verify-full", "sslrootcert": str(files.authority)}
        dsn = server.dsn_for("postgres", "postgres", port=port, password="s3cret", **tls)
        run = start(database, dsn=dsn)
        database.execute(
            "insert into t select g, repeat(md5(g::text), g % 2000) from generate_series(1, 3000) g"
        )
        run.wait_seen(run.position())
        assert run.rows() == 3000
        run.capture.stop()


def test_settings_with_the_connection_string_are_for_us_alone(db: Database, tmp_path: Path) -> None:
    """The file that carries the settings to the planner is readable by its owner only, and reads back the same."""
    settings = CaptureSettings(dsn=db.dsn, slot="s", publication="p", position=7, directory="d")
    file = tmp_path / "settings.json"
    settings.save(file)
    replace(settings, position=8).save(file)
    assert file.stat().st_mode & 0o077 == 0
    assert CaptureSettings.load(file) == replace(settings, position=8)


def test_a_heartbeat_moves_the_slot(db: Database, start: Callable[..., Running]) -> None:
    """The option for databases without traffic of their own: the message passes, and the slot follows it."""
    run = start(db)
    with db.connect() as conn:
        emit_heartbeat(conn)
    target = run.position()
    wait_until(lambda: run.confirmed() >= target, "the slot follows")
    run.capture.check()
    assert run.rows() == 0


def test_a_table_that_is_added_while_the_stream_runs_is_decoded(
    db: Database, start: Callable[..., Running]
) -> None:
    """Promise 6: the capture learns of new tables from the driver's note, without a new connection."""
    run = start(db)
    db.execute("insert into t values (1, 'x')")
    run.wait_seen(run.position())
    pid = db.value("select active_pid from pg_replication_slots where slot_name = 's'")
    db.execute("create table late (id int primary key)")
    with db.connect() as conn:
        tables = [describe_table(conn, f"public.{name}") for name in ("t", "late")]
    write_tables(Path(run.settings.tables_path), [(table, None) for table in tables])
    db.execute("alter publication p add table late")
    db.execute("insert into late select generate_series(1, 5); insert into t values (2, 'y')")
    run.wait_seen(run.position())
    assert run.rows() == 7
    assert db.value("select active_pid from pg_replication_slots where slot_name = 's'") == pid
