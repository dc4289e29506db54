from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.errors import (
    NoKeyError,
    PrivilegeError,
    PublicationError,
    SlotActiveError,
    SlotConflictError,
    SlotLimitError,
    SlotLostError,
    TwoPhaseSlotError,
    WalLevelError,
)
from aqueduck.model.schema import TableSchema, lsn_text, parse_lsn
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.publications import create_publication_sql, publishes_exactly
from aqueduck.postgres.publications.slots import (
    SlotInfo,
    check_slot,
    create_slot,
    drop_publication,
    drop_slot,
    ensure_publication,
    read_server,
    slot_info,
)
from aqueduck.postgres.session.server import flushed_position
from aqueduck.state_files.files import Confirmation
from tests.fix_postgres import Database, wait_until

NewServer = Callable[..., EmbeddedPostgres]
Connection = psycopg.Connection[Any]


@pytest.fixture
def conn(any_db: Database) -> Iterator[Connection]:
    with any_db.connect() as made:
        yield made


@pytest.fixture
def tables(any_db: Database) -> dict[str, TableSchema]:
    """Tables a, b and c, and a partitioned one."""
    any_db.execute(
        """create table a (id int primary key); create table b (id int primary key, t text);
        create schema "S x"; create table "S x"."c ""q" (id int primary key);
        create table p (id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (10)"""
    )
    with any_db.connect() as conn:
        names = {"a": "a", "b": "b", "c": '"S x"."c ""q"', "p": "p"}
        return {key: describe_table(conn, name) for key, name in names.items()}


def published(db: Database, name: str = "pub") -> list[str]:
    query = "select format('%%s.%%s', schemaname, tablename) from pg_publication_tables where pubname = %s"
    return sorted(row[0] for row in db.query(query, [name]))


# -- the server


def test_the_server_describes_itself(any_db: Database, conn: Connection) -> None:
    """Version, identity, limits and position come in one look."""
    info = read_server(conn)
    assert info.version_num // 10000 == any_db.server.version
    assert info.wal_level == "logical"
    assert info.system_identifier == any_db.value("select system_identifier::text from pg_control_system()")
    assert info.timeline == 1
    assert (info.max_replication_slots, info.max_wal_senders) == (20, 20)
    assert (info.database, info.role, info.in_recovery) == (any_db.name, "postgres", False)
    assert info.has_replication
    assert info.can_create_in_db
    assert 0 < info.current_lsn <= parse_lsn(any_db.value("select pg_current_wal_lsn()::text"))


def test_used_slots_and_walsenders_are_counted(any_db: Database, conn: Connection) -> None:
    """The counts can be compared with the server's limits."""
    before = read_server(conn)
    create_slot(conn, "counted")
    with any_db.connect(replication="database"):
        after = read_server(conn)
    assert after.slots_used == before.slots_used + 1
    assert after.wal_senders_used == before.wal_senders_used + 1


def test_a_role_without_rights_may_look(db: Database, role: str) -> None:
    """P-S24: reading needs no privilege, and shows which ones are missing."""
    with db.connect(role) as conn:
        info = read_server(conn)
        assert (info.role, info.has_replication) == (role, False)
        assert not info.can_create_in_db
        db.execute(f'alter role "{role}" replication; grant create on database {db.name} to "{role}"')
        info = read_server(conn)
        assert (info.has_replication, info.can_create_in_db) == (True, True)


def test_the_replication_role_of_rds_counts(db: Database, role: str) -> None:
    """On the managed service the attribute is replaced by membership."""
    db.execute(f'create role rds_replication; grant rds_replication to "{role}"')
    with db.connect(role) as conn:
        assert read_server(conn).has_replication
    db.execute("drop role rds_replication")


def test_the_flushed_position_is_after_every_commit(db: Database) -> None:
    """Also a commit that did not wait for its WAL is before the position, and the position is streamed."""
    db.execute("create table t (n int); set synchronous_commit = off")
    for n in range(5):
        db.execute(f"insert into t values ({n})")
        committed = parse_lsn(db.value("select pg_current_wal_insert_lsn()::text"))
        assert flushed_position(db.dsn) >= committed


# -- publications


def test_a_publication_is_made_for_exactly_the_tables(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """P-S01, P-S14: names are quoted, partitions go by their root, doing it twice changes nothing."""
    wanted = [tables["a"], tables["c"], tables["p"]]
    for _ in range(2):
        ensure_publication(conn, 'p "1"', wanted)
        assert published(any_db, 'p "1"') == ['S x.c "q', "public.a", "public.p"]
    assert any_db.value("select pubviaroot from pg_publication")
    assert publishes_exactly(conn, 'p "1"', wanted)


def test_tables_are_added_and_removed(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """An existing publication gets exactly the wanted tables, even none."""
    for wanted in ("a", "ab", "bp", "", "c"):
        ensure_publication(conn, "pub", [tables[key] for key in wanted])
        assert len(published(any_db)) == len(wanted)
        assert publishes_exactly(conn, "pub", [tables[key] for key in wanted])


def test_a_publication_made_by_hand_is_corrected(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """Column lists, row filters, whole schemas and left-out changes would lose data: they go."""
    wanted = [tables["b"]]
    any_db.execute("create publication pub for table b (id) where (id > 3) with (publish = 'insert')")
    assert not publishes_exactly(conn, "pub", wanted)
    ensure_publication(conn, "pub", wanted)
    assert publishes_exactly(conn, "pub", wanted)
    assert any_db.query("select prattrs, prqual from pg_publication_rel") == [(None, None)]
    any_db.execute('alter publication pub add tables in schema "S x"')
    assert not publishes_exactly(conn, "pub", wanted)
    ensure_publication(conn, "pub", wanted)
    assert published(any_db) == ["public.b"]


def test_generated_columns_stay_unpublished(db: Database) -> None:
    """Generated columns are neither in a table's description nor in the stream."""
    db.execute("create table g (id int primary key, twice int generated always as (id * 2) stored)")
    with db.connect() as conn:
        table = describe_table(conn, "g")
        db.execute("create publication pub for table g with (publish_generated_columns = stored)")
        ensure_publication(conn, "pub", [table])
    assert db.value("select attnames from pg_publication_tables") == ["id"]


def test_a_publication_for_all_tables_is_refused(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """It cannot be narrowed, and it is not ours to drop."""
    any_db.execute("create publication pub for all tables")
    with pytest.raises(PublicationError, match="for all tables"):
        ensure_publication(conn, "pub", [tables["a"]])
    assert not publishes_exactly(conn, "pub", [tables["a"]])


def test_tables_that_inherit_are_not_published_along(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """Only the tables of the group are in the stream."""
    any_db.execute("create table child () inherits (a)")
    ensure_publication(conn, "pub", [tables["a"]])
    assert published(any_db) == ["public.a"]


@pytest.mark.parametrize("identity", ["default", "nothing"])
def test_the_applications_updates_are_never_broken(any_db: Database, conn: Connection, identity: str) -> None:
    """P-S02: PostgreSQL refuses updates of a published table without identity, so it is not published."""
    any_db.execute(
        f"create table k (id int); insert into k values (1); alter table k replica identity {identity}"
    )
    table = describe_table(conn, "k", need_key=False)
    with pytest.raises(NoKeyError) as caught:
        ensure_publication(conn, "pub", [table])
    assert published(any_db) == []
    any_db.execute(str(caught.value.hint))
    ensure_publication(conn, "pub", [describe_table(conn, "k", need_key=False)])
    any_db.execute("update k set id = 2")


def test_a_key_without_identity_is_not_enough(any_db: Database, conn: Connection) -> None:
    """P-S02: with REPLICA IDENTITY NOTHING the old key is not in WAL; the hint repairs it."""
    any_db.execute("create table k (id int primary key); alter table k replica identity nothing")
    with pytest.raises(NoKeyError) as caught:
        ensure_publication(conn, "pub", [describe_table(conn, "k")])
    any_db.execute(str(caught.value.hint))
    ensure_publication(conn, "pub", [describe_table(conn, "k")])


def test_nothing_stays_of_a_publication_that_failed(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """P-S01: one missing table leaves no half-made publication."""
    any_db.execute("drop table b")
    with pytest.raises(Exception, match=r"\[pg.table_missing\]"):
        ensure_publication(conn, "pub", [tables["a"], tables["b"]])
    assert any_db.query("select pubname from pg_publication") == []


def test_what_an_administrator_prepared_needs_no_rights(db: Database, role: str) -> None:
    """P-S24: a role that owns nothing can use a publication that fits already."""
    db.execute("create table a (id int primary key)")
    with db.connect(role) as conn:
        wanted = [describe_table(conn, "a")]
        with pytest.raises(PrivilegeError, match="permission denied for database"):
            ensure_publication(conn, "pub", wanted)
        db.execute(create_publication_sql("pub", wanted))
        ensure_publication(conn, "pub", wanted)


def test_dropping_a_publication_twice_is_fine(
    any_db: Database, conn: Connection, tables: dict[str, TableSchema]
) -> None:
    """An absent publication is already dropped."""
    ensure_publication(conn, "pub", [tables["a"]])
    for _ in range(2):
        drop_publication(conn, "pub")
    assert any_db.query("select pubname from pg_publication") == []


# -- slots


def test_a_slot_is_created_once(any_db: Database, conn: Connection) -> None:
    """P-S01: creating again gives the same slot and position; nothing committed since is skipped."""
    position = create_slot(conn, "aq")
    any_db.execute("create table t (n int)")
    assert create_slot(conn, "aq") == position
    assert slot_info(conn, "aq") == SlotInfo(
        name="aq", plugin="pgoutput", database=any_db.name, active=False,
        confirmed_flush_lsn=position, wal_status="reserved", invalidation_reason=None, temporary=False,
        two_phase=False,
        retained_bytes=any_db.value(
            "select (pg_current_wal_lsn() - restart_lsn)::int8 from pg_replication_slots"
        ),
    )  # fmt: skip


def test_a_slot_that_does_not_exist_is_none(conn: Connection) -> None:
    """Absence is a value, not an error."""
    assert slot_info(conn, "nowhere") is None


def test_dropping_a_slot_twice_is_fine(conn: Connection) -> None:
    """P-E06: an absent slot is already dropped."""
    create_slot(conn, "aq")
    for _ in range(2):
        drop_slot(conn, "aq")
    assert slot_info(conn, "aq") is None


@contextmanager
def reader(db: Database, name: str) -> Iterator[None]:
    """Another program that reads a slot."""
    db.execute("create publication pub")
    command: list[str | Path] = [
        db.server.bin("pg_recvlogical"), "-d", db.dsn, "--slot", name, "--start", "-f", "-",
        "-o", "proto_version=1", "-o", "publication_names=pub",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: db.value("select active from pg_replication_slots"), "the slot is read")
            yield
        finally:
            process.terminate()
    wait_until(lambda: not db.value("select active from pg_replication_slots"), "the slot is free")


def test_a_slot_that_is_read_is_not_dropped(any_db: Database, conn: Connection) -> None:
    """P-E06, P-S31: an active slot is an error that the service may retry."""
    create_slot(conn, "aq")
    with reader(any_db, "aq"):
        info = slot_info(conn, "aq")
        assert info is not None
        assert info.active
        with pytest.raises(SlotActiveError):
            drop_slot(conn, "aq")
    drop_slot(conn, "aq")
    assert slot_info(conn, "aq") is None


def test_slots_of_others_are_left_alone(any_db: Database, conn: Connection) -> None:
    """A slot of that name for physical replication is a conflict, and not ours to drop."""
    any_db.execute("select pg_create_physical_replication_slot('physical')")
    with pytest.raises(SlotConflictError, match="physical replication"):
        create_slot(conn, "physical")
    with pytest.raises(SlotConflictError):
        drop_slot(conn, "physical")
    any_db.execute("select pg_drop_replication_slot('physical')")


def test_a_slot_of_another_database_is_a_conflict(any_db: Database, conn: Connection) -> None:
    """Slot names are shared by all databases of a server; changes of another one are not ours."""
    with psycopg.connect(any_db.server.dsn, autocommit=True) as elsewhere:
        create_slot(elsewhere, "shared")
        for action in (create_slot, drop_slot):
            with pytest.raises(SlotConflictError, match="the database postgres"):
                action(conn, "shared")
        drop_slot(elsewhere, "shared")


def test_wal_level_replica_is_a_named_error(new_server: NewServer) -> None:
    """The hint is the statement that repairs it, after a restart."""
    server = new_server(settings={"wal_level": "replica"})
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        with pytest.raises(WalLevelError) as caught:
            create_slot(conn, "aq")
        conn.execute(str(caught.value.hint).encode())
    server.restart()
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        assert create_slot(conn, "aq") > 0


def test_all_slots_in_use_is_a_named_error(new_server: NewServer) -> None:
    """The setting that is too small is in the hint."""
    server = new_server(settings={"max_replication_slots": 1})
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        create_slot(conn, "first")
        with pytest.raises(SlotLimitError) as caught:
            create_slot(conn, "second")
    assert "max_replication_slots" in str(caught.value.hint)


def test_a_role_without_replication_learns_how_to_get_it(db: Database, role: str) -> None:
    """P-S24: the printed statement is enough to create, read and drop a slot."""
    with db.connect(role) as conn:
        with pytest.raises(PrivilegeError) as caught:
            create_slot(conn, "aq")
        db.execute(str(caught.value.hint))
        create_slot(conn, "aq")
        assert slot_info(conn, "aq") is not None
        drop_slot(conn, "aq")


@pytest.mark.parametrize("version", [18, 16])
def test_a_slot_whose_wal_was_removed_is_lost(new_server: NewServer, version: int) -> None:
    """P-S30: a slot that the server invalidated is detected from what it shows."""
    server = new_server(version=version, settings={"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"})
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        position = create_slot(conn, "aq")

        def lost() -> bool:
            conn.execute("select pg_logical_emit_message(false, '', repeat('x', 1000))")
            conn.execute("select pg_switch_wal()")
            conn.execute("checkpoint")
            info = slot_info(conn, "aq")
            return info is not None and info.wal_status == "lost"

        wait_until(lost, "the slot is lost")
        with pytest.raises(SlotLostError, match="invalidated by the server"):
            check_slot(slot_info(conn, "aq"), name="aq", database="postgres", position=position)


def test_a_slot_that_was_created_again_is_detected(any_db: Database, conn: Connection) -> None:
    """P-S30, hazard 10: a slot dropped and re-created behind our back has skipped changes."""
    position = create_slot(conn, "aq")
    any_db.execute("create table t (n int)")
    check_slot(slot_info(conn, "aq"), name="aq", database=any_db.name, position=position)
    drop_slot(conn, "aq")
    any_db.execute("insert into t values (1)")
    create_slot(conn, "aq")
    with pytest.raises(SlotLostError, match="re-created or moved"):
        check_slot(slot_info(conn, "aq"), name="aq", database=any_db.name, position=position)


def test_a_slot_with_two_phase_is_refused_and_the_documented_way_out_works(
    any_db: Database, conn: Connection
) -> None:
    """Prepared transactions that come before their commit could not be taken back; a slot of our own sends them with it."""
    any_db.execute("select pg_create_logical_replication_slot('aq', 'pgoutput', false, true)")
    with pytest.raises(TwoPhaseSlotError, match="may still be rolled back"):
        create_slot(conn, "aq")
    if any_db.server.version < 18:
        return
    with any_db.connect(replication="database") as replication:
        replication.execute('ALTER_REPLICATION_SLOT "aq" (TWO_PHASE false)')
    create_slot(conn, "aq")


# -- check_slot, without a server


def slot(**changes: Any) -> SlotInfo:
    values: dict[str, Any] = {
        "name": "aq", "plugin": "pgoutput", "database": "d", "active": False,
        "confirmed_flush_lsn": 100, "wal_status": "reserved", "temporary": False,
        "two_phase": False, "invalidation_reason": None, "retained_bytes": 0,
    }  # fmt: skip
    return SlotInfo(**{**values, **changes})


@given(
    position=st.integers(0, 1 << 62),
    noted=st.none()
    | st.builds(Confirmation, *[st.integers(0, 1 << 62)] * 2, st.sampled_from(["this", "other"])),
    confirmed=st.integers(0, 1 << 62),
    trusted=st.booleans(),
)
def test_a_slot_may_stand_at_what_we_confirmed_and_no_further(
    position: int, noted: Confirmation | None, confirmed: int, trusted: bool
) -> None:
    """P-S30: behind us it replays, up to what we confirmed for this lake it is ours, beyond that changes are lost."""

    def check() -> None:
        check_slot(
            slot(confirmed_flush_lsn=confirmed),
            name="aq",
            database="d",
            position=position,
            lake="this",
            noted=noted,
            trusted=trusted,
        )

    ours = None if noted is None or noted.lake != "this" else noted
    went_back = ours is not None and ours.durable > position
    covered = ours is not None and ours.durable <= position and confirmed <= ours.position
    if confirmed <= position or (not went_back and (covered or trusted)):
        check()
    else:
        with pytest.raises(SlotLostError, match="older backup" if went_back else "re-created") as caught:
            check()
        assert lsn_text(position) in caught.value.message


def test_a_missing_slot_matters_once_the_lake_has_a_position() -> None:
    """P-S30: before the first commit there is nothing to lose."""
    check_slot(None, name="aq", database="d", position=None)
    with pytest.raises(SlotLostError, match="does not exist"):
        check_slot(None, name="aq", database="d", position=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"plugin": "wal2json"}, SlotConflictError),
        ({"plugin": None, "database": None, "confirmed_flush_lsn": None}, SlotConflictError),
        ({"temporary": True}, SlotConflictError),
        ({"database": "other"}, SlotConflictError),
        ({"wal_status": "lost"}, SlotLostError),
        ({"invalidation_reason": "idle_timeout"}, SlotLostError),
    ],
)
@pytest.mark.parametrize("position", [None, 100])
def test_a_slot_that_cannot_be_ours_is_refused(
    change: dict[str, Any], error: type[Exception], position: int | None
) -> None:
    """P-S30: detected before anything is written, whether or not the lake has a position."""
    with pytest.raises(error):
        check_slot(slot(**change), name="aq", database="d", position=position)
