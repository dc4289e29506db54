"""The formats in a user's own Spark: the examples of docs/spark.md run unchanged, and errors keep their names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import aqueduck
from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from aqueduck.model.errors import AqueduckError
from aqueduck.spark.formats.cdc_options import CDC_OPTIONS
from aqueduck.spark.formats.lake_writer import WRITE_OPTIONS
from aqueduck.spark.formats.table_source import TABLE_OPTIONS
from aqueduck.spark.session.session import build_session
from tests.fix_postgres import Database

DOCUMENT = Path(__file__).parents[3] / "docs" / "spark.md"


def lake_rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    """What an observer sees in the lake below a directory; `lake.t` is a table of it."""
    pool = LakePool(max_open=1)
    place = LakePlace(catalog=f"sqlite:{directory}/lake.sqlite", data_path="")
    with pool.use(place, read_only=True) as lake:
        rows = lake.execute(query.replace("lake.", f"{lake.alias}."))
    pool.close()
    return rows


def test_importing_the_package_is_light() -> None:
    """A driver that only registers formats loads neither DuckDB nor PySpark before it does."""
    code = "import sys, aqueduck; print([m for m in ('pyspark', 'duckdb', 'pyarrow', 'numba', 'psycopg') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert found.stdout.strip() == "[]"


def test_every_option_is_documented() -> None:
    """docs/spark.md names each option of each format."""
    text = DOCUMENT.read_text()
    assert [name for name in (*CDC_OPTIONS, *TABLE_OPTIONS, *WRITE_OPTIONS) if f"`{name}`" not in text] == []


# -- with Spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for Spark's workers
        session = build_session("local[2]", {}, "sources")
        aqueduck.register(session)
        yield session
        session.stop()


@pytest.fixture
def shop(db: Database) -> Database:
    """The tables of docs/spark.md, with some rows."""
    [tables] = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    db.execute(tables)
    db.execute(
        "insert into customers select g, 'c' || g, (array['CH','FR'])[1 + g % 2] from generate_series(1, 10) g"
    )
    db.execute("insert into orders select g, 1 + g % 10, g, 'n' from generate_series(1, 200) g")
    return db


@pytest.mark.spark
@pytest.mark.slow
def test_the_examples_of_the_document_run(shop: Database, spark: SparkSession, tmp_path: Path) -> None:
    """P-E10: notebook, stream into a lake, join with a dimension and stateful counts, as docs/spark.md has them."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 4
    blocks = [block.replace("/data/", f"{tmp_path}/").replace('"dsn_env"', '"dsn"') for block in blocks]
    blocks = [block.replace('"PG_DSN"', repr(shop.dsn)).replace("dsn_env=", "dsn=") for block in blocks]
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["spark"] is spark
    assert lake_rows(tmp_path, "select count(*), min(amount) from lake.large_orders") == [(100, 101)]

    exec(blocks[1], names)  # makes the slot: nothing has happened since
    shop.execute(
        "insert into orders values (1001, 1, 10, null), (1002, 2, 20, 'x'); update orders set note = 'y' where id = 1001"
    )
    shop.execute("delete from orders where id = 1002; update orders set id = 1003 where id = 1001")
    shop.execute("insert into orders values (1004, 3, 30, 'z')")
    exec(blocks[1], names)
    assert lake_rows(tmp_path, "from lake.orders order by id") == shop.query(
        "select * from orders where id > 1000 order by id"
    )
    marks = lake_rows(
        tmp_path,
        "select count(*), max(batch_id) > 0 from lake.aqueduck.spark_writes where table_name = 'main.orders'",
    )
    assert marks == [(1, True)]

    exec(blocks[2], names)
    shop.execute("insert into orders values (2001, 4, 1.5, null), (2002, 5, 2.5, null)")
    exec(blocks[2], names)
    sales = lake_rows(tmp_path, "select id, amount, country from lake.sales order by id")
    assert [(i, float(a), c) for i, a, c in sales] == [(2001, 1.5, "CH"), (2002, 2.5, "FR")]

    exec(blocks[3], names)
    shop.execute(
        "insert into customers values (11, 'new', 'IT'); update orders set note = 'all' where id <= 7"
    )
    exec(blocks[3], names)
    shop.execute("delete from customers where id = 11")
    exec(blocks[3], names)
    counts = lake_rows(tmp_path, 'select "table", op, changes from lake.change_counts order by all')
    assert counts == [("customers", "delete", 1), ("customers", "insert", 1), ("orders", "update", 7)]


@pytest.mark.slow
@pytest.mark.spark
def test_tables_are_read_and_written_in_every_mode(
    shop: Database, spark: SparkSession, tmp_path: Path
) -> None:
    """`postgres_table` to `ducklake`: append, overwrite and upsert; a read at a lake snapshot, filtered, in parts."""
    lake = {"catalog": f"sqlite:{tmp_path}/lake.sqlite", "data_path": f"{tmp_path}/lake/", "table": "o"}

    def source(**options: str) -> DataFrame:
        read = spark.read.format("postgres_table").option("dsn", shop.dsn).option("table", "orders")
        return read.options(**options).load()

    def target(**options: str) -> DataFrame:
        return spark.read.format("ducklake").options(**lake, **options).load()

    shop.execute("insert into orders select g, 1, g, md5(g::text) from generate_series(201, 20000) g")
    source(partition_bytes="256k").write.format("ducklake").options(**lake).mode("append").save()
    first = str(lake_rows(tmp_path, "select max(snapshot_id) from ducklake_snapshots('lake_1')")[0][0])
    assert target().where("amount >= 19991 and customer = 1").count() == 10
    assert source().where("id between 11 and 20 and note = 'n'").count() == 10
    shop.execute("update orders set note = 'late' where id <= 100")
    source().where("id <= 100").write.format("ducklake").options(**lake, keys="id").mode("append").save()
    assert target().where("note = 'late'").count() == 100
    assert target().count() == 20_000
    assert target(snapshot=first).where("note = 'late'").count() == 0
    source(columns="id, customer, amount, note").limit(5).write.format("ducklake").options(**lake).mode(
        "overwrite"
    ).save()
    assert target().count() == 5


@pytest.mark.spark
def test_errors_keep_their_codes_across_spark(shop: Database, spark: SparkSession, tmp_path: Path) -> None:
    """Bad input: an error keeps its code, text and fix on every way through Spark."""
    lake = {"catalog": f"sqlite:{tmp_path}/lake.sqlite", "data_path": f"{tmp_path}/lake/", "table": "o"}
    cdc = spark.readStream.format("postgres_cdc").option("dsn", shop.dsn)

    def code(act: Callable[[], Any]) -> str:
        with pytest.raises(PySparkException) as caught:
            act()
        error = AqueduckError.from_text(str(caught.value))
        assert error is not None, str(caught.value)
        return error.code

    def run(slot: str, **options: str) -> None:
        stream = cdc.options(slot=slot, publication="p", **options).load().writeStream.format("noop")
        stream.option("checkpointLocation", str(tmp_path / slot)).trigger(
            availableNow=True
        ).start().awaitTermination()

    assert code(lambda: cdc.option("slot", "s").load()) == "config.invalid"
    assert code(lambda: run("missing")) == "pg.slot_lost"
    shop.execute("create publication p for table customers")
    assert code(lambda: run("s", table="orders", create="true")) == "pg.publication"
    table = spark.read.format("postgres_table").option("dsn", shop.dsn)
    assert code(lambda: table.option("table", "nowhere").load()) == "pg.table_missing"
    rows = spark.range(3)
    rows.write.format("ducklake").options(**lake).mode("append").save()
    wrong = rows.withColumnRenamed("id", "other").write.format("ducklake").options(**lake).mode("append")
    assert code(wrong.save) == "lake.schema_change"
    failing = rows.selectExpr("if(id = 2, raise_error('no'), id) as id").repartition(3)
    with pytest.raises(PySparkException):
        failing.write.format("ducklake").options(**lake).mode("append").save()
    assert lake_rows(tmp_path, "select count(*) from lake.o") == [(3,)]
    assert list((tmp_path / "lake").rglob("*.parquet")) == [], "an aborted write leaves no files"


@pytest.mark.spark
def test_a_stream_into_a_lake_survives_a_restart(shop: Database, spark: SparkSession, tmp_path: Path) -> None:
    """Limits, restart from the checkpoint, marks and confirmation hold under Spark's own scheduling."""
    options = {
        "slot": "s",
        "publication": "p",
        "table": "customers",
        "create": "true",
        "maxRowsPerTrigger": "4",
    }
    lake = {"catalog": f"sqlite:{tmp_path}/lake.sqlite", "data_path": f"{tmp_path}/lake/", "table": "c"}

    def run() -> None:
        stream = spark.readStream.format("postgres_cdc").option("dsn", shop.dsn).options(**options).load()
        query = stream.select("id", "name", "_op").writeStream.format("ducklake").options(**lake)
        query = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()

    def confirmed() -> str:
        return str(shop.value("select confirmed_flush_lsn from pg_replication_slots where slot_name = 's'"))

    run()
    for i in range(100, 110):
        shop.execute("insert into customers values (%s, 'n', 'DE')", (i,))
    run()
    shop.execute("insert into customers values (200, 'n', 'DE')")
    run()
    assert [i for (i,) in lake_rows(tmp_path, "select id from lake.c order by id")] == [*range(100, 110), 200]
    sizes = [n for (n,) in lake_rows(tmp_path, "select count(*) from lake.c group by snapshot_id")]
    assert max(sizes) <= 4
    [(queries, batch)] = lake_rows(
        tmp_path, "select count(distinct query_id), max(batch_id) from lake.aqueduck.spark_writes"
    )
    assert queries == 1
    assert batch >= 3
    before = confirmed()
    shop.execute("insert into orders values (5000, 1, 1, 'of another table')")
    run()
    assert shop.value("select %s::pg_lsn > %s::pg_lsn", (confirmed(), before)), "others' changes pin no WAL"


@pytest.mark.spark
def test_plans_show_no_connection_string(spark: SparkSession, tmp_path: Path) -> None:
    """The attack: `explain`, Spark's page and event logs showed the options of streams and writes, a URI's password among them."""
    dsn = "postgresql://u:password-planted@h/d"
    stream = (
        spark.readStream.format("postgres_cdc").options(dsn=dsn, slot="slot_shown", publication="p").load()
    )
    plan = stream._jdf.queryExecution().toString()
    lake = {"catalog": f"sqlite:{tmp_path}/catalog-planted.sqlite", "data_path": f"{tmp_path}/lake/"}
    spark.conf.set("spark.sql.ui.explainMode", "extended")
    store = spark._jsparkSession.sharedState().statusStore()
    for mode in ("append", "overwrite"):
        rows = spark.range(1).write.format("ducklake").options(**lake, table="table_shown").mode(mode)
        rows.options(s3_access_key_id="key-planted", s3_session_token="token-planted").save()
        plans = store.executionsList()
        plan += "".join(plans.apply(i).physicalPlanDescription() for i in range(plans.size()))
    spark.conf.unset("spark.sql.ui.explainMode")
    assert all(text in plan for text in ("slot_shown", "AppendData", "OverwriteByExpression", "table_shown"))
    assert "-planted" not in plan
