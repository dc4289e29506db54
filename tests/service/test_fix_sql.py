"""`check --fix-sql`: what can be run as it is, is; everything else is a comment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.service.check_server import CheckResult
from aqueduck.service.fix_sql import fix_script
from tests.cli.conftest import Cli, run  # noqa: F401 - a fixture
from tests.fix_postgres import Database


def failed(*fixes: str) -> list[CheckResult]:
    return [CheckResult(f"n{number}", False, "wrong", fix) for number, fix in enumerate(fixes)]


def test_nothing_to_fix_is_a_comment() -> None:
    """The script can always be given to psql."""
    assert fix_script([CheckResult("a", True, "fine")]) == "-- nothing to fix\n"


@pytest.mark.parametrize(
    ("fix", "lines"),
    [
        (
            "alter system set wal_level = 'logical'; -- then restart the server",
            ["alter system set wal_level = 'logical';", "-- then restart the server"],
        ),
        (
            'grant usage on schema "a;b" to r; grant select on "a;b"."t" to r',
            ['grant usage on schema "a;b" to r;', 'grant select on "a;b"."t" to r;'],
        ),
        (
            "alter table t replica identity using index i; -- or alter table t add primary key (<columns>)",
            [
                "alter table t replica identity using index i;",
                "-- or alter table t add primary key (<columns>)",
            ],
        ),
        (
            "alter table t add primary key (<columns>), or set mode: append",
            ["-- alter table t add primary key (<columns>), or set mode: append"],
        ),
        (
            "set another slot_name, or run: select pg_drop_replication_slot('s')",
            ["-- set another slot_name, or run: select pg_drop_replication_slot('s')"],
        ),
        ("select pg_drop_replication_slot('s')", ["-- select pg_drop_replication_slot('s')"]),
    ],
)
def test_only_whole_statements_that_take_nothing_away_are_run(fix: str, lines: list[str]) -> None:
    """A person decides about the rest."""
    assert fix_script(failed(fix)).splitlines()[1:] == lines


def test_a_statement_comes_once() -> None:
    """Several tables need the same right on their schema."""
    script = fix_script(
        failed("grant usage on schema s to r; grant select on a to r", "grant usage on schema s to r")
    )
    assert script.count("grant usage") == 1


def psql(server: EmbeddedPostgres, dsn: str, script: str) -> None:
    subprocess.run(
        [server.bin("psql"), dsn, "-v", "ON_ERROR_STOP=1", "-q"],
        input=script,
        check=True,
        text=True,
        timeout=60,
    )


def test_psql_runs_the_script_and_the_check_passes(db: Database, role: str, run: Cli) -> None:  # noqa: F811
    """Rights of a new role, a table of a superuser and one without a replica identity."""
    db.execute(
        "create table orders (id int primary key); create table items (id int primary key);"
        " alter table items replica identity nothing"
    )
    config = run.config(db.dsn_for(role), "public.orders", "public.items")
    for _ in range(2):  # what is behind the first problem of a table shows in the second round
        code, script, _ = run("check", "-c", config, "--fix-sql")
        assert code == 1
        psql(db.server, db.dsn, script)
    code, script, _ = run("check", "-c", config, "--fix-sql")
    assert code == 0, script
    assert [f["name"] for f in json.loads(run("check", "-c", config, "--json")[1]) if not f["ok"]] == []


def test_a_setting_that_waits_for_a_restart_is_not_set_again(
    new_server: Callable[..., EmbeddedPostgres],
    run: Cli,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The statement was run: what is left is the restart, before and after the server has read its files."""
    server = new_server(settings={"wal_level": "replica"})
    config = run.config(server.dsn)
    assert "alter system set wal_level = 'logical';" in run("check", "-c", config, "--fix-sql")[1]
    psql(server, server.dsn, "alter system set wal_level = 'logical'")
    pending = "wal_level: wal_level is replica; another value is set, restart pending\n       fix: restart the server"
    assert pending in run("check", "-c", config)[1]
    psql(server, server.dsn, "select pg_reload_conf()")
    assert pending in run("check", "-c", config)[1]
