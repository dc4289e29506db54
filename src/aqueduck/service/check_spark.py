"""The Spark part of `aqueduck check`: whether other users could read the data of its jobs."""

from __future__ import annotations

from collections.abc import Iterator

from aqueduck.config.sync import SparkConfig
from aqueduck.service.check_server import CheckResult
from aqueduck.spark.session.authentication import open_to_strangers

__all__ = ["spark_checks"]


def spark_checks(spark: SparkConfig) -> Iterator[CheckResult]:
    """Nothing if Spark answers its own processes only."""
    if todo := open_to_strangers(spark.master, spark.conf):
        detail = "does not authenticate: anyone who reaches its ports can read rows and run code"
        yield CheckResult("Spark", True, detail, todo)
