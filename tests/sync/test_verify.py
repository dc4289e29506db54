"""`aqueduck verify` finds every difference and no other, even while source and lake move."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.ledger.table_states import read_states, write_state
from aqueduck.model.errors import ConfigError
from aqueduck.sync.comparing import verify_reads, verify_rounds
from aqueduck.sync.verify import TableComparison, verify_tables
from tests.fix_postgres import Database
from tests.small_service import SmallService, small_service
from tests.whole_group import whole_group

Start = Callable[..., SmallService]


@pytest.fixture
def start(db: Database, tmp_path: Path) -> Iterator[Start]:
    """Starts a small service for tables of `db`."""
    made: list[SmallService] = []

    def make(*tables: str, **keywords: Any) -> SmallService:
        made.append(SmallService(db, tmp_path, *tables, **keywords))
        return made[-1]

    yield make
    for service in made:
        service.close()


def verify(service: SmallService, **keywords: Any) -> list[TableComparison]:
    """On the service's own session, which saves the time to open another."""
    return verify_tables(service.config, session=service.lake, **keywords)


def keys(result: TableComparison) -> list[tuple[Any, ...]]:
    return [(d["kind"], *d["key"].values()) for d in result.differences]


@pytest.fixture
def items(db: Database, start: Start) -> SmallService:
    """A table with 1 000 rows, all in the lake."""
    db.execute("create table items (id int primary key, name text, n int)")
    service = start("public.items")
    db.execute("insert into items select g, 'item ' || g, g % 7 from generate_series(1, 1000) g")
    service.apply()
    return service


def test_a_copy_that_is_whole_is_identical(items: SmallService) -> None:
    """Counts and content agree, at a position, and nothing is in motion."""
    [result] = verify_tables(items.config)
    assert (result.verdict, result.same, result.note) == ("identical", True, None)
    assert (result.source_rows, result.lake_rows, result.in_motion) == (1000, 1000, 0)
    assert result.position is not None
    assert result.lake_snapshot is not None


def test_every_kind_of_difference_is_found_with_its_key(
    items: SmallService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row too few, too many, changed or repeated is named by its key; so are cells that were swapped between rows."""
    monkeypatch.setattr(verify_rounds, "BUCKET_ROWS", 10)
    items.change_lake("delete from lake.main.items where id = 17")
    items.change_lake("insert into lake.main.items values (5000, 'x', 1)")
    items.change_lake("update lake.main.items set n = case id when 1 then 2 else 1 end where id in (1, 2)")
    items.change_lake("update lake.main.items set name = null where id = 3")
    items.change_lake("update lake.main.items set name = '' where id = 10")
    items.change_lake("insert into lake.main.items from lake.main.items where id = 5")
    [result] = verify(items)
    changed = [("changed", "1"), ("changed", "2"), ("changed", "3")]
    others = [("repeated", "5"), ("changed", "10"), ("missing", "17"), ("extra", "5000")]
    assert keys(result) == changed + others
    assert (result.verdict, result.differing, result.more) == ("different", 7, False)
    assert (result.source_rows, result.lake_rows) == (1000, 1001)


def test_one_difference_is_enough(items: SmallService) -> None:
    """A single cell of a thousand rows, counts being equal."""
    items.change_lake("update lake.main.items set n = n + 1 where id = 9")
    [result] = verify(items)
    assert (result.verdict, keys(result)) == ("different", [("changed", "9")])
    assert result.source_rows == result.lake_rows


def test_null_and_empty_text_are_reported_apart(db: Database, start: Start) -> None:
    """P-S06: NULL in the one and '' in the other is a difference."""
    db.execute("create table t (id int primary key, a text, b text)")
    service = start("public.t")
    db.execute("insert into t values (1, null, ''), (2, '', null)")
    service.apply()
    assert verify(service)[0].same
    service.change_lake("update lake.main.t set a = '', b = null where id = 1")
    assert keys(verify(service)[0]) == [("changed", "1")]


def test_only_the_first_keys_are_shown_and_all_are_counted(items: SmallService) -> None:
    """Ten keys in their order, however many differ."""
    items.change_lake("delete from lake.main.items where id % 4 = 0")
    [result] = verify(items)
    assert [key for _, key in keys(result)] == [str(4 * i) for i in range(1, 11)]
    assert (result.differing, result.more, result.lake_rows) == (250, False, 750)


def test_a_table_that_differs_everywhere_is_not_listed_as_a_whole(
    items: SmallService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed memory: beyond a number of rows the rest is only said to be there."""
    monkeypatch.setattr(verify_rounds, "BUCKET_ROWS", 50)
    monkeypatch.setattr(verify_rounds, "LISTED_ROWS_MAX", 300)
    items.change_lake("update lake.main.items set n = -1")
    [result] = verify(items)
    assert (result.verdict, result.more) == ("different", True)
    assert 0 < result.differing < 400


def test_odd_values_compare_as_what_the_lake_holds(db: Database, start: Start) -> None:
    """Promise 7: NaN, infinities, BC, numerics without scale, json, bytea, char(n) and odd names."""
    db.execute(
        """create table "Odd ""Table" ("Key 1" numeric(10,2), k2 char(4), f float8, g float4, n numeric, m numeric(6,2),
           j json, b bytea, d date, ts timestamptz, u uuid, a int[], i interval, x text, primary key ("Key 1", k2))"""
    )
    service = start('public."Odd ""Table"')
    db.execute(
        r"""insert into "Odd ""Table" values
        (1.50, 'ab', 'NaN', '-Infinity', 'NaN', 'NaN', '{"a": 1,  "b": "\ud800"}', '\x00ff', '0044-03-15 BC',
         '2024-02-29 12:00+02', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{1,null,3}', '1 year 2 days', E'\\N\n\t"'),
        (1.50, 'abc', '-0', 1e-40, 12345678901234567890.123456789, 0.01, 'null', '', 'infinity', '-infinity', null, '{}', '0', ''),
        ('NaN', 'z', null, null, null, null, null, null, null, null, null, null, null, null)"""
    )
    service.apply()
    [result] = verify(service)
    assert (result.verdict, result.source_rows, result.note) == ("identical", 3, None)
    service.change_lake("""update lake.main."Odd ""Table" set f = 1 where k2 = 'abc '""")
    service.change_lake("""delete from lake.main."Odd ""Table" where k2 = 'z   '""")
    [result] = verify(service)
    assert [(d["kind"], d["key"]) for d in result.differences] == [
        ("changed", {"Key 1": "1.50", "k2": "abc "}),
        ("missing", {"Key 1": None, "k2": "z   "}),
    ]


def test_empty_and_partitioned_tables_are_compared(db: Database, start: Start) -> None:
    """P-S14: an empty table is identical to an empty one; a partitioned table is one table."""
    db.execute(
        "create table empty (id int primary key);"
        "create table parts (id int, day int, v text, primary key (id, day)) partition by list (day);"
        "create table parts_1 partition of parts for values in (1);"
        "create table parts_2 partition of parts for values in (2)"
    )
    service = start("public.empty", "public.parts")
    db.execute("insert into parts select g, 1 + g % 2, 'x' from generate_series(1, 100) g")
    service.apply()
    assert [(r.table, r.verdict, r.source_rows) for r in verify(service)] == [
        ("public.empty", "identical", 0),
        ("public.parts", "identical", 100),
    ]
    service.change_lake("insert into lake.main.empty values (1)")
    service.change_lake("delete from lake.main.parts where id in (7, 8)")
    empty, parts = verify(service)
    assert keys(empty) == [("extra", "1")]
    assert keys(parts) == [("missing", "7", "2"), ("missing", "8", "1")]


def test_large_tables_are_read_in_chunks(items: SmallService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a table add up to the same as the whole, and their progress ends at 1."""
    monkeypatch.setattr(verify_reads, "CHUNK_BYTES", 8192)
    reported: list[tuple[str, str, float]] = []
    [result] = verify(items, progress=lambda *what: reported.append(what))
    assert (result.verdict, result.source_rows) == ("identical", 1000)
    shares = [share for table, doing, share in reported if (table, doing) == ("public.items", "compares")]
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# -- while both sides move


def during(moment: str, act: Callable[[], None]) -> Callable[[str, str, float], None]:
    """A progress callback that acts once, at the first moment of that name."""
    acts = [act]

    def progress(_table: str, doing: str, _share: float) -> None:
        if doing.startswith(moment) and acts:
            acts.pop()()

    return progress


def test_changes_after_the_sources_snapshot_are_no_differences(db: Database, items: SmallService) -> None:
    """Rows that the lake has already and the snapshot does not: compared in the next round, equal there."""

    def move() -> None:
        db.execute("update items set n = 99 where id <= 20; delete from items where id = 30")
        db.execute("insert into items values (2000, 'new', 1); update items set id = 3000 where id = 40")
        items.apply()

    with items.running():
        [result] = verify(items, progress=during("waits for the lake", move))
    assert (result.verdict, result.source_rows, result.lake_rows) == ("identical", 1000, 1000)
    assert (result.in_motion, result.note) == (0, None)


def test_a_row_that_came_and_went_within_one_batch_is_no_difference(
    db: Database, items: SmallService
) -> None:
    """The source's snapshot has it, and no version of the lake ever does."""

    def come() -> None:
        db.execute("insert into items values (7777, 'short', 1)")

    def go() -> None:
        db.execute("delete from items where id = 7777")
        items.apply()

    seen: list[str] = []

    def progress(_table: str, doing: str, _share: float) -> None:
        if doing.startswith("waits for a snapshot") and not seen:
            seen.append("before")
            come()
        elif doing.startswith("waits for the lake") and len(seen) == 1:
            seen.append("between")
            go()

    with items.running(seconds=3600):  # only `go` commits, all in one batch
        [result] = verify(items, progress=progress, wait_seconds=5)
    assert seen == ["before", "between"]
    assert (result.verdict, result.source_rows, result.lake_rows) == ("identical", 1000, 1000)


def test_a_missing_row_is_found_while_others_move(db: Database, items: SmallService) -> None:
    """A difference among unchanged rows is proven although the table is busy."""
    items.change_lake("delete from lake.main.items where id = 500")

    def move() -> None:
        db.execute("update items set n = n + 1 where id between 100 and 200")
        items.apply()

    [result] = verify(items, progress=during("waits for the lake", move))
    assert keys(result) == [("missing", "500")]


def test_a_truncate_meanwhile_is_no_difference(db: Database, items: SmallService) -> None:
    """P-S11: the table is compared again as it is afterwards."""

    def empty() -> None:
        db.execute("truncate items; insert into items values (1, 'again', 1)")
        items.apply()

    [result] = verify(items, progress=during("waits for the lake", empty))
    assert (result.verdict, result.source_rows, result.lake_rows) == ("identical", 1, 1)


def test_a_truncate_under_the_reader_is_no_difference(
    db: Database, items: SmallService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S11: TRUNCATE removes rows from older snapshots, too; the reading is discarded."""
    monkeypatch.setattr(verify_reads, "CHUNK_BYTES", 8192)

    def empty() -> None:
        db.execute("truncate items; insert into items values (1, 'again', 1)")
        items.apply()

    [result] = verify(items, progress=during("compares", empty))
    assert (result.verdict, result.source_rows, result.lake_rows) == ("identical", 1, 1)


@pytest.mark.slow
def test_a_snapshot_waits_for_transactions_that_are_open(db: Database, items: SmallService) -> None:
    """Hazard 1: a transaction that was open when the comparison began, and ends meanwhile, is compared as well."""
    writer = db.connect()
    writer.execute("begin; update items set n = 1000 where id = 1")
    timer = threading.Timer(1.0, writer.commit)
    with items.running(), writer:
        [result] = verify(items, progress=during("waits for a snapshot", timer.start))
    assert result.verdict == "identical"


def test_keys_that_cannot_be_looked_up_are_found_by_reading(db: Database, start: Start) -> None:
    """A key of dates is compared again by reading the table once more."""
    db.execute("create table days (day date primary key, n int)")
    service = start("public.days")
    db.execute("insert into days select date '0001-01-01 BC' + 400 * g, g from generate_series(1, 500) g")
    service.apply()

    def move() -> None:
        db.execute("update days set n = -1 where n <= 100")
        service.apply()

    [result] = verify(service, progress=during("waits for the lake", move))
    assert (result.verdict, result.source_rows, result.lake_rows) == ("identical", 500, 500)


@pytest.mark.slow
def test_a_busy_source_is_verified_without_false_differences(
    db: Database, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers of all kinds of changes, a service that applies them: identical, and a planted difference is found."""
    monkeypatch.setattr(verify_rounds, "BUCKET_ROWS", 100)
    db.execute(
        "create table t (id int primary key, v int); create table q (id text primary key, v int);"
        "create table counter (id int primary key, n int)"
    )
    service = start("public.t", "public.q", "public.counter")
    db.execute("insert into t select g, 0 from generate_series(1, 2000) g; insert into counter values (1, 0)")
    stopping = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with db.connect() as conn:
            while not stopping.is_set():
                n = chance.randrange(2, 3000)
                with conn.transaction():
                    conn.execute(
                        "insert into t values (%s, 1) on conflict (id) do update set v = t.v + 1", [n]
                    )
                    conn.execute("delete from t where id = %s", [chance.randrange(2000, 3000)])
                    conn.execute("update counter set n = n + 1")
                # a queue: rows come and go at once
                conn.execute("insert into q values (%s, 1)", [f"{seed} {n}"])
                conn.execute("delete from q where id = %s", [f"{seed} {n}"])

    writers = [threading.Thread(target=write, args=[seed]) for seed in range(2)]
    for writer in writers:
        writer.start()
    try:
        with service.running():
            results = verify_tables(service.config)
        assert {r.table: (r.verdict, r.differences) for r in results} == dict.fromkeys(
            ("public.t", "public.q", "public.counter"), ("identical", ())
        )
        service.change_lake("delete from lake.main.t where id = 1")
        with service.running():
            by_name = {r.table: r for r in verify_tables(service.config)}
        assert keys(by_name["public.t"]) == [("missing", "1")]
        assert by_name["public.q"].same
    finally:
        stopping.set()
        for writer in writers:
            writer.join()


# -- what cannot be compared


def test_a_row_that_changes_all_the_time_is_counted(db: Database, items: SmallService) -> None:
    """Rounds are bounded: keys that changed in each round are reported, not judged."""

    def progress(_table: str, doing: str, _share: float) -> None:
        if doing.startswith("waits for the lake"):
            db.execute("update items set n = n + 1 where id = 77")
            items.apply()

    [result] = verify(items, progress=progress)
    assert (result.verdict, result.in_motion, result.source_rows, result.lake_rows) == (
        "identical",
        1,
        999,
        999,
    )
    assert "1 keys" in (result.note or "")


def test_a_lake_that_is_behind_is_said_to_be(db: Database, items: SmallService) -> None:
    """Without a service, equal is identical, and anything else comes with how far the lake is behind."""
    items.stop()
    assert verify(items)[0].same
    db.execute("insert into items values (1001, 'late', 1)")
    [result] = verify(items)
    assert (result.verdict, keys(result)) == ("different", [("missing", "1001")])
    assert "bytes behind: run the service" in (result.note or "")


def test_tables_that_are_not_ready_are_not_compared(db: Database, items: SmallService) -> None:
    """A copy under way, an error, a table that no service knows yet: each is said, none is a difference."""
    db.execute("create table later (id int primary key)")
    file = items.config.groups[0].tables[0]
    later = file.model_copy(update={"source": "public.later", "target": "main.later"})
    group = items.config.groups[0].model_copy(update={"tables": (file, later)})
    config = items.config.model_copy(update={"groups": (group,)})
    [(_, state)] = read_states(items.lake, "test").items()
    for error, note in (
        (None, "its copy is not complete yet"),
        ("[lake.write] x", "errored: [lake.write] x"),
    ):
        write_state(items.lake, "test", [type(state)(state.oid, state.source, state.target, False, 0, error)])
        results = verify_tables(config)
        assert [(r.table, r.verdict, r.note) for r in results] == [
            ("public.items", "not compared", note),
            ("public.later", "not compared", "it is not in the lake yet"),
        ]


def test_a_table_that_is_copied_again_meanwhile_is_compared_afterwards(
    db: Database, items: SmallService
) -> None:
    """P-S22: a resync between the two sides starts the comparison of that table anew."""

    def resync() -> None:
        [state] = read_states(items.lake, "test").values()
        with items.lake.transaction():
            items.lake.execute("delete from lake.main.items where id = 600")
            items.lake.execute("insert into lake.main.items values (600, 'item 600', 600 % 7)")
            write_state(
                items.lake, "test", [type(state)(state.oid, state.source, state.target, True, items.position)]
            )

    [result] = verify(items, progress=during("waits for the lake", resync))
    assert (result.verdict, result.source_rows) == ("identical", 1000)


def test_a_dropped_table_is_named_and_the_others_continue(db: Database, start: Start) -> None:
    """One table cannot hurt another."""
    db.execute("create table a (id int primary key); create table b (id int primary key)")
    service = start("public.a", "public.b")
    db.execute("drop table a")
    a, b = verify(service)
    assert (a.verdict, b.verdict) == ("not compared", "identical")
    assert "does not exist" in (a.note or "")


@pytest.mark.slow
def test_columns_that_differ_are_said_without_values(db: Database, items: SmallService) -> None:
    """Promise 8: a lake table without a column is not compared, and the reason holds no cell."""
    items.change_lake("alter table lake.main.items drop column n")
    [result] = verify(items)
    assert result.verdict == "not compared"
    assert "[lake" in (result.note or "")
    assert "item " not in (result.note or "")


@pytest.mark.parametrize("change", ["add late text default 'x'", "rename n to m", "drop n"])
def test_columns_that_no_row_has_brought_yet(db: Database, tmp_path: Path, change: str) -> None:
    """P-S12: a change of columns is in the stream with the next row; until then the verdict says what is waited for."""
    db.execute("create table t (id int primary key, n int); insert into t values (1, 1)")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute(f"alter table t {change}")
        group.apply()
        [result] = group.verify()
        assert (result.verdict, "its columns changed in the source" in (result.note or "")) == (
            "not compared",
            True,
        )
        db.execute("update t set id = 2")
        group.apply()
        assert [r.verdict for r in group.verify()] == ["identical"]


def test_one_table_can_be_chosen(db: Database, start: Start) -> None:
    """A table is named as in SQL; the error for an unknown one lists the known tables."""
    db.execute("create table a (id int primary key); create table b (id int primary key)")
    service = start("public.a", "public.b")
    assert [r.table for r in verify(service, tables=["b"])] == ["public.b"]
    with pytest.raises(ConfigError, match=r"tables of this lake: public.a, public.b"):
        verify(service, tables=["something_else"])


def test_a_caller_may_hold_the_catalog(db: Database, tmp_path: Path) -> None:
    """A DuckDB file is open in one process only: its session is taken."""
    db.execute("create table t (id int primary key)")
    with small_service(db, tmp_path, "public.t", catalog=str(tmp_path / "lake.ducklake")) as service:
        db.execute("insert into t select generate_series(1, 10)")
        service.apply()
        [result] = verify(service)
    assert (result.verdict, result.lake_rows) == ("identical", 10)
