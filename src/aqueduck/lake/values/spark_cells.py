"""
How a cell of a lake is shown to Spark, and taken from it.

Spark gets a type of its own where it has one that holds every value, the next wider one for unsigned integers, and text
for the rest.  A VARIANT crosses in Parquet's encoding, which is Spark's too; a GEOMETRY as WKB.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from aqueduck.lake.session.sql import literal
from aqueduck.lake.values.kept_types import leaves

__all__ = ["OWN_MESSAGE", "from_spark", "is_nested", "mark_variants", "marked", "spark_type", "to_spark"]

OWN_MESSAGE = "aqueduck: "
"""What the text of an error begins with that our own SQL raises about a cell."""

VARIANT = 'STRUCT("value" BLOB, metadata BLOB)'
_BYTES = 'struct(metadata blob, "value" blob)'
_WIDER = {"UTINYINT": "SMALLINT", "USMALLINT": "INTEGER", "UINTEGER": "BIGINT", "UBIGINT": "DECIMAL(20,0)"}
_OTHER = {"TIMESTAMP_S": "TIMESTAMP", "TIMESTAMP_MS": "TIMESTAMP", "VARIANT": VARIANT, "GEOMETRY": "BLOB"}
_TEXT = frozenset(
    {
        "UUID",
        "HUGEINT",
        "UHUGEINT",
        "TIME",
        "TIME_NS",
        "TIME WITH TIME ZONE",
        "TIMESTAMP_NS",
        "INTERVAL",
        "JSON",
    }
)
_MARKED = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
"""By this mark Spark knows a VARIANT in Arrow."""


def spark_type(kind: str) -> str:
    """The type in which Spark gets a column."""
    if is_nested(kind):
        return kind if all(spark_type(leaf) == leaf for leaf in leaves(kind)) else "VARCHAR"
    if kind.startswith("GEOMETRY"):
        return "BLOB"
    return "VARCHAR" if kind in _TEXT else _WIDER.get(kind) or _OTHER.get(kind, kind)


def is_nested(kind: str) -> bool:
    return kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION"))


def to_spark(name: str, kind: str, cell: str) -> str:
    """The expression by which Spark gets a cell of a column."""
    target = spark_type(kind)
    if target == kind:
        return cell
    if kind == "VARIANT":
        problem = literal(f"{OWN_MESSAGE}the column {name} has a VARIANT that Spark cannot hold")
        encoded = f"cast(try(variant_to_parquet_variant({cell})) as {_BYTES})"
        shown = f'struct_pack("value" := {encoded}."value", metadata := {encoded}.metadata)'
        return f"case when {cell} is null then null when {encoded} is null then error({problem}) else {shown} end"
    if target == "BLOB":
        return f"st_aswkb({cell})"
    return f"cast({f'to_json({cell})' if is_nested(kind) else cell} as {target})"


def from_spark(kind: str, source: str, cell: str) -> str:
    """The expression by which a column of a type takes a cell of Spark's."""
    if kind == "VARIANT":
        decoded = f'variant_bytes_to_variant({cell}.metadata || {cell}."value")'
        return f"case when {cell} is null then null else {decoded} end"
    if kind.startswith("GEOMETRY") and source == "BLOB":
        return f"cast(st_geomfromwkb({cell}) as {kind})"
    return f"cast({cell} as {kind})"


def mark_variants(schema: pa.Schema, names: frozenset[str]) -> pa.Schema:
    """The schema with these columns as Spark's VARIANTs."""
    return pa.schema([pa.field(f.name, _MARKED) if f.name in names else f for f in schema])


def marked(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of the schema that `mark_variants` gave."""
    columns = [
        _variant(column) if field.type.equals(_MARKED, check_metadata=True) else column
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _variant(column: pa.StructArray) -> pa.StructArray:
    parts = [pc.fill_null(column.field(name), b"") for name in ("value", "metadata")]
    return pa.StructArray.from_arrays(parts, fields=list(_MARKED), mask=column.is_null())
