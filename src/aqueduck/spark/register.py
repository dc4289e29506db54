"""All formats of ours for a Spark session; `aqueduck.register` is how users call it."""

from __future__ import annotations

from pyspark.sql import SparkSession

from aqueduck.spark.cdc_source import PostgresCdcSource
from aqueduck.spark.lake_source import LakeChangesSource, LakeSource
from aqueduck.spark.table_source import PostgresTableSource

__all__ = ["SOURCES", "register_sources"]

SOURCES = (PostgresCdcSource, PostgresTableSource, LakeSource, LakeChangesSource)
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register_sources(spark: SparkSession) -> None:
    """Make the formats known, and let Spark hand filters to them: without, it refuses readers that take any."""
    spark.conf.set(_PUSHDOWN, "true")
    for source in SOURCES:
        spark.dataSource.register(source)
