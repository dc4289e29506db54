"""`aqueduck new` writes a file that the program accepts, about a database as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aqueduck.config.sync import load_config, parse_config
from aqueduck.sync.check import run_checks
from aqueduck.sync.setup.new_file import look_at_database
from tests.cli.conftest import Cli, run  # noqa: F401 - a fixture
from tests.fix_postgres import Database

SHOP = """
    create table orders (id int primary key, total numeric);
    create table audit (what text);
    create table everything (what text);
    alter table everything replica identity full;
    create table "Odd Name: #1" (a int, b int, primary key (b, a));
    create unlogged table scratch (id int primary key);
    create view seen as select * from orders;
    create table events (id int, at date, primary key (id, at)) partition by range (at);
    create table events_2026 partition of events for values from ('2026-01-01') to ('2027-01-01');
    create schema eu; create table eu.orders (id int primary key);
    insert into orders select g, g from generate_series(1, 1234) g; analyze orders
"""


def test_the_file_has_the_tables_and_says_what_is_wrong_with_others(db: Database, tmp_path: Path) -> None:
    """Keys and replica identities are in comments, and a table that cannot be replicated is one."""
    db.execute(SHOP)
    made = look_at_database(db.dsn)
    assert (made.tables, made.left_out) == (5, 2)
    config = parse_config(made.text, base_dir=tmp_path, env={"PG_DSN": db.dsn})
    tables = {table.source: table.target for table in config.groups[0].tables}
    assert tables == {
        "eu.orders": "eu.orders",
        'public."Odd Name: #1"': 'main."Odd Name: #1"',
        "public.events": "main.events",
        "public.everything": "main.everything",
        "public.orders": "public.orders",
    }
    for line in (
        "# key b, a; ",
        "# key id; about 1,234 rows, ",
        "# no key, replica identity full: rows are identified by all columns; ",
        "# public.audit is left out: public.audit has neither a primary key nor a replica identity",
        '#   fix: alter table "public"."audit" add primary key (<columns>); -- or ',
        "# public.scratch is left out: public.scratch is unlogged or temporary",
    ):
        assert f"      {line}" in made.text
    assert [r.name for r in run_checks(config) if not r.ok] == []


def test_only_the_tables_of_a_schema(db: Database) -> None:
    """A large database has more than one application."""
    db.execute(SHOP)
    made = look_at_database(db.dsn, schemas=["eu"])
    assert (made.tables, made.left_out) == (1, 0)
    assert "public" not in made.text


def test_a_database_without_tables_gets_a_file_as_well(db: Database, tmp_path: Path) -> None:
    """Tables are added later."""
    made = look_at_database(db.dsn)
    assert parse_config(made.text, base_dir=tmp_path, env={"PG_DSN": db.dsn}).groups[0].tables == ()


def test_the_file_is_written_once_and_without_a_password(
    db: Database,
    run: Cli,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection string goes into the variable that the file names; a file of a person is not overwritten."""
    db.execute("create table orders (id int primary key)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PG_DSN", f"{db.dsn} password=hunter2")
    code, out, error = run("new")
    assert (code, error) == (0, "")
    assert out.splitlines()[0] == "aqueduck.yaml: 1 tables, 0 left out"
    assert out.splitlines()[1].startswith('next: export PG_DSN="')
    text = (tmp_path / "aqueduck.yaml").read_text(encoding="utf-8")
    assert "hunter2" not in text + out
    assert load_config("aqueduck.yaml").source.dsn == os.environ["PG_DSN"]
    assert run("check")[0] == 0
    code, error = run.fails("new")
    assert (code, "aqueduck.yaml exists already" in error) == (2, True)
    assert (tmp_path / "aqueduck.yaml").read_text(encoding="utf-8") == text
