"""A row of the registry that cannot be read is a matter of its own group, and is seen there."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from aqueduck.config.sync import SyncConfig
from aqueduck.model.errors import ConfigError
from aqueduck.overview.metrics import scrape
from aqueduck.postgres.registry.registry import install
from aqueduck.postgres.session.connection import connect
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.prepare import prepare
from tests.fix_postgres import Database, wait_until
from tests.local_service import local_config, local_service
from tests.sync.test_errored_groups import config, service_of

__all__ = ["config"]


@pytest.mark.parametrize(
    ("statement", "reported"),
    [
        ("""update aqueduck.sync_groups set settings = '{"flush_interval_ms": "soon"}'""", "flush_interval_ms"),
        ("""update aqueduck.sync_groups set settings = '{"flush_interval_ms": -1}'""", "flush_interval_ms"),
        ("update aqueduck.sync_groups set last_sync_at = 'infinity'", "a value that no service writes"),
        (
            """update aqueduck.table_mappings m set copy_started_at = 'infinity' from aqueduck.sync_groups g
               where g.id = m.group_id and g.name = 'two'""",
            "a value that no service writes",
        ),
        (
            """update aqueduck.table_mappings m set settings = '{"inline_rows": null}' from aqueduck.sync_groups g
               where g.id = m.group_id and g.name = 'two' and 'two' <> ''""",
            "inline_rows",
        ),
        (
            """update aqueduck.table_mappings m set target_table = '' from aqueduck.sync_groups g
               where g.id = m.group_id and g.name = 'two'""",
            "tables.0.target",
        ),
        (
            """update aqueduck.table_mappings m set options = json_build_object('mask', (repeat('[', 5000) || repeat(']', 5000))::json)
               from aqueduck.sync_groups g where g.id = m.group_id and g.name = 'two'""",
            "a value that no service writes",
        ),
        (
            """update aqueduck.sync_groups set settings = '{"flush_interval_ms": 1e5000}'""",
            "a value that no service writes",
        ),
    ],
    ids=["text", "negative", "infinity", "infinite-copy", "null", "no-target", "deep", "long"],
)  # fmt: skip
def test_a_malformed_row_errors_its_group_alone(
    db: Database, config: SyncConfig, statement: str, reported: str
) -> None:
    """At a start: the other group runs, the error names the key without its value, and the repair is enough."""
    list(prepare(config))
    without_file = config.model_copy(update={"groups": ()})
    db.execute("update aqueduck.sync_groups set created_by_file = false")
    db.execute("update aqueduck.table_mappings set created_by_file = false")
    where = "" if "table_mappings" in statement else " where name = 'two'"
    db.execute(statement + where)
    with service_of(without_file) as service:
        service.prepare()
        assert set(service.prepared) == {"one"}
        error = service.errored["two"].error
        assert isinstance(error, ConfigError)
        assert reported in error.message
        assert "soon" not in str(error)
        service.reconciler.observe()
        shown = dict(db.query("select name, error_code from aqueduck.groups()"))
        assert shown == {"one": None, "two": "config.invalid"}
    db.execute(
        "update aqueduck.sync_groups set settings = '{}', last_sync_at = null;"
        " update aqueduck.table_mappings set settings = '{}', options = '{}', target_table = source_table,"
        " copy_started_at = null"
    )
    with service_of(without_file) as service:
        service.prepare()
        assert set(service.prepared) == {"one", "two"}


@pytest.mark.usefixtures("without_spark")
def test_a_malformed_row_of_a_running_group_is_shown_at_once(db: Database, tmp_path: Path) -> None:
    """P-T01: its tables continue as they were; SQL, the page and the metrics show the group's error until the row is repaired."""
    db.execute("create table t (id int primary key); create table u (id int primary key)")
    file = local_config(db, tmp_path, {"one": ["public.t"], "two": ["public.u"]})
    with local_service(db, file) as service:
        service.wait_streaming("public.t", "public.u")
        overviews = SyncOverviews(service.service)

        def shown() -> dict[str, tuple[str, str | None]]:
            flow = overviews.overview().flows[0]
            return {g.name: (g.state, g.error.code if g.error else None) for g in flow.groups}

        def reported() -> dict[str, str | None]:
            return dict(db.query("select name, error_code from aqueduck.groups()"))

        db.execute("update aqueduck.table_mappings set target_table = '' where source_table = 'u'")
        wait_until(lambda: reported() == {"one": None, "two": "config.invalid"}, "SQL says so", 8)
        assert shown() == {"one": ("streaming", None), "two": ("streaming", "config.invalid")}
        said = scrape(overviews.overview(), ready=True)[0].decode()
        assert re.search(r'aqueduck_errors_total\{code="config.invalid",flow="\w+",group="two"\} [1-9]', said)
        db.execute("insert into t values (1); insert into u values (1)")
        service.wait_same("t", "u")
        db.execute("update aqueduck.table_mappings set target_table = 'u' where source_table = 'u'")
        wait_until(lambda: reported() == {"one": None, "two": None}, "it is over", 8)
        assert shown() == {"one": ("streaming", None), "two": ("streaming", None)}


@pytest.mark.parametrize(
    "statement",
    [
        "update aqueduck.sync_groups set settings = '[]'",
        "update aqueduck.table_mappings set options = '3'",
        "insert into aqueduck.settings values ('inline_rows', '\"many\"')",
        "insert into aqueduck.settings values ('no_such_setting', '1')",
        "insert into aqueduck.settings values ('inline_rows', '-1')",
        "update aqueduck.table_mappings set source_oid = 5000000000",
        "update aqueduck.table_mappings set source_oid = -1",
        "update aqueduck.table_mappings set lag_seconds = 'nan'",
    ],
)
def test_the_registry_does_not_accept_unreadable_values(
    db: Database, config: SyncConfig, statement: str
) -> None:
    """A value that would affect all groups, or is malformed, is refused when it is written."""
    list(prepare(config))
    with pytest.raises(psycopg.errors.CheckViolation):
        db.execute(statement)


def test_an_upgrade_takes_malformed_rows_out(db: Database, config: SyncConfig) -> None:
    """They ended every service before, so nothing that was in force is lost."""
    list(prepare(config))
    db.execute(
        "alter table aqueduck.settings drop constraint settings_fit; drop function aqueduck._setting_fits;"
        " alter table aqueduck.sync_groups drop constraint sync_groups_objects;"
        " alter table aqueduck.table_mappings drop constraint table_mappings_objects,"
        " drop constraint table_mappings_numbers;"
        " update aqueduck.schema_version set version = 6; update aqueduck.sync_groups set settings = '[]';"
        " update aqueduck.table_mappings set source_oid = -1, lag_seconds = 'infinity';"
        " insert into aqueduck.settings values ('inline_rows', '\"many\"'), ('flush_interval_ms', '7')"
    )
    with connect(db.dsn) as conn:
        assert install(conn)
    assert db.query("select name, value from aqueduck.settings") == [("flush_interval_ms", 7)]
    assert db.query("select distinct settings from aqueduck.sync_groups") == [({},)]
    assert db.query("select distinct source_oid, lag_seconds from aqueduck.table_mappings") == [(None, 0.0)]
