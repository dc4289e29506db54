"""
Aqueduck carries changes from PostgreSQL into DuckLake tables, from one DuckLake into many, and out as JSON events.

Apache Spark is the pipeline.  The three flows, `sync`, `fanout` and `events`, do not know each other.  Each imports only
what is below it: `spark`, then `postgres`, `lake` and `sinks`, then the pure code in `envelopes`, `config` and `model`.
`cli`, `web`, `service` and `overview` serve all flows; `docs/tour.md` follows one change through the code.
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
