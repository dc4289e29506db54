"""
Spark's Python daemon with all modules that a task needs already imported.

Spark forks a worker from the daemon for each task slot.  Workers share the modules that the daemon has
imported instead of each importing them.  Set as `spark.python.daemon.module`.

A worker collects garbage after each task.  `gc.freeze` excludes imported objects, because walking them
took longer than many tasks.
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
    restrict_new_files(os.environ)  # a worker of a cluster does not inherit the driver's umask
    gc.freeze()
    daemon.worker = quiet_worker
    daemon.manager()
