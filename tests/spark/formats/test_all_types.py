"""Every type goes out to Spark and comes back as itself, or is refused by column; in one session, started as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, types

import aqueduck
from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.values.spark_cells import spark_type
from aqueduck.model.errors import LakeTypeError
from aqueduck.spark.formats.spark_types import refuse_unwritable
from aqueduck.spark.session.session import prepare_environment
from tests.fanout_lakes import Fan, connect
from tests.lake_types import KEPT, shown

COLUMNS = {f"c{i}": kind for i, kind in enumerate(KEPT)}
DEPTH = max(map(len, KEPT.values()))

SPARK_TYPES = {
    "b": "true",
    "t": "-128Y",
    "s": "-32768S",
    "i": "-2147483648",
    "l": "-9223372036854775808L",
    "f": "cast('NaN' as float)",
    "d": "cast('-Infinity' as double)",
    "z": "cast('-0.0' as double)",
    "dec": "cast(-0.1 as decimal(38,38))",
    "str": "'a''b\"c'",
    "ch": "cast('x' as char(3))",
    "vc": "cast('x' as varchar(3))",
    "bin": "X'00FF27'",
    "day": "date'0001-01-01'",
    "ts": "timestamp'0001-01-01 00:00:00.000001'",
    "ntz": "timestamp_ntz'9999-12-31 23:59:59.999999'",
    "v": 'parse_json(\'{"a": [1, 2.50, null, "x"], "b": true}\')',
    "arr": "array('a''b', null, '\"')",
    "arr_ts": "array(timestamp'2020-01-01 00:00:00', null)",
    "mp": "map('k', array(1.5D, null))",
    "st": "named_struct('a', 1Y, 'b b', named_struct('x', X'0027', 'y', date'2020-01-01'))",
}
"""One value of each Spark type that a lake keeps."""

REFUSED = {
    "interval day to second": "interval '1 00:00:00.000001' day to second",
    "interval year to month": "interval '1-1' year to month",
    "void": "null",
    "array<variant>": "array(parse_json('1'))",
    "struct<a:interval day to second>": "named_struct('a', interval '1 00:00:00' day to second)",
    "map<string,interval year to month>": "map('a', interval '1-1' year to month)",
}


WRITTEN = {
    "ArrayType", "BinaryType", "BooleanType", "ByteType", "DateType", "DecimalType", "DoubleType", "FloatType",
    "IntegerType", "LongType", "MapType", "ShortType", "StringType", "StructType", "TimestampNTZType", "TimestampType",
    "VariantType",
}  # fmt: skip
"""The classes of the types in `SPARK_TYPES`; Spark itself makes strings of `char` and `varchar`."""
ABSTRACT = {
    "AnsiIntervalType", "AnyTimeType", "AtomicType", "DataType", "DatetimeType", "FractionalType", "IntegralType",
    "NumericType", "SpatialType", "StructField", "UserDefinedType",
}  # fmt: skip


def test_every_other_type_of_spark_is_refused() -> None:
    """P-T08: a type that a new version of Spark brings is in one of these lists, or refused by column."""
    every = {n: t for n, t in vars(types).items() if isinstance(t, type) and issubclass(t, types.DataType)}
    assert set(every) >= WRITTEN | ABSTRACT
    given = {"CharType": (3,), "VarcharType": (3,), "GeographyType": (4326,), "GeometryType": (4326,)}
    for name in set(every) - WRITTEN - ABSTRACT:
        schema = types.StructType([types.StructField("odd", every[name](*given.get(name, ())))])
        with pytest.raises(LakeTypeError, match="the column odd"):
            refuse_unwritable(schema, "t")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        env: dict[str, str] = dict(os.environ)
        prepare_environment(env, "local[2]")
        patch.setenv("JAVA_HOME", env.get("JAVA_HOME", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.delenv("PYSPARK_PYTHON", raising=False)
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.session.timeZone": "UTC",
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        aqueduck.register(session)
        assert session.sparkContext.pythonExec == sys.executable
        yield session
        session.stop()


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    """A lake with a column of every type, at its extremes and with NULLs; `one` is where it goes."""
    found = Fan(tmp_path, {"one": ""}, inline=0)
    cells = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    found.change(f"create table lake.t (id int, {cells})")
    found.change(f"insert into lake.t (id) values ({DEPTH})")
    for row in range(DEPTH):
        values = (f"({values[row % len(values)]})::{kind}" for kind, values in KEPT.items())
        found.change(f"insert into lake.t values ({row}, {', '.join(values)})")
    yield found
    found.close()


def options(place: LakePlace, table: str = "t") -> dict[str, str]:
    return {"catalog": place.catalog, "data_path": place.data_path, "table": table}


def written(fan: Fan, frame: DataFrame, table: str, times: int = 1) -> None:
    """Write Spark's rows into a table with the same types, created by hand, and compare cell by cell."""
    whole = {
        n: k
        for n, k in COLUMNS.items()
        if not (k.endswith("]") or k.startswith(("STRUCT", "MAP"))) or spark_type(k) == k
    }
    con = connect(fan.place("one"))
    con.execute(
        f"create table if not exists lake.{table} (id int, {', '.join(f'{n} {k}' for n, k in whole.items())})"
    )
    con.close()
    rows = frame.select("id", *whole)
    for _ in range(times - 1):
        rows = rows.unionAll(frame.select("id", *whole))
    rows.write.format("ducklake").options(**options(fan.place("one"), table)).mode("append").save()
    differing = {}
    for name, kind in whole.items():
        query = f"select distinct id, {shown(name, kind)} from lake.{{}} order by id"
        here, there = fan.look("one", query.format(table)), fan.look("source", query.format("t"))
        if here != there:
            differing[f"{name} {kind}"] = [
                pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]
            ]
    assert differing == {}


@pytest.mark.spark
def test_every_type_of_a_lake_is_read_by_spark_and_written_back(fan: Fan, spark: SparkSession) -> None:
    """P-T08, P-E10: a table, its changes as a batch and as a stream, copied by Spark, are cell by cell what the lake has."""
    table = spark.read.format("ducklake").options(**options(fan.place("source"))).load()
    types = {field.name: field.dataType.simpleString() for field in table.schema}
    assert (types["c0"], types["c31"], types["c32"]) == ("boolean", "variant", "binary")
    written(fan, table, "few")
    written(fan, table, "many", times=1001 // (DEPTH + 1) + 1)
    changes = spark.read.format("ducklake_changes").options(**options(fan.place("source"))).load()
    assert changes.select("_change_type").distinct().collect() == [("insert",)]
    written(fan, changes, "changed")
    stream = spark.readStream.format("ducklake_changes").options(**options(fan.place("source"))).load()
    checkpoint = str(fan.directory / "checkpoint")
    query = stream.writeStream.trigger(availableNow=True).option("checkpointLocation", checkpoint)
    started = query.foreachBatch(lambda batch, _: written(fan, batch, "streamed")).start()
    started.awaitTermination()


@pytest.mark.spark
def test_every_type_of_spark_comes_back_from_a_lake_as_itself(tmp_path: Path, spark: SparkSession) -> None:
    """P-T08, P-E10: values of each type that Spark writes are read with the same type and value, inlined and from files."""
    cells = ", ".join(f"{value} as {name}" for name, value in SPARK_TYPES.items())
    nulls = ", ".join(f"if(id = 1, null, {name}) as {name}" for name in SPARK_TYPES)
    place = LakePlace(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data/")
    for rows, table in ((3, "few"), (1500, "many")):
        frame = spark.sql(f"select id, {nulls} from (select id, {cells} from range({rows}))")
        assert {type(field.dataType).__name__ for field in frame.schema} == WRITTEN
        frame.write.format("ducklake").options(**options(place, table)).mode("append").save()
        found = spark.read.format("ducklake").options(**options(place, table)).load()
        assert [(f.name, f.dataType.simpleString()) for f in found.schema] == [
            (f.name, f.dataType.simpleString()) for f in _plain(frame).schema
        ]
        seen = [
            f"cast({n} as string)" if n not in ("bin", "st") else f"to_json(named_struct('x', {n}))"
            for n in frame.columns
        ]
        assert found.selectExpr(*seen).exceptAll(frame.selectExpr(*seen)).count() == 0
        assert found.count() == rows


def _plain(frame: DataFrame) -> DataFrame:
    """Lengths are not kept: `char(3)` and `varchar(3)` are strings in a lake, as in most of Spark."""
    return frame.withColumn("ch", frame.ch.cast("string")).withColumn("vc", frame.vc.cast("string"))


@pytest.mark.spark
def test_a_type_that_a_lake_does_not_keep_is_refused_by_column(tmp_path: Path, spark: SparkSession) -> None:
    """P-T08, P-E10: `lake.type` names the column and the type before anything is written."""
    place = LakePlace(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data/")
    for kind, value in REFUSED.items():
        with pytest.raises(PySparkException) as raised:
            spark.sql(f"select 1 as id, {value} as odd").write.format("ducklake").options(
                **options(place)
            ).mode("append").save()
        assert f"[lake.type] the column odd is {kind}" in str(raised.value)
    assert not Path(place.data_path).exists()


@pytest.mark.spark
def test_a_value_that_a_lake_does_not_keep_is_refused_by_column(fan: Fan, spark: SparkSession) -> None:
    """P-T08, P-E10: text that a column's type takes and its files change is refused with `lake.value`, and no row is written."""
    con = connect(fan.place("one"))
    con.execute("create table lake.t (id int, v interval)")
    con.close()
    rows = spark.sql("select 1 as id, '1 microsecond' as v")
    with pytest.raises(PySparkException) as raised:
        rows.write.format("ducklake").options(**options(fan.place("one"))).mode("append").save()
    assert "[lake.value] the column v has a value that DuckLake does not keep exactly as INTERVAL" in str(
        raised.value
    )
    assert fan.look("one", "from lake.t") == []


NOTEBOOK = """
import os, sys
from pyspark.sql import SparkSession
import aqueduck
from aqueduck.model.errors import AqueduckError
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
aqueduck.register(spark)
place = dict(catalog=f"sqlite:{sys.argv[1]}/lake.sqlite", data_path=f"{sys.argv[1]}/data/", table="t")
spark.range(3).write.format("ducklake").options(**place).mode("append").save()
print("rows:", spark.read.format("ducklake").options(**place).load().count())
os.environ["PYSPARK_PYTHON"] = spark.sparkContext.pythonExec = sys.argv[2]
try:
    aqueduck.register(spark)
except AqueduckError as exc:
    print("refused:", exc)
"""


@pytest.mark.slow
@pytest.mark.spark
def test_the_formats_work_where_python3_is_another_interpreter(tmp_path: Path) -> None:
    """P-E10: in a notebook of a virtual environment workers run its Python; an interpreter without aqueduck is refused in one line."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 3\n")
    other.chmod(0o755)
    env: dict[str, str] = dict(os.environ)
    prepare_environment(env, "local[1]")
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        env.pop(name)
    env["PATH"] = f"{other.parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(tmp_path), str(other)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert "rows: 3" in done.stdout, done.stderr[-2000:]
    assert (
        f"refused: [spark.start] the Python of Spark's workers, {other}, cannot import aqueduck"
        in done.stdout
    )
