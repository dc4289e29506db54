"""
Spark's Python daemon with everything a task needs already imported.

Spark forks a worker from the daemon for each task slot; what the daemon has imported, workers
share instead of importing and holding it each.  Set as `spark.python.daemon.module`.
"""

from __future__ import annotations

from pyspark import daemon

import aqueduck.lake.units
import aqueduck.spark.capture_source
import aqueduck.spark.fanout_query  # noqa: F401 - imported for the workers

if __name__ == "__main__":
    daemon.manager()
