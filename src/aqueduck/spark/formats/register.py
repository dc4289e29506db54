"""Register all formats in a Spark session; users call this as `aqueduck.register`."""

from __future__ import annotations

import os
import subprocess
import sys

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from aqueduck.config.secret_text import SECRETS_VARIABLE, keep_secrets
from aqueduck.model.errors import SparkStartError
from aqueduck.spark.formats.cdc_source import PostgresCdcSource
from aqueduck.spark.formats.lake_source import LakeChangesSource, LakeSource
from aqueduck.spark.formats.table_source import PostgresTableSource
from aqueduck.state_files.scratch import scratch_directory

__all__ = ["SOURCES", "register_sources"]

SOURCES = (PostgresCdcSource, PostgresTableSource, LakeSource, LakeChangesSource)
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_REDACTED = "spark.sql.redaction.options.regex"
_HIDDEN_OPTIONS = "(?i)^(dsn|catalog|s3.*)$"


def register_sources(spark: SparkSession) -> None:
    """Register the formats and enable filter pushdown, without which Spark refuses readers that accept filters."""
    if not is_remote():
        _find_python(spark.sparkContext)
        _keep_secrets(spark.sparkContext)
    spark.conf.set(_PUSHDOWN, "true")
    _redact_options(spark)
    for source in SOURCES:
        spark.dataSource.register(source)


def _redact_options(spark: SparkSession) -> None:
    """Redact secret options of streams and writes in plans, which also appear in event logs and on Spark's page."""
    before = spark.conf.get(_REDACTED, "") or ""
    if _HIDDEN_OPTIONS not in before:
        spark.conf.set(_REDACTED, "|".join(filter(None, [before, _HIDDEN_OPTIONS])))


def _keep_secrets(context: SparkContext) -> None:
    """Pass connection strings in options to local tasks by file; a cluster's workers share no file with this process."""
    if _is_local(context) and SECRETS_VARIABLE not in os.environ:
        keep_secrets(scratch_directory())
    if SECRETS_VARIABLE in os.environ:
        context.environment[SECRETS_VARIABLE] = os.environ[SECRETS_VARIABLE]


def _is_local(context: SparkContext) -> bool:
    return str(context.master).startswith("local")


def _find_python(context: SparkContext) -> None:
    """
    Make workers run a Python that can import aqueduck: without PYSPARK_PYTHON, Spark takes `python3` from the path.

    PySpark reads the variable when a session starts and passes it to everything registered or defined afterwards.
    """
    local = _is_local(context)
    if local and not os.environ.get("PYSPARK_PYTHON"):
        context.pythonExec = sys.executable
    elif context.pythonExec != sys.executable and not _knows_us(context.pythonExec):
        raise SparkStartError(
            f"the Python of Spark's workers, {context.pythonExec}, cannot import aqueduck",
            hint="set PYSPARK_PYTHON to the Python that has it, the same path on all machines, before the session starts"
            + (f": {sys.executable}" if local else ""),
        )


def _knows_us(python: str) -> bool:
    try:
        done = subprocess.run([python, "-c", "import aqueduck"], capture_output=True, timeout=60, check=False)
    except OSError:
        return False
    return done.returncode == 0
