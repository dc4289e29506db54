"""The Spark part of `aqueduck check`: whether it can start, and whether other users could read the data of its jobs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from aqueduck.config.sync import SparkConfig
from aqueduck.service.check_server import CheckResult, result_of
from aqueduck.spark.session.authentication import open_to_strangers
from aqueduck.spark.session.java import find_java

__all__ = ["spark_checks"]


def spark_checks(spark: SparkConfig) -> Iterator[CheckResult]:
    """Whether there is a Java; a remark unless Spark answers its own processes only."""
    yield result_of("Java", _check_java, os.environ.get("JAVA_HOME"), os.environ.get("PATH"))
    if todo := open_to_strangers(spark.master, spark.conf):
        detail = "does not authenticate: anyone who reaches its ports can read rows and run code"
        yield CheckResult("Spark", True, detail, todo)


@functools.cache
def _check_java(home: str | None, path: str | None) -> str:
    found = find_java({k: v for k, v in (("JAVA_HOME", home), ("PATH", path)) if v is not None})
    return f"version {found.version}, {found.home}"
