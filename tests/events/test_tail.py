"""`aqueduck tail` and `aqueduck slots`, as a person runs them; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from aqueduck.cli.commands import app
from aqueduck.events.tail import TailOptions, _drop_left_over, _published
from aqueduck.model.errors import AqueduckError, ConfigError, SlotActiveError, SlotLostError
from aqueduck.postgres.session.connection import connect
from tests.fix_postgres import Database, wait_until

SLOTS = "select slot_name::text from pg_replication_slots where database = current_database()"
PUBLICATIONS = "select pubname::text from pg_publication"


@contextlib.contextmanager
def tailing(db: Database, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running tail that has its slot."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PG_DSN": db.dsn}
    command = [sys.executable, "-m", "aqueduck.cli", "tail", *arguments]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        active = f"{SLOTS} and temporary and active and confirmed_flush_lsn is not null"
        wait_until(lambda: db.query(active) or process.poll() is not None, "the tail reads", 90)
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield process
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not db.query(f"{SLOTS} and temporary"), "its slot is gone", 60)


def left(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, errors = process.communicate(timeout=90)
    return out.splitlines(), errors


def test_tail_prints_changes_and_leaves_nothing(db: Database) -> None:
    """Live changes of all tables with a key; after ctrl-C no slot and no publication is there."""
    db.execute(
        "create table a (id int primary key, v text); create table b (id int primary key); create table no_key (v int)"
    )
    with tailing(db) as process:
        db.execute("insert into a values (1, 'x'); insert into b values (2); insert into no_key values (3)")
        assert process.stdout
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert (first["table"], first["after"]) == ("a", {"id": 1, "v": "x"})
        assert second["after"] == {"id": 2}
        process.send_signal(signal.SIGINT)
        rest, errors = left(process)
    assert rest == []
    assert process.returncode == 0, errors
    assert "public.no_key" in errors, "what it leaves out, it says"
    assert db.query(SLOTS) == []
    assert db.query(PUBLICATIONS) == []


def test_tail_of_one_table_for_people(db: Database) -> None:
    """--table, --format and --count; the next tail drops the slot of a killed one."""
    db.execute('create table a (id int primary key, v text); create table "B b" (id int primary key)')
    db.execute("create publication aqueduck_tail_dead for table a; create publication mine for table a")
    with tailing(db, "--table", '"B b"', "--format", "pretty", "--count", "2") as process:
        assert sorted(db.query(PUBLICATIONS))[1] == ("mine",)
        db.execute("""insert into a values (1, 'x'); insert into "B b" values (7); delete from "B b" """)
        lines, errors = left(process)
    assert process.returncode == 0, errors
    assert [line.split()[0] for line in lines] == ["insert", "delete"]
    assert all("public.B b" in line and "id=7" in line for line in lines)
    assert db.query(PUBLICATIONS) == [("mine",)]


def test_a_tail_that_has_no_slot_yet_keeps_its_publication(db: Database) -> None:
    """Another tail that starts at the same time drops the slot of a killed one, and nothing else."""
    db.execute("create table a (id int primary key); create publication aqueduck_tail_dead for table a")
    with (
        connect(db.dsn) as first,
        connect(db.dsn) as second,
        _published(first, TailOptions(db.dsn), "aqueduck_tail_first") as (name, _),
    ):
        _drop_left_over(second)
        assert db.query(PUBLICATIONS) == [(name,)]
    with connect(db.dsn) as third:
        _drop_left_over(third)
    assert db.query(PUBLICATIONS) == []


def test_tail_from_an_earlier_position(db: Database) -> None:
    """--from slot and --from LSN read what a slot still keeps, through a copy: the slot itself does not move."""
    db.execute("create table a (id int primary key); create publication mine for table a")
    db.execute("select pg_create_logical_replication_slot('keeper', 'pgoutput')")
    standing = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = 'keeper'"
    before = db.value(standing)
    db.execute("insert into a values (1)")
    here = db.value("select pg_current_wal_flush_lsn()::text")
    db.execute("insert into a values (2)")
    for begin, wanted in ((("slot", "--slot", "keeper"), [1, 2]), ((here,), [2])):
        with tailing(
            db, "--from", *begin, "--publication", "mine", "--format", "flat", "--count", str(len(wanted))
        ) as process:
            lines, errors = left(process)
        assert [json.loads(line)["id"] for line in lines] == wanted, errors
    assert db.value(standing) == before
    db.execute("select pg_drop_replication_slot('keeper')")


def run(db: Database, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--dsn", db.dsn])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--from", "slot", "--publication", "p"), ConfigError),
        (("--from", "yesterday", "--publication", "p"), ConfigError),
        (("--from", "slot", "--slot", "none", "--publication", "p"), SlotLostError),
        (("--from", "0/1", "--publication", "p"), SlotLostError),
        (("--from", "yesterday"), ConfigError),
        (("--from", "0/1"), ConfigError),
        (("--table", "a.b.c"), AqueduckError),
    ],
)
def test_tail_refuses_what_cannot_work(
    db: Database, arguments: tuple[str, ...], error: type[AqueduckError]
) -> None:
    """Each with its own error, and nothing is left behind."""
    db.execute("create table a (id int primary key); create publication p for table a")
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.getsignal(number))
        result = run(db, "tail", *arguments)
    assert isinstance(result.exception, error), result.output
    assert db.query(PUBLICATIONS) == [("p",)]


def test_slots_are_listed_created_and_dropped(db: Database) -> None:
    """P-E06: creating twice and dropping an absent one are fine, dropping one that is read is not."""
    for _ in range(2):
        created = run(db, "slots", "create", "mine")
        assert created.exit_code == 0
        assert "keeps all WAL" in created.output
    listed = {row["name"]: row for row in json.loads(run(db, "slots", "list", "--json").output)}
    assert (listed["mine"]["plugin"], listed["mine"]["active"]) == ("pgoutput", False)
    assert "mine" in run(db, "slots", "list").output
    db.execute("create publication p")
    with subprocess.Popen(
        [str(db.server.bin("pg_recvlogical")), "-d", db.dsn, "--slot", "mine", "--start", "-f", "/dev/null",
         "-o", "proto_version=1", "-o", "publication_names=p"], stderr=subprocess.DEVNULL,
    ) as reader:  # fmt: skip
        wait_until(lambda: db.query(f"{SLOTS} and active"), "the slot is read", 60)
        assert isinstance(run(db, "slots", "drop", "mine").exception, SlotActiveError)
        reader.terminate()
    wait_until(lambda: not db.query(f"{SLOTS} and active"), "it is free", 60)
    for _ in range(2):
        assert json.loads(run(db, "slots", "drop", "mine", "--json").output)["dropped"]
    assert db.query(SLOTS) == []


@pytest.mark.parametrize("name", ["", "Mine", "m" * 64])
def test_a_slot_name_that_the_server_would_change_is_refused(db: Database, name: str) -> None:
    """PostgreSQL cuts long names: a slot with another name would be created or dropped."""
    db.execute(f"select pg_create_logical_replication_slot('{'m' * 63}', 'pgoutput')")
    for command in ("create", "drop"):
        assert isinstance(run(db, "slots", command, name).exception, ConfigError)
    assert db.query(SLOTS) == [("m" * 63,)]
