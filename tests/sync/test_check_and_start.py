"""`check` reports the same code as a start, in every state that a start refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aqueduck.config.events import load_events
from aqueduck.config.sync import SparkConfig, SyncConfig, TracingConfig
from aqueduck.events.check import run_event_checks
from aqueduck.events.prepare import prepare_source
from aqueduck.lake.ledger.table_states import read_states
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import AqueduckError, BookmarkError, ConfigError, SparkStartError
from aqueduck.postgres.registry.registry import call, install, reconcile_file
from aqueduck.service.check_spark import spark_checks
from aqueduck.sinks.bookmark_file import FileBookmarks
from aqueduck.spark.session.session import prepare_environment
from aqueduck.sync.check import run_checks
from aqueduck.sync.control import RegistryControl, Wanted
from aqueduck.sync.prepare import prepare_group
from aqueduck.sync.service import SyncService
from aqueduck.sync.verify import verify_tables
from tests.fix_events import Flow
from tests.fix_postgres import Database
from tests.small_service import small_config
from tests.whole_group import WholeGroup

TABLES: dict[str, dict[str, str]] = {"public.t": {}, "public.u": {}}


@pytest.fixture
def stopped(db: Database, tmp_path: Path) -> WholeGroup:
    """A group that has run, and is stopped."""
    for name in "tu":
        db.execute(f"create table {name} (id int primary key, v text); insert into {name} values (1, 'a')")
    group = WholeGroup(db, tmp_path, TABLES)
    group.stop()
    return group


def checked(group: WholeGroup) -> set[str]:
    """The codes that `aqueduck check` gives."""
    return {r.error.code if r.error else "" for r in run_checks(group.config) if not r.ok}


def started(group: WholeGroup) -> set[str]:
    """The codes that a start gives, for the group as a whole or for its tables."""
    return codes_of_a_start(group.config)


def codes_of_a_start(config: SyncConfig) -> set[str]:
    with open_lake(config.lake) as lake:
        try:
            ready = prepare_group(config, Wanted(config.groups[0]), lake)
        except AqueduckError as exc:
            return {exc.code}
        states = read_states(lake, "test").values()
        errors = [AqueduckError.from_text(s.error) for s in states if s.error is not None]
        return {e.code for e in (*errors, *ready.refused.values()) if e is not None}


SOURCE = {
    "the slot is gone": ("select pg_drop_replication_slot('aqueduck_test')", "pg.slot_lost"),
    "the slot is another": (
        "select pg_drop_replication_slot('aqueduck_test');"
        " select pg_create_logical_replication_slot('aqueduck_test', 'pgoutput')",
        "pg.slot_lost",
    ),
    "the slot is another user's": (
        "select pg_drop_replication_slot('aqueduck_test');"
        " select pg_create_physical_replication_slot('aqueduck_test')",
        "pg.slot_conflict",
    ),
    "a table was made anew": (
        "drop table t; create table t (id int primary key, v text)",
        "pg.table_recreated",
    ),
    "a table is gone": ("drop table t", "pg.table_missing"),
    "a key is gone": ("alter table t drop constraint t_pkey", "pg.no_key"),
}
LAKE = {
    "the target is gone": ("drop table lake.main.t", "lake.table_missing"),
    "the target is partitioned by a key twice": (
        "alter table lake.main.t set partitioned by (v, v)",
        "lake.partitioned",
    ),
    "the target has another column": ("alter table lake.main.t add column mine int", "lake.schema_change"),
}
QUICK = (
    "the slot is gone",
    "a table was made anew",
    "the target is gone",
    "the target is partitioned by a key twice",
)


@pytest.mark.parametrize(
    "what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in SOURCE]
)
def test_check_says_what_a_start_says_of_the_source(db: Database, stopped: WholeGroup, what: str) -> None:
    """P-T07: slots and tables that a start refuses."""
    assert checked(stopped) == set()
    statements, code = SOURCE[what]
    for statement in statements.split(";"):
        db.execute(statement)
    assert code in checked(stopped)
    assert code in started(stopped)


@pytest.mark.parametrize("what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in LAKE])
def test_check_says_what_a_start_says_of_the_lake(stopped: WholeGroup, what: str) -> None:
    """P-T07: targets that a start refuses."""
    statement, code = LAKE[what]
    with open_lake(stopped.config.lake) as lake:
        lake.execute(statement)
    assert checked(stopped) == {code}
    assert started(stopped) == {code}


@pytest.mark.parametrize("what", ["traces", "a link"])
def test_check_says_what_a_start_says_of_its_surroundings(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """P-T07: an endpoint for traces without the package, and a directory that is not ours."""
    db.execute("create table t (id int primary key)")
    config = small_config(db, tmp_path, "public.t")
    assert {r.name for r in run_checks(config) if not r.ok} == set()
    if what == "traces":
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        config = config.model_copy(update={"tracing": TracingConfig(otlp_endpoint="http://127.0.0.1:1")})
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "state").mkdir(exist_ok=True)
        (tmp_path / "state" / "test").symlink_to(tmp_path / "elsewhere")
    assert {r.error.code for r in run_checks(config) if r.error is not None} == {"config.invalid"}
    service = SyncService(config)
    try:
        with pytest.raises(ConfigError):
            service.prepare()
    finally:
        service.stop()


def test_check_asks_for_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P-T07: without one, nothing starts."""
    assert all(result.ok for result in spark_checks(SparkConfig()))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [r.error.code for r in spark_checks(SparkConfig()) if r.error is not None] == ["spark.start"]
    with pytest.raises(SparkStartError):
        prepare_environment(dict(os.environ), "local[1]")


def test_check_asks_about_tables_that_only_the_registry_has(db: Database, stopped: WholeGroup) -> None:
    """P-T07: a table that was added by SQL is checked like those of the file."""
    db.execute("create table extra (id int primary key)")
    with db.connect() as conn:
        install(conn)
        reconcile_file(conn, stopped.config)
        conn.execute("update aqueduck.sync_groups set lake = %s", (stopped.config.lake.data_path,))
        call(conn, "add_table", source="public.extra", group_name="test")
    assert "table public.extra" in {r.name for r in run_checks(stopped.config)}
    db.execute("drop table extra")
    assert checked(stopped) == {"pg.table_missing"}


@pytest.mark.parametrize(
    "row", ["target_table = ''", """options = '{"columns": 3}'"""], ids=["a group's", "a table's"]
)
def test_check_and_verify_say_which_rows_of_the_registry_cannot_be_read(
    db: Database, stopped: WholeGroup, row: str
) -> None:
    """P-T07, P-T01: an unreadable row stops its group or table at a start, and hides tables that the lake may lack."""
    db.execute("create table extra (id int primary key)")
    with db.connect() as conn:
        install(conn)
        reconcile_file(conn, stopped.config)
        conn.execute("update aqueduck.sync_groups set lake = %s", (stopped.config.lake.data_path,))
        call(conn, "add_table", source="public.extra", group_name="test")
    assert checked(stopped) == set()
    db.execute(f"update aqueduck.table_mappings set {row} where source_table = 'extra'")
    assert checked(stopped) == {"config.invalid"}
    wanted = RegistryControl(stopped.config, db.observer).wanted()
    assert [w for w in wanted if w.problem is not None or w.unusable]
    told = {c.table: c.verdict for c in verify_tables(stopped.config)}
    assert told.pop("public.t") == told.pop("public.u") == "identical"
    assert list(told.values()) == ["not compared"]


def test_check_leaves_out_what_a_start_removes(db: Database, stopped: WholeGroup) -> None:
    """P-T07: tables that an earlier version of the file made; a start takes them out, so they are no problem."""
    with db.connect() as conn:
        install(conn)
        reconcile_file(conn, stopped.config)
        conn.execute("update aqueduck.sync_groups set lake = %s", (stopped.config.lake.data_path,))
    [group] = stopped.config.groups
    fewer = group.model_copy(update={"tables": tuple(t for t in group.tables if t.source == "public.t")})
    config = stopped.config.model_copy(update={"groups": (fewer,)})
    db.execute("alter table u drop constraint u_pkey")
    assert {r.name for r in run_checks(config) if not r.ok} == set()


def test_check_of_events_says_what_a_start_says_of_the_bookmark(db: Database, tmp_path: Path) -> None:
    """P-T07: a bookmark of another cluster."""
    flow = Flow(db, tmp_path)
    flow.write_config()
    config = load_events(flow.config_file)
    assert config is not None
    db.execute("create table t (id int primary key); create publication faucet_pub for table t")
    FileBookmarks(tmp_path / "state", "faucet_slot").save(Bookmark(1, "1"))
    codes = {r.error.code for r in run_event_checks(config) if r.error is not None}
    assert codes == {"events.bookmark"}
    with pytest.raises(BookmarkError):
        prepare_source(config.source, db.dsn, Bookmark(1, "1"), tmp_path / "confirmed")


FOREIGN = {
    "slot": ("select pg_create_logical_replication_slot('aqueduck_test', 'pgoutput')", "pg.slot_conflict"),
    "publication": ("create publication aqueduck_test for table u", "pg.publication"),
    "target": ("create table lake.main.t (id int, v varchar)", "lake.foreign_target"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_check_says_what_a_start_says_of_what_others_made(db: Database, tmp_path: Path, what: str) -> None:
    """P-T07, P-T11: a slot, a publication or a lake table in our place that Aqueduck did not make; the check makes nothing."""
    db.execute("create table t (id int primary key, v text); create table u (id int primary key)")
    config = small_config(db, tmp_path, "public.t")
    statement, code = FOREIGN[what]
    with open_lake(config.lake) as lake:
        lake.execute("create schema if not exists lake.main")
        if what == "target":
            lake.execute(statement)
        else:
            db.execute(statement)
        before = lake.query("from lake.current_snapshot()")[0]
    assert {r.error.code for r in run_checks(config) if r.error} == {code}
    with open_lake(config.lake) as lake:
        assert lake.query("from lake.current_snapshot()")[0] == before
    assert codes_of_a_start(config) == {code}
