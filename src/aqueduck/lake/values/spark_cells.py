"""
Convert cells of a lake to and from Spark.

A column has the matching Spark type if that holds every value, the next wider type for unsigned integers, and text
otherwise.  A VARIANT is passed in Parquet's encoding, which Spark uses too, and a GEOMETRY as WKB.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from aqueduck.lake.session.sql import literal
from aqueduck.lake.values.kept_types import leaves

__all__ = ["OWN_MESSAGE", "from_spark", "is_nested", "mark_variants", "marked", "spark_type", "to_spark"]

OWN_MESSAGE = "aqueduck: "
"""The prefix of errors that our own SQL raises about a cell."""

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
"""The metadata by which Spark recognizes a VARIANT in Arrow."""


def spark_type(kind: str) -> str:
    """The DuckDB type in which a column is passed to Spark."""
    if is_nested(kind):
        return kind if all(spark_type(leaf) == leaf for leaf in leaves(kind)) else "VARCHAR"
    if kind.startswith("GEOMETRY"):
        return "BLOB"
    return "VARCHAR" if kind in _TEXT else _WIDER.get(kind) or _OTHER.get(kind, kind)


def is_nested(kind: str) -> bool:
    return kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION"))


def to_spark(name: str, kind: str, cell: str) -> str:
    """The expression that converts a cell for Spark."""
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
    """The expression that converts a cell from Spark to a column of a type."""
    if kind == "VARIANT":
        decoded = f'variant_bytes_to_variant({cell}.metadata || {cell}."value")'
        return f"case when {cell} is null then null else {decoded} end"
    if kind.startswith("GEOMETRY") and source == "BLOB":
        return f"cast(st_geomfromwkb({cell}) as {kind})"
    return f"cast({cell} as {kind})"


def mark_variants(schema: pa.Schema, names: frozenset[str]) -> pa.Schema:
    """The schema with these columns marked as Spark's VARIANTs."""
    return pa.schema([pa.field(f.name, _MARKED) if f.name in names else f for f in schema])


def marked(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch converted to a schema from `mark_variants`."""
    columns = [
        _variant(column) if field.type.equals(_MARKED, check_metadata=True) else column
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _variant(column: pa.StructArray) -> pa.StructArray:
    parts = [pc.fill_null(column.field(name), b"") for name in ("value", "metadata")]
    return pa.StructArray.from_arrays(parts, fields=list(_MARKED), mask=column.is_null())
