"""A user who follows a tutorial from top to bottom gets the results that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.reader import ROOT, Reader, blocks_of
from tests.fix_postgres import Database

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_the_first_fanout_works_as_written(tmp_path: Path) -> None:
    """Every file and command of docs/tutorials/first-fanout.md, with the rows that it shows."""
    Reader(tmp_path).follow("docs/tutorials/first-fanout.md")


@pytest.mark.slow
def test_the_first_events_work_as_written(db: Database, tmp_path: Path) -> None:
    """Every statement, file and command of docs/tutorials/first-events.md, with the events that it shows."""
    Reader(tmp_path, db).follow("docs/tutorials/first-events.md")
    assert db.value("select count(*) from pg_replication_slots where slot_name = 'tickets_slot'") == 0


def test_the_lake_can_be_queried_as_written(tmp_path: Path) -> None:
    """The queries of docs/how-to/query-the-lake.md from DuckDB, Python and Spark, and that of docs/fanout.md."""
    here = {"'orders.parquet'": f"'{tmp_path}/orders.parquet'", "interval '1 hour'": "interval '0 seconds'"}
    reader = Reader(tmp_path, instead=here)
    lake = f"ducklake:sqlite:{tmp_path}/lake.sqlite"
    reader.lake.execute(f"attach '{lake}' as filled (data_path '{tmp_path}/lake_data/')")
    reader.lake.execute("create table filled.orders (id int, country varchar, total decimal(10, 2))")
    for country, total in (("DE", 12.5), ("FR", 40)):  # a lake snapshot each
        reader.lake.execute("insert into filled.orders values (1, ?, ?)", [country, total])
    reader.lake.execute("delete from filled.orders where country = 'DE'; detach filled")
    [changes] = [
        b.text for b in blocks_of(ROOT / "docs" / "fanout.md") if b.mark.endswith(Path(__file__).name)
    ]
    changes = changes.replace("sqlite:./source.sqlite", "sqlite:lake.sqlite").replace('"events"', '"orders"')
    here["orders.groupBy"] = f"{changes}\ntable.show()\norders.groupBy"
    reader.follow("docs/how-to/query-the-lake.md")
    assert (tmp_path / "orders.parquet").exists()
    assert "|     FR|    1|" in reader.shown
