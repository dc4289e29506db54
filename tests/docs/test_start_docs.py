"""The first steps of docs/tutorials/first-sync.md lead to a green `aqueduck check`, and its last ones leave nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

from aqueduck.config.sync import parse_config
from aqueduck.sync.check import run_checks
from aqueduck.sync.prepare import prepare
from tests.fix_postgres import Database

DOCUMENT = (Path(__file__).parents[2] / "docs" / "tutorials" / "first-sync.md").read_text(encoding="utf-8")


def test_the_statements_of_the_document_are_enough_and_can_be_undone(db: Database, tmp_path: Path) -> None:
    """P-S24: the role of the document, with nothing more than the document gives it."""
    setup, _, undo = re.findall(r"```sql\n(.*?)```", DOCUMENT, re.DOTALL)
    [file] = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert "grant shop_owner to aqueduck;" in DOCUMENT
    db.execute("create role shop_owner; create table orders (id int primary key, total numeric(10, 2))")
    db.execute("create table customers (id int primary key, name text)")
    db.execute("alter table orders owner to shop_owner; alter table customers owner to shop_owner")
    try:
        for statement in setup.replace("database shop", f"database {db.name}").splitlines():
            if not statement.startswith("alter system"):  # the server of the tests has it
                db.execute(statement)
        config = parse_config(file, base_dir=tmp_path, env={"PG_DSN": db.dsn_for("aqueduck")})
        assert [r.name for r in run_checks(config) if not r.ok] != [], "ownership is still missing"

        db.execute("grant shop_owner to aqueduck")
        assert [(r.name, r.detail) for r in run_checks(config) if not r.ok] == []
        assert list(prepare(config))

        for statement in undo.strip().splitlines():
            db.execute(statement)
        assert left_behind(db) == (0, 0, 0)
    finally:
        db.execute("drop owned by aqueduck cascade; drop role aqueduck")
        db.execute("drop owned by shop_owner cascade; drop role shop_owner")


def left_behind(db: Database) -> tuple[int, int, int]:
    """Slots of the database, publications, and schemas of ours."""
    [counts] = db.query(
        "select (select count(*) from pg_replication_slots where database = current_database()),"
        " (select count(*) from pg_publication), (select count(*) from pg_namespace where nspname = 'aqueduck')"
    )
    return (counts[0], counts[1], counts[2])
