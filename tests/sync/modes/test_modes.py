"""Modes on the whole way but Spark: a real server, its stream, a real lake, and `verify` on both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import parse_config
from aqueduck.lake.target.mode_rows import remove_target
from aqueduck.model.errors import ConfigError, LakeError
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName
from aqueduck.sync.verify import TableComparison, verify_tables
from tests.fix_postgres import Database
from tests.small_service import SmallService, small_service

DOCUMENT = Path(__file__).parents[3] / "docs" / "modes.md"


def verdicts(service: SmallService) -> dict[str, TableComparison]:
    found = verify_tables(service.config, session=service.lake, wait_seconds=10)
    return {comparison.table: comparison for comparison in found}


def lake(service: SmallService, statement: str) -> list[tuple[Any, ...]]:
    return service.lake.query(statement)[0]


def test_a_table_without_a_key_is_logged(db: Database, tmp_path: Path) -> None:
    """P-S02, P-S16: its identity becomes FULL, deletes carry the whole row, an update is a delete and an insert, twins count."""
    db.execute("create table log (a int, b text); create table keyed (id int primary key, doc text, n int)")
    db.execute("alter table keyed alter doc set storage external")
    tables = ({"source": "public.log", "mode": "append"}, {"source": "public.keyed", "mode": "append"})
    with small_service(db, tmp_path, *tables) as service:
        assert db.value("select relreplident::text from pg_class where relname = 'log'") == "f"
        db.execute("insert into log values (1, 'x'), (1, 'x'), (2, null), (3, 'z')")
        db.execute("update log set b = 'y' where a = 2; delete from log where a = 3")
        db.execute("insert into keyed values (1, repeat('d', 9000), 1), (2, 'short', 2)")
        db.execute("update keyed set n = 5 where id = 1; update keyed set id = 9 where id = 2")
        service.apply()
        rows = lake(service, "select _op, a, b from lake.main.log order by _commit_lsn, _seq")
        assert rows == [
            *[("insert", 1, "x")] * 2, ("insert", 2, None), ("insert", 3, "z"),
            ("delete", 2, None), ("insert", 2, "y"), ("delete", 3, "z"),
        ]  # fmt: skip
        assert lake(
            service, "select _op, id, doc is null, n, _unchanged::varchar from lake.main.keyed order by _commit_lsn, _seq"
        ) == [
            ("insert", 1, False, 1, None), ("insert", 2, False, 2, None), ("update", 1, True, 5, '["doc"]'),
            ("delete", 2, True, None, None), ("insert", 9, False, 2, None),
        ]  # fmt: skip
        found = verdicts(service)
        assert [c.verdict for c in found.values()] == ["identical"] * 2
        assert "doc" in str(found["public.keyed"].note)
        assert (found["public.log"].source_rows, found["public.log"].lake_rows) == (3, 3)
        times = lake(
            service,
            "select count(distinct _commit_time), min(_commit_time) > now() - interval 1 hour from lake.main.log",
        )
        assert times == [(2, True)]
        service.change_lake("delete from lake.main.log where _op = 'delete' and a = 3")
        assert verdicts(service)["public.log"].verdict == "different"


def test_long_and_short_transactions_are_logged_in_the_order_of_their_commits(
    db: Database, tmp_path: Path
) -> None:
    """Hazard 2: changes of a long transaction come after short ones that committed earlier, once, for any batches."""
    db.execute("create table log (id int primary key, v text)")
    with small_service(db, tmp_path, {"source": "public.log", "mode": "append"}) as service:
        with db.connect() as long, db.connect() as longer:
            longer.execute("begin; insert into log values (100, 'longer')")
            long.execute("begin")
            for number in range(3):
                long.execute("insert into log values (%s, 'long')", (10 + number,))
                db.execute("insert into log values (%s, 'short')", (number,))
                service.apply()
            long.execute("update log set v = 'long too' where id = 0; commit")
            db.execute("insert into log values (3, 'short')")
            service.apply()
            longer.execute("delete from log where id = 11; commit")
        service.apply()
        rows = lake(service, "select _op, id from lake.main.log order by _commit_lsn, _seq")
        assert rows == [
            ("insert", 0), ("insert", 1), ("insert", 2),
            ("insert", 10), ("insert", 11), ("insert", 12), ("update", 0),
            ("insert", 3),
            ("insert", 100), ("delete", 11),
        ]  # fmt: skip
        assert [c.verdict for c in verdicts(service).values()] == ["identical"]


def test_truncates_of_several_tables(db: Database, tmp_path: Path) -> None:
    """P-S11: TRUNCATE … CASCADE RESTART IDENTITY, in every mode, in order with what is around it."""
    db.execute("create table parent (id int generated always as identity primary key, v text)")
    names = {"append": "child_log", "history": "child_history", "soft_delete": "child_soft"}
    for name in names.values():
        db.execute(f"create table {name} (id int primary key, p int references parent)")
    tables = [{"source": f"public.{name}", "mode": mode} for mode, name in names.items()]
    with small_service(db, tmp_path, "public.parent", *tables) as service:
        db.execute("insert into parent (v) values ('a'), ('b')")
        for name in names.values():
            db.execute(f"insert into {name} values (1, 1), (2, 2)")
        service.apply()
        for name in names.values():
            db.execute(f"insert into {name} values (3, 1)")
        db.execute("truncate parent restart identity cascade")
        db.execute("insert into parent (v) values ('again')")
        for name in names.values():
            db.execute(f"insert into {name} values (1, 1)")
        service.apply()
        assert lake(service, "select id, v from lake.main.parent") == [(1, "again")]
        assert lake(service, "select _op, id from lake.main.child_log order by _commit_lsn, _seq") == [
            ("insert", 1), ("insert", 2), ("insert", 3), ("truncate", None), ("insert", 1),
        ]  # fmt: skip
        assert lake(
            service, "select id, _valid_to is null from lake.main.child_history order by id, _valid_from"
        ) == [(1, False), (1, True), (2, False), (3, False)]
        assert lake(service, "select id, _deleted from lake.main.child_soft order by id") == [
            (1, False), (2, True), (3, True),
        ]  # fmt: skip
        assert {c.verdict for c in verdicts(service).values()} == {"identical"}


def test_sources_share_a_target(db: Database, tmp_path: Path) -> None:
    """P-S15: changes, truncates and removal of one source leave the rows of the others alone, in every mode."""
    db.execute("create schema eu; create schema us")
    tables = []
    for mode in ("upsert", "append", "history", "soft_delete"):
        for region in ("eu", "us"):
            name = f"{region}.{mode}"
            db.execute(f"create table {name} (id int primary key, v text, doc text)")
            db.execute(f"alter table {name} alter doc set storage external")
            tables.append(
                {
                    "source": name,
                    "target": f"main.{mode}_all",
                    "mode": mode,
                    "source_column": "region",
                    "source_value": region,
                }
            )
    with small_service(db, tmp_path, *tables) as service:
        for table in tables:
            name = table["source"]
            db.execute(
                f"insert into {name} select g, '{name}', repeat('d', 5000) from generate_series(1, 5) g"
            )
        service.apply()
        for table in tables:
            name = table["source"]
            db.execute(f"update {name} set v = 'u' where id = 1; delete from {name} where id = 2")
            db.execute(f"update {name} set id = 10 where id = 3")
        for mode in ("upsert", "append", "history", "soft_delete"):
            db.execute(f"truncate us.{mode}; insert into us.{mode} values (1, 'after', null)")
        service.apply()
        found = verdicts(service)
        assert {name: c.verdict for name, c in found.items()} == {t["source"]: "identical" for t in tables}
        assert lake(service, "select region, count(*) from lake.main.upsert_all group by all order by 1") == [
            ("eu", 4), ("us", 1),
        ]  # fmt: skip
        assert lake(
            service, "select count(*) from lake.main.soft_delete_all where _deleted and region = 'eu'"
        ) == [(2,)]
        with service.lake.transaction():
            remove_target(service.lake, TableName("main", "upsert_all"), TableMode("upsert", "region", "us"))
        assert lake(service, "select distinct region from lake.main.upsert_all") == [("eu",)]


def test_a_shared_target_needs_columns_that_fit(db: Database, tmp_path: Path) -> None:
    """P-S15: the second source is refused where its columns do not fit those of the first; the first continues."""
    db.execute("create table one (id int primary key, v int); create table two (id int primary key, v text)")
    tables = [
        {"source": f"public.{name}", "target": "main.both", "source_column": "src"} for name in ("one", "two")
    ]
    with small_service(db, tmp_path, *tables) as service:
        assert list(service.ready.refused) == ["public.two"]
        assert isinstance(service.ready.refused["public.two"], LakeError)
        db.execute("insert into one values (1, 1)")
        service.apply()
        assert lake(service, "select src, id from lake.main.both") == [("public.one", 1)]


SHARED = """
source: {{ dsn: "host=x" }}
lake: {{ catalog: "sqlite:l", data_path: d }}
groups:
  - {{ name: a, tables: [{{ source: s.one, target: t, {} }}] }}
  - {{ name: b, tables: [{{ source: s.two, target: t, {} }}] }}
"""


@pytest.mark.parametrize(
    ("one", "two", "complaint"),
    [
        ("source_column: src", "source_column: src", None),
        ("source_column: src, mode: append", "source_column: src, mode: append, source_value: x", None),
        ("copy: true", "copy: true", "source_column"),
        ("source_column: src", "copy: true", "source_column"),
        ("source_column: src", "source_column: other", "same mode and source_column"),
        ("source_column: src, mode: append", "source_column: src", "same mode and source_column"),
        ("source_column: c, source_value: x", "source_column: c, source_value: x", "source_value"),
        ("source_value: x", "source_column: c", "needs a source_column"),
    ],
)
def test_a_target_is_shared_only_by_sources_that_differ(
    one: str, two: str, complaint: str | None, tmp_path: Path
) -> None:
    """P-S15, P-S26: a file that would let sources overwrite each other is refused by name."""
    text = SHARED.format(one, two)
    if complaint is None:
        assert len(parse_config(text, base_dir=tmp_path, env={}).groups) == 2
        return
    with pytest.raises(ConfigError, match=complaint):
        parse_config(text, base_dir=tmp_path, env={})


def test_names_of_our_columns_are_refused(db: Database, tmp_path: Path) -> None:
    """A source column that a mode needs for itself is not overwritten."""
    db.execute("create table good (id int primary key); create table t (id int primary key, _op text)")
    with small_service(db, tmp_path, "public.good", {"source": "public.t", "mode": "append"}) as service:
        assert "_op" in str(service.ready.refused["public.t"])


def test_the_examples_of_the_document_work(db: Database, tmp_path: Path) -> None:
    """Every query in docs/modes.md runs, and the ones for the present state say what the source says."""
    db.execute("create schema eu; create schema us; create table orders (id int primary key)")
    db.execute(
        "create table audit (id int primary key, what text); create table prices (id int primary key, price int)"
    )
    db.execute("create table customers (id int primary key, name text)")
    for region in ("eu", "us"):
        db.execute(f"create table {region}.sales (id int primary key, n int)")
    text = DOCUMENT.read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    listed = parse_config(block, base_dir=tmp_path, env={"PG_DSN": "host=x"}).groups[0].tables
    tables = [t.model_dump(by_alias=True, exclude_none=True) | {"copy": False} for t in listed]
    queries = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    assert len(queries) == 7
    with small_service(db, tmp_path, *tables) as service:
        for name in ("audit (id, what)", "customers (id, name)"):
            db.execute(f"insert into {name} select g, 'x' || g from generate_series(1, 4) g")
        db.execute(
            "insert into prices values (1, 10), (2, 20); insert into eu.sales values (1, 1); insert into us.sales values (1, 1)"
        )
        service.apply()
        db.execute(
            "delete from audit where id = 1; update audit set what = 'y' where id = 2; delete from customers where id = 3"
        )
        db.execute("update prices set price = 11 where id = 1; delete from prices where id = 2")
        service.apply()
        answers = [lake(service, query) for query in queries]
    changes, now, positions, as_of, held, alive, regions = answers
    assert [row[0] for row in changes] == ["delete", "update"]
    assert sorted(row[:2] for row in now) == [(2, "y"), (3, "x3"), (4, "x4")]
    assert all(re.fullmatch(r"[0-9A-F]+/[0-9A-F]+", lsn) for (lsn,) in positions)
    assert [row[:2] for row in as_of] == [(1, 11)], "in the far future, what is now"
    assert [row[:2] for row in held] == [(1, 10), (1, 11), (2, 20)]
    assert sorted(row[0] for row in alive) == [1, 2, 4]
    assert sorted(regions) == [("eu", 1), ("us", 1)]
