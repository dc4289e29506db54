"""Hand × (next write | verify | resync): what people do to targets under a running service, and the way out of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.model.errors import LakeBusyError
from aqueduck.sync.verify import TableComparison, verify_tables
from tests.fix_postgres import Database, wait_until
from tests.local_service import LocalService, local_config, local_service

pytestmark = pytest.mark.usefixtures("without_spark")

ROWS = 1500
"""More than are inlined, so that the copy is a file."""


@dataclass(frozen=True)
class Hand:
    """What somebody does to the lake table {t}, and what is seen."""

    statements: tuple[str, ...]
    write: str | None
    """The code at the next write, or none if the table streams."""
    verify: str
    """The verdict of verify, or the code in its note."""
    keeps: tuple[str, int] | None = None
    """A table that is theirs, with its number of rows: nothing may touch it."""
    value: str = "'next write'"
    """What the next write sets."""
    helps: bool = True
    """Whether a resync makes source and lake equal."""


HANDS = {
    "dropped": Hand(("drop table {t}",), "lake.table_missing", "lake.table_missing"),
    "renamed": Hand(
        ("alter table {t} rename to t_renamed_away",),
        "lake.table_missing",
        "lake.table_missing",
        keeps=("t_renamed_away", ROWS),
    ),
    "truncated": Hand(("delete from {t}",), None, "different"),
    "rows_deleted": Hand(("delete from {t} where id between 10 and 20",), None, "different"),
    "rows_changed": Hand(("update {t} set v = 'mine' where id = 7",), None, "different"),
    "rows_added": Hand(("insert into {t} values (-1, 'mine')",), None, "different"),
    "column_added": Hand(
        ("alter table {t} add column mine int",), "lake.schema_change", "lake.schema_change"
    ),
    "column_dropped": Hand(("alter table {t} drop column v",), "lake.schema_change", "lake.schema_change"),
    "column_renamed": Hand(("alter table {t} rename v to mine",), "lake.schema_change", "lake.schema_change"),
    "column_retyped": Hand(("alter table {t} alter id set data type bigint",), None, "identical"),
    "not_null": Hand(
        ("alter table {t} alter v set not null",), "lake.schema_change", "lake.schema_change", value="null"
    ),
    "replaced": Hand(
        ("drop table {t}", "create table {t} (id int, v varchar)", "insert into {t} values (42, 'theirs')"),
        "lake.table_replaced",
        "lake.table_replaced",
        keeps=("t_replaced", 1),
        helps=False,
    ),
    "view": Hand(
        ("drop table {t}", "create view {t} as select 42 as id, 'theirs' as v"),
        "lake.table_replaced",
        "lake.table_replaced",
        keeps=("t_view", 1),
        helps=False,
    ),
    "files_removed": Hand((), "lake.file_missing", "lake.file_missing"),
    "untouched": Hand((), None, "identical"),
}


def table_of(hand: str) -> str:
    return f"t_{hand}"


def compared(service: LocalService) -> dict[str, TableComparison]:
    found = verify_tables(service.config, session=service.service.lake)
    return {c.table.removeprefix("public.t_"): c for c in found}


def same(db: Database, service: LocalService, hands: Sequence[str]) -> bool:
    """Source rows = lake rows, read by connections of their own."""
    with open_lake(service.config.lake, read_only=True) as lake:
        return all(
            sorted(lake.query(f"select id, v from lake.main.{table_of(h)}")[0])
            == sorted(db.query(f"select id, v from {table_of(h)}"))
            for h in hands
        )


def by_hand(lake: LakeSession, statement: str) -> None:
    """The service may commit at the same time."""

    def done() -> bool:
        try:
            lake.execute(statement)
        except LakeBusyError:
            lake.reopen()
            return False
        return True

    wait_until(done, statement, 30)


def wait_states(db: Database, service: LocalService, expected: dict[str, str | None]) -> None:
    """Until each table is errored with its code, or streams; the message has those that do not."""
    found: dict[str, str | None] = {}

    def seen() -> bool:
        service.alive()
        rows = db.query("select source, state, error_code from aqueduck.status()")
        found.update({source: code if state == "ERRORED" else None for source, state, code in rows})
        return found == expected

    try:
        wait_until(seen, "each table has its state", 60)
    except AssertionError:
        assert found == expected
        raise


def test_each_hand_is_found_and_has_a_way_out(db: Database, tmp_path: Path) -> None:
    """The table is errored by code or `verify` finds the difference, the others stream, and a resync makes it right or leaves it alone."""
    for name in HANDS:
        db.execute(
            f"create table {table_of(name)} (id int primary key, v text);"
            f" insert into {table_of(name)} select g, 'v' || g from generate_series(1, {ROWS}) g"
        )
    sources = {name: f"public.{table_of(name)}" for name in HANDS}
    with local_service(db, local_config(db, tmp_path, {"test": list(sources.values())})) as service:
        service.wait_streaming(*sources.values(), seconds=60)
        with open_lake(service.config.lake) as lake:
            for name, hand in HANDS.items():
                for statement in hand.statements:
                    by_hand(lake, statement.format(t=f"lake.main.{table_of(name)}"))
        for file in (tmp_path / "data" / "main" / "t_files_removed").glob("*.parquet"):
            file.unlink()

        with db.connect() as conn, conn.transaction():
            for name, hand in HANDS.items():
                conn.execute(f"update {table_of(name)} set v = {hand.value} where id = 3".encode())
        expected = {sources[name]: hand.write for name, hand in HANDS.items()}

        wait_states(db, service, expected)
        wait_until(lambda: same(db, service, ["untouched", "column_retyped"]), "the others stream", 60)

        verdicts = compared(service)
        for name, hand in HANDS.items():
            said = f"{verdicts[name].verdict} {verdicts[name].note}"
            assert hand.verify in said, name

        for source in sources.values():
            db.execute("select aqueduck.resync_table(%s)", (source,))
        repaired = [name for name, hand in HANDS.items() if hand.helps]
        for name in repaired:
            service.wait_streaming(sources[name], seconds=60)
        wait_until(lambda: same(db, service, repaired), "a resync made them right", 60)
        for name, hand in HANDS.items():
            if hand.keeps is not None:
                kept, count = hand.keeps
                assert service.service.query_lake(f"select count(*) from lake.main.{kept}")[0] == [
                    (count,)
                ], name
        verdicts = compared(service)
        assert {name for name in HANDS if verdicts[name].verdict == "identical"} == set(repaired)
