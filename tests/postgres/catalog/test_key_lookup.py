"""Rows are found by the text of their keys, and only those."""

from __future__ import annotations

from aqueduck.postgres.catalog.key_lookup import can_look_up, key_condition
from aqueduck.postgres.catalog.table_storage import read_storage
from aqueduck.postgres.catalog.tables import describe_table
from tests.fix_postgres import Database


def test_a_condition_finds_exactly_the_rows_of_its_keys(db: Database) -> None:
    """Quotes, backslashes, padding and types of composite keys mean themselves; a NULL finds nothing."""
    db.execute(
        'create table t ("The ""Key" text, c char(4), u uuid, b boolean, n bigint,'
        ' primary key ("The ""Key", c, u, b))'
    )
    one = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    keys = [("it's", "ab  ", one, "true"), ("\\N", "ab  ", one, "false"), ("", "    ", one, "true")]
    for n, key in enumerate(keys):
        db.execute("insert into t values (%s, %s, %s, %s, %s)", [*key, n])
    db.execute("insert into t values (%s, %s, %s, %s, 99)", ["it's", "ab", one, "false"])
    table = describe_table(db.observer, "t")
    assert can_look_up(table)
    condition = key_condition(table, [*keys, (None, "ab  ", one, "true")])
    assert db.query(f"select n from t where {condition} order by n") == [(0,), (1,), (2,)]


def test_keys_of_other_types_are_not_looked_up(db: Database) -> None:
    """Their text in the lake may not be PostgreSQL's."""
    db.execute("create table t (id int, at timestamptz, primary key (id, at))")
    assert not can_look_up(describe_table(db.observer, "t"))


def test_a_rewrite_changes_the_storage_and_writing_does_not(any_db: Database) -> None:
    """TRUNCATE, VACUUM FULL, new and detached partitions and a drop are noticed; changes of rows are not."""
    any_db.execute(
        "create table t (id int primary key);"
        "create table p (id int primary key) partition by range (id);"
        "create table p1 partition of p for values from (0) to (10)"
    )
    oids = [any_db.value(f"select '{name}'::regclass::oid::int8") for name in ("t", "p")]

    def storage() -> tuple[str, str]:
        found = read_storage(any_db.observer, oids)
        return found[oids[0]], found[oids[1]]

    t, p = storage()
    any_db.execute("insert into t values (1); insert into p values (1); delete from t")
    any_db.execute("vacuum t")
    assert storage() == (t, p)
    seen = {(t, p)}
    for statement in (
        "truncate t",
        "vacuum full t",
        "truncate p",
        "create table p2 partition of p for values from (10) to (20)",
        "alter table p detach partition p1",
        "drop table t",
    ):
        any_db.execute(statement)
        assert storage() not in seen, statement
        seen.add(storage())
    assert storage()[0] == ""
