"""What the catalog shows of dropped tables and of partitions that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aqueduck.postgres.catalog.structure import News, partition_news, read_structure
from tests.fix_postgres import Database

SETUP = """
    create table t (id int, kind text, primary key (id, kind)) partition by range (id);
    create table low partition of t for values from (0) to (100);
    create table high partition of t for values from (100) to (200) partition by list (kind);
    create table high_a partition of high for values in ('a');
    create table high_rest partition of high default;
    create table plain (id int primary key);
"""


def oid(db: Database, name: str) -> int:
    return int(db.value("select %s::regclass::oid::int8", (name,)))


def news_after(db: Database, *statements: str) -> tuple[News, dict[str, int]]:
    """What the statements make of the tree; and the oids that there were, by name."""
    root = oid(db, "t")
    before = read_structure(db.observer, [root]).leaves[root]
    for statement in statements:
        db.execute(statement)
    now = read_structure(db.observer, [root]).leaves[root]
    names = {leaf.name: number for number, leaf in (before | now).items()}
    nodes = {number: leaf.filenode for number, leaf in before.items()}
    return partition_news(nodes, now, {number: leaf.ties for number, leaf in before.items()}), names


def test_tables_that_are_gone_and_leaves_of_all_levels(db: Database) -> None:
    db.execute(SETUP)
    root, plain = oid(db, "t"), oid(db, "plain")
    db.execute("drop table plain")
    found = read_structure(db.observer, [root, plain])
    assert found.tables == {root}
    assert sorted(leaf.name for leaf in found.leaves[root].values()) == [
        "public.high_a", "public.high_rest", "public.low",
    ]  # fmt: skip
    assert all(leaf.born_here for leaf in found.leaves[root].values())


def test_rows_alone_and_created_partitions_are_no_news(db: Database) -> None:
    db.execute(SETUP)
    news, _ = news_after(
        db, "insert into t values (1, 'a'), (150, 'a'), (151, 'x')", "delete from t", "vacuum t", "analyze t",
        "create table next partition of t for values from (200) to (300)", "alter table t add column v text",
    )  # fmt: skip
    assert news == News()


def test_a_subtree_that_is_attached_may_bring_rows(db: Database) -> None:
    """Its leaves were created as partitions, but of a separate table."""
    db.execute(SETUP)
    news, names = news_after(
        db, "create table more (id int not null, kind text not null) partition by list (kind)",
        "create table more_a partition of more for values in ('a')", "alter table t attach partition more for values from (300) to (400)",
    )  # fmt: skip
    assert news == News(attached=(names["public.more_a"],))


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("alter table t detach partition low", "lost"),
        ("drop table low", "lost"),
        ("truncate low", "rewritten"),
        ("vacuum full low", "rewritten"),
    ],
)
def test_rows_that_go_without_a_change(db: Database, statement: str, kind: str) -> None:
    db.execute(SETUP)
    news, names = news_after(db, statement)
    assert news == replace(News(), **{kind: (names["public.low"],)})  # type: ignore[arg-type]


def test_truncate_of_the_table_differs_from_that_of_each_partition(db: Database) -> None:
    db.execute(SETUP)
    assert news_after(db, "truncate t")[0].whole
    news, names = news_after(db, "truncate low", "truncate high_a", "truncate high_rest")
    assert not news.whole
    assert set(news.rewritten) == set(names.values())
