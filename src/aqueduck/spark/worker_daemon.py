"""
Spark's Python daemon with everything a task needs already imported.

Spark forks a worker from the daemon for each task slot; what the daemon has imported, workers
share instead of importing and holding it each.  Set as `spark.python.daemon.module`.

A worker collects garbage after each task.  What was imported is no garbage: `gc.freeze` keeps the
collector from walking it, which took longer than many a task.
"""

from __future__ import annotations

import gc
import os

import pandas  # noqa: F401 - Spark's own code for tasks imports it
import pyspark.worker  # noqa: F401
from pyspark import daemon

import aqueduck.lake.units
import aqueduck.spark.capture_source
import aqueduck.spark.fanout_query  # noqa: F401 - imported for the workers
from aqueduck.private_files import restrict_new_files
from aqueduck.spark.quiet_worker import quiet_worker

if __name__ == "__main__":
    restrict_new_files(os.environ)  # a worker of a cluster has not got its mask from the driver
    gc.freeze()
    daemon.worker = quiet_worker
    daemon.manager()
