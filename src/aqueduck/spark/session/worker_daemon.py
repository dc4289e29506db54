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

import aqueduck.lake.fold.fold_tasks
import aqueduck.spark.query.capture_source
import aqueduck.spark.query.fanout_query  # noqa: F401 - imported for the workers
from aqueduck.spark.session.quiet_worker import quiet_worker
from aqueduck.state_files.private_files import restrict_new_files

if __name__ == "__main__":
    restrict_new_files(os.environ)  # a worker of a cluster has not got its mask from the driver
    gc.freeze()
    daemon.worker = quiet_worker
    daemon.manager()
