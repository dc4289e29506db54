"""docs/sql-api.md describes every function, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

from aqueduck.postgres.registry.registry import (
    install,
    manage_grants,
    monitor_grants,
    rows_of,
)
from aqueduck.postgres.session.connection import connect
from tests.fix_postgres import Database

Connection = psycopg.Connection[Any]
DOCUMENT = Path(__file__).parents[3] / "docs" / "sql-api.md"


def document_sections() -> dict[str, str]:
    parts = re.split(r"^### `([a-z_]+)`$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_function_is_documented_with_its_arguments_and_an_example(conn: Connection) -> None:
    """docs/sql-api.md has each function of the schema that is for people, and no other."""
    sections = document_sections()
    functions = conn.execute(
        "select proname::text, max(pg_get_function_arguments(oid)), max(format_type(prorettype, null)), "
        "bool_or(prorettype = 'record'::regtype) from pg_proc where pronamespace = 'aqueduck'::regnamespace "
        "and left(proname, 1) <> '_' and not 'bigint' = split_part(split_part("
        "pg_get_function_arguments(oid), ', ', 2), ' ', 2) group by proname"
    ).fetchall()
    assert {name for name, *_ in functions} == sections.keys()
    for name, arguments, returned, is_table in functions:
        text = " ".join(sections[name].split())
        written = re.sub(
            r"DEFAULT ('?[\w{}]+'?)(::\w+)?", lambda found: f"default {found[1].lower()}", arguments
        )
        assert f"`{name}({written}) returns {'table (…)' if is_table else returned}`" in text
        assert re.search(rf"```sql[^`]*aqueduck\.{name}\(", sections[name]), name


def test_every_column_of_the_status_is_documented(conn: Connection) -> None:
    """P-S27: every column has a comment that says what it means."""
    sections = document_sections()
    for function in ("status", "groups"):
        columns = set(conn.execute(f"select * from aqueduck.{function}()".encode()).description or ())
        cells = re.findall(r"^\| (`[^|]+) \|", sections[function], re.MULTILINE)
        documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
        assert {column.name for column in columns} == documented


def test_every_setting_is_documented_as_it_is(conn: Connection) -> None:
    """P-S26: name, default, range, levels and meaning."""
    lines = [
        line
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if " global" in line and line[0] == "|"
    ]
    for row in rows_of(conn, "list_settings"):
        limits = ", ".join(row["choices"] or ()) or f"{row['lowest']} – {row['highest']}"
        cells = (
            f"`{row['name']}`",
            f"`{row['default_value']}`",
            limits,
            ", ".join(row["levels"]),
            row["description"],
        )
        assert f"| {' | '.join(cells)} |" in lines
    assert len(lines) == len(rows_of(conn, "list_settings"))


def test_the_grants_in_the_document_are_those_of_the_program() -> None:
    """P-S24: what is documented is what is tested."""
    text = DOCUMENT.read_text(encoding="utf-8").replace('"', "")
    for statements in (monitor_grants("dashboard"), manage_grants("operator")):
        assert "\n".join(f"{line};" for line in statements).replace('"', "") in text


def test_every_example_runs(any_db: Database) -> None:
    """A reader can paste the document from top to bottom."""
    blocks = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    roles = ("dashboard", "operator", "aqueduck_service")
    any_db.execute(
        "create table orders (id int primary key); create table items (id int primary key); create table audit (n int);"
        "create table people (id int primary key, country text, notes text);"
        "create schema eu; create table eu.sales (id int primary key);"
        + "".join(f"create role {role};" for role in roles)
    )
    try:
        create_schema = next(block for block in blocks if "create schema" in block)
        any_db.execute(create_schema)
        any_db.execute("alter role aqueduck_service login")
        with connect(any_db.dsn_for("aqueduck_service")) as service:
            install(service)
        with any_db.connect() as conn:
            for block in blocks:
                if block is not create_schema:
                    conn.execute(block.replace("database shop", f"database {any_db.name}").encode())
    finally:
        any_db.execute("".join(f"drop owned by {role} cascade; drop role {role};" for role in roles))
