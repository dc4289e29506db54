"""Every PostgreSQL type through `postgres_table` and `postgres_cdc`, driven without Spark: the types and values of docs/types.md."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import StructType

from aqueduck.lake.session.engine import new_connection
from aqueduck.spark.formats.cdc_source import CdcReader, PostgresCdcSource
from aqueduck.spark.formats.table_source import PostgresTableSource
from tests.fix_postgres import Database
from tests.model.columns.test_typemap import CASES, USER_TYPES

DEPTH = max(len(values) for _, _, values in CASES)
SPARK = {
    "BOOLEAN": "boolean", "SMALLINT": "smallint", "INTEGER": "int", "BIGINT": "bigint", "FLOAT": "float", "DOUBLE": "double",
    "BLOB": "binary", "DATE": "date", "TIMESTAMP": "timestamp_ntz", "TIMESTAMP WITH TIME ZONE": "timestamp",
}  # fmt: skip
"""What docs/types.md says of a lake's types in Spark; the others are decimals and strings."""


def shown(batches: list[pa.RecordBatch]) -> list[tuple[str | None, ...]]:
    """What arrived, as DuckDB prints it in the lake's types."""
    con = new_connection(threads=1)
    con.register("arrived", pa.Table.from_batches(batches))
    cells = ", ".join(f"cast(cast(c{i} as {kind}) as varchar)" for i, (_, kind, _) in enumerate(CASES))
    return con.execute(f"select {cells} from arrived order by id").fetchall()


def check_types(schema: StructType) -> None:
    found = {field.name: field.dataType.simpleString() for field in schema}
    wanted = [
        SPARK.get(kind) or (kind.lower() if kind.startswith("DECIMAL") else "string") for _, kind, _ in CASES
    ]
    assert [found[f"c{i}"] for i in range(len(CASES))] == wanted


def test_every_type_of_postgresql_is_read_with_its_type_and_value(db: Database, tmp_path: Path) -> None:
    """P-T08, P-E10: `postgres_table` and `postgres_cdc` give each type of the table of types, its extremes and NULL, as in the lake."""
    columns = ", ".join(f"c{i} {kind}" for i, (kind, _, _) in enumerate(CASES))
    db.execute(f"{USER_TYPES}; create table t (id int primary key, {columns})")
    changes = PostgresCdcSource(
        {
            "dsn": db.dsn,
            "slot": "s",
            "publication": "p",
            "table": "t",
            "create": "true",
            "stage_dir": str(tmp_path),
        }
    )
    reader = changes.streamReader(changes.schema())
    assert isinstance(reader, CdcReader)
    start = reader.initialOffset()
    expected: list[tuple[str | None, ...]] = []
    for row in range(DEPTH):
        turn = [values[row % len(values)] for _, _, values in CASES]
        expected.append(tuple(printed for _, printed in turn))
        db.execute(f"insert into t values ({row}, {', '.join(written for written, _ in turn)})")
    db.execute(f"insert into t (id) values ({DEPTH})")
    expected.append((None,) * len(CASES))

    table = PostgresTableSource({"dsn": db.dsn, "table": "t"})
    check_types(table.schema())
    whole = table.reader(table.schema())
    assert shown([batch for part in whole.partitions() for batch in whole.read(part)]) == expected

    check_types(changes.schema())
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert shown([batch for part in reader.partitions(start, end) for batch in reader.read(part)]) == expected
    reader.stop()
