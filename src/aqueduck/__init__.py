"""
Aqueduck carries changes from PostgreSQL into DuckLake tables, on Apache Spark.

The modules beside this one are pure: they open no socket and no session.  A subpackage
is named after what it touches: `postgres`, `lake`, `sinks`, `spark`, and `app` on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register(spark: SparkSession) -> None:
    """Make `postgres_cdc`, `postgres_table`, `ducklake` and `ducklake_changes` known to a Spark session."""
    from aqueduck.spark.formats.register import register_sources

    register_sources(spark)
