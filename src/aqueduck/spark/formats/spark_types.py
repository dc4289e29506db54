"""
Convert types between Spark, Arrow and DuckDB, for our data sources.

Data is exchanged as Arrow.  `struct_of` returns the Spark schema for a schema from DuckDB; `duckdb_types` returns the
DuckDB types for a schema that Spark requests.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from aqueduck.model.errors import ConfigError, LakeTypeError

__all__ = ["arrow_of", "duckdb_types", "refuse_unwritable", "struct_of"]

_WRITABLE = (
    BinaryType, BooleanType, ByteType, DateType, DecimalType, DoubleType, FloatType, IntegerType, LongType, ShortType,
    StringType, TimestampNTZType, TimestampType,
)  # fmt: skip

_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.timestamp("us"): "TIMESTAMP",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}


def struct_of(schema: pa.Schema) -> StructType:
    """The Spark schema of an Arrow schema."""
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def arrow_of(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects of batches."""
    return to_arrow_schema(schema, timezone="UTC")


def refuse_unwritable(schema: StructType, table: str) -> None:
    """Raise if a lake would not return a column's values unchanged."""
    for field in schema:
        if not isinstance(field.dataType, VariantType) and not _is_writable(field.dataType):
            raise LakeTypeError(
                f"the column {field.name} is {field.dataType.simpleString()}, which a lake cannot store as that type",
                hint="cast it to string, number or binary before you write it",
                table=table,
            )


def _is_writable(kind: DataType) -> bool:
    match kind:
        case ArrayType():
            return _is_writable(kind.elementType)
        case MapType():
            return _is_writable(kind.keyType) and _is_writable(kind.valueType)
        case StructType():
            return bool(kind.fields) and all(_is_writable(field.dataType) for field in kind)
    return isinstance(kind, _WRITABLE)


def duckdb_types(schema: StructType) -> tuple[tuple[str, str], ...]:
    """The columns by name and DuckDB type."""
    return tuple((field.name, _duckdb_type(field)) for field in arrow_of(schema))


def _duckdb_type(field: pa.Field) -> str:
    if pa.types.is_decimal(field.type):
        return f"DECIMAL({field.type.precision},{field.type.scale})"
    if field.type == pa.list_(pa.string()):
        return "VARCHAR[]"
    if field.type not in _NAMES:
        raise ConfigError(
            f"the column {field.name} cannot be read as {field.type}",
            hint="omit .schema(…) to get the actual types, and cast the column afterwards",
        )
    return _NAMES[field.type]
