"""The command line: bad input is one line with a code and a fix, the right exit code, and nothing half-created."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from tests.cli.conftest import Cli
from tests.fix_postgres import Database
from tests.small_service import small_service


def shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A command line with `aqueduck` in it, as a shell runs it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("PYTHONUNBUFFERED", None)
    aqueduck = f'aqueduck() {{ "{sys.executable}" -m aqueduck.cli "$@"; }}; '
    return subprocess.run(
        ["bash", "-c", aqueduck + command],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def leftovers(db: Database) -> list[tuple[Any, ...]]:
    return db.query(
        "select slot_name::text from pg_replication_slots where database = current_database()"
        " union all select pubname::text from pg_publication"
    )


def test_an_unknown_key_is_refused_by_name(db: Database, run: Cli) -> None:
    """Exit code 2, the key, and the expected value."""
    code, error = run.fails("init", "-c", run.config(db.dsn, "public.t", sorce={}))
    assert (code, "[config.invalid]" in error, "sorce" in error, "source" in error) == (2, True, True, True)


def test_an_option_of_another_flow_is_refused(run: Cli) -> None:
    """Nothing that was asked for is left out in silence."""
    code, error = run.fails("verify", "-c", run.config("host=127.0.0.1"), "--destination", "acme")
    assert (code, "--destination is only for the file of a fan-out" in error) == (2, True)


def test_a_bug_is_one_line_too(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kind and place, without a traceback, and without its message: that may hold anything."""

    def broken(*_: Any) -> None:
        raise KeyError("hunter2")

    monkeypatch.setattr("aqueduck.config.sync.load_config", broken)
    code, error = run.fails("check", "-c", run.config("host=127.0.0.1"))
    assert code == 1
    assert "[aqueduck.error] KeyError in broken (line " in error
    assert "hunter2" not in error


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("aqueduck --version > /dev/full", 1, "[aqueduck.error] no space left on device"),
        ("aqueduck --version >&-", 0, ""),
        ("aqueduck --version | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("PYTHONIOENCODING=ascii aqueduck check -c ä.yaml", 2, "cannot be read"),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    tmp_path: Path, command: str, code: int, words: str
) -> None:
    """A full disk is said in one line, a closed stream or pipe needs no words."""
    ended = shell(command, tmp_path)
    assert ended.returncode == code
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == bool(words)


INTERRUPTED = """
import sys
from aqueduck.cli.__main__ import main

class Interrupt:
    def find_spec(self, *_):
        raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
main()
"""


def test_an_interrupt_while_the_command_line_loads_is_no_traceback() -> None:
    """An impatient ctrl-C ends it as a later one does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], env=env, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_an_unreachable_server_is_named(run: Cli) -> None:
    """Exit code 1 and pg.unreachable."""
    code, error = run.fails("init", "-c", run.config("host=127.0.0.1 port=1 dbname=x user=y", "public.t"))
    assert code == 1
    assert "[pg.unreachable]" in error


def test_a_wrong_password_is_said_without_showing_it(
    new_server: Callable[..., EmbeddedPostgres], run: Cli
) -> None:
    """pg.auth; the password is in no output."""
    server = new_server(password="right")
    dsn = server.dsn_for("postgres", "postgres", password="hunter2")
    code, error = run.fails("init", "-c", run.config(dsn, "public.t"))
    assert code == 1
    assert "[pg.auth]" in error
    assert "hunter2" not in error


def test_a_server_without_logical_wal_gets_the_statement(
    new_server: Callable[..., EmbeddedPostgres], run: Cli
) -> None:
    """pg.wal_level with the alter system that fixes it, and nothing created."""
    server = new_server(settings={"wal_level": "replica"})
    code, error = run.fails("init", "-c", run.config(server.dsn, "public.t"))
    assert code == 1
    assert "[pg.wal_level]" in error
    assert "alter system set wal_level = 'logical'" in error


def test_missing_rights_name_the_grant(db: Database, role: str, run: Cli) -> None:
    """pg.privilege with the exact statement; no slot or publication stays behind."""
    db.execute(f'create table t (id int primary key); grant select on t to "{role}"')
    code, error = run.fails("init", "-c", run.config(db.dsn_for(role), "public.t"))
    assert code == 1
    assert (
        "[pg.privilege] only the owner of a table may publish it, and public.t belongs to postgres" in error
    )
    assert "create publication" in error
    assert "publication_by: user" in error
    assert leftovers(db) == []


def test_warnings_do_not_mix_with_json(db: Database, role: str, run: Cli) -> None:
    """What a command has to say besides is on stderr: stdout has one JSON document."""
    db.execute(f'create table t (id int primary key); alter table t owner to "{role}"')
    db.execute(f'alter role "{role}" replication')
    config = run.config(db.dsn_for(role), "public.t", groups=[{"name": "test", "publication_by": "user"}])
    db.execute("create publication aqueduck_test for table t")
    code, out, error = run("init", "-c", config, "--json")
    assert (code, json.loads(out)["prepared"][0]) == (0, "registry: none, the file alone is used"), error
    assert "no registry in the source database" in error


def test_a_table_without_a_key_is_refused(db: Database, run: Cli) -> None:
    """P-S02: pg.no_key says how to add a key; nothing is left behind."""
    db.execute("create table t (id int)")
    code, error = run.fails("init", "-c", run.config(db.dsn, "public.t"))
    assert code == 1
    assert "[pg.no_key]" in error
    assert leftovers(db) == []


def test_a_missing_table_is_named(db: Database, run: Cli) -> None:
    """P-S02: a missing table says "does not exist"."""
    _, error = run.fails("init", "-c", run.config(db.dsn, "public.nowhere"))
    assert "[pg.table_missing]" in error
    assert "does not exist" in error
    assert leftovers(db) == []


def test_a_data_path_that_cannot_be_written_is_refused(db: Database, run: Cli, tmp_path: Path) -> None:
    """lake.data_path; neither catalog nor slot stays behind."""
    db.execute("create table t (id int primary key)")
    (tmp_path / "file").write_text("not a directory")
    lake = {"catalog": "sqlite:lake.sqlite", "data_path": "file/data"}
    code, error = run.fails("init", "-c", run.config(db.dsn, "public.t", lake=lake))
    assert code == 1
    assert "[lake.data_path]" in error
    assert not (tmp_path / "lake.sqlite").exists()
    assert leftovers(db) == []


def test_an_unreachable_catalog_is_refused(db: Database, run: Cli, tmp_path: Path) -> None:
    """lake.catalog; no slot, no publication, no data directory stays behind, and no secret is shown."""
    db.execute("create table t (id int primary key)")
    lake = {"catalog": "postgres:host=127.0.0.1 port=1 dbname=lake password=hunter2", "data_path": "data"}
    code, error = run.fails("init", "-c", run.config(db.dsn, "public.t", lake=lake))
    assert code == 1
    assert "[lake.catalog]" in error
    assert "hunter2" not in error
    assert leftovers(db) == []
    assert not (tmp_path / "data").exists()


def test_init_is_idempotent_and_check_agrees(db: Database, run: Cli) -> None:
    """P-S01: init makes publication, slot and lake; a second init changes nothing; check passes."""
    db.execute("create table t (id int primary key)")
    config = run.config(db.dsn, "public.t")
    first = run("init", "-c", config)
    slot = db.query(
        "select slot_name::text, confirmed_flush_lsn::text from pg_replication_slots where slot_name = 'aqueduck_test'"
    )
    second = run("init", "-c", config)
    assert (first[0], second[0]) == (0, 0)
    assert first[1] == second[1]
    assert slot == db.query(
        "select slot_name::text, confirmed_flush_lsn::text from pg_replication_slots where slot_name = 'aqueduck_test'"
    )
    code, out, _ = run("check", "-c", config, "--json")
    assert code == 0, out
    assert all(check["ok"] for check in json.loads(out))


def test_a_slot_that_was_made_again_is_refused(db: Database, run: Cli) -> None:
    """Hazard 10, P-S30: a slot dropped and re-created behind our back is noticed before anything is written."""
    db.execute("create table t (id int primary key)")
    config = run.config(db.dsn, "public.t")
    assert run("init", "-c", config)[0] == 0
    db.execute("select pg_drop_replication_slot('aqueduck_test')")
    assert "[pg.slot_lost]" in run.fails("init", "-c", config)[1]
    db.execute("insert into t values (1); select pg_switch_wal()")
    db.execute("select pg_create_logical_replication_slot('aqueduck_test', 'pgoutput')")
    assert "[pg.slot_lost]" in run.fails("init", "-c", config)[1]


def test_verify_prints_verdicts_and_the_first_keys(db: Database, run: Cli, tmp_path: Path) -> None:
    """Exit codes 0, 1 for a difference and 3 for a table that was not compared; keys for people and as JSON."""
    db.execute("create table t (id int primary key, v text); create table u (id int primary key)")
    with small_service(db, tmp_path, "public.t", "public.u") as service:
        db.execute("insert into t select g, 'secret' from generate_series(1, 50) g")
        service.apply()
        verify = ("verify", "-c", tmp_path / "aqueduck.yaml", "--no-spark")
        code, out, err = run(*verify)
        assert (code, err) == (0, "")
        assert "identical" in out
        assert "secret" not in out
        service.change_lake("update lake.main.t set v = 'x' where id = 33")
        code, out, err = run(*verify)
        assert code == 1
        assert err.startswith(
            "aqueduck: [verify.different] public.t of 2 tables: 50 rows in the source, 50 in the lake"
        )
        assert "different" in out
        assert "changed   id=33" in out
        assert "secret" not in out
        code, out, _ = run(*verify, "--json", "--table", "public.t")
        [result] = json.loads(out)
        assert code == 1
        assert result["differences"] == [{"kind": "changed", "key": {"id": "33"}}]
        assert (result["verdict"], result["same"], result["lake_rows"]) == ("different", False, 50)
        service.change_lake("update lake.aqueduck.tables set ready = false where source_name = 'public.u'")
        code, out, _ = run(*verify, "--table", "u")
        assert code == 3
        assert "not compared" in out


def test_tables_groups_and_settings_are_managed_and_shown(db: Database, run: Cli) -> None:
    """Every command has a table for people and JSON for programs, on the functions of the SQL API."""
    db.execute("create table t (id int primary key); create table later (id int primary key)")
    config = run.config(db.dsn, "public.t")
    assert "prepared" in json.loads(run("init", "-c", config, "--json")[1])
    assert run("tables", "add", "public.later", "--group", "test", "-c", config)[1] == (
        "public.later will be copied and replicated\n"
    )
    listed = json.loads(run("tables", "list", "-c", config, "--json")[1])
    assert [(row["source"], row["created_by_file"]) for row in listed] == [
        ("public.later", False),
        ("public.t", True),
    ]
    for command, words in (
        (("tables", "list"), ("public.later", "main.later", "SQL")),
        (("status",), ("public.t", "PENDING", "no service is running")),
        (("groups", "list"), ("aqueduck_test", "keeps")),
        (("settings", "list"), ("flush_interval_ms", "1000")),
    ):
        code, out, _ = run(*command, "-c", config)
        assert code == 0
        assert all(word in out for word in words), out
    assert json.loads(run("status", "-c", config, "--json")[1])[1]["source"] == "public.t"
    removed = json.loads(run("tables", "remove", "later", "-c", config, "--json")[1])
    assert (removed["called"], removed["source"]) == ("remove_table", "later")
    assert run("groups", "disable", "test", "-c", config)[1].startswith("the group test stops")
    assert json.loads(run("groups", "list", "-c", config, "--json")[1])[0]["enabled"] is False


def test_settings_are_set_read_and_taken_back(db: Database, run: Cli) -> None:
    """P-S26: for all groups or for one; the error for an unknown name lists the known ones."""
    db.execute("create table t (id int primary key)")
    config = run.config(db.dsn, "public.t")
    run("init", "-c", config)
    assert run("settings", "set", "inline_rows", "7", "-c", config)[1] == "inline_rows is 7\n"
    run("settings", "set", "inline_rows", "9", "--group", "test", "-c", config)
    assert run("settings", "get", "inline_rows", "-c", config)[1] == "7\n"
    got = json.loads(run("settings", "get", "inline_rows", "--group", "test", "-c", config, "--json")[1])
    assert got["result"] == "9"
    run("settings", "set", "inline_rows", "-c", config)
    assert run("settings", "get", "inline_rows", "-c", config)[1] == "1000\n"
    code, error = run.fails("settings", "set", "nonsense", "1", "-c", config)
    assert code == 2
    assert "known settings" in error


def test_the_help_is_grouped_and_has_examples(run: Cli) -> None:
    """A new user finds the first steps, and where to read more."""
    code, out, _ = run("--help")
    assert code == 0
    assert out.index("Set up") < out.index("check") < out.index("Run and watch") < out.index("status")
    assert "aqueduck new --dsn" in out.partition("Examples:")[2]
    assert "docs/cli.md" in out
    assert "aqueduck tables retry public.orders" in run("tables", "--help")[1].partition("Examples:")[2]
